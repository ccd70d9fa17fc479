"""What ends a wait at the replay buffer unmet: a death, the end of a task, a close: L07, L12."""

from __future__ import annotations

import asyncio

import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import begins, desk, put, waits_for_room
from trainer.errors import BufferClosed, EndOfData, PartFailed
from trainer.replay import ReplayBuffer
from trainer.rollout import Status
from trainer.testing import run_virtual, store_group
from trainer.trace import TraceStore

P, L = "producer-0", "learner"


async def test_a_dead_part_reaches_takers_putters_and_all_who_come_later(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, max_bytes=1)
    await put(buffer, traces, "a")
    taker = asyncio.create_task(buffer.take({"code": 1}, train_step=1, owner=L))
    putter = asyncio.create_task(put(buffer, traces, "b"))
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
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    await put(buffer, traces, "a")
    waiting = asyncio.create_task(buffer.take({"math": 2}, train_step=1, owner=L))
    await asyncio.sleep(0)
    buffer.waiting.end_task("math", "its prompts ran out")
    with pytest.raises(EndOfData, match="2 groups asked, 1 left") as error:
        await waiting
    assert error.value.task == "math"
    assert len(await buffer.take({"math": 1}, train_step=1, owner=L)) == 1


@pytest.mark.parametrize("woken", [False, True])
async def test_L12_takes_and_puts_for_a_dead_owner_end_and_take_nothing(
    store: Store, traces: TraceStore, woken: bool
) -> None:
    buffer = ReplayBuffer(store, max_bytes=1)
    await put(buffer, traces, "a", task="code")
    putting = await begins(buffer.put(store_group(traces, "p", owner="p"), owner="p"))
    taking = await begins(buffer.take({"code": 1, "rest": 1}, train_step=1, owner=L))
    if woken:
        await put(buffer, traces, "b", task="rest")
        put_room, buffer.max_bytes = buffer.max_bytes, None
        buffer.waiting.wake()
        buffer.max_bytes = put_room
    for owner, waiter in ((L, taking), ("p", putting)):
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
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    woken = await begins(buffer.take({"math": 1}, train_step=1, owner=L))
    await put(buffer, traces, "a")
    buffer.waiting.fail("producer-0", "killed by signal 9")
    for taking in (woken, buffer.take({"math": 1}, train_step=1, owner=L)):
        with pytest.raises(PartFailed, match="killed by signal 9"):
            await taking
    assert store.sessions.list(L) == []


async def test_L07_a_taker_that_dies_as_its_task_ends_is_told_of_its_death(
    buffer: ReplayBuffer,
) -> None:
    """Told of the end alone, whoever asks for it would ask again, for a dead owner."""
    taking = asyncio.create_task(buffer.take({"code": 1}, train_step=1, owner="learner"))
    await asyncio.sleep(0)
    buffer.waiting.end_task("code", "it is over")
    buffer.owner_died("learner")
    with pytest.raises(PartFailed, match="died while it waited"):
        await taking


async def test_whoever_waits_when_the_buffer_is_closed_or_comes_later_is_told(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    _, putting = await waits_for_room(buffer, traces)
    second = await begins(buffer.put(store_group(traces, "later"), owner=P))
    taking = await begins(buffer.take({"code": 1}, train_step=1, owner=L))
    just_woken = await begins(buffer.take({"math": 2}, train_step=1, owner=L))
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


async def test_what_comes_back_to_a_closed_buffer_ends(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    for uid, owner in (("a", L), ("b", "second")):
        await put(buffer, traces, uid)
        await buffer.take({"math": 1}, train_step=1, owner=owner)
    buffer.close()
    assert buffer.owner_died(L) == (0, [])
    store.sessions.transfer(["b-0", "b-1"], src="second", dst=buffer.owner)  # as its heir
    assert buffer.reclaim() == 0
    assert (len(buffer), len(store.sessions), buffer.held()) == (0, 0, {})
    assert buffer.accounts.ledger.total.cancelled == 4
    buffer.check_books()


async def test_a_close_does_not_hide_of_what_the_run_died(
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    _, putting = await waits_for_room(buffer, traces)
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
            drawing = await begins(made.dispatcher.draw("producer-1"))
            made.buffer.close()
            with pytest.raises(BufferClosed):
                await drawing
            assert await made.dispatcher.give_back(P) == len(drawn)

    run_virtual(main())
