"""One run, from an empty arena to an empty arena.

Owns the order of things in the driver's process: arena, processes, prompts and buffer, the
training loop, and at the end, however it comes, letting everything go and saying what is left
(lifecycle L26, L27). The loop is `trainer.run.driver`'s, the answers to deaths are the links', the
books are the ledger's.

`run_blocking` is what the command line calls; `fit` is for people with a loop of their own. Both
return a `Summary`, also when the run failed: `summary.exit` is the exit status and `summary.error`
says why.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import actors
from shmstore import Store, StoreError
from trainer import snapshot
from trainer.checkpoint import Checkpoint, read_checkpoint
from trainer.config import Config
from trainer.dispatch import DispatchConfig, Dispatcher
from trainer.environments import PromptSource, build_source
from trainer.errors import NoProgress, TrainerError
from trainer.expiry import Expiry, ExpiryAction
from trainer.ledger import ENDS
from trainer.metrics import MetricsWriter, tensorboard_missing
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.run.desk import ProgressBoard, RemoteDesk
from trainer.run.display import Display, QuietDisplay, make_display
from trainer.run.driver import Driver
from trainer.run.folder import RunFolder
from trainer.run.learner_actor import LEARNER_OWNER, WEIGHTS_OWNER, LearnerReady
from trainer.run.learner_link import StateLost
from trainer.run.learner_state import STATE_OWNER
from trainer.run.plot import plot_rewards
from trainer.run.summary import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LEFTOVERS,
    EXIT_OK,
    ArenaLeft,
    Summary,
)
from trainer.run.watchdog import Watchdog
from trainer.run.wiring import PRODUCER_OWNER, Parts, open_parts
from trainer.shares import TaskMix
from trainer.staleness import StalenessBudget

T = TypeVar("T")

__all__ = ["fit", "open_arena", "open_sources", "run_blocking"]

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler's request, a terminal that was closed."""
_BATCHES_AHEAD_MAX = 8
"""Batches that may be ready or in production, however fresh; bounds buffer and prompts under
way.
"""


def run_blocking(
    folder: RunFolder, *, resume: bool, quiet: bool = False, gpus: Sequence[str] | None = None
) -> Summary:
    """Runs a run on a loop of its own. Ctrl-C once ends it in order, twice at once; what comes
    after the end, while the loop is taken down, is ignored.

    gpus: what CUDA calls the devices that the run may use; None: those of the machine.
    """
    display = make_display(table_rows=folder.config().metrics.table_rows, quiet=quiet)
    before = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        return actors.run(_with_signals(folder, resume, display, gpus))
    finally:
        display.close()
        for number, handler in before.items():
            if handler is not None:  # one that was installed from C cannot be put back
                signal.signal(number, handler)


