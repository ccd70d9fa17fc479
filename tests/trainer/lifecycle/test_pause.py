"""Pausing and taking weights while rollouts are under way: L20, L21; on virtual time."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import (
    SLOW,
    WIDE,
    CountingJudge,
    check_trace,
    desk,
)
from trainer.engine.protocol import WeightsVersion
from trainer.engine.scripted import Script, ScriptedEngine
from trainer.environment import RolloutAborted, Session
from trainer.errors import EngineError
from trainer.rollout import Prompt, Status
from trainer.segment import Trace
from trainer.testing import run_virtual


class _Silent:
    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        await asyncio.sleep(1e6)
        raise AssertionError("nobody waits so long")


def test_L20_in_flight_no_rollout_is_thrown_away_and_each_token_has_its_step(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, dispatch=WIDE) as made:
            for step in (1, 2, 3):
                await asyncio.sleep(2)
                await made.engine.load_weights(WeightsVersion(b"", step), "in_flight")
                await made.dispatcher.set_steps(model_step=step)
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            for rollout in batch.rollouts:
                steps = check_trace(made, rollout).model_steps
                # A token a second from second 0 on; weights change at seconds 2 and 4.
                assert sorted(set(steps[steps >= 0].tolist())) == [0, 1, 2]
                assert rollout.attempt == 0
            made.traces.release(batch.session_ids, owner="learner")
            assert made.producer.report().put.get("aborted", 0) == 0

    run_virtual(main())


def test_L21_a_pause_ends_at_its_deadline_and_reports_what_it_cancelled(store: Store) -> None:
    class Stuck(ScriptedEngine):
        async def abort(self, request_ids: Any = None) -> int:
            return 0  # an engine that does not listen

    async def main() -> None:
        async with desk(store, script=Script(stall_rate=1.0), dispatch=WIDE, run=False) as made:
            parts = made.producer._parts
            made.producer._parts = parts.__class__(
                Stuck(Script(stall_rate=1.0)),
                parts.traces,
                parts.tokenizer,
                parts.environment,
                parts.judge,
            )
            running = asyncio.create_task(made.producer.run())
            await asyncio.sleep(1)
            started = asyncio.get_running_loop().time()
            report = await made.producer.pause(7)
            assert asyncio.get_running_loop().time() - started == pytest.approx(7)
            assert (report.finished_groups, report.cancelled_rollouts) == (0, 16)
            assert store.sessions.list() == []
            assert made.dispatcher.report()["cancelled"] == 16
            made.dispatcher.check_books()
            await made.producer.stop(10)
            await running

    run_virtual(main())


@pytest.mark.parametrize("drain", [False, True])
def test_L21_a_pause_loses_no_rollout_and_nothing_starts_until_resume(
    store: Store, drain: bool
) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, dispatch=WIDE) as made:
            await asyncio.sleep(2)
            report = await made.producer.pause(100, drain=drain)
            assert report.cancelled_rollouts == 0
            assert report.finished_groups == 8
            status = Status.COMPLETED if drain else Status.ABORTED
            assert made.buffer.count("math", status) == 8
            assert store.sessions.list("producer-0") == []
            await asyncio.sleep(1000)
            assert made.producer.report().in_production == 0
            assert made.engine.running == 0
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())


def test_a_slow_judge_does_not_keep_a_pause_beyond_its_deadline(store: Store) -> None:
    async def main() -> None:
        judge = _Silent()
        async with desk(store, judge=judge, dispatch=WIDE) as made:
            await asyncio.sleep(3)
            report = await made.producer.pause(5)
            assert report.seconds == pytest.approx(5)
            assert report.cancelled_rollouts == 16

    run_virtual(main())


class _Deaf:
    """User code that takes cancellations for hiccups, and tries again after a minute."""

    def __init__(self) -> None:
        self.deaf = True
        self.refused = 0

    async def run(self, session: Session, prompt: Prompt) -> None:
        while True:
            try:
                await session.generate(prompt.text)
            except RolloutAborted:
                self.refused += 1
            await self._sleep()

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        while True:
            await self._sleep()

    async def _sleep(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not self.deaf:
                raise
            await asyncio.sleep(60)


@pytest.mark.parametrize("part", ["environment", "judge"])
def test_L21_user_code_that_goes_on_when_cancelled_keeps_neither_a_pause_nor_its_session(
    store: Store, part: str
) -> None:
    async def main() -> None:
        deaf = _Deaf()
        options: Any = {part: deaf, "produce": {"grace_s": 2.0}}
        async with desk(store, script=Script(), dispatch=WIDE, **options) as made:
            await asyncio.sleep(30)
            report = await made.producer.pause(5)
            assert report.seconds == pytest.approx(5 + 2)
            assert report.cancelled_rollouts == 16
            assert store.sessions.list() == []
            made.producer._stopped = True
            await made.producer.resume()
            await asyncio.sleep(60)  # what was left behind tries again
            assert deaf.refused == (16 if part == "environment" else 0)
            assert store.sessions.list() == []
            deaf.deaf = False
            left = [t for t in asyncio.all_tasks() if "_guarded" in repr(t.get_coro())]
            assert len(left) == 16
            for task in left:
                task.cancel()

    run_virtual(main())


@pytest.mark.parametrize("turns_of_the_loop", range(9))
def test_a_rollout_that_is_cancelled_before_it_began_leaves_no_coroutine_behind(
    store: Store, turns_of_the_loop: int
) -> None:
    """A warning would be an error: user code is called only when its task runs."""

    async def main() -> None:
        async with desk(store, script=Script(), dispatch=WIDE) as made:
            while not made.producer._groups:
                await asyncio.sleep(0)
            for _ in range(turns_of_the_loop):
                await asyncio.sleep(0)
            for task in asyncio.all_tasks():  # as a loop that is closed does
                if task in made.producer._groups or "_guarded" in repr(task.get_coro()):
                    task.cancel()

    run_virtual(main())
    gc.collect()


class _CancelsWhoAsks(CountingJudge):
    """Cancels the groups when it is asked, before it answers."""

    groups: Any = ()

    def score(self, prompt: Prompt, text: str, trace: Trace | None) -> Any:
        for task in self.groups:
            task.cancel()
        return super().score(prompt, text, trace)


def test_a_rollout_that_is_cancelled_while_its_judge_is_asked_leaves_no_coroutine_behind(
    store: Store,
) -> None:
    async def main() -> None:
        judge = _CancelsWhoAsks()
        async with desk(store, judge=judge, dispatch=WIDE) as made:
            judge.groups = made.producer._groups
            await asyncio.sleep(60)
            assert not made.producer._groups

    run_virtual(main())
    gc.collect()


class _CannotAbort(ScriptedEngine):
    """As a remote engine whose address for aborts is gone."""

    aborts = 0

    async def abort(self, request_ids: Any = None) -> int:
        self.aborts += 1
        raise EngineError("no answer from the engine")


def test_L13_an_engine_that_fails_at_an_abort_costs_rollouts_and_not_the_producer(
    store: Store,
) -> None:
    async def main() -> None:
        engine = _CannotAbort(Script(token_s=1.0, tokens_min=4, tokens_max=4, stall_rate=0.1))
        produce = {"rollout_timeout_s": 3.0, "grace_s": 2.0}
        async with desk(store, dispatch=WIDE, produce=produce, engine=engine) as made:
            await asyncio.sleep(60)
            assert engine.aborts > 0  # at the soft limits of rollouts
            assert made.producer.report().put["aborted"] > 0
            aborts = engine.aborts
            report = await made.producer.pause(20)
            assert engine.aborts > aborts
            assert report.seconds < 20
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())


class _SlowDesk:
    """It answers a second after it has done what was asked, as one in another process might."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._dispatcher, name)

        async def slow(*args: Any, **options: Any) -> Any:
            found = await call(*args, **options)
            if name in ("cancel", "put_all"):
                await asyncio.sleep(1)
            return found

        return slow


