"""How groups that have ended get from the producer to the desk, several in one call: L31."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import (
    SLOW,
    WIDE,
    Questions,
    desk,
)
from trainer.dispatch import Dispatcher
from trainer.engine.scripted import Script
from trainer.errors import BadGroup
from trainer.rollout import Group, Rollout, Status
from trainer.testing import make_segment, run_virtual
from trainer.work import HandedIn


class _CountingDesk:
    """Passes on what the producer asks, and keeps how many groups each call handed in."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.handed_in: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[HandedIn]:
        self.handed_in.append(len(groups))
        return await self._dispatcher.put_all(groups, owner=owner)


def test_groups_that_end_in_one_turn_of_the_loop_are_handed_in_by_one_call(store: Store) -> None:
    async def main() -> None:
        script = Script(token_s=1.0, tokens_min=4, tokens_max=4)  # all end at the same time
        dispatch = {"batch_groups": 4, "group_size": 2}
        async with desk(store, script=script, dispatch=dispatch, run=False) as made:
            counting = made.producer._dispatcher = _CountingDesk(made.dispatcher)
            running = asyncio.create_task(made.producer.run())
            await made.train(1)
            assert counting.handed_in[0] == 8  # two batches, as the budget allows
            await made.producer.stop(10)
            await running

    run_virtual(main())


def test_an_error_at_one_group_of_a_call_keeps_no_other_from_its_place(store: Store) -> None:
    async def main() -> None:
        async with desk(store, run=False) as made:
            stranger = Group(uid="never-drawn", task="math", rollouts=(Rollout("s"),))
            works = await made.dispatcher.draw("producer-0", 1)
            made.traces.open("t", owner="producer-0")
            member = Rollout("t", status=Status.COMPLETED, reward=1.0)
            mine = Group(uid=works[0].uid, task="math", rollouts=(member,))
            refused, status = await made.dispatcher.put_all([stranger, mine], owner="producer-0")
            assert isinstance(refused, BadGroup)
            assert "never-drawn" in str(refused)
            assert status is Status.COMPLETED
            assert store.sessions.owner("t") == "replay"

    run_virtual(main())


def test_L09_a_member_that_was_not_run_is_refused_also_in_a_group_that_came_in_a_message(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store, run=False) as made:
            works = await made.dispatcher.draw("producer-0", 2)
            groups = []
            for work, status in zip(works, (Status.INIT, Status.COMPLETED), strict=True):
                made.traces.open(work.uid, owner="producer-0")
                member = Rollout(work.uid, status=status, reward=1.0)
                groups.append(Group(uid=work.uid, task=work.task, rollouts=(member,)))
            refused, _ = await made.dispatcher.put_all(groups, owner="producer-0", carried=True)
            assert isinstance(refused, BadGroup)
            assert "still INIT" in str(refused)
            owners = store.sessions.owners([work.uid for work in works])
            assert owners == ["producer-0", "replay"]

    run_virtual(main())


@pytest.mark.parametrize("together", [1, 3])
def test_groups_that_came_in_a_message_are_not_looked_through_again_and_told_of_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    async def main() -> None:
        async with desk(store, run=False) as made:
            works = await made.dispatcher.draw("producer-0", together)
            groups = []
            for work in works:
                made.traces.open(work.uid, owner="producer-0")
                member = Rollout(work.uid, status=Status.COMPLETED, reward=1.0)
                groups.append(Group(uid=work.uid, task=work.task, rollouts=(member,)))
            told: list[int] = []
            made.buffer.on_change(lambda: told.append(len(made.buffer)))
            monkeypatch.setattr("trainer.replay.checks.as_carried", _never)
            outcomes = await made.dispatcher.put_all(groups, owner="producer-0", carried=True)
            assert outcomes == [Status.COMPLETED] * together
            assert told == [together]

    run_virtual(main())


def _never(group: Group) -> Any:
    raise AssertionError(f"{group.uid} was carried already")