async def _with_signals(
    folder: RunFolder, resume: bool, display: Display, gpus: Sequence[str] | None
) -> Summary:
    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def interrupt(name: str) -> None:
        if task.cancelling():
            display.note(
                f"{name}: it is ending; what the arena and the processes hold is let go of"
            )
        elif stop.is_set():
            task.cancel()
        else:
            stop.set()
            told = "ends after the step under way, if any; once more ends it at once"
            display.note(f"{name}: {told}")

    # `nohup` has asked for the terminal's end to be ignored.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    stopping = [number for number in _STOPPING if not (ignored and number == signal.SIGHUP)]
    for number in stopping:
        loop.add_signal_handler(number, interrupt, number.name)
    try:
        return await fit(folder, resume=resume, display=display, stop=stop, gpus=gpus)
    finally:
        for number in stopping:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


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

    Cancelling ends it at once; either way nothing is left in the arena and no process. `gpus`: as
    in `run_blocking`.
    """
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
        self.checkpoint = self._latest() if resume else None
        self._first_step = self.checkpoint.train_step + 1 if self.checkpoint else 1
        self._gone_back = 0
        self._deaths: Counter[str] = Counter()

    def _latest(self) -> Checkpoint | None:
        """What to go on from; None when the run died before its first checkpoint."""
        found = self.folder.latest_checkpoint()
        checkpoint = read_checkpoint(found[1]) if found else None
        self.folder.keep_metrics_through(checkpoint.train_step if checkpoint else -1)
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
            kept = self.folder.latest_checkpoint()
            summary.error = "ended at once, by a second Ctrl-C or a cancellation; " + (
                f"the checkpoint of step {kept[0]} is whole, and `shmrl resume` goes on from it"
                if kept
                else "there is no checkpoint, so `shmrl resume` begins again"
            )
        except (*_EXPECTED, ExceptionGroup) as error:
            first = _first(error)
            if not isinstance(first, _EXPECTED):
                raise
            summary.error = f"{type(first).__name__}: {first}"
        summary.restarts = dict(self._deaths)
        summary.settle()
        summary.exit = _exit_status(summary)
        self._leave_pictures()
        return summary

    async def _once(self) -> bool:
        """From an arena to its end; False when the run has to go back to its last checkpoint."""
        try:
            with open_arena(self.config, self.folder.name, self.summary) as store:
                await self._with_parts(store)
        except (StateLost, ExceptionGroup) as error:
            if not isinstance(_first(error), StateLost) or self.stop.is_set():
                raise
            self._gone_back += 1
            if self._gone_back > self.config.faults.restarts_max:
                raise
            self.display.note(str(_first(error)))
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
        dispatcher = await self._dispatcher(store)
        alarm = _Alarm(config.faults.no_progress_s, dispatcher.describe)
        opening = open_parts(
            config, self.folder.name, store, self.folder.logs, note, self.gpus, self._deaths
        )
        try:
            async with AsyncExitStack() as stack:
                parts = await self._unless_stopped(stack.enter_async_context(opening))
                if parts is not None:
                    await self._work(parts, dispatcher, alarm)
        finally:
            alarm.disarm()
            self._close_books(store, dispatcher)

    async def _work(self, parts: Parts, dispatcher: Dispatcher, alarm: _Alarm) -> None:
        """Trains. Production ends in order, or by a kill when nobody waits for it any more."""
        desk = await parts.runtime.host(RemoteDesk(dispatcher, alarm.moved), name="desk")
        in_order = True
        try:
            in_order = await self._train(parts, dispatcher, desk, alarm)
        except asyncio.CancelledError:
            in_order = False
            raise
        finally:
            await asyncio.shield(parts.producer.end() if in_order else parts.kill())

    async def _train(
        self, parts: Parts, dispatcher: Dispatcher, desk: actors.Handle, alarm: _Alarm
    ) -> bool:
        """False: it was stopped while the processes got ready, and they still do."""
        display = self.display
        display.note("building the model" + (" and warming it up" if self.config.warmup else ""))
        ready = await self._unless_stopped(self._start(parts))
        if ready is None:
            return False
        display.note(
            f"{ready.parameters:,} parameters, at step {ready.train_step}"
            + "".join(f", {name} {value:.4g}" for name, value in ready.warmup.items())
        )
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
            await _beside((parts.producer.supervise(), alarm.ring()), driver.run(self.stop))
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

    async def _dispatcher(self, store: Store) -> Dispatcher:
        """Buffer, prompts and books: new ones, or those of the checkpoint."""
        config = self.config
        schedule, replay = config.schedule, config.replay
        retries = replay.expiry == "retry" and replay.tail_batch >= 0
        expiry = Expiry(
            action=ExpiryAction.RETRY if retries else ExpiryAction.DROP,
            max_staleness=schedule.max_staleness,
            sync_interval=schedule.sync_every,
            max_token_staleness=schedule.max_token_staleness,
            tail_batch=replay.tail_batch if retries else None,
        )
        order, limit = replay.order, replay.max_bytes or config.store.capacity // 2
        if self.checkpoint is None:
            buffer = ReplayBuffer(store, order=order, max_bytes=limit, expiry=expiry)
        else:
            buffer = await ReplayBuffer.resume(
                self.checkpoint.buffer, store, order=order, max_bytes=limit, expiry=expiry
            )
        sampler = PromptSampler(
            {s.name: s for s in open_sources(config, held_out=False)},
            seed=config.run.seed,
            epochs={task.name: None if task.source.repeat else 1 for task in config.tasks},
        )
        dispatcher = Dispatcher(
            buffer,
            sampler,
            _dispatch_config(config),
            TaskMix({task.name: task.weight for task in config.tasks}),
        )
        if self.checkpoint is not None:
            dispatcher.restore(snapshot.read_state(self.checkpoint.buffer))
            self.summary.restore(self.checkpoint.totals)
        return dispatcher

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

    def _leave_pictures(self) -> None:
        """Summary, plot and the last words; none of them may hide how the run ended."""
        try:
            self.folder.write_summary(self.summary.to_json())
            if self.config.metrics.plot and self.folder.metrics_file.is_file():
                plot_rewards(self.folder.metrics_file, self.folder.plot_file, self.folder.name)
        except ModuleNotFoundError as error:
            self.display.note(f"no reward.png: {error}")
        except OSError as error:
            self.display.note(f"summary and plot could not be written: {error}")
        self.display.close()  # the last words come below the last table
        for line in _last_words(self.summary, self.folder, self._first_step):
            self.display.note(line)


_EXPECTED = (TrainerError, StoreError, actors.ActorError, OSError)
"""What a run may end with; anything else is a bug of ours and keeps its trace."""


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Alarm:
    """The watchdog as an error that ends the run, whatever everybody waits for.

    Armed once the models are built: how long that takes is nobody's fault.
    """

    def __init__(self, limit_s: float, describe: Callable[[], Sequence[str]]) -> None:
        self._limit_s = limit_s
        self._describe = describe
        self._watchdog: Watchdog | None = None
        self._stuck: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def moved(self, what: str) -> None:
        """A sign of life."""
        if self._watchdog is not None:
            self._watchdog.moved(what)

    async def ring(self) -> None:
        """Raises NoProgress when nothing moved for too long; otherwise waits for ever."""
        self._watchdog = Watchdog(self._limit_s, self._describe, self._say)
        await self._stuck

    def _say(self, report: NoProgress) -> None:
        if not self._stuck.done():
            self._stuck.set_exception(report)

    def disarm(self) -> None:
        """No more alarms."""
        if self._watchdog is not None:
            self._watchdog.stop()
        self._stuck.cancel()


async def _beside(
    background: Sequence[Coroutine[Any, Any, None]], main: Coroutine[Any, Any, None]
) -> None:
    """Runs `main` to its end; `background` is ended with it, and an error of any ends all."""
    async with asyncio.TaskGroup() as tasks:
        helpers = [tasks.create_task(helper) for helper in background]
        await main
        for helper in helpers:
            helper.cancel()


@contextmanager
def open_arena(config: Config, name: str, summary: Summary) -> Iterator[Store]:
    """The arena of the run; on leaving it is measured, told and removed."""
    limits = config.store
    store = Store.create(
        name,
        capacity=limits.capacity,
        max_objects=limits.max_objects,
        max_sessions=limits.max_sessions,
    )
    try:
        yield store
    finally:
        store.sweep()
        stats = store.stats()
        summary.arena = ArenaLeft(stats.sessions, stats.objects, stats.used if stats.objects else 0)
        summary.left_by_owner = {} if summary.arena.empty else dict(stats.by_owner)
        store.close()
        Store.unlink(name)


def open_sources(config: Config, *, held_out: bool) -> list[PromptSource]:
    """One source a task; a task that holds nothing out is not evaluated."""
    tasks = [task for task in config.tasks if not held_out or task.source.holdout > 0]
    return [build_source(task, seed=config.run.seed, held_out=held_out) for task in tasks]


def _dispatch_config(config: Config) -> DispatchConfig:
    schedule = config.schedule
    turns = schedule.name != "async"
    return DispatchConfig(
        batch_groups=config.rollout.prompts_per_step,
        group_size=config.rollout.rollouts_per_prompt,
        budget=StalenessBudget(
            max_staleness=0 if turns else schedule.max_staleness,
            sync_interval=schedule.sync_every,
            batches_ahead_max=_BATCHES_AHEAD_MAX,
        ),
        over_sampling=schedule.oversample - 1.0,
        useless_in_row_max=config.faults.useless_groups_max,
    )


def _exit_status(summary: Summary) -> int:
    if not summary.arena.empty:
        return EXIT_LEFTOVERS
    if summary.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.error else EXIT_OK


def _last_words(summary: Summary, folder: RunFolder, first_step: int) -> Sequence[str]:
    lines = []
    for name, series, first, last in (
        ("reward of all rollouts", summary.rewards, summary.reward_first, summary.reward_last),
        ("reward on held-out prompts", summary.evals, summary.eval_first, summary.eval_last),
    ):
        if len(series) > 1:
            lines.append(f"{name}: {first:.3f} -> {last:.3f}")
        elif series:
            lines.append(f"{name}: {series[0]:.3f}, measured once")
    steps = f"{summary.steps} steps in {summary.wall_s:.1f} s"
    if 1 < first_step <= summary.steps:
        steps += f", of which steps {first_step}-{summary.steps} since it was resumed"
    lines.append(f"{steps}; everything is in {folder.path}")
    if summary.interrupted and not summary.error:
        lines.append(f"it was interrupted; `shmrl resume {folder.path}` goes on")
    elif first_step > summary.steps and not summary.error:
        lines.append("no step was left to train; `--set schedule.steps=N` gives it more")
    arena = summary.arena
    left = f": left by {summary.left_by_owner}" if not arena.empty else ""
    lines.append(f"arena: {arena.sessions} sessions, {arena.objects} objects{left}")
    return [*lines, _books(summary.ledger)] if summary.ledger else lines


def _books(ledger: Mapping[str, Any]) -> str:
    """`books balance: produced 96 = trained 64 + ...`, in rollouts; only what there is."""
    ends = {end: ledger[end] for end in (*ENDS, "buffered") if ledger[end]}
    total = sum(ends.values())
    shown = " + ".join(f"{end} {count}" for end, count in ends.items()) or "0"
    if ledger["produced"] != total:
        return f"books do NOT balance: produced {ledger['produced']}, but {shown}"
    why = " (filtered: groups of equal rewards, which teach nothing)" if "filtered" in ends else ""
    return f"books balance: produced {total} = {shown} rollouts{why}"
