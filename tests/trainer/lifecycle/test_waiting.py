"""Who waits at the replay buffer, and what may change between a wake-up and the moment at which the
waiter runs: L14, limits in bytes, deaths.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shmstore import NotOwner, Store
from tests.trainer.lifecycle.kit import desk
from trainer.errors import BadGroup, BufferClosed, EndOfData, PartFailed, PutTimeout, TakeTimeout
from trainer.expiry import Expiry, ExpiryAction
from trainer.replay import ReplayBuffer
from trainer.replay.waiting import Waiting
from trainer.rollout import Group, Rollout, Status
from trainer.staleness import StalenessBudget
from trainer.testing import make_segment, run_virtual, store_group
from trainer.trace import TraceStore

P, L = "producer-0", "learner"


async def _put(buffer: ReplayBuffer, traces: TraceStore, uid: str, **options: Any) -> Status:
    return await buffer.put(store_group(traces, uid, **options), owner=P, train_step=1)


async def _begins(waiting: Any) -> asyncio.Task[Any]:
    """A task that has come to its first wait."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0)
    assert not task.done()
    return task


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
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store)
    looks = 0
    can_meet = buffer.waiting.can_meet

    def counted(need: Any) -> bool:
        nonlocal looks
        looks += 1
        return can_meet(need)

    buffer.waiting.can_meet = counted  # type: ignore[method-assign]
    taker = asyncio.create_task(buffer.take({"math": 2, "code": 1}, train_step=1, owner=L))
    await _put(buffer, traces, "a")
    await _put(buffer, traces, "b", task="code")
    await asyncio.sleep(0.02)
    assert not taker.done()
    idle = looks
    await asyncio.sleep(0.05)
    assert looks == idle  # nobody looks while nothing changes
    await _put(buffer, traces, "c")
    assert {g.uid for g in (await taker).groups} == {"a", "b", "c"}


async def test_L14_takers_are_served_in_the_order_in_which_they_came(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store)
    first = asyncio.create_task(buffer.take({"math": 1}, train_step=1, owner="one"))
    await asyncio.sleep(0)
    second = asyncio.create_task(buffer.take({"math": 1}, train_step=1, owner="two"))
    await asyncio.sleep(0)
    await _put(buffer, traces, "a")
    await _put(buffer, traces, "b")
    assert (await first).groups[0].uid == "a"
    assert (await second).groups[0].uid == "b"


async def test_what_expires_while_a_taker_waits_is_not_handed_out(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=0))
    await _put(buffer, traces, "a", model_step=0)
    taker = asyncio.create_task(buffer.take({"math": 2}, train_step=1, owner=L))
    await asyncio.sleep(0)
    await _put(buffer, traces, "b", model_step=0)  # completes the batch; the taker has not run yet
    await buffer.refresh(train_step=2)
    await asyncio.sleep(0)
    assert not taker.done()
    for uid in ("c", "d"):
        await buffer.put(store_group(traces, uid, model_step=1), owner=P, train_step=2)
    assert [g.uid for g in (await taker).groups] == ["c", "d"]


async def test_take_says_what_is_missing_when_its_time_is_over(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store)
    await _put(buffer, traces, "a")
    with pytest.raises(
        TakeTimeout, match=r"need {'math': 2}, in the buffer {'math': {'completed': 1}}"
    ):
        await buffer.take({"math": 2}, train_step=1, owner=L, timeout=0.01)
    assert buffer.waiting.describe() == []


async def test_a_taker_that_is_cancelled_takes_nothing_and_blocks_nobody(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store)
    first = asyncio.create_task(buffer.take({"math": 1}, train_step=1, owner="one"))
    second = asyncio.create_task(buffer.take({"math": 1}, train_step=1, owner="two"))
    await asyncio.sleep(0)
    await _put(buffer, traces, "a")  # wakes the first
    first.cancel()
    assert (await second).groups[0].uid == "a"
    assert store.sessions.list("one") == []


