"""One run, from an empty arena to an empty arena.

Owns the order of things in the driver's process: arena, processes, the training loop, and at the
end, however it comes, letting everything go (lifecycle L26, L27). What the run stands on is made by
`trainer.run.opening`, its processes by `trainer.run.wiring`; the loop is `trainer.run.driver`'s,
the answers to deaths are the links', the books are the ledger's, the last words
`trainer.run.ending`'s.

`run_blocking` is what the command line calls; `fit` is for people with a loop of their own. Both
return a `Summary`, also when the run failed: `summary.exit` is the exit status and `summary.error`
says why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import actors
from shmstore import Store, StoreError
from trainer.checkpoint import Checkpoint, read_checkpoint
from trainer.dispatch import Dispatcher
from trainer.errors import TrainerError
from trainer.metrics import MetricsWriter, tensorboard_missing
from trainer.run import ending
from trainer.run.beside import beside, first_error
from trainer.run.desk import FailedRollouts, ProgressBoard, RemoteDesk
from trainer.run.display import Display, QuietDisplay, make_display
from trainer.run.driver import Driver
from trainer.run.folder import RunFolder
from trainer.run.learner_actor import LEARNER_OWNER, WEIGHTS_OWNER, LearnerReady
from trainer.run.learner_link import StateLost
from trainer.run.learner_state import STATE_OWNER
from trainer.run.opening import (
    check_capacity,
    open_arena,
    open_dispatcher,
    open_sources,
    words_after,
    words_before,
)
from trainer.run.signals import handlers_put_back, stop_by_signals
from trainer.run.summary import Summary
from trainer.run.watchdog import Alarm
from trainer.run.wiring import PRODUCER_OWNER, Parts, open_parts

T = TypeVar("T")

__all__ = ["fit", "run_blocking"]


def run_blocking(
    folder: RunFolder, *, resume: bool, quiet: bool = False, gpus: Sequence[str] | None = None
) -> Summary:
    """Runs a run on a loop of its own. Ctrl-C once ends it in order, twice at once; what comes
    after the end, while the loop is taken down, is ignored.

    gpus: what CUDA calls the devices that the run may use; None: those of the machine.
    """
    display = make_display(table_rows=folder.config().metrics.table_rows, quiet=quiet)
    with handlers_put_back(), contextlib.closing(display):
        display.note(f"{folder.path}: `shmrl top {folder.name}` shows its processes meanwhile")
        return actors.run(_with_signals(folder, resume, display, gpus))


async def _with_signals(
    folder: RunFolder, resume: bool, display: Display, gpus: Sequence[str] | None
) -> Summary:
    with stop_by_signals(display.note) as stop:
        return await fit(folder, resume=resume, display=display, stop=stop, gpus=gpus)


async def fit(
    folder: RunFolder,
    *,
    resume: bool = False,
    display: Display | None = None,
    stop: asyncio.Event | None = None,
    gpus: Sequence[str] | None = None,
) -> Summary:
    """Trains the run in `folder`. Setting `stop` ends it after the step under way, with a
    checkpoint.

    Cancelling ends it at once; either way nothing is left in the arena and no process. The folder
    of a new run that failed before it began is removed again. BadRunFolder while another process
    trains it. `gpus`: as in `run_blocking`.
    """
    with folder.claimed():
        run = _Run(folder, display or QuietDisplay(), stop or asyncio.Event(), resume, gpus)
        return await run.to_the_end()


class _Run:
    """What one call of `fit` knows."""

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        stop: asyncio.Event,
        resume: bool,
        gpus: Sequence[str] | None,
    ) -> None:
        self.folder, self.gpus = folder, gpus
        self.config = folder.config()
        self.display = display
        self.stop = stop
        self.summary = Summary(folder.name)
        self._resumes = resume
        self.checkpoint = self._latest() if resume else None
        self._first_step = self.checkpoint.train_step + 1 if self.checkpoint else 1
        self._gone_back = 0
        self._deaths: Counter[str] = Counter()

    def _latest(self) -> Checkpoint | None:
        """What to go on from; None when the run died before its first checkpoint."""
        found = self.folder.latest_checkpoint()
        checkpoint = read_checkpoint(found[1]) if found else None
        try:
            self.folder.keep_metrics_through(checkpoint.train_step if checkpoint else -1)
        except OSError as error:
            raise TrainerError(ending.failed(self.folder, error)) from error
        return checkpoint

    async def to_the_end(self) -> Summary:
        """Trains, and turns every end into a summary; only cancellation of the task goes on up."""
        summary = self.summary
        try:
            while not await self._once():
                self._go_back()
            summary.interrupted = self.stop.is_set()
        except asyncio.CancelledError:
            summary.interrupted = True
            summary.error = ending.ended_at_once(self.folder)
        except (*_EXPECTED, ExceptionGroup) as error:
            first = first_error(error)
            if not isinstance(first, _EXPECTED):
                raise
            if not self._resumes and self.folder.remove_unbegun():
                return self._not_begun(first)
            summary.error = ending.failed(self.folder, first)
        summary.restarts = dict(self._deaths)
        # Resumed without a step to train, the totals are those of the checkpoint, time included.
        summary.settle(count_time=self.checkpoint is None or summary.steps >= self._first_step)
        summary.exit = ending.exit_status(summary)
        self._last_words()
        return summary

    def _not_begun(self, error: Exception) -> Summary:
        self.summary.error = ending.not_begun(error)
        self.summary.settle()
        self.summary.exit = ending.exit_status(self.summary)
        return self.summary

    async def _once(self) -> bool:
        """From an arena to its end; False when the run has to go back to its last checkpoint."""
        try:
            with open_arena(self.config, self.folder.name, self.summary) as store:
                await self._with_parts(store)
        except (StateLost, ExceptionGroup) as error:
            if not isinstance(first_error(error), StateLost) or self.stop.is_set():
                raise
            self._gone_back += 1
            if self._gone_back > self.config.faults.restarts_max:
                raise
            self.display.note(str(first_error(error)))
            return False
        return True

    def _go_back(self) -> None:
        """To the last checkpoint, or to the beginning when there is none yet."""
        before = self.checkpoint.train_step if self.checkpoint else 0
        self.checkpoint = self._latest()
        step = self.checkpoint.train_step if self.checkpoint else 0
        if step > before:
            self._gone_back = 1  # it gets on: deaths count against the same checkpoint only
        self.summary.begin_again()
        self.display.note(f"the run goes back to step {step}")

    async def _with_parts(self, store: Store) -> None:
        config, note = self.config, self.display.note
        dispatcher = await open_dispatcher(config, store, self.checkpoint)
        if self.checkpoint is not None:
            self.summary.restore(self.checkpoint.totals)
        alarm = Alarm(config.faults.no_progress_s, dispatcher.describe)
        opening = open_parts(
            config, self.folder.name, store, self.folder.logs, note, self.gpus, self._deaths
        )
        try:
            async with contextlib.AsyncExitStack() as stack:
                parts = await self._unless_stopped(stack.enter_async_context(opening))
                if parts is not None:
                    await self._work(parts, dispatcher, alarm)
        finally:
            alarm.disarm()
            self._close_books(store, dispatcher)

    async def _work(self, parts: Parts, dispatcher: Dispatcher, alarm: Alarm) -> None:
        """Trains. Production ends in order, or by a kill when nobody waits for it any more."""
        desk = await parts.runtime.host(
            RemoteDesk(dispatcher, alarm.moved, FailedRollouts(self.display.note).add), name="desk"
        )
        in_order = True
        try:
            in_order = await self._train(parts, dispatcher, desk, alarm)
        except asyncio.CancelledError:
            in_order = False
            raise
        finally:
            await asyncio.shield(parts.producer.end() if in_order else parts.kill())

    async def _train(
        self, parts: Parts, dispatcher: Dispatcher, desk: actors.Handle, alarm: Alarm
    ) -> bool:
        """False: it was stopped while the processes got ready, and they still do."""
        display = self.display
        display.note(words_before(self.config, self.checkpoint))
        ready = await self._unless_stopped(self._start(parts))
        if ready is None:
            return False
        warmup = ready.warmup
        if warmup and not warmup["cached"]:  # its bar ends where the target was reached
            accuracy = f"accuracy {warmup['accuracy']:.2f}"
            display.phase("warm-up", warmup["steps"], warmup["steps"], accuracy)
        display.note(words_after(ready))
        check_capacity(self.config, ready)
        weights = await parts.learner.publish(ready.train_step)
        await dispatcher.set_steps(train_step=ready.train_step + 1, model_step=ready.train_step)
        await parts.producer.begin(weights, dispatcher, desk)
        metrics = self._metrics()
        driver = Driver(
            self.config,
            self.folder,
            parts,
            dispatcher,
            metrics,
            display,
            self.summary,
            open_sources(self.config, held_out=True) if self.config.eval.prompts else [],
            ready.train_step,
            alarm.moved,
        )
        try:
            await beside((parts.producer.supervise(), alarm.ring()), driver.run(self.stop))
        finally:
            metrics.close()
        return True

    async def _start(self, parts: Parts) -> LearnerReady:
        """Both processes build their models at once."""
        checkpoint = str(self.checkpoint.learner) if self.checkpoint else None
        board = await parts.runtime.host(ProgressBoard(self.display), name="board")
        start = asyncio.ensure_future(parts.learner.start(checkpoint, board))
        prepare = asyncio.ensure_future(parts.producer.prepare())
        try:
            ready, _ = await asyncio.gather(start, prepare)
        finally:  # of either, when the other fails
            start.cancel()
            prepare.cancel()
            await asyncio.gather(start, prepare, return_exceptions=True)
        return ready

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Its result; None when the run is stopped first, and `work` has been cancelled."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for job in (task, stopping):
                job.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    def _metrics(self) -> MetricsWriter:
        wanted = self.config.metrics.tensorboard
        missing = tensorboard_missing() if wanted else None
        if missing:
            self.display.note(missing)
        folder = self.folder.tensorboard if wanted and not missing else None
        first_step = self.checkpoint.train_step + 1 if self.checkpoint else 0
        return MetricsWriter(self.folder.metrics_file, folder, first_step, self._warn)

    def _warn(self, text: str) -> None:
        self.display.note(text)
        self.summary.warnings.append(text)

    def _close_books(self, store: Store, dispatcher: Dispatcher) -> None:
        """Books what is left and ends every session of the run, whose processes have ended."""
        store.sweep()
        dispatcher.owner_died(PRODUCER_OWNER)
        dispatcher.owner_died(LEARNER_OWNER)
        dispatcher.buffer.close()
        store.sessions.release_owned(STATE_OWNER)
        store.sessions.release_owned(WEIGHTS_OWNER)
        # What was produced since the last batch is part of the run as well.
        rest = dispatcher.buffer.accounts.window.close({}).total
        self.summary.tokens_generated += rest.produced_tokens
        self.summary.ledger = dispatcher.report()
        dispatcher.check_books()

    def _last_words(self) -> None:
        wrong = list(
            ending.leave_pictures(self.summary, self.folder, plot=self.config.metrics.plot)
        )
        self.display.close()  # the last words come below the last table
        for line in (*wrong, *ending.last_words(self.summary, self.folder, self._first_step)):
            self.display.note(line)


_EXPECTED = (TrainerError, StoreError, actors.ActorError, OSError)
"""What a run may end with; anything else is a bug of ours and keeps its trace."""
