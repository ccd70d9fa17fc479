"""The training loop of the driver and what it keeps between steps.

Owns: the current step, the timing of a step, metrics and totals, and when to sync, evaluate,
export and checkpoint. It moves no tokens: it asks the dispatcher for a batch, hands its names to
the learner, and books what comes back. Deaths and restarts are the business of the links.

The three schedules (lifecycle L30) are one loop under three staleness budgets: with `sync` and
`colocated` nothing may be produced for the next step before its weights are there, so production
and training take turns; with `async` they overlap.

Made by `trainer.fit` for one run; one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer import step_metrics
from trainer.checkpoint import CheckpointFailed, write_checkpoint
from trainer.config import Config
from trainer.display import Display
from trainer.engine_actor import EngineUse
from trainer.environments import PromptSource
from trainer.errors import StalenessError
from trainer.learner_actor import LEARNER_OWNER
from trainer.metrics import MetricsWriter
from trainer.rollout import Batch, Prompt
from trainer.run_folder import RunFolder
from trainer.step_metrics import StepTimes
from trainer.summary import Summary
from trainer.trajectories import write_trajectories

if TYPE_CHECKING:
    from trainer.dispatch import Dispatcher
    from trainer.wiring import Parts

__all__ = ["Driver"]


@dataclass
class _Clock:
    """Seconds of the step under way. It began when the one before ended."""

    began: float
    aside_s: float = 0.0
    """Evaluation, checkpoint, export: no part of any step."""
    sync_s: float = 0.0


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
        self._takes_turns = config.schedule.name != "async"
        self._clock = _Clock(time.perf_counter())
        self._evaluated: dict[str, float] = {}
        self._wait_s = self._step_s = self._overhead_s = 0.0
        self._first_step = train_step
        self._saved_step = train_step
        self._exported_step = self._aside_step = -1
        self.train_step = train_step

    # -- the loop --------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Trains up to `schedule.steps`, or until `stop` is set and the step under way has
        ended.
        """
        steps = self._config.schedule.steps
        if self.train_step == 0:
            await self._evaluate()
            if self._evaluated:
                self._metrics.write(0, self._evaluated)
            self._evaluated = {}
        self._clock = _Clock(time.perf_counter())
        while self.train_step < steps and not stop.is_set():
            self._display.phase("train", self.train_step, steps)
            batch = await self._next_batch(stop)
            if batch is None:
                break
            await self._step(batch)
        self._display.phase("train", self.train_step, steps)
        if self._config.checkpoint.final or stop.is_set():
            await self._checkpoint()
        if self._config.checkpoint.final and not stop.is_set():
            await self._export()

    async def _next_batch(self, stop: asyncio.Event) -> Batch | None:
        """The batch of the next step; None when the run was asked to stop while it waited."""
        take = asyncio.ensure_future(self._take(self.train_step + 1))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((take, stopping), return_when=asyncio.FIRST_COMPLETED)
            return take.result() if take.done() else None
        finally:
            take.cancel()
            stopping.cancel()
            await asyncio.gather(take, stopping, return_exceptions=True)

    async def _take(self, step: int) -> Batch:
        limit_s = self._config.schedule.batch_timeout_s
        try:
            return await self._dispatcher.take(step, owner=LEARNER_OWNER, timeout=limit_s)
        except StalenessError:
            # The engines' weights are too old to make this batch, so nothing will come (L23).
            await self._sync()
            return await self._dispatcher.take(step, owner=LEARNER_OWNER, timeout=limit_s)

    async def _step(self, batch: Batch) -> None:
        step = self.train_step + 1
        wait_s = time.perf_counter() - self._clock.began - self._clock.aside_s
        use_before = await self._parts.producer.use()
        texts = self._wants(self._config.metrics.trajectories_every, step)
        if texts:
            await write_trajectories(self._folder, step, batch, self._parts.store)
        done = await self._parts.learner.train(batch.groups, step)
        self._moved(f"step {step} was trained")
        self.train_step = step
        await self._dispatcher.set_steps(train_step=step + 1)
        if step % self._config.schedule.sync_every == 0:
            await self._sync()
        self._dispatcher.check_books()
        numbers = await self._report(batch, done.metrics, wait_s, use_before)
        if not self._takes_turns:
            await self._aside(step)
        numbers |= self._evaluated
        self._evaluated = {}
        self._display.step(self._metrics.write(step, numbers))

    async def _sync(self) -> None:
        """New weights into every engine, in flight or with a pause (lifecycle L20)."""
        began, aside_s = time.perf_counter(), self._clock.aside_s
        schedule = self._config.schedule
        parts = self._parts
        weights = await parts.learner.publish(self.train_step)
        if schedule.weight_sync == "pause":
            await parts.producer.pause(schedule.pause_timeout_s)
        await parts.producer.load_weights(weights, schedule.weight_sync)
        if self._takes_turns:
            # Before anything is drawn for the next step: a checkpoint of here repeats exactly.
            await self._aside(self.train_step)
        await self._dispatcher.set_steps(model_step=weights.model_step)
        if schedule.weight_sync == "pause":
            await parts.producer.resume()
        parts.learner.retire()
        self._clock.sync_s += time.perf_counter() - began - (self._clock.aside_s - aside_s)

    # -- between steps ---------------------------------------------------------------------------

    async def _aside(self, step: int) -> None:
        """What a step does not pay for: evaluation, checkpoint, export; once a step."""
        if step == self._aside_step:
            return
        self._aside_step = step
        began = time.perf_counter()
        if self._wants(self._config.eval.every, step) or step == self._config.schedule.steps:
            await self._evaluate()
        if self._wants(self._config.checkpoint.every, step):
            await self._checkpoint()
        if self._wants(self._config.checkpoint.hf_every, step):
            await self._export()
        self._clock.aside_s += time.perf_counter() - began

    @staticmethod
    def _wants(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    async def _evaluate(self) -> None:
        config = self._config.eval
        if not config.prompts:
            return
        prompts = held_out_prompts(self._held_out, config.prompts)
        self._display.phase("evaluate", 0, len(prompts))
        found = await self._parts.producer.evaluate(
            prompts, config.rollouts_per_prompt, config.temperature, config.timeout_s
        )
        reward = found.get("reward")
        detail = "" if reward is None else f"held-out reward {reward:.3f}"
        self._display.phase("evaluate", len(prompts), len(prompts), detail)
        self._moved("an evaluation ended")
        self._evaluated = {f"eval/{name}": value for name, value in found.items()}
        if reward is not None:
            self._summary.evals.append(reward)

    async def _checkpoint(self) -> None:
        if self._saved_step == self.train_step and self.train_step != self._first_step:
            return
        try:
            await write_checkpoint(
                self._folder,
                self.train_step,
                self._parts.learner,
                self._dispatcher,
                self._summary.totals(),
            )
        except CheckpointFailed as error:
            self._display.note(f"{error}; the run goes on")
            self._summary.warnings.append(str(error))
            return
        self._saved_step = self.train_step
        self._folder.prune_checkpoints(self._config.checkpoint.keep)

    async def _export(self) -> None:
        if self._exported_step == self.train_step:
            return
        await self._parts.learner.export(str(self._folder.hf(self.train_step)))
        self._exported_step = self.train_step

    # -- numbers ---------------------------------------------------------------------------------

    async def _report(
        self,
        batch: Batch,
        learner: Mapping[str, float],
        wait_s: float,
        use_before: Mapping[str, EngineUse],
    ) -> dict[str, float]:
        """The numbers of the step that just ended; the next one begins here."""
        use_after = await self._parts.producer.use()
        now = time.perf_counter()
        clock, self._clock = self._clock, _Clock(now)
        times = StepTimes(
            now - clock.began - clock.aside_s, wait_s, clock.sync_s, self._parts.producer.n_engines
        )
        use = [(use_before[name], use_after[name]) for name in use_before if name in use_after]
        found = step_metrics.batch_metrics(batch, self.train_step)
        found |= step_metrics.learner_metrics(learner)
        found |= step_metrics.speed_metrics(times, found, use)
        found |= step_metrics.arena_metrics(self._parts.store.stats())
        found["model_step"] = float(self._dispatcher.model_step)
        found["buffer_groups"] = float(len(self._dispatcher.buffer))
        found["buffer_bytes"] = float(self._dispatcher.buffer.nbytes)
        found["restarts"] = float(sum(self.restarts().values()))
        ledger = self._dispatcher.report()
        found |= {f"ledger/{k}": float(v) for k, v in ledger.items() if isinstance(v, int)}
        self._add_up(found)
        return found

    def _add_up(self, found: Mapping[str, float]) -> None:
        summary = self._summary
        summary.add_step(found.get("reward"))
        summary.tokens_generated += int(found["tokens_generated"])
        summary.tokens_trained += int(found["tokens_trained"])
        self._wait_s += found["wait_s"]
        self._step_s += found["step_s"]
        self._overhead_s += found["overhead_s"]
        summary.learner_wait_share = self._wait_s / max(self._step_s, 1e-9)
        summary.overhead_share = self._overhead_s / max(self._step_s, 1e-9)

    def restarts(self) -> dict[str, int]:
        """Deaths so far, by process."""
        found = dict(self._parts.producer.restarts)
        if self._parts.learner.restarts:
            found["learner"] = self._parts.learner.restarts
        return found


def held_out_prompts(sources: Sequence[PromptSource], count: int) -> list[Prompt]:
    """The same `count` prompts each time, spread evenly over the tasks."""
    prompts: list[Prompt] = []
    for index, source in enumerate(sources):
        share = count // len(sources) + (index < count % len(sources))
        size = source.size
        prompts += [source.prompt(i) for i in range(share if size is None else min(share, size))]
    return prompts
