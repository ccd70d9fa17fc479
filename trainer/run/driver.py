"""The training loop of the driver and what it keeps between steps.

Owns: the current step, the timing of a step, metrics and totals, and when to sync, evaluate,
export and checkpoint. It moves no tokens: it asks the dispatcher for a batch, hands its names to
the learner, and books what comes back. The order of events is `trainer.schedule`'s, deaths and
restarts are the links'.

Made by `trainer.fit` for one run; one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.checkpoint import CheckpointFailed, write_checkpoint
from trainer.config import Config
from trainer.engine.protocol import SyncMode
from trainer.environments import PromptSource
from trainer.metrics import MetricsWriter
from trainer.rollout import Batch, Prompt
from trainer.run import step_metrics
from trainer.run.display import Display
from trainer.run.ending import not_kept
from trainer.run.engine_actor import EngineUse, leave_out
from trainer.run.folder import RunFolder
from trainer.run.learner_actor import LEARNER_OWNER
from trainer.run.step_metrics import StepTimes
from trainer.run.summary import Summary
from trainer.run.trajectories import write_trajectories
from trainer.schedule import ScheduleConfig, ScheduleParts, StepReport, run_schedule

if TYPE_CHECKING:
    from trainer.dispatch import Dispatcher
    from trainer.run.wiring import Parts

__all__ = ["Driver"]


@dataclass
class _Clock:
    """Seconds of the step under way. It began when the one before had been trained."""

    began: float
    aside_s: float = 0.0
    """Evaluation, checkpoint, export: no part of any step."""


@dataclass(frozen=True)
class _Written:
    """The newest file of its kind that was tried, and why it is not on disk."""

    step: int
    problems: tuple[str, ...] = ()


class Driver:
    """See the module. `train_step` is the last finished step."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        parts: Parts,
        dispatcher: Dispatcher,
        metrics: MetricsWriter,
        display: Display,
        summary: Summary,
        held_out: Sequence[PromptSource],
        train_step: int,
        moved: Callable[[str], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._parts = parts
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._display = display
        self._summary = summary
        self._held_out = held_out
        self._moved = moved
        self._clock = _Clock(time.perf_counter())
        self._evaluated: dict[str, float] = {}
        self._evaluated_on: list[Prompt] = []  # made once
        self._use: dict[str, EngineUse] = {}
        self._use_at_sync: dict[str, EngineUse] = {}
        self._cpu_s = time.process_time()
        self._saved = _Written(train_step if train_step else -1)
        self._exported = _Written(-1)
        self._model_step = train_step
        self.train_step = train_step

    # -- the loop --------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Trains up to `schedule.steps`, or until `stop` is set and the step under way has
        ended.
        """
        config = self._config
        if self.train_step < config.schedule.steps:
            self._use, self._cpu_s = await self._parts.producer.use(), time.process_time()
            parts = self._schedule_parts(stop)
            await run_schedule(config.schedule.name, parts, self._when())
        problems: list[str] = []
        if config.checkpoint.final or stop.is_set():
            problems += await self._checkpoint(self.train_step)
        if config.checkpoint.final and not stop.is_set():
            problems += await self._export()
        if problems:
            self._summary.error = not_kept(self._folder, self.train_step, problems)
            self._summary.warnings += [p for p in problems if p not in self._summary.warnings]

    def _schedule_parts(self, stop: asyncio.Event) -> ScheduleParts:
        return ScheduleParts(
            dispatcher=self._dispatcher,
            learner=self,
            producer=self._parts.producer,
            sync_weights=self._sync,
            evaluate=self._evaluate_first_or_due,
            checkpoint=self._checkpoint_due,
            on_step=self._step_ended,
            devices=self._parts if self._config.schedule.name == "colocated" else None,
            prepares=True,
            stop=stop,
        )

    def _when(self) -> ScheduleConfig:
        config = self._config
        return ScheduleConfig(
            steps=config.schedule.steps,
            first_step=self.train_step + 1,
            sync_interval=config.schedule.sync_every,
            sync_mode=config.schedule.weight_sync,
            evaluate_every=config.eval.every,
            evaluate_first=self.train_step == 0 and not self._summary.evals,
            checkpoint_every=math.gcd(config.checkpoint.every, config.checkpoint.hf_every),
            pause_timeout_s=config.schedule.pause_timeout_s,
            take_timeout_s=config.schedule.batch_timeout_s,
            learner=LEARNER_OWNER,
        )

    async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
        """One step in the learner's process, with its time; the schedule's learner part."""
        if self._config.run.deterministic:  # in which order groups end, their times say
            groups = sorted(batch.groups, key=lambda group: group.uid)
            batch = dataclasses.replace(batch, groups=tuple(groups))
        if self._wants(self._config.metrics.trajectories_every, train_step):
            try:
                await write_trajectories(self._folder, train_step, batch, self._parts.store)
            except OSError as error:
                self._warn(f"the trajectories of step {train_step} could not be written: {error}")
        due = self._wants(self._config.schedule.sync_every, train_step)
        done = await self._parts.learner.train(batch.groups, train_step, publish=due)
        now = time.perf_counter()
        clock, self._clock = self._clock, _Clock(now)
        self._moved(f"step {train_step} was trained")
        self.train_step = train_step
        return {**done.metrics, "step_s": now - clock.began - clock.aside_s}

    async def _sync(self, model_step: int, mode: SyncMode) -> None:
        """New weights into every engine (lifecycle L20), which then need no older ones."""
        parts = self._parts
        weights = parts.learner.weights
        if weights is None or weights.model_step != model_step:
            weights = await parts.learner.publish(model_step)
        self._use_at_sync = await parts.producer.load_weights(weights, mode)
        parts.learner.retire(before=model_step)
        self._model_step = model_step
        self._moved(f"the engines run the weights of step {model_step}")

    async def _step_ended(self, report: StepReport) -> None:
        """Books and tells the step; the next one may be under way."""
        step = report.train_step
        numbers = await self._numbers(report)
        last = step == self._config.schedule.steps
        if last and not self._evaluated and report.failed is None:
            await self._evaluate()
        numbers |= self._evaluated
        self._evaluated = {}
        self._display.step(self._metrics.write(step, numbers))
        self._display.phase("train", step, self._config.schedule.steps)

    # -- between steps ---------------------------------------------------------------------------

    @staticmethod
    def _wants(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    async def _evaluate_first_or_due(self, step: int) -> None:
        with self._aside():
            await self._evaluate()
        if step == 0:
            if self._evaluated:
                self._metrics.write(0, self._evaluated)
            self._evaluated = {}
            self._clock = _Clock(time.perf_counter())

    async def _checkpoint_due(self, step: int) -> None:
        with self._aside():
            if self._wants(self._config.checkpoint.every, step):
                self._warn(*await self._checkpoint(step))
            if self._wants(self._config.checkpoint.hf_every, step):
                self._warn(*await self._export())

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Time that no step pays for."""
        began = time.perf_counter()
        yield
        self._clock.aside_s += time.perf_counter() - began

    async def _evaluate(self) -> None:
        config = self._config.eval
        if not self._evaluated_on:
            note = self._display.note
            self._evaluated_on = held_out_prompts(self._held_out, config.prompts, note)
        prompts = self._evaluated_on
        if not prompts:  # turned off, or no task holds anything out
            return
        self._display.phase("evaluate", 0, len(prompts))
        use_before = await self._parts.producer.use()
        found = await self._parts.producer.evaluate(
            prompts, config.rollouts_per_prompt, config.temperature, config.timeout_s
        )
        reward = found.get("reward")
        if reward is not None and not math.isfinite(reward):  # nothing was scored
            reward = None
        failed = found.get("failed", 0)
        detail = "" if reward is None else f"held-out reward {reward:.3f}"
        if failed:
            detail += f" ({failed} of {found['rollouts']} rollouts failed)"
        self._display.phase("evaluate", len(prompts), len(prompts), detail)
        # Its work is no part of a step; what was done in the step before it is.
        use_after = await self._parts.producer.use()
        self._use = leave_out(self._use, use_before, use_after)
        self._use_at_sync = leave_out(self._use_at_sync, use_before, use_after)
        self._moved("an evaluation ended")
        self._evaluated = {f"eval/{name}": value for name, value in found.items()}
        if reward is not None:
            self._summary.evals.append(reward)

    async def _checkpoint(self, step: int) -> Sequence[str]:
        """Why the checkpoint of `step` is not on disk, if so; what failed is not tried again."""
        if self._saved.step == step:
            return self._saved.problems
        totals = self._summary.totals()
        problems: tuple[str, ...] = ()
        try:
            await write_checkpoint(
                self._folder, step, self._parts.learner, self._dispatcher, totals
            )
            await asyncio.to_thread(self._folder.prune_checkpoints, self._config.checkpoint.keep)
        except CheckpointFailed as error:
            problems = (str(error),)
        self._saved = _Written(step, problems)
        return problems

    async def _export(self) -> Sequence[str]:
        """The same for the folder with the model as it is, for from_pretrained."""
        if self._exported.step == self.train_step:
            return self._exported.problems
        place = self._folder.hf(self.train_step)
        problems: tuple[str, ...] = ()
        try:
            await self._parts.learner.export(str(place))
        except OSError as error:
            problems = (f"the export to {place} could not be written: {error}",)
        self._exported = _Written(self.train_step, problems)
        return problems

    def _warn(self, *problems: str) -> None:
        """Told now and in the summary: what failed can be done again later."""
        for problem in problems:
            self._display.note(f"{problem}; the run goes on")
            self._summary.warnings.append(problem)

    # -- numbers ---------------------------------------------------------------------------------

    async def _numbers(self, report: StepReport) -> dict[str, float]:
        """The numbers of a step that has ended."""
        use_after = self._use_at_sync or await self._parts.producer.use()
        before, self._use, self._use_at_sync = self._use, use_after, {}
        use = [(before[name], use_after[name]) for name in before if name in use_after]
        cpu_before_s, self._cpu_s = self._cpu_s, time.process_time()
        times = StepTimes(
            step_s=report.metrics["step_s"],
            wait_s=report.wait_s,
            sync_s=report.sync_s,
            driver_cpu_s=self._cpu_s - cpu_before_s,
            engines=self._parts.producer.n_engines,
            overlap=self._config.schedule.name == "async",
        )
        found = step_metrics.batch_metrics(report.batch, report.train_step, len(self._config.tasks))
        found["tokens_trained"] = report.metrics["tokens"]
        self._summary.add_step(
            found.get("reward", math.nan),  # none was scored since the last batch
            found["tokens_generated"],
            found["tokens_trained"],
        )
        found |= step_metrics.learner_metrics(report.metrics)
        found |= step_metrics.speed_metrics(times, found, use)
        found |= step_metrics.arena_metrics(self._parts.store.stats())
        found["model_step"] = self._model_step
        found["buffer_groups"] = len(self._dispatcher.buffer)
        found["buffer_bytes"] = self._dispatcher.buffer.nbytes
        found["restarts"] = self._parts.deaths.total()
        ledger = self._dispatcher.report()
        found |= {f"ledger/{k}": v for k, v in ledger.items() if isinstance(v, int)}
        self._summary.add_time(times.wait_s, times.step_s)
        return found


def held_out_prompts(
    sources: Sequence[PromptSource], count: int, say: Callable[[str], None]
) -> list[Prompt]:
    """The same `count` prompts each time, spread evenly over the tasks; it is said when there are
    fewer: a mean reward over a handful is noise.
    """
    prompts: list[Prompt] = []
    for index, source in enumerate(sources):
        share = count // len(sources) + (index < count % len(sources))
        size = source.size
        prompts += [source.prompt(i) for i in range(share if size is None else min(share, size))]
    if 0 < len(prompts) < count:
        say(f"evaluating on {len(prompts)} prompts, not {count}: source.holdout holds out no more")
    return prompts
