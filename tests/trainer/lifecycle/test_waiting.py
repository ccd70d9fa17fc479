"""Who waits at the replay buffer, and what may change between a wake-up and the moment at which the
waiter runs: L10, L14, L16, limits in bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shmstore import NotOwner, Store
from tests.trainer.lifecycle.kit import begins, put, waits_for_room
from trainer.errors import BadGroup, PutTimeout, TakeTimeout
from trainer.expiry import Expiry, ExpiryAction
from trainer.replay import ReplayBuffer
from trainer.replay.waiting import Waiting
from trainer.rollout import Status
from trainer.testing import run_virtual, store_group
from trainer.trace import TraceStore

P, L = "producer-0", "learner"


class _Room:
    """A `Waiting` whose bytes and groups are plain numbers."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.completed: dict[str, int] = {}
        self.waiting = Waiting(
            lambda task: self.completed.get(task, 0), lambda n: n <= self.free, lambda: None
        )

    async def put(self, nbytes: int, task: str = "math", owner: str = P) -> None:
        await self.waiting.for_room(task, nbytes, owner=owner)
        self.free -= nbytes
        self.waiting.wake()

    async def take(self, owner: str = L, **need: int) -> None:
        await self.waiting.for_batch(need, owner=owner)
        for task, count in need.items():
            self.completed[task] -= count

    def gain(self, free: int = 0, **completed: int) -> None:
        self.free += free
        for task, count in completed.items():
            self.completed[task] = self.completed.get(task, 0) + count
        self.waiting.wake()