async def test_a_dead_part_reaches_takers_putters_and_all_who_come_later(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, max_bytes=1)
    await _put(buffer, traces, "a")
    taker = asyncio.create_task(buffer.take({"code": 1}, train_step=1, owner=L))
    putter = asyncio.create_task(_put(buffer, traces, "b"))
    await asyncio.sleep(0.01)
    buffer.waiting.fail("producer-0", "killed by signal 9")
    for task in (
        taker,
        putter,
        asyncio.create_task(buffer.take({"math": 9}, train_step=1, owner=L)),
    ):
        with pytest.raises(PartFailed, match="producer-0 failed: killed by signal 9") as error:
            await task
        assert error.value.part == "producer-0"


async def test_the_end_of_a_task_reaches_only_those_who_need_more_of_it(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store)
    await _put(buffer, traces, "a")
    waiting = asyncio.create_task(buffer.take({"math": 2}, train_step=1, owner=L))
    await asyncio.sleep(0)
    buffer.waiting.end_task("math", "its prompts ran out")
    with pytest.raises(EndOfData, match="2 groups asked, 1 left") as error:
        await waiting
    assert error.value.task == "math"
    assert len(await buffer.take({"math": 1}, train_step=1, owner=L)) == 1


def test_a_put_beyond_the_byte_limit_waits_for_room_and_then_goes_on(store: Store) -> None:
    async def main() -> None:
        traces = TraceStore(store)
        size = sum(traces.nbytes(s) for s in store_group(traces, "x").session_ids)
        store.sessions.release(store.sessions.list(), owner="*")
        buffer = ReplayBuffer(store, max_bytes=2 * size)
        for uid in ("a", "b"):
            await _put(buffer, traces, uid)
        assert buffer.nbytes <= 2 * size
        with pytest.raises(PutTimeout, match="no room after 5 s"):
            await buffer.put(store_group(traces, "late"), owner=P, timeout=5)
        waiting = asyncio.create_task(_put(buffer, traces, "c"))
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
        await _put(buffer, traces, "a")
        putter = asyncio.create_task(_put(buffer, traces, "b"))
        await asyncio.sleep(1)
        assert not putter.done()
        batch = await buffer.take({"math": 2}, train_step=1, owner=L, timeout=10)
        assert [g.uid for g in batch.groups] == ["a", "b"]
        await putter

    run_virtual(main())


async def test_two_changes_before_the_first_putter_runs_do_not_let_two_into_one_room() -> None:
    room = _Room(free=0)
    first, second = await _begins(room.put(5)), await _begins(room.put(5))
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
    putter = await _begins(room.put(5))
    room.gain(free=5)
    room.gain(free=-5)  # a dead learner's batch came back
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not putter.done()
    room.gain(free=5)
    await putter


async def test_small_groups_do_not_pass_a_large_one_that_waits_for_room() -> None:
    room = _Room(free=3)
    large = await _begins(room.put(8))
    small = await _begins(room.put(2))
    room.gain(free=5)
    await large
    assert not small.done()
    room.gain(free=2)
    await small


async def test_what_a_taker_lacks_passes_a_group_that_waits_for_room() -> None:
    room = _Room(free=3)
    large = await _begins(room.put(8, task="code"))
    taker = await _begins(room.take(math=1))
    await room.put(2)
    room.gain(math=1)
    await taker
    assert not large.done()
    large.cancel()


async def test_L14_a_later_taker_passes_only_with_tasks_that_nobody_ahead_waits_for() -> None:
    room = _Room(free=0)
    large = await _begins(room.take("one", math=3))
    small = await _begins(room.take("two", math=1))
    other = await _begins(room.take("three", code=1))
    room.gain(math=1, code=1)
    await other
    assert not small.done()
    room.gain(math=2)
    await large
    assert not small.done()
    room.gain(math=1)
    await small


@pytest.mark.parametrize("woken", [False, True])
async def test_L12_takes_and_puts_for_a_dead_owner_end_and_take_nothing(
    store: Store, traces: TraceStore, woken: bool
) -> None:
    buffer = ReplayBuffer(store, max_bytes=1)
    await _put(buffer, traces, "a", task="code")
    put = await _begins(buffer.put(store_group(traces, "p", owner="p"), owner="p"))
    take = await _begins(buffer.take({"code": 1, "rest": 1}, train_step=1, owner=L))
    if woken:
        await _put(buffer, traces, "b", task="rest")
        put_room, buffer.max_bytes = buffer.max_bytes, None
        buffer.waiting.wake()
        buffer.max_bytes = put_room
    for owner, waiter in ((L, take), ("p", put)):
        buffer.owner_died(owner)
        with pytest.raises(PartFailed, match=f"{owner} failed: it died while it waited"):
            await waiter
        assert store.sessions.list(owner) == []
    assert buffer.describe() == []
    buffer.check_books()
    assert buffer.accounts.ledger.task("math").produced == 0
    # A successor under the same name is served.
    if woken:
        await buffer.take({"code": 1, "rest": 1}, train_step=1, owner=L, timeout=1)
        assert buffer.owner_died(L)[0] == 2