def test_L31_a_group_that_waits_for_room_holds_up_none_that_ended_with_it(store: Store) -> None:
    """Nor the slot of one: its task may be what the learner lacks."""

    async def main() -> None:
        sources = {"math": Questions("math"), "code": Questions("code")}
        dispatch = {"batch_groups": 4, "group_size": 2}
        async with desk(store, sources=sources, dispatch=dispatch, run=False) as made:
            works = await made.dispatcher.draw("producer-0", 4)
            groups = []
            for work in works:
                made.traces.open(work.uid, owner="producer-0")
                made.traces.insert(work.uid, make_segment(4))
                member = Rollout(work.uid, status=Status.COMPLETED, reward=1.0)
                groups.append(Group(uid=work.uid, task=work.task, rollouts=(member,)))
            made.buffer.max_bytes = 1
            told = await made.dispatcher.put_all(groups, owner="producer-0")
            assert told == [Status.COMPLETED, None, None, None]  # an empty buffer takes any
            assert len(store.sessions.list("producer-0")) == 3
            taker = asyncio.create_task(made.dispatcher.take(1, owner="learner"))
            await asyncio.sleep(0)
            told = await made.dispatcher.put_all(groups[1:], owner="producer-0")
            assert told == [Status.COMPLETED] * 3  # what a taker lacks
            assert len(await taker) == 4
            store.sessions.release_owned("learner")

    run_virtual(main())


def test_a_producer_that_was_taken_for_dead_ends_with_the_cause(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, dispatch=WIDE, run=False) as made:
            running = asyncio.create_task(made.producer.run())
            await asyncio.sleep(1)
            made.dispatcher.owner_died("producer-0")  # somebody took it for dead
            with pytest.raises(BadGroup, match="not in production with 'producer-0'"):
                await running

    run_virtual(main())


class _LosesOne(_CountingDesk):
    """Has forgotten one of the groups of the first call that hands in several."""

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[HandedIn]:
        if len(groups) > 1 and max(self.handed_in, default=0) < 2:
            self._dispatcher._leave_production(groups[0].uid)
        return await super().put_all(groups, owner=owner)


def test_of_a_call_that_hands_in_several_each_hears_of_its_own_group_alone(store: Store) -> None:
    """The filed ones were told what the refused one was, and counted nowhere."""

    async def main() -> None:
        script = Script(token_s=1.0, tokens_min=4, tokens_max=4)  # all end at the same time
        dispatch = {"batch_groups": 4, "group_size": 2}
        async with desk(store, script=script, dispatch=dispatch, run=False) as made:
            forgetful = made.producer._dispatcher = _LosesOne(made.dispatcher)
            with pytest.raises(BadGroup, match="'math-0' is not in production with 'producer-0'"):
                await made.producer.run()
            assert forgetful.handed_in[0] == 8
            assert made.producer.report().put == {"completed": 7}
            assert len(made.buffer) == 7
            store.sessions.release_owned("producer-0")

    run_virtual(main())


class _BrokenDesk(_CountingDesk):
    """Has a bug where groups are handed in."""

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[HandedIn]:
        raise ZeroDivisionError("a bug")


def test_an_error_at_a_hand_in_reaches_a_producer_that_waits_for_work(store: Store) -> None:
    """It was kept until the next draw, which waited for ever for what had been handed in."""

    async def main() -> None:
        async with desk(store, run=False) as made:
            made.producer._dispatcher = _BrokenDesk(made.dispatcher)
            with pytest.raises(ZeroDivisionError, match="a bug"):
                await asyncio.wait_for(made.producer.run(), 1000)
            made.dispatcher.owner_died("producer-0")
            store.sessions.release_owned("producer-0")

    run_virtual(main())


def test_a_hand_in_of_several_does_not_wait_and_leaves_none_of_them_in_line(store: Store) -> None:
    """What stood in line would be filed behind its caller's back."""

    async def main() -> None:
        async with desk(store, run=False) as made:
            groups = []
            for work in await made.dispatcher.draw("producer-0", 3):
                made.traces.open(work.uid, owner="producer-0")
                made.traces.insert(work.uid, make_segment(4))
                member = Rollout(work.uid, status=Status.COMPLETED, reward=1.0)
                groups.append(Group(uid=work.uid, task=work.task, rollouts=(member,)))
            await made.dispatcher.put(groups[0], owner="producer-0")
            made.buffer.max_bytes = 1
            assert await made.dispatcher.put_all(groups[1:], owner="producer-0") == [None, None]
            assert made.buffer.describe() == []
            made.buffer.max_bytes = None
            made.buffer.waiting.wake()
            await asyncio.sleep(1)
            assert len(made.buffer) == 1
            assert (
                await made.dispatcher.put_all(groups[1:], owner="producer-0")
                == [Status.COMPLETED] * 2
            )

    run_virtual(main())
