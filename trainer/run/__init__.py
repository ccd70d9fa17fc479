"""A run and its processes: the driver, the actors of learner, producer and engines with the
driver's links to them, the run folder, what is shown and summed up. `trainer.fit` wires them.
"""

__all__: list[str] = []
