"""The three schedules over the same parts (L08, L20, L23, L30), and that nobody wakes while all
wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from bench.idle import count_idle_wakes
from shmstore import Store
from tests.trainer.lifecycle.kit import SLOW, Questions, desk
from tests.trainer.lifecycle.scheduled import Parts, run_parts
from trainer.engine.protocol import SyncMode
from trainer.engine.scripted import Script
from trainer.errors import ConfigError, EndOfData, EngineError, LedgerError
from trainer.producer import Producer
from trainer.rollout import Batch, Prompt
from trainer.schedule import StepReport
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual


@pytest.mark.parametrize("name", ["async", "sync", "colocated"])
def test_L30_the_three_schedules_train_the_same_number_of_groups_and_end_empty(
    store: Store, name: str
) -> None:
    async def main() -> Parts:
        async with desk(store, dispatch={"over_sampling": 0.5}) as made:
            parts = Parts(made)
            await run_parts(made, name, parts)
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


def test_L30_producers_that_have_nothing_in_production_are_not_told_to_rest(store: Store) -> None:
    async def main() -> None:
        async with desk(store, budget=StalenessBudget(0)) as made:  # only its batch is drawn
            parts = Parts(made)
            await run_parts(made, "sync", parts)
            assert "pause" not in parts.log
            assert "resume" not in parts.log
            assert len(parts.reports) == 4

    run_virtual(main())


def test_L25_prompts_are_made_ahead_for_steps_that_come_and_not_behind_the_last(
    store: Store,
) -> None:
    made_after: list[tuple[int, str]] = []

    async def main() -> None:
        async with desk(store, budget=StalenessBudget(0)) as made:
            parts = Parts(made)

            class Counted(Questions):
                def prompt(self, index: int) -> Prompt:
                    made_after.append((index, parts.log[-1] if parts.log else ""))
                    return super().prompt(index)

            made.dispatcher.sampler._sources["math"] = Counted()
            await run_parts(made, "sync", parts)

    run_virtual(main())
    assert [index for index, _ in made_after] == list(range(8)), "each once, none for a fifth step"
    assert [what for _, what in made_after[4:]] == ["told 1", "told 1", "told 2", "told 2"]


def test_L30_the_producers_have_their_work_before_the_step_before_is_booked(store: Store) -> None:
    at_work: list[bool] = []

    class Noting(Parts):
        async def on_step(self, report: StepReport) -> None:
            lines = self.made.dispatcher.describe()
            at_work.append(any("is producing 2 groups" in line for line in lines))

    async def main() -> None:
        async with desk(store, budget=StalenessBudget(0)) as made:
            await run_parts(made, "sync", Noting(made))

    run_virtual(main())
    assert at_work == [True, True, True, False]  # nothing is drawn after the last step


def test_L20_a_producer_that_is_started_in_a_pause_gets_no_work_before_its_end(
    store: Store,
) -> None:
    """As the successor of one that died: nobody has told it of the pause yet."""

    async def main() -> None:
        async with desk(store, script=SLOW, budget=StalenessBudget(5)) as made:
            first = made.producer
            successor = Producer(first._dispatcher, first._parts, first._config, owner="producer-1")
            tasks: list[asyncio.Task[None]] = []

            class Noting(Parts):
                async def sync(self, model_step: int, mode: SyncMode) -> None:
                    if not tasks:
                        tasks.append(asyncio.create_task(successor.run()))
                    await asyncio.sleep(5)
                    assert successor.report().in_production == 0
                    await super().sync(model_step, mode)  # an engine at work would refuse

            await run_parts(made, "async", Noting(made), sync_mode="pause")
            assert successor.report().rollouts > 0
            await successor.stop(30)
            await tasks[0]

    run_virtual(main())


def test_L30_a_session_that_outlives_its_batch_is_an_error_when_they_take_turns(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store) as made:
            with pytest.raises(LedgerError, match="still holds 4 sessions after its step"):
                await run_parts(made, "sync", Parts(made, forgets=True))
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
            parts = Parts(made)
            await run_parts(
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
            parts = Parts(made, dies_at=2)
            await run_parts(made, name, parts)
            trains = [entry for entry in parts.log if entry.startswith(("train", "death"))]
            assert trains == ["train 1", "train 2", "death", "train 2", "train 3", "train 4"]
            assert made.dispatcher.report()["trained"] == 16

    run_virtual(main())


def _slow(parts: Parts, seconds: float, broken_at: int | None = None) -> None:
    """Engines that take `seconds` until they have new weights, or refuse those of one step."""
    sync = parts.sync

    async def slow(model_step: int, mode: SyncMode) -> None:
        await asyncio.sleep(seconds)
        if model_step == broken_at:
            raise EngineError(f"no weights of step {model_step}")
        await sync(model_step, mode)

    parts.sync = slow  # type: ignore[method-assign]


def test_L20_the_learner_does_not_wait_for_engines_that_take_weights_in_flight(
    store: Store,
) -> None:
    async def main() -> tuple[list[str], list[float]]:
        async with desk(store, budget=StalenessBudget(max_staleness=2)) as made:
            parts = Parts(made)
            _slow(parts, 2)
            await run_parts(made, "async", parts, sync_mode="in_flight", steps=3)
        return parts.log, [report.sync_s for report in parts.reports]

    log, sync_s = run_virtual(main())
    beside = ["sync 1 in_flight", "told 1", "train 3", "sync 2 in_flight", "told 2"]
    assert log == ["train 1", "train 2", *beside, "sync 3 in_flight", "told 3"]
    assert sync_s == pytest.approx([2, 2, 2])


def test_L20_every_token_bears_the_weights_that_sampled_it_while_new_ones_are_on_their_way(
    store: Store,
) -> None:
    async def main() -> list[tuple[int, int | None]]:
        async with desk(store, budget=StalenessBudget(max_staleness=1)) as made:
            parts = Parts(made)
            _slow(parts, 2.5)
            trained: list[tuple[int, int | None]] = []
            train = parts.train

            async def note(batch: Batch, train_step: int) -> Mapping[str, float]:
                trained.extend((train_step, group.model_step_min) for group in batch.groups)
                return await train(batch, train_step)

            parts.train = note  # type: ignore[method-assign]
            await run_parts(made, "async", parts, sync_mode="in_flight", steps=6)
        return trained

    trained = run_virtual(main())
    ages = {step - oldest - 1 for step, oldest in trained if oldest is not None}
    assert len(trained) == 12
    assert ages <= {0, 1}  # the budget holds although the engines are behind the learner


@pytest.mark.parametrize("name", ["async", "sync", "colocated"])
def test_weights_that_cannot_be_taken_end_the_run_but_the_step_is_told(
    store: Store, name: str
) -> None:
    async def main() -> Parts:
        async with desk(store) as made:
            parts = Parts(made)
            _slow(parts, 1, broken_at=2)
            mode = "in_flight" if name == "async" else "pause"
            with pytest.raises(EngineError, match="no weights of step 2"):
                await run_parts(made, name, parts, sync_mode=mode, checkpoint_every=1)
            store.sessions.release_owned("learner")
        return parts

    parts = run_virtual(main())
    assert [r.train_step for r in parts.reports] == [1, 2]
    assert [type(r.failed) for r in parts.reports] == [type(None), EngineError]
    assert [line for line in parts.log if "checkpoint" in line] == ["checkpoint 1"]


def test_a_step_that_is_trained_while_the_weights_before_it_fail_is_told_too(store: Store) -> None:
    async def main() -> Parts:
        async with desk(store, dispatch={"budget": StalenessBudget(max_staleness=2)}) as made:
            parts = Parts(made)
            _slow(parts, 2, broken_at=1)
            with pytest.raises(EngineError, match="no weights of step 1"):
                await run_parts(made, "async", parts, sync_mode="in_flight")
        return parts

    parts = run_virtual(main())
    assert [line for line in parts.log if "train" in line] == ["train 1", "train 2"]
    assert [(r.train_step, type(r.failed)) for r in parts.reports] == [
        (1, EngineError),
        (2, EngineError),
    ]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_step_that_cannot_be_told_either_hides_no_cause(store: Store, hangs: bool) -> None:
    async def main() -> BaseException:
        async with desk(store) as made:
            parts = Parts(made)
            _slow(parts, 1, broken_at=1)

            async def not_told(report: StepReport) -> None:
                assert report.failed is not None
                if hangs:
                    await asyncio.Event().wait()
                raise OSError("no room")

            parts.on_step = not_told  # type: ignore[method-assign]
            with pytest.raises(EngineError, match="no weights of step 1") as raised:
                await run_parts(made, "async", parts, sync_mode="pause")
            store.sessions.release_owned("learner")
        return raised.value

    (note,) = run_virtual(main()).__notes__
    assert note.startswith("and step 1 was not told: " + ("TimeoutError" if hangs else "OSError"))


def test_a_step_is_told_although_the_next_one_fails_before_its_weights_are_taken(
    store: Store,
) -> None:
    async def main() -> list[str]:
        async with desk(store, sources={"math": Questions(size=2)}, epochs=1) as made:
            parts = Parts(made)
            _slow(parts, 60)
            with pytest.raises(EndOfData):
                await run_parts(made, "async", parts, sync_mode="in_flight", pause_timeout_s=90)
        return parts.log

    assert run_virtual(main()) == ["train 1", "sync 1 in_flight", "told 1"]


@pytest.mark.parametrize("name", ["async", "sync", "colocated"])
def test_a_stop_ends_the_run_behind_the_step_under_way(store: Store, name: str) -> None:
    async def main() -> Parts:
        async with desk(store) as made:
            parts = Parts(made)
            stop = asyncio.Event()
            train = parts.train

            async def stopped(batch: Batch, train_step: int) -> Mapping[str, float]:
                if train_step == 2:
                    stop.set()
                return await train(batch, train_step)

            parts.train = stopped  # type: ignore[method-assign]
            await run_parts(made, name, parts, stop=stop)
            await made.producer.resume()
        return parts

    parts = run_virtual(main())
    assert [report.train_step for report in parts.reports] == [1, 2]


@pytest.mark.parametrize("name", ["async", "sync", "colocated"])
def test_a_stop_ends_the_waiting_for_a_batch_and_takes_nothing(store: Store, name: str) -> None:
    async def main() -> Parts:
        async with desk(store, run=False) as made:
            parts = Parts(made)
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(5, stop.set)
            await run_parts(made, name, parts, stop=stop)
        return parts

    assert run_virtual(main()).log == []
    assert store.sessions.list("learner") == []


def test_L23_the_schedule_syncs_first_when_the_engines_are_too_old(store: Store) -> None:
    async def main() -> list[str]:
        budget = StalenessBudget(max_staleness=1, sync_interval=3, max_token_staleness=0)
        async with desk(store, dispatch={"budget": budget}) as made:
            parts = Parts(made)
            await run_parts(made, "async", parts, sync_interval=3, sync_mode="in_flight", steps=3)
        return parts.log

    log = run_virtual(main())
    wanted = ["train 1", "sync 1 in_flight", "train 2", "sync 2 in_flight", "train 3"]
    assert [entry for entry in log if "told" not in entry] == [*wanted, "sync 3 in_flight"]


def test_a_learner_that_waits_for_weights_first_counts_that_as_waiting(store: Store) -> None:
    async def main() -> None:
        budget = StalenessBudget(max_staleness=1, sync_interval=3, max_token_staleness=0)
        async with desk(store, dispatch={"budget": budget}) as made:
            parts = Parts(made)
            sync = parts.sync

            async def slow_sync(model_step: int, mode: SyncMode) -> None:
                await asyncio.sleep(50)
                await sync(model_step, mode)

            parts.sync = slow_sync  # type: ignore[method-assign]
            await run_parts(made, "async", parts, sync_interval=3, sync_mode="in_flight", steps=3)
            first, *later = parts.reports
            assert first.wait_s < 50
            assert all(report.wait_s >= 50 for report in later)

    run_virtual(main())


def test_L29_the_window_says_how_long_producers_worked_and_stood_still(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=Script(token_s=0.5)) as made:
            parts = Parts(made)
            sync = parts.sync

            async def slow_sync(model_step: int, mode: SyncMode) -> None:
                await asyncio.sleep(2)
                await sync(model_step, mode)

            parts.sync = slow_sync  # type: ignore[method-assign]
            await run_parts(made, "async", parts)
            for report in parts.reports[1:]:
                assert report.batch.report.pause_s == pytest.approx(2)
                assert report.batch.report.production_s >= 3

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
                await run_parts(made, name, Parts(made), **config)

    run_virtual(main())


def test_nobody_wakes_while_a_taker_a_putter_and_a_producer_wait() -> None:
    """No system call of the loop's thread in a second; the kernel's count of its sleeps where
    strace is not installed.
    """
    assert count_idle_wakes(1.0)[0] == 0