@pytest.mark.parametrize("after_s", [0.5, 5.5, 7.5])
def test_L21_a_pause_that_is_cancelled_keeps_no_group_under_way_for_good(
    store: Store, after_s: float
) -> None:
    """Cancelled while the engine ends, while groups are given up one by one, or in between."""

    async def main() -> None:
        script = Script(token_s=1e5)
        async with desk(store, script=script, dispatch=WIDE, run=False) as made:
            made.producer._dispatcher = _SlowDesk(made.dispatcher)  # type: ignore[assignment]
            running = asyncio.create_task(made.producer.run())
            await asyncio.sleep(1)
            made.engine.abort = _nothing  # type: ignore[method-assign, assignment]
            pausing = asyncio.create_task(made.producer.pause(5))
            await asyncio.sleep(after_s)
            pausing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pausing
            again = await made.producer.pause(5)
            books = made.dispatcher.report()
            report = made.producer.report()
            assert (books["cancelled"], books["buffered"]) == (16, 0)
            assert (report.cancelled_rollouts, report.in_production) == (16, 0)
            assert again.cancelled_rollouts == (16 if after_s < 5 else 0)
            assert made.dispatcher.rest(), "nothing is in production as the desk sees it"
            made.dispatcher.work()
            await made.producer.stop(10)
            await running

    run_virtual(main())


