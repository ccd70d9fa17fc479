"""The order of events in a run: three schedules over the same parts, chosen by name (lifecycle L08,
L20, L23, L30).

`async`      the producer goes on while the learner trains; weights every `sync_interval` steps;
             what weights on their way will allow is prepared before they come
`sync`       produce a batch, pause, train, sync; nothing is stale. While one is trained the next
             is prepared: drawn, its sessions opened, its requests made; it is begun with the
             weights
`colocated`  as `sync`, and learner and engine take turns on the same devices

What need not be waited for is not: a step is booked, and in flight the engines take its weights,
while the next one is trained (`async`) or produced (the others). One step at a time, though: the
engines have its weights and its books balance before the step after it may end.

The parts are protocols (`trainer.schedule_parts`): processes in a run, plain objects in a
simulation. This file knows no process, no model and no clock but the loop's. Runs in the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from trainer.engine.protocol import SyncMode
from trainer.errors import ConfigError, LearnerLost, LedgerError
from trainer.producer import PauseReport
from trainer.rollout import Batch
from trainer.schedule_parts import ScheduleConfig, ScheduleParts, StepReport

__all__ = ["SCHEDULES", "ScheduleConfig", "ScheduleParts", "StepReport", "run_schedule"]

_T = TypeVar("_T")


async def run_schedule(name: str, parts: ScheduleParts, config: ScheduleConfig) -> None:
    """Run the train steps by the schedule `name` to the last, or until the parts' `stop` is set;
    the books are checked after each (L26).
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r} is unknown; allowed are {', '.join(SCHEDULES)}")
    if (name == "colocated") != (parts.devices is not None):
        raise ConfigError("the colocated schedule, and no other, needs `devices`")
    run = _Run(parts, config)
    try:
        with contextlib.suppress(_Stopped):
            await SCHEDULES[name](run)
        await run.settle()
    except Exception as error:
        await run.settle_after(error)
        raise
    finally:
        await run.give_up()


class _Stopped(Exception):
    """`stop` was set while nothing but waiting was going on."""