async def test_a_take_that_could_be_met_hears_of_a_dead_part_all_the_same(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store)
    woken = await _begins(buffer.take({"math": 1}, train_step=1, owner=L))
    await _put(buffer, traces, "a")
    buffer.waiting.fail("producer-0", "killed by signal 9")
    for taking in (woken, buffer.take({"math": 1}, train_step=1, owner=L)):
        with pytest.raises(PartFailed, match="killed by signal 9"):
            await taking
    assert store.sessions.list(L) == []


async def test_L16_what_is_offered_again_too_old_is_not_handed_to_one_who_waits(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=1))
    await _put(buffer, traces, "old", model_step=0)
    await buffer.take({"math": 1}, train_step=1, owner="one")
    taker = await _begins(buffer.take({"math": 1}, train_step=3, owner="two"))
    assert buffer.owner_died("one")[0] == 1
    await buffer.put(store_group(traces, "new", model_step=2), owner=P, train_step=3)
    assert [g.uid for g in (await taker).groups] == ["new"]
    assert buffer.accounts.ledger.task("math").expired_dropped == 2
    buffer.owner_died("two")
    buffer.check_books()


async def _waits_for_room(
    buffer: ReplayBuffer, traces: TraceStore
) -> tuple[Group, asyncio.Task[Status]]:
    await _put(buffer, traces, "first")
    buffer.max_bytes = 1
    group = store_group(traces, "late")
    return group, await _begins(buffer.put(group, owner=P))


async def test_L10_a_group_that_was_given_up_while_it_waited_for_room_is_not_booked_again(
    store: Store, traces: TraceStore
) -> None:
    """Also when it is too old by then, and would be dropped: its sessions are gone."""
    buffer = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=0))
    group, putting = await _waits_for_room(buffer, traces)
    buffer.discard(group, owner=P)
    await buffer.refresh(train_step=9)
    with pytest.raises(NotOwner):
        await putting
    assert buffer.accounts.ledger.task("math").produced == 4
    buffer.check_books()


async def test_a_group_is_filed_once_when_it_is_put_twice_at_the_same_time(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store)
    group, once = await _waits_for_room(buffer, traces)
    twice = await _begins(buffer.put(group, owner=P))
    buffer.max_bytes = None
    buffer.waiting.wake()
    assert await once is Status.COMPLETED
    with pytest.raises(BadGroup, match="in the buffer already"):
        await twice
    buffer.check_books()


def test_L21_a_pause_does_not_wait_for_room_that_only_its_own_end_could_make(store: Store) -> None:
    """The learner takes nothing before the pause is over, so nothing leaves the buffer."""

    async def main() -> None:
        budget = {"batch_groups": 2, "budget": StalenessBudget(max_staleness=5)}
        async with desk(store, dispatch=budget) as made:
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


def test_L12_what_was_drawn_and_not_begun_goes_out_again_when_its_producer_is_cancelled(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store, run=False) as made:
            running = asyncio.create_task(made.producer.run())
            while not made.dispatcher._in_production:
                await asyncio.sleep(0)
            running.cancel()  # between the draw and the start of what was drawn
            await asyncio.wait([running])
            assert running.cancelled()
            assert made.dispatcher._in_production == {}
            works = await made.dispatcher.draw("producer-1")
            assert works[0].prompt.uid == "math/0"
            await made.dispatcher.give_back("producer-1")

    run_virtual(main())


