"""The order of events in a run: three schedules over the same parts, chosen by name (lifecycle L08,
L20, L23, L30).

`async`      the producer goes on while the learner trains; weights every `sync_interval` steps
`sync`       produce a batch, pause, train, sync; nothing is stale
`colocated`  as `sync`, and learner and engine take turns on the same devices

The parts are protocols: processes in a run, plain objects in a simulation. This file knows no
process, no model and no clock but the loop's. Runs in the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trainer.dispatch import Dispatcher
from trainer.engine.protocol import SyncMode
from trainer.errors import ConfigError, LearnerLost, LedgerError
from trainer.producer import PauseReport
from trainer.rollout import Batch
from trainer.window import WindowReport

__all__ = [
    "SCHEDULES",
    "Devices",
    "LearnerPart",
    "ProducerPart",
    "ScheduleConfig",
    "ScheduleParts",
    "StepReport",
    "run_schedule",
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
    """One finished train step. Seconds: waiting for the batch, training, taking new weights."""

    train_step: int
    metrics: Mapping[str, float]
    window: WindowReport
    wait_s: float
    train_s: float
    sync_s: float
    pause: PauseReport | None = None


async def _nothing(_: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ScheduleParts:
    """Who does the work.

    `sync_weights(model_step, mode)`: the engines run the learner's weights when it returns.
    `evaluate(train_step)`, `checkpoint(train_step)`: called when due. `on_step(report)`: after each
    step.
    """

    dispatcher: Dispatcher
    learner: LearnerPart
    producer: ProducerPart
    sync_weights: Callable[[int, SyncMode], Awaitable[None]]
    evaluate: Callable[[int], Awaitable[None]] = _nothing
    checkpoint: Callable[[int], Awaitable[None]] = _nothing
    on_step: Callable[[StepReport], Awaitable[None]] | None = None
    devices: Devices | None = None


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
                "must "
                f"be a multiple of sync_interval {self.sync_interval}"
            )


async def run_schedule(name: str, parts: ScheduleParts, config: ScheduleConfig) -> None:
    """Run all train steps by the schedule `name`; the books are checked after each (L26)."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r} is unknown; allowed are {', '.join(SCHEDULES)}")
    if (name == "colocated") != (parts.devices is not None):
        raise ConfigError("the colocated schedule, and no other, needs `devices`")
    await SCHEDULES[name](_Run(parts, config))


