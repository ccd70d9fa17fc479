"""The device of a process: whether it is there, and how much of its memory this process may have.

Called once by a learner's or an engine's process before it builds its model.
"""

from __future__ import annotations

import torch

from trainer.errors import ConfigError

__all__ = ["prepare_device"]


def prepare_device(name: str, memory_fraction: float | None = None) -> torch.device:
    """The torch device `name`, such as cpu or cuda:1; limits this process to `memory_fraction` of
    its memory, so that a learner and an engine can share it.

    Raises ConfigError when there is no such device here, saying which there are.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; give cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        raise ConfigError(f"device is {name!r}; torch {torch.__version__} sees {there} here")
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(float(memory_fraction), device)
    return device
