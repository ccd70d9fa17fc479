"""The watchdog: says what everybody waits for, and costs nothing while things move."""

from __future__ import annotations

import asyncio

import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import Desk, desk
from trainer.engine.scripted import Script
from trainer.errors import ConfigError, LearnerLost, NoProgress
from trainer.rollout import Batch
from trainer.run.desk import RemoteDesk
from trainer.run.watchdog import Watchdog
from trainer.schedule import ScheduleConfig, ScheduleParts, run_schedule
from trainer.testing import run_virtual


def test_after_the_limit_without_a_move_it_reports_who_waits_for_what(store: Store) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        reports: list[tuple[float, NoProgress]] = []
        async with desk(store, script=Script(stall_rate=1.0)) as made:
            dog = Watchdog(
                60, made.dispatcher.describe, lambda error: reports.append((loop.time(), error))
            )
            taking = asyncio.create_task(made.dispatcher.take(1, owner="learner"))
            await asyncio.sleep(50)
            dog.moved("an evaluation ended")
            await asyncio.sleep(200)
            dog.stop()
            taking.cancel()
        assert [time for time, _ in reports] == [110, 170, 230]
        text = str(reports[0][1])
        assert "nothing moved for 60 s; the last sign of life was 'an evaluation ended'" in text
        assert "take waits for {'math': 2}, completed now {'math': 0}" in text
        assert "in production 4" in text

    run_virtual(main())


def test_it_stays_silent_while_things_move_and_wakes_once_a_limit(store: Store) -> None:
    async def main() -> None:
        reports: list[NoProgress] = []
        dog = Watchdog(10, list, reports.append)
        looks = 0
        look = dog._look

        def counted() -> None:
            nonlocal looks
            looks += 1
            look()

        dog._look = counted  # type: ignore[method-assign]
        for _ in range(1000):
            await asyncio.sleep(1)
            dog.moved("step")
        dog.stop()
        assert reports == []
        assert looks <= 1000 / 9

    run_virtual(main())


def _watched(made: Desk, limit_s: float, reports: list[NoProgress]) -> tuple[Watchdog, RemoteDesk]:
    """As `trainer.fit` joins them: the desk tells the watchdog what moved."""
    dog = Watchdog(limit_s, made.dispatcher.describe, reports.append)
    made.producer._dispatcher = watched = RemoteDesk(made.dispatcher, dog.moved, list)
    return dog, watched


def test_a_producer_that_dies_again_and_again_is_no_sign_of_life(store: Store) -> None:
    """It starts, draws, and dies before it has handed anything in."""

    async def main() -> None:
        reports: list[NoProgress] = []
        async with desk(store, run=False) as made:
            dog, watched = _watched(made, 60, reports)
            for deaths in range(13):
                (work,) = await watched.draw("producer-0")
                assert work.attempt == deaths
                await asyncio.sleep(10)
                made.dispatcher.owner_died("producer-0")
            assert len(reports) == 2
            assert "the last sign of life was 'start'" in str(reports[0])
            dog.stop()

    run_virtual(main())


def test_a_learner_that_dies_again_and_again_is_no_sign_of_life(store: Store) -> None:
    """Its batch is taken again each time, by a successor that does not come to its end either."""

    class Learner:
        deaths = 0

        async def train(self, batch: Batch, train_step: int) -> dict[str, float]:
            await asyncio.sleep(10)
            self.deaths += 1
            raise LearnerLost("again")

    async def nothing(*_: object) -> None: ...

    async def main() -> None:
        reports: list[NoProgress] = []
        learner = Learner()
        async with desk(store) as made:
            dog, _ = _watched(made, 60, reports)
            parts = ScheduleParts(made.dispatcher, learner, made.producer, sync_weights=nothing)
            running = asyncio.create_task(run_schedule("async", parts, ScheduleConfig(steps=5)))
            await asyncio.sleep(130)
            assert learner.deaths >= 12
            assert len(reports) == 2
            assert "learner has taken and not released 2 groups" in str(reports[1])
            dog.stop()
            running.cancel()
            await asyncio.wait([running])

    run_virtual(main())


def test_a_limit_that_is_no_time_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="limit is 0 s"):
            Watchdog(0, list, print)

    run_virtual(main())
