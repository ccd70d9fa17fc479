"""The three schedules over the same parts (L08, L20, L23, L30), and that nobody wakes while all
wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from bench.replay import count_idle_wakes
from shmstore import Store
from tests.trainer.lifecycle.kit import Desk, desk
from trainer.engine.protocol import SyncMode, WeightsVersion
from trainer.engine.scripted import Script
from trainer.errors import ConfigError, LearnerLost, LedgerError
from trainer.producer import PauseReport
from trainer.rollout import Batch
from trainer.schedule import ScheduleConfig, ScheduleParts, StepReport, run_schedule
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual


class _Parts:
    """A learner that takes 3 s a step, devices that note who has them, and what happened when."""

    def __init__(self, made: Desk, dies_at: int | None = None, forgets: bool = False) -> None:
        self.made = made
        self.log: list[str] = []
        self.reports: list[StepReport] = []
        self.dies_at = dies_at
        self.forgets = forgets

    async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
        self.log.append(f"train {train_step}")
        before = self.made.producer.report().response_tokens
        await asyncio.sleep(3)
        if train_step == self.dies_at:
            self.dies_at = None
            self.log.append("death")
            raise LearnerLost("killed by signal 9")
        if not self.forgets:
            self.made.traces.release(batch.session_ids, owner="learner")
        return {"overlap": float(self.made.producer.report().response_tokens - before)}

    async def pause(self, timeout_s: float) -> PauseReport:
        self.log.append("pause")
        return await self.made.producer.pause(timeout_s)

    async def resume(self) -> None:
        self.log.append("resume")
        await self.made.producer.resume()

    async def sync(self, model_step: int, mode: SyncMode) -> None:
        self.log.append(f"sync {model_step} {mode}")
        await self.made.engine.load_weights(WeightsVersion(b"", model_step), mode)

    async def evaluate(self, train_step: int) -> None:
        self.log.append(f"evaluate {train_step}")

    async def checkpoint(self, train_step: int) -> None:
        self.log.append(f"checkpoint {train_step}")

    async def on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        self.log.append(f"told {report.train_step}")

    async def to_engine(self) -> None:
        self.log.append("engine has the devices")

    async def to_learner(self) -> None:
        assert self.made.producer.report().in_production == 0
        self.log.append("learner has the devices")


async def _run(made: Desk, name: str, parts: _Parts, **config: Any) -> None:
    await run_schedule(
        name,
        ScheduleParts(
            made.dispatcher,
            parts,
            parts,
            parts.sync,
            parts.evaluate,
            parts.checkpoint,
            parts.on_step,
            parts if name == "colocated" else None,
        ),
        ScheduleConfig(**{"steps": 4, "take_timeout_s": 1e4, **config}),
    )


@pytest.mark.parametrize("name", ["async", "sync", "colocated"])
def test_L30_the_three_schedules_train_the_same_number_of_groups_and_end_empty(
    store: Store, name: str
) -> None:
    async def main() -> _Parts:
        async with desk(store, dispatch={"over_sampling": 0.5}) as made:
            parts = _Parts(made)
            await _run(made, name, parts)
            assert made.dispatcher.report()["trained"] == 4 * 2 * 2
            assert store.sessions.list("learner") == []
        return parts

    parts = run_virtual(main())
    assert store.sessions.list() == []
    assert [report.train_step for report in parts.reports] == [1, 2, 3, 4]
    overlap = sum(report.metrics["overlap"] for report in parts.reports)
    assert (overlap > 0) == (name == "async")
    if name == "colocated":
        turns = ["pause", "learner has the devices", "train 1", "engine has the devices"]
        assert parts.log[:4] == turns


def test_L30_a_session_that_outlives_its_batch_is_an_error_when_they_take_turns(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store) as made:
            with pytest.raises(LedgerError, match="still holds 4 sessions after its step"):
                await _run(made, "sync", _Parts(made, forgets=True))
            store.sessions.release_owned("learner")
            await made.producer.resume()

    run_virtual(main())


@pytest.mark.parametrize("mode", ["pause", "in_flight"])
def test_L20_weights_are_taken_every_interval_in_the_configured_way(
    store: Store, mode: SyncMode
) -> None:
    async def main() -> list[str]:
        budget = StalenessBudget(max_staleness=1, sync_interval=2)
        async with desk(store, dispatch={"budget": budget}) as made:
            parts = _Parts(made)
            await _run(
                made,
                "async",
                parts,
                sync_interval=2,
                sync_mode=mode,
                evaluate_every=4,
                evaluate_first=True,
                checkpoint_every=2,
            )
        return parts.log

    log = run_virtual(main())
    middle, last = [f"sync 2 {mode}"], [f"sync 4 {mode}", "evaluate 4"]
    if mode == "pause":
        middle, last = ["pause", *middle, "resume"], ["pause", *last, "resume"]
    # A checkpoint comes after its step was told, and the producers work meanwhile (L24).
    middle, last = [*middle, "told 2", "checkpoint 2"], [*last, "told 4", "checkpoint 4"]
    first = ["evaluate 0", "train 1", "told 1", "train 2", *middle]
    assert log == [*first, "train 3", "told 3", "train 4", *last]


@pytest.mark.parametrize("name", ["async", "sync", "colocated"])
def test_L07_a_learner_lost_in_a_step_gets_its_batch_again(store: Store, name: str) -> None:
    async def main() -> None:
        async with desk(store) as made:
            parts = _Parts(made, dies_at=2)
            await _run(made, name, parts)
            trains = [entry for entry in parts.log if entry.startswith(("train", "death"))]
            assert trains == ["train 1", "train 2", "death", "train 2", "train 3", "train 4"]
            assert made.dispatcher.report()["trained"] == 16

    run_virtual(main())


def test_L23_the_schedule_syncs_first_when_the_engines_are_too_old(store: Store) -> None:
    async def main() -> list[str]:
        budget = StalenessBudget(max_staleness=1, sync_interval=3, max_token_staleness=0)
        async with desk(store, dispatch={"budget": budget}) as made:
            parts = _Parts(made)
            await _run(made, "async", parts, sync_interval=3, sync_mode="in_flight", steps=3)
        return parts.log

    log = run_virtual(main())
    wanted = ["train 1", "sync 1 in_flight", "train 2", "sync 2 in_flight", "train 3"]
    assert [entry for entry in log if "told" not in entry] == [*wanted, "sync 3 in_flight"]


def test_L29_the_window_says_how_long_producers_worked_and_stood_still(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=Script(token_s=0.5)) as made:
            parts = _Parts(made)
            sync = parts.sync

            async def slow_sync(model_step: int, mode: SyncMode) -> None:
                await asyncio.sleep(2)
                await sync(model_step, mode)

            parts.sync = slow_sync  # type: ignore[method-assign]
            await _run(made, "async", parts)
            for report in parts.reports[1:]:
                assert report.window.pause_s == pytest.approx(2)
                assert report.window.production_s >= 3

    run_virtual(main())


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("turbo", {}, "'turbo' is unknown; allowed are async, sync, colocated"),
        ("async", {"steps": 0}, "not before the first"),
        ("async", {"sync_interval": 2, "checkpoint_every": 3}, "multiple of sync_interval 2"),
        ("async", {"pause_timeout_s": 0}, "pause_timeout_s is 0"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(
    store: Store, name: str, config: dict[str, Any], said: str
) -> None:
    async def main() -> None:
        async with desk(store) as made:
            with pytest.raises(ConfigError, match=said):
                await _run(made, name, _Parts(made), **config)

    run_virtual(main())


def test_nobody_wakes_while_a_taker_a_putter_and_a_producer_wait() -> None:
    """The kernel's count of the loop thread's voluntary switches over a second."""
    assert count_idle_wakes(1.0) == 0
