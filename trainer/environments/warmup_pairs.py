"""The (prompt, answer) texts of the supervised warm-up, from the same sources as the training.

Training examples come from the training side of the split, at indices that reinforcement learning
does not reach; held-out ones from the held-out side, so the warm-up never sees an evaluation
prompt.
"""

from __future__ import annotations

from trainer.config.schema import Config
from trainer.environments.sources import build_source
from trainer.errors import ConfigError

__all__ = ["WarmupPairs"]

_FIRST_INDEX = 1 << 19
"""Procedural sources are read from here on: far from the prompts of the run itself."""


class WarmupPairs:
    """Index → (prompt text, answer text), tasks in turn; negative indices are held out."""

    def __init__(self, config: Config) -> None:
        tasks = config.tasks
        seed = config.run.seed
        self._train = [build_source(task, seed=seed, held_out=False) for task in tasks]
        self._eval = [build_source(task, seed=seed, held_out=True) for task in tasks]

    def __call__(self, index: int) -> tuple[str, str]:
        sources = self._eval if index < 0 else self._train
        number = -1 - index if index < 0 else index
        source = sources[number % len(sources)]
        place = number // len(sources)
        size = source.size
        place = _FIRST_INDEX + place if size is None else place % size
        prompt = source.prompt(place)
        if prompt.text is None:
            raise ConfigError(
                f"warmup: task {source.name} gives messages, but the warm-up needs plain prompt "
                "text: set source.chat to false and source.system to none, or remove warmup"
            )
        return prompt.text, str(prompt.answer)