async def test_L14_a_taker_wakes_when_its_batch_is_complete_and_not_before(
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    looks = 0
    can_meet = buffer.waiting.can_meet

    def counted(need: Any) -> bool:
        nonlocal looks
        looks += 1
        return can_meet(need)

    buffer.waiting.can_meet = counted  # type: ignore[method-assign]
    taker = asyncio.create_task(buffer.take({"math": 2, "code": 1}, train_step=1, owner=L))
    await put(buffer, traces, "a")
    await put(buffer, traces, "b", task="code")
    await asyncio.sleep(0.02)
    assert not taker.done()
    idle = looks
    await asyncio.sleep(0.05)
    assert looks == idle  # nobody looks while nothing changes
    await put(buffer, traces, "c")
    assert {g.uid for g in (await taker).groups} == {"a", "b", "c"}


async def test_L14_takers_are_served_in_the_order_in_which_they_came(
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    first = asyncio.create_task(buffer.take({"math": 1}, train_step=1, owner="one"))
    await asyncio.sleep(0)
    second = asyncio.create_task(buffer.take({"math": 1}, train_step=1, owner="two"))
    await asyncio.sleep(0)
    await put(buffer, traces, "a")
    await put(buffer, traces, "b")
    assert (await first).groups[0].uid == "a"
    assert (await second).groups[0].uid == "b"


async def test_what_expires_while_a_taker_waits_is_not_handed_out(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=0))
    await put(buffer, traces, "a", model_step=0)
    taker = asyncio.create_task(buffer.take({"math": 2}, train_step=1, owner=L))
    await asyncio.sleep(0)
    await put(buffer, traces, "b", model_step=0)  # completes the batch; the taker has not run yet
    await buffer.refresh(train_step=2)
    await asyncio.sleep(0)
    assert not taker.done()
    for uid in ("c", "d"):
        await buffer.put(store_group(traces, uid, model_step=1), owner=P, train_step=2)
    assert [g.uid for g in (await taker).groups] == ["c", "d"]


async def test_take_says_what_is_missing_when_its_time_is_over(
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    await put(buffer, traces, "a")
    with pytest.raises(
        TakeTimeout, match=r"need {'math': 2}, in the buffer {'math': {'completed': 1}}"
    ):
        await buffer.take({"math": 2}, train_step=1, owner=L, timeout=0.01)
    assert buffer.waiting.describe() == []


async def test_a_taker_that_is_cancelled_takes_nothing_and_blocks_nobody(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    first = asyncio.create_task(buffer.take({"math": 1}, train_step=1, owner="one"))
    second = asyncio.create_task(buffer.take({"math": 1}, train_step=1, owner="two"))
    await asyncio.sleep(0)
    await put(buffer, traces, "a")  # wakes the first
    first.cancel()
    assert (await second).groups[0].uid == "a"
    assert store.sessions.list("one") == []


def test_a_put_beyond_the_byte_limit_waits_for_room_and_then_goes_on(store: Store) -> None:
    async def main() -> None:
        traces = TraceStore(store)
        size = sum(traces.nbytes(s) for s in store_group(traces, "x").session_ids)
        store.sessions.release(store.sessions.list(), owner="*")
        buffer = ReplayBuffer(store, max_bytes=2 * size)
        for uid in ("a", "b"):
            await put(buffer, traces, uid)
        assert buffer.nbytes <= 2 * size
        with pytest.raises(PutTimeout, match="no room after 5 s"):
            await buffer.put(store_group(traces, "late"), owner=P, timeout=5)
        waiting = asyncio.create_task(put(buffer, traces, "c"))
        await asyncio.sleep(1)
        assert not waiting.done()
        await buffer.take({"math": 1}, train_step=1, owner=L)
        assert await waiting is Status.COMPLETED

    run_virtual(main())


def test_a_put_that_is_given_up_lets_the_next_one_have_its_room() -> None:
    """Also when its turn had come already: the wake-up is passed on."""

    async def main() -> None:
        room = False
        waiting = Waiting(lambda task: 0, lambda nbytes: room, lambda: None)
        first, second = (
            asyncio.create_task(waiting.for_room("math", 1, owner=P)) for _ in range(2)
        )
        await asyncio.sleep(0)
        room = True
        waiting.wake()
        first.cancel()
        await asyncio.wait_for(second, 1)
        assert first.cancelled()

    run_virtual(main())


def test_the_byte_limit_never_stands_between_a_taker_and_its_batch(store: Store) -> None:
    async def main() -> None:
        traces = TraceStore(store)
        buffer = ReplayBuffer(store, max_bytes=1)
        await put(buffer, traces, "a")
        putter = asyncio.create_task(put(buffer, traces, "b"))
        await asyncio.sleep(1)
        assert not putter.done()
        batch = await buffer.take({"math": 2}, train_step=1, owner=L, timeout=10)
        assert [g.uid for g in batch.groups] == ["a", "b"]
        await putter

    run_virtual(main())


async def test_two_changes_before_the_first_putter_runs_do_not_let_two_into_one_room() -> None:
    room = _Room(free=0)
    first, second = await begins(room.put(5)), await begins(room.put(5))
    room.gain(free=5)
    room.gain()  # whatever else happens in the same turn of the loop
    await first
    await asyncio.sleep(0)
    assert not second.done()
    assert room.free == 0
    room.gain(free=5)
    await second


async def test_a_putter_that_was_woken_waits_on_when_its_room_went_to_another() -> None:
    room = _Room(free=0)
    putter = await begins(room.put(5))
    room.gain(free=5)
    room.gain(free=-5)  # a dead learner's batch came back
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not putter.done()
    room.gain(free=5)
    await putter


async def test_small_groups_do_not_pass_a_large_one_that_waits_for_room() -> None:
    room = _Room(free=3)
    large = await begins(room.put(8))
    small = await begins(room.put(2))
    room.gain(free=5)
    await large
    assert not small.done()
    room.gain(free=2)
    await small


async def test_what_a_taker_lacks_passes_a_group_that_waits_for_room() -> None:
    room = _Room(free=3)
    large = await begins(room.put(8, task="code"))
    taker = await begins(room.take(math=1))
    await room.put(2)
    room.gain(math=1)
    await taker
    assert not large.done()
    large.cancel()


async def test_L14_a_later_taker_passes_only_with_tasks_that_nobody_ahead_waits_for() -> None:
    room = _Room(free=0)
    large = await begins(room.take("one", math=3))
    small = await begins(room.take("two", math=1))
    other = await begins(room.take("three", code=1))
    room.gain(math=1, code=1)
    await other
    assert not small.done()
    room.gain(math=2)
    await large
    assert not small.done()
    room.gain(math=1)
    await small


async def test_L16_what_is_offered_again_too_old_is_not_handed_to_one_who_waits(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=1))
    await put(buffer, traces, "old", model_step=0)
    await buffer.take({"math": 1}, train_step=1, owner="one")
    taker = await begins(buffer.take({"math": 1}, train_step=3, owner="two"))
    assert buffer.owner_died("one")[0] == 1
    await buffer.put(store_group(traces, "new", model_step=2), owner=P, train_step=3)
    assert [g.uid for g in (await taker).groups] == ["new"]
    assert buffer.accounts.ledger.task("math").expired_dropped == 2
    buffer.owner_died("two")
    buffer.check_books()


async def test_L10_a_group_that_was_given_up_while_it_waited_for_room_is_not_booked_again(
    store: Store, traces: TraceStore
) -> None:
    """Also when it is too old by then, and would be dropped: its sessions are gone."""
    buffer = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=0))
    group, putting = await waits_for_room(buffer, traces)
    buffer.discard(group, owner=P)
    await buffer.refresh(train_step=9)
    with pytest.raises(NotOwner):
        await putting
    assert buffer.accounts.ledger.task("math").produced == 4
    buffer.check_books()


async def test_a_group_is_filed_once_when_it_is_put_twice_at_the_same_time(
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    group, once = await waits_for_room(buffer, traces)
    twice = await begins(buffer.put(group, owner=P))
    buffer.max_bytes = None
    buffer.waiting.wake()
    assert await once is Status.COMPLETED
    with pytest.raises(BadGroup, match="in the buffer already"):
        await twice
    buffer.check_books()