async def _nothing(request_ids: Any = None) -> int:
    return 0


def test_L21_a_group_that_the_desk_has_when_time_is_over_is_counted_as_handed_in(
    store: Store,
) -> None:
    async def main() -> None:
        script = Script(token_s=1.0, tokens_min=4, tokens_max=4)
        async with desk(store, script=script, dispatch=WIDE, run=False) as made:
            made.producer._dispatcher = _SlowDesk(made.dispatcher)  # type: ignore[assignment]
            running = asyncio.create_task(made.producer.run())
            while len(made.buffer) < 8:
                await asyncio.sleep(0.1)
            report = await made.producer.pause(0.5, drain=True)  # the desk's answer comes later
            assert (report.finished_groups, report.cancelled_rollouts) == (8, 0)
            assert made.producer.report().put == {"completed": 8}
            assert made.producer.report().rollouts == made.dispatcher.report()["produced"] == 16
            await made.producer.stop(10)
            await running

    run_virtual(main())


def test_L21_a_pause_does_not_wait_for_room_that_only_its_own_end_could_make(store: Store) -> None:
    """The learner takes nothing before the pause is over, so nothing leaves the buffer."""

    async def main() -> None:
        async with desk(store, dispatch=WIDE) as made:
            await asyncio.sleep(0)
            made.buffer.max_bytes = 1
            await asyncio.sleep(100)
            assert len(made.buffer) < 8 == len(made.buffer) + made.producer.report().in_production
            report = await made.producer.pause(60)
            assert (report.seconds, report.cancelled_rollouts) == (0, 0)
            assert len(made.buffer) == 8
            await made.producer.resume()
            assert not made.buffer.waiting._admitted

    run_virtual(main())


def test_L21_nothing_starts_in_a_pause_that_begins_where_another_ends(store: Store) -> None:
    async def main() -> None:
        async with desk(store) as made:
            while not made.dispatcher._in_production:
                await asyncio.sleep(0)
            await made.producer.pause(1)  # between the draw and the start of what was drawn
            for _ in range(9):
                await asyncio.sleep(0)
            await made.producer.resume()
            await made.producer.pause(1)
            for _ in range(9):
                await asyncio.sleep(0)
            assert made.producer.report().in_production == 0
            assert store.sessions.list() == []
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())
