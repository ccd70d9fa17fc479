"""What the dispatcher hands out, and the sizes and limits by which it does (lifecycle L12, L19,
L23).

Values only; used by the dispatcher, the producer and the config.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shmstore import StoreError
from trainer.errors import ConfigError, TrainerError
from trainer.rollout import Group, Prompt, Status
from trainer.staleness import StalenessBudget

__all__ = ["DispatchConfig", "HandedIn", "Work"]

#: What became of a group that was handed in with others: its status; why it was refused; None:
#: nothing, for it would have to wait for room.
HandedIn = Status | TrainerError | StoreError | None


@dataclass(frozen=True, slots=True)
class Work:
    """One group to produce. `group` is set when members of an earlier attempt are kept (L11,
    L16). `model_step`: nothing of it is asked of the engines before they run these weights.
    """

    uid: str
    task: str
    prompt: Prompt
    attempt: int = 0
    group: Group | None = None
    model_step: int | None = None

    def waits_at(self, model_step: int) -> bool:
        """Whether it waits for weights while the engines run those of `model_step`."""
        return self.model_step is not None and self.model_step > model_step

    def __reduce__(self) -> tuple[type[Work], tuple[Any, ...]]:
        """As `Prompt.__reduce__`."""
        return Work, (
            self.uid,
            self.task,
            self.prompt,
            self.attempt,
            self.group,
            self.model_step,
        )


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Sizes and limits. `batch_groups`: groups in a batch; `group_size`: rollouts in a group.

    `over_sampling`: how much more than a batch lacks may be in production, as a fraction.
    `attempts_max`: after so many a rollout that still did not finish fails its group, so that a
    straggler cannot pin its mates for ever. `useless_in_row_max`: so many failed or filtered groups
    in a row end a task.
    """

    batch_groups: int
    group_size: int
    budget: StalenessBudget = field(default_factory=StalenessBudget)
    over_sampling: float = 0.0
    attempts_max: int = 16
    useless_in_row_max: int = 256

    def __post_init__(self) -> None:
        for name in ("batch_groups", "group_size", "attempts_max", "useless_in_row_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0.0 <= self.over_sampling <= 8.0:
            raise ConfigError(f"over_sampling is {self.over_sampling}; allowed are 0 to 8")