class _Run:
    """What the schedules share: one train step, one change of weights."""

    def __init__(self, parts: ScheduleParts, config: ScheduleConfig) -> None:
        self.parts = parts
        self.config = config
        self.dispatcher = parts.dispatcher
        self._loop = asyncio.get_running_loop()
        self._resumed_at = self._paused_at = self._loop.time()
        self._paused = False
        self._trained = config.first_step - 1

    @property
    def steps(self) -> range:
        """Train steps of this run."""
        return range(self.config.first_step, self.config.steps + 1)

    async def take(self, step: int) -> tuple[Batch, float]:
        """The batch of `step` and how long it was waited for. Syncs first if that is what is
        missing (L23).
        """
        if (
            await self.dispatcher.must_sync_first(step)
            and self.dispatcher.model_step < self._trained
        ):
            await self.sync(self._trained)
        started = self._loop.time()
        batch = await self.dispatcher.take(
            step, owner=self.config.learner, timeout=self.config.take_timeout_s
        )
        return batch, self._loop.time() - started

    async def train(self, step: int, batch: Batch) -> tuple[Mapping[str, float], float, Batch]:
        """Train; a learner that died gets its batch again in its successor (L07)."""
        while True:
            started = self._loop.time()
            try:
                metrics = await self.parts.learner.train(batch, step)
            except LearnerLost:
                self.dispatcher.owner_died(self.config.learner)
                batch = await self._take_again(step)
                continue
            self._trained = step
            return metrics, self._loop.time() - started, batch

    async def _take_again(self, step: int) -> Batch:
        """A batch for a learner's successor; producers at rest work on if a new one is needed."""
        if not self._paused or self.dispatcher.ready(step):
            return (await self.take(step))[0]
        devices = self.parts.devices
        if devices is not None:
            await devices.to_engine()
        await self.resume()
        batch, _ = await self.take(step)
        await self.pause()
        if devices is not None:
            await devices.to_learner()
        return batch

    async def pause(self) -> PauseReport:
        """Stop the producers, and book how long they had worked."""
        self._paused = True
        window = self.dispatcher.buffer.accounts.window
        window.production_s += self._loop.time() - self._resumed_at
        self._paused_at = self._loop.time()
        return await self.parts.producer.pause(self.config.pause_timeout_s)

    async def resume(self) -> None:
        """Let the producers go on, and book how long they had stood still."""
        self._paused = False
        await self.parts.producer.resume()
        self._resumed_at = self._loop.time()
        self.dispatcher.buffer.accounts.window.pause_s += self._resumed_at - self._paused_at

    async def take_weights(self, step: int, mode: SyncMode) -> None:
        """The engines get the weights of `step`; what is too old for the next step expires."""
        await self.parts.sync_weights(step, mode)
        await self.dispatcher.set_steps(train_step=step + 1, model_step=step)

    async def evaluate_due(self, step: int) -> None:
        """Evaluation, when due."""
        every = self.config.evaluate_every
        if every and step % every == 0:
            await self.parts.evaluate(step)

    async def sync(self, step: int) -> tuple[PauseReport | None, float]:
        """Take the weights of `step` while producers are running (L20), then evaluate when due.

        -> the pause, and seconds until the engines had the weights.
        """
        started = self._loop.time()
        if self.config.sync_mode == "in_flight":
            await self.take_weights(step, "in_flight")
            sync_s = self._loop.time() - started
            await self.evaluate_due(step)
            return None, sync_s
        report = await self.pause()
        try:
            await self.take_weights(step, "pause")
            sync_s = self._loop.time() - started
            await self.evaluate_due(step)
        finally:
            await self.resume()
        return report, sync_s

    async def finish_step(self, report: StepReport) -> None:
        """Check the books, tell, and then the checkpoint when due: a run that dies right after it
        resumes behind a step that was told.
        """
        self.dispatcher.check_books()
        if self.parts.on_step is not None:
            await self.parts.on_step(report)
        every = self.config.checkpoint_every
        if every and report.train_step % every == 0:
            await self.parts.checkpoint(report.train_step)


async def _run_async(run: _Run) -> None:
    if run.config.evaluate_first:
        await run.parts.evaluate(run.config.first_step - 1)
    for step in run.steps:
        batch, wait_s = await run.take(step)
        metrics, train_s, batch = await run.train(step, batch)
        sync_s, pause = 0.0, None
        if step % run.config.sync_interval == 0:
            pause, sync_s = await run.sync(step)
        await run.finish_step(
            StepReport(step, metrics, batch.report, wait_s, train_s, sync_s, pause)
        )


async def _run_sync(run: _Run) -> None:
    """Also `colocated`: the producers are at rest whenever the learner works."""
    devices = run.parts.devices
    run.dispatcher.limit_ahead(1)
    if run.config.evaluate_first:
        await run.parts.evaluate(run.config.first_step - 1)
    for step in run.steps:
        batch, wait_s = await run.take(step)
        pause = await run.pause()
        if devices is not None:
            await devices.to_learner()
        metrics, train_s, batch = await run.train(step, batch)
        _check_no_session_is_left(run)
        started = asyncio.get_running_loop().time()
        if devices is not None:
            await devices.to_engine()
        await run.parts.sync_weights(step, "pause")
        sync_s = asyncio.get_running_loop().time() - started
        await run.evaluate_due(step)
        # The checkpoint comes before anything may be drawn for the next step: what a resumed run
        # draws is then exactly what this one does.
        await run.finish_step(
            StepReport(step, metrics, batch.report, wait_s, train_s, sync_s, pause)
        )
        await run.dispatcher.set_steps(train_step=step + 1, model_step=step)
        if step != run.config.steps:
            await run.resume()


def _check_no_session_is_left(run: _Run) -> None:
    """No session outlives its batch unless the buffer holds it (L30)."""
    left = run.dispatcher.buffer.sessions_of(run.config.learner)
    if left:
        raise LedgerError(
            f"the learner still holds {len(left)} sessions after its step, for example {left[:3]}"
        )


#: Name -> schedule.
SCHEDULES: Mapping[str, Callable[[_Run], Awaitable[None]]] = {
    "async": _run_async,
    "sync": _run_sync,
    "colocated": _run_sync,
}