async def test_L07_a_taker_that_dies_as_its_task_ends_is_told_of_its_death(store: Store) -> None:
    """Told of the end alone, whoever asks for it would ask again, for a dead owner."""
    buffer = ReplayBuffer(store)
    taking = asyncio.create_task(buffer.take({"code": 1}, train_step=1, owner="learner"))
    await asyncio.sleep(0)
    buffer.waiting.end_task("code", "it is over")
    buffer.owner_died("learner")
    with pytest.raises(PartFailed, match="died while it waited"):
        await taking


async def test_whoever_waits_when_the_buffer_is_closed_or_comes_later_is_told(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store)
    _, putting = await _waits_for_room(buffer, traces)
    second = await _begins(buffer.put(store_group(traces, "later"), owner=P))
    taking = await _begins(buffer.take({"code": 1}, train_step=1, owner=L))
    just_woken = await _begins(buffer.take({"math": 2}, train_step=1, owner=L))
    buffer._file(store_group(traces, "b"), P)
    assert buffer.close() == 4
    useless = store_group(traces, "useless", status=Status.FAILED)
    for ended in (putting, second, taking, just_woken, buffer.put(useless, owner=P)):
        with pytest.raises(BufferClosed, match="the replay buffer is closed"):
            await ended
    with pytest.raises(BufferClosed):
        buffer.lend("math", Status.ABORTED, owner=P)
    with pytest.raises(BufferClosed):
        await buffer.take({"math": 1}, train_step=1, owner=L)
    assert buffer.describe() == []
    assert set(store.sessions.list()) == set(store.sessions.list(P)), "each keeps what it has"
    assert buffer.close() == 0
    buffer.check_books()


async def test_what_comes_back_to_a_closed_buffer_ends(store: Store, traces: TraceStore) -> None:
    buffer = ReplayBuffer(store)
    for uid, owner in (("a", L), ("b", "second")):
        await _put(buffer, traces, uid)
        await buffer.take({"math": 1}, train_step=1, owner=owner)
    buffer.close()
    assert buffer.owner_died(L) == (0, [])
    store.sessions.transfer(["b-0", "b-1"], src="second", dst=buffer.owner)  # as its heir
    assert buffer.reclaim() == 0
    assert (len(buffer), len(store.sessions), buffer.held()) == (0, 0, {})
    assert buffer.accounts.ledger.total.cancelled == 4
    buffer.check_books()


async def test_a_close_does_not_hide_of_what_the_run_died(store: Store, traces: TraceStore) -> None:
    buffer = ReplayBuffer(store)
    _, putting = await _waits_for_room(buffer, traces)
    buffer.waiting.fail("engine", "exit code 1")
    buffer.close()
    with pytest.raises(PartFailed, match="engine failed: exit code 1"):
        await putting
    with pytest.raises(PartFailed, match="engine failed: exit code 1"):
        await buffer.take({"math": 1}, train_step=1, owner=L)


def test_a_draw_that_waits_when_the_buffer_is_closed_is_told(store: Store) -> None:
    async def main() -> None:
        async with desk(store, run=False) as made:
            drawn = await made.dispatcher.draw(P, 100)
            drawing = await _begins(made.dispatcher.draw("producer-1"))
            made.buffer.close()
            with pytest.raises(BufferClosed):
                await drawing
            assert await made.dispatcher.give_back(P) == len(drawn)

    run_virtual(main())


def test_a_hand_in_of_several_does_not_wait_and_leaves_none_of_them_in_line(store: Store) -> None:
    """What stood in line would be filed behind its caller's back."""

    async def main() -> None:
        async with desk(store, run=False) as made:
            groups = []
            for work in await made.dispatcher.draw(P, 3):
                made.traces.open(work.uid, owner=P)
                made.traces.insert(work.uid, make_segment(4))
                member = Rollout(work.uid, status=Status.COMPLETED, reward=1.0)
                groups.append(Group(uid=work.uid, task=work.task, rollouts=(member,)))
            await made.dispatcher.put(groups[0], owner=P)
            made.buffer.max_bytes = 1
            assert await made.dispatcher.put_all(groups[1:], owner=P) == [None, None]
            assert made.buffer.describe() == []
            made.buffer.max_bytes = None
            made.buffer.waiting.wake()
            await asyncio.sleep(1)
            assert len(made.buffer) == 1
            assert await made.dispatcher.put_all(groups[1:], owner=P) == [Status.COMPLETED] * 2

    run_virtual(main())
