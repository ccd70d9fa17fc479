"""What a schedule asks of the parts that do the work, when it does, and what it tells.

The contract of `trainer.schedule`: whoever runs train steps by it (the driver of a run, a loop of
one's own, a simulation) fills in `ScheduleParts` and `ScheduleConfig`, and is given a `StepReport`
after each step. Knows no process, no model and no clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trainer.dispatch import Dispatcher
from trainer.engine.protocol import SyncMode
from trainer.errors import ConfigError
from trainer.producer import PauseReport
from trainer.rollout import Batch

__all__ = [
    "Devices",
    "LearnerPart",
    "ProducerPart",
    "ScheduleConfig",
    "ScheduleParts",
    "StepReport",
]


class LearnerPart(Protocol):
    """What trains."""

    async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
        """Train one step, release exactly the batch's sessions, return metrics.

        `LearnerLost` when the process died and a successor is ready: the batch is offered again.
        """
        ...


class ProducerPart(Protocol):
    """All producers of the run."""

    async def pause(self, timeout_s: float) -> PauseReport: ...

    async def resume(self) -> None: ...


class Devices(Protocol):
    """Who uses the shared devices of the `colocated` schedule."""

    async def to_engine(self) -> None: ...

    async def to_learner(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished train step: its batch, and what the learner said of it. Seconds: waiting for
    the batch, training, and from the end of that until the engines had the new weights. `failed`:
    what went wrong after the training; then it is the last one, and nothing more is due.
    """

    train_step: int
    metrics: Mapping[str, float]
    batch: Batch
    wait_s: float
    train_s: float
    sync_s: float
    pause: PauseReport | None = None
    failed: Exception | None = None


async def _nothing(_: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ScheduleParts:
    """Who does the work.

    `sync_weights(model_step, mode)`: the engines run the learner's weights when it returns.
    `evaluate(train_step)`, `checkpoint(train_step)`: called when due. `on_step(report)`: after each
    step, in their order, when its weights are out, or cannot be; perhaps while the next one is
    trained. `stop`: once it is set the step under way is the last; waiting for a batch then ends.
    `prepares`: the producers hear of weights that the engines have taken
    (`Producer.weights_taken`), so that they can be given work for weights that are still to come.
    """

    dispatcher: Dispatcher
    learner: LearnerPart
    producer: ProducerPart
    sync_weights: Callable[[int, SyncMode], Awaitable[None]]
    evaluate: Callable[[int], Awaitable[None]] = _nothing
    checkpoint: Callable[[int], Awaitable[None]] = _nothing
    on_step: Callable[[StepReport], Awaitable[None]] | None = None
    devices: Devices | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    prepares: bool = False


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """When things happen; steps are 1-based and inclusive. 0 for `..._every` means never."""

    steps: int
    first_step: int = 1
    sync_interval: int = 1
    sync_mode: SyncMode = "pause"
    evaluate_every: int = 0
    evaluate_first: bool = False
    checkpoint_every: int = 0
    pause_timeout_s: float = 60.0
    take_timeout_s: float | None = None
    learner: str = field(default="learner")

    def __post_init__(self) -> None:
        if self.steps < self.first_step or self.first_step < 1 or self.sync_interval < 1:
            raise ConfigError(
                f"steps {self.first_step} to {self.steps} with sync_interval {self.sync_interval}: "
                "all must be at least 1, and the last step not before the first"
            )
        if not self.pause_timeout_s > 0:
            raise ConfigError(f"pause_timeout_s is {self.pause_timeout_s}; it must be above 0")
        if self.checkpoint_every % self.sync_interval:
            raise ConfigError(
                f"checkpoint_every {self.checkpoint_every} never meets a weight sync reliably; it "
                f"must be a multiple of sync_interval {self.sync_interval}"
            )