class _Run:
    """What the schedules share: one train step, one change of weights."""

    def __init__(self, parts: ScheduleParts, config: ScheduleConfig) -> None:
        self.parts = parts
        self.config = config
        self.dispatcher = parts.dispatcher
        self._loop = asyncio.get_running_loop()
        self._resumed_at = self._paused_at = self._loop.time()
        self._paused = False
        self.told = False
        """Whether the producers have been told of the rest that there is."""
        self._trained = config.first_step - 1
        self._untold: dict[int, StepReport] = {}
        self._beside: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[Any] | None = None

    @property
    def steps(self) -> range:
        """Train steps of this run."""
        return range(self.config.first_step, self.config.steps + 1)

    @property
    def stopping(self) -> bool:
        """Whether the last finished step was the last."""
        return self.parts.stop.is_set()

    async def take(self, step: int) -> tuple[Batch, float]:
        """The batch of `step` and how long it was waited for. Syncs first if that is what is
        missing (L23), which is part of the wait.
        """
        started = self._loop.time()
        if await self.dispatcher.must_sync_first(step):
            await self.settle()  # newer weights may be on their way
            if self.dispatcher.model_step < self._trained and await self.dispatcher.must_sync_first(
                step
            ):
                await self.sync(self._trained)
        batch = await self.unless_stopped(
            self.dispatcher.take(
                step, owner=self.config.learner, timeout=self.config.take_timeout_s
            )
        )
        return batch, self._loop.time() - started

    async def unless_stopped(self, waiting: Awaitable[_T]) -> _T:
        """What `waiting` comes to; it is cancelled and `_Stopped` raised when `stop` is set first,
        and so it is when what is done beside has failed.
        """
        task = asyncio.ensure_future(waiting)
        if self._stopping is None:
            self._stopping = self._loop.create_task(self.parts.stop.wait())
        stopping, beside = self._stopping, self._beside

        def interrupt(ended: asyncio.Task[Any]) -> None:
            if ended is stopping or ended.cancelled() or ended.exception() is not None:
                task.cancel()

        watched = [stopping] if beside is None else [stopping, beside]
        for one in watched:
            one.add_done_callback(interrupt)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            if stopping.done():
                raise _Stopped from None
            await self.settle()
            raise
        finally:
            for one in watched:
                one.remove_done_callback(interrupt)

    def beside(self, rest: Coroutine[Any, Any, None]) -> None:
        """Do the rest of a step beside the next one; that of the step before is settled."""
        assert self._beside is None
        self._beside = self._loop.create_task(rest)

    async def settle(self) -> None:
        """Wait for what is done beside; its error is raised here."""
        if self._beside is not None:
            task, self._beside = self._beside, None
            await task

    async def settle_after(self, error: Exception) -> None:
        """What was trained is booked, or told at least, although the run fails with `error`."""
        if self._beside is not None:
            await asyncio.wait((self._beside,), timeout=self.config.pause_timeout_s)
            self._beside.cancel()
            if self._beside.done() and not self._beside.cancelled() and self._beside.exception():
                error.add_note(f"and the step before was not booked: {self._beside.exception()!r}")
        for report in list(self._untold.values()):
            try:
                async with asyncio.timeout(self.config.pause_timeout_s):
                    await self.tell(dataclasses.replace(report, failed=error))
            except Exception as other:  # the first one is the cause
                error.add_note(f"and step {report.train_step} was not told: {other!r}")

    async def give_up(self) -> None:
        """Nothing goes on after the schedule, whatever ended it."""
        left = [task for task in (self._beside, self._stopping) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def train(self, step: int, batch: Batch, wait_s: float) -> StepReport:
        """Train; a learner that died gets its batch again in its successor (L07). -> what is known
        of the step so far, which is told also if what follows fails.
        """
        while True:
            started = self._loop.time()
            try:
                metrics = await self.parts.learner.train(batch, step)
            except LearnerLost:
                self.dispatcher.owner_died(self.config.learner)
                batch = await self._take_again(step)
                continue
            self._trained = step
            train_s = self._loop.time() - started
            report = self._untold[step] = StepReport(step, metrics, batch, wait_s, train_s, 0.0)
            return report

    async def _take_again(self, step: int) -> Batch:
        """A batch for a learner's successor; producers at rest work on if a new one is needed."""
        if not self._paused and self.dispatcher.works_ahead and not self.dispatcher.ready(step):
            await self.pause()  # what was prepared may be what is needed now
            await self.resume()
        if not self._paused or self.dispatcher.ready(step):
            return (await self.take(step))[0]
        await self.rest_again()
        devices = self.parts.devices
        if devices is not None:
            await devices.to_engine()
        await self.resume()
        batch, _ = await self.take(step)
        await self.rest()
        if devices is not None:
            await devices.to_learner()
        return batch

    async def rest(self) -> PauseReport:
        """No producer works when this returns. With nothing in production none need be told."""
        self.told = not self.dispatcher.rest()
        if self.told:
            return await self.pause()
        self._note_pause()
        return PauseReport(0, 0, 0.0)

    def work_ahead(self, step: int) -> None:
        """While `step` is trained, let the producers prepare what they begin with its weights."""
        last = step == self.config.steps or self.stopping
        if self.parts.prepares and not last:
            self.dispatcher.work_ahead(step)

    async def rest_again(self) -> None:
        """What was prepared is given back: the weights are not for it."""
        if self.dispatcher.works_ahead and not self.dispatcher.rest():
            self.told = True
            await self.parts.producer.pause(self.config.pause_timeout_s)

    async def pause(self) -> PauseReport:
        """Stop the producers, and book how long they had worked. One that is started meanwhile, in
        the place of a dead one, gets no work either.
        """
        self.dispatcher.rest()
        self.told = True
        self._note_pause()
        return await self.parts.producer.pause(self.config.pause_timeout_s)

    def _note_pause(self) -> None:
        self._paused = True
        self._paused_at = self._loop.time()
        window = self.dispatcher.buffer.accounts.window
        window.production_s += self._paused_at - self._resumed_at

    async def resume(self) -> None:
        """Let the producers go on, and book how long they had stood still."""
        self._paused = False
        self.dispatcher.work()
        if self.told:
            await self.parts.producer.resume()
        self._resumed_at = self._loop.time()
        self.dispatcher.buffer.accounts.window.pause_s += self._resumed_at - self._paused_at

    async def take_weights(self, step: int, mode: SyncMode) -> None:
        """The engines get the weights of `step`; what is too old for the next step expires."""
        await self.parts.sync_weights(step, mode)
        await self.dispatcher.set_steps(train_step=step + 1, model_step=step)

    def due(self, step: int) -> bool:
        """Whether an evaluation or a checkpoint belongs to the end of `step`."""
        config = self.config
        return any(n and step % n == 0 for n in (config.evaluate_every, config.checkpoint_every))

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

    async def others_first(self) -> None:
        """Returns when whoever was woken before has run, and what they sent is on its way: a
        producer has its work, then the step is booked, while that is computed.
        """
        turn = self._loop.create_future()
        self._loop.call_soon(turn.set_result, None)
        await turn

    async def tell(self, report: StepReport) -> None:
        """Once, whatever comes of it."""
        self._untold.pop(report.train_step, None)
        if self.parts.on_step is not None:
            await self.parts.on_step(report)

    async def finish_step(self, report: StepReport) -> None:
        """Check the books, tell, and then the checkpoint when due: a run that dies right after it
        resumes behind a step that was told. The prompts of a later step are made here, too.
        """
        self.dispatcher.check_books()
        await self.tell(report)
        # The next step has its work, or will get it now; these are for the one after it.
        if report.train_step + 1 < self.config.steps and not self.stopping:
            self.dispatcher.prepare()
        every = self.config.checkpoint_every
        if every and report.train_step % every == 0:
            await self.parts.checkpoint(report.train_step)


async def _run_async(run: _Run) -> None:
    config = run.config
    if config.evaluate_first:
        await run.unless_stopped(run.parts.evaluate(config.first_step - 1))
    for step in run.steps:
        batch, wait_s = await run.take(step)
        if config.sync_mode == "in_flight" and step % config.sync_interval == 0:
            run.work_ahead(step)
        report = await run.train(step, batch, wait_s)
        await run.settle()
        run.beside(_after_async(run, report))
        if config.sync_mode == "pause" or run.due(step) or run.stopping:
            await run.settle()
        if run.stopping:
            return


async def _after_async(run: _Run, report: StepReport) -> None:
    """New weights into the engines when it is time, what is due with them, and the books."""
    if report.train_step % run.config.sync_interval == 0:
        pause, sync_s = await run.sync(report.train_step)
        report = dataclasses.replace(report, sync_s=sync_s, pause=pause)
    await run.finish_step(report)


async def _run_sync(run: _Run) -> None:
    """Also `colocated`: the producers are at rest whenever the learner works."""
    devices, loop = run.parts.devices, asyncio.get_running_loop()
    run.dispatcher.limit_ahead(1)
    if run.config.evaluate_first:
        await run.unless_stopped(run.parts.evaluate(run.config.first_step - 1))
    for step in run.steps:
        batch, wait_s = await run.take(step)
        pause = await run.rest()
        if devices is not None:
            await devices.to_learner()
        # An evaluation or a checkpoint finds nothing drawn; and where the last batch had more than
        # it needed, the producers have that to go on with.
        if devices is None and not (run.told or run.due(step)):
            run.work_ahead(step)
        report = await run.train(step, batch, wait_s)
        if run.stopping:
            await run.rest_again()
        started = loop.time()
        if devices is not None:
            await devices.to_engine()
        await run.parts.sync_weights(step, "pause")
        report = dataclasses.replace(report, pause=pause, sync_s=loop.time() - started)
        await run.evaluate_due(step)
        # The checkpoint comes before anything may be drawn for the next step: what a resumed run
        # draws is then exactly what this one does. Without one, production need not wait.
        early = run.due(step)
        if early:
            _check_no_session_is_left(run)
            await run.finish_step(report)
        await run.dispatcher.set_steps(train_step=step + 1, model_step=step)
        last = step == run.config.steps or run.stopping
        if not last:
            await run.resume()
        if not early:
            await run.others_first()
            _check_no_session_is_left(run)
            await run.finish_step(report)
        if last:
            return


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
