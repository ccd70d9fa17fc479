"""The replay buffer on a real arena: L06, L07, L14 to L17, L26, L29."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shmstore import NotOwner, Store
from tests.trainer.lifecycle.kit import put
from trainer.errors import (
    BadGroup,
    ConfigError,
    LedgerError,
    ReplayError,
)
from trainer.expiry import Expiry, ExpiryAction
from trainer.replay import ReplayBuffer
from trainer.replay import index as replay_index
from trainer.rollout import Group, Prompt, Rollout, Status
from trainer.testing import make_segment, store_group
from trainer.trace import TraceStore

P, L = "producer-0", "learner"


async def test_L06_taking_moves_exactly_the_sessions_of_the_batch(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    for uid in ("a", "b", "c"):
        await put(buffer, traces, uid)
    traces.open("meanwhile", owner=P)
    batch = await buffer.take({"math": 2}, train_step=1, owner=L, timeout=1)
    assert [group.uid for group in batch.groups] == ["a", "b"]
    assert store.sessions.list(L) == list(batch.session_ids) == ["a-0", "a-1", "b-0", "b-1"]
    assert buffer.count("math", Status.COMPLETED) == 1
    assert traces.release(batch.session_ids, owner=L) == list(batch.session_ids)
    assert store.sessions.list() == ["c-0", "c-1", "meanwhile"]
    assert buffer.settle(L) == 4
    buffer.check_books()


@pytest.mark.parametrize("first", [0, 1])
async def test_L06_a_group_is_trained_when_all_its_sessions_are_released(
    store: Store, traces: TraceStore, buffer: ReplayBuffer, first: int
) -> None:
    await put(buffer, traces, "a")
    await put(buffer, traces, "b")
    await buffer.take({"math": 2}, train_step=1, owner=L, timeout=1)
    one, other = ("a-0", "a-1") if first == 0 else ("a-1", "a-0")
    traces.release([one], owner=L)
    assert (buffer.settle(L), buffer.reclaim()) == (0, 0)
    traces.release([other], owner=L)
    assert (buffer.settle(L), buffer.reclaim()) == (2, 0)
    assert buffer.held() == {"math": 2}
    buffer.check_books()


async def test_L06_when_the_sessions_cannot_move_the_groups_stay(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    await put(buffer, traces, "a")
    await put(buffer, traces, "b")
    store.sessions.release(["b-1"], owner="*")
    with pytest.raises(NotOwner):
        await buffer.take({"math": 2}, train_step=1, owner=L, timeout=1)
    assert buffer.count("math", Status.COMPLETED) == 2
    assert store.sessions.list(L) == []
    assert (await buffer.take({"math": 1}, train_step=1, owner=L, timeout=1)).groups[0].uid == "a"


def _index_of(n: int) -> replay_index.ReplayIndex:
    index = replay_index.ReplayIndex(replay_index.Order.STALENESS)
    for i in range(n):
        rollout = Rollout(f"s{i}", status=Status.COMPLETED, model_step_min=i % 7, model_step_max=9)
        index.add(Group(f"g{i}", "math", None, (rollout,)), i, deadline=10 + i % 7)
    return index


def _lines_run(n: int) -> int:
    """Lines of the index that run for one of each call, with `n` groups in it; loops count each
    turn.
    """
    index, lines = _index_of(n), 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename == replay_index.__file__:
            lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        popped = [index.pop("math", Status.COMPLETED) for _ in range(3)]
        assert index.remove("g3") is not None
        assert index.pop_expired(9) == []
        index.count("math", Status.COMPLETED)
        index.counts()
        index.add(popped[0].group, 0, 10)  # type: ignore[union-attr]
    finally:
        sys.settrace(before)
    assert [entry.group.uid for entry in popped if entry] == ["g0", "g7", "g14"]
    assert index.count("math", Status.COMPLETED) == len(index) == n - 3
    return lines


def test_L14_no_call_looks_at_groups_that_it_does_not_return() -> None:
    assert _lines_run(200) == _lines_run(20_000) > 20
    assert len(_index_of(700).pop_expired(10)) == 100


def test_L14_an_entry_that_is_filed_again_in_its_old_place_does_not_meet_its_dead_row() -> None:
    index = replay_index.ReplayIndex(replay_index.Order.FIFO)
    for uid in "abc":
        group = Group(uid, "math", None, (Rollout(uid, status=Status.COMPLETED),))
        index.add(group, ord(uid), None)
    for _ in range(3):
        removed = index.remove("b")  # its row stays in the heap
        assert removed is not None
        index.add(removed.group, removed.seq, None)
    assert [index.pop("math", Status.COMPLETED).group.uid for _ in "abc"] == ["a", "b", "c"]  # type: ignore[union-attr]
    assert index.pop("math", Status.COMPLETED) is None


def test_L14_groups_that_expire_leave_no_rows_behind_in_the_heaps() -> None:
    """The row of a removed group stays where it is, but not more of them than of live ones."""
    index = replay_index.ReplayIndex(replay_index.Order.STALENESS)
    for n in range(5000):
        rollout = Rollout(str(n), status=Status.COMPLETED, model_step_min=0, model_step_max=0)
        index.add(Group(str(n), "math", None, (rollout,)), n, deadline=n + 1)
    index.pop_expired(4990)
    assert len(index) == 10
    assert len(index._heaps["math", Status.COMPLETED]) <= 64 + 2 * 10


@pytest.mark.parametrize(
    ("order", "wanted"),
    [("staleness", ["old-1", "old-2", "mid", "new"]), ("fifo", ["new", "old-1", "mid", "old-2"])],
)
async def test_L15_order_is_oldest_staleness_first_or_first_in_first_out(
    store: Store, traces: TraceStore, order: str, wanted: list[str]
) -> None:
    buffer = ReplayBuffer(store, order=order)
    for uid, step in (("new", 5), ("old-1", 0), ("mid", 3), ("old-2", 0)):
        await put(buffer, traces, uid, model_step=step)
    taken = await buffer.take({"math": 4}, train_step=6, owner=L)
    assert [group.uid for group in taken.groups] == wanted


async def test_L16_retry_releases_only_the_stale_responses_and_keeps_fresh_members(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, expiry=Expiry(max_staleness=0))
    group = store_group(traces, "a", model_step=0)
    fresh = group.rollouts[1].evolve(model_step_min=4, model_step_max=4)
    await buffer.put(group.with_rollouts([group.rollouts[0], fresh]), owner=P, train_step=1)
    refreshed = await buffer.refresh(train_step=2)
    assert (refreshed.retry, refreshed.dropped) == (1, 0)
    assert buffer.count("math", Status.EXPIRED) == 1
    assert traces.length("a-0") == 1  # the prompt
    assert traces.length("a-1") == 2
    lent = buffer.lend("math", Status.EXPIRED, owner=P)
    assert lent is not None
    assert [r.status for r in lent.rollouts] == [Status.EXPIRED, Status.COMPLETED]
    # A new attempt cannot mismatch the old trace: there is none.
    traces.insert("a-0", make_segment(3, model_step=4), parent=0)
    assert len(traces.export("a-0")) == 7


async def test_L16_drop_removes_under_the_lock_and_releases_in_one_call_outside_it(
    store: Store, traces: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=0))
    for uid in ("a", "b"):
        await put(buffer, traces, uid, model_step=0)
    await put(buffer, traces, "c", model_step=3)
    calls: list[tuple[list[str], bool]] = []
    release = store.sessions.release

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(store.sessions, name)

        def release(self, ids: list[str], owner: str) -> list[str]:
            calls.append((list(ids), buffer._lock.locked()))
            return release(ids, owner)

    monkeypatch.setattr(buffer, "_store", _With(store, Watched()))
    assert (await buffer.refresh(train_step=2)).dropped == 2
    assert calls == [(["a-0", "a-1", "b-0", "b-1"], False)]
    assert store.sessions.list() == ["c-0", "c-1"]
    buffer.check_books()
    assert buffer.accounts.ledger.task("math").expired_dropped == 4


class _With:
    """The store with other sessions."""

    def __init__(self, store: Store, sessions: Any) -> None:
        self.sessions = sessions
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_L17_nothing_is_awaited_and_nobody_is_called_while_the_lock_is_held(
    store: Store, traces: TraceStore
) -> None:
    buffer = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=0))
    held: list[str] = []

    def check(what: str) -> Callable[..., None]:
        return lambda *_: held.append(what) if buffer._lock.locked() else None

    buffer.on_change(check("listener"))
    waiting = asyncio.create_task(buffer.take({"math": 2}, train_step=2, owner=L))
    waiting.add_done_callback(check("taker"))
    await asyncio.sleep(0)
    for i in range(4):
        await put(buffer, traces, f"g{i}", model_step=1)
    await waiting
    await buffer.refresh(train_step=9)
    buffer.lend("math", Status.ABORTED, owner=P)
    assert held == []


@pytest.mark.parametrize(("setting", "allowed"), [("expiry", "drop"), ("order", "fifo")])
def test_a_setting_that_does_not_exist_is_refused_with_what_is_allowed(
    store: Store, setting: str, allowed: str
) -> None:
    given: Any = {setting: "nonsense"}
    with pytest.raises(ConfigError, match=f"'nonsense' is unknown; allowed are .*'{allowed}'"):
        ReplayBuffer(store, **given)


async def test_a_group_that_is_stale_on_arrival_is_expired_at_once(
    store: Store, traces: TraceStore
) -> None:
    retry = ReplayBuffer(store, expiry=Expiry(max_staleness=0), owner="replay-1")
    stale = store_group(traces, "a", model_step=0)
    assert await retry.put(stale, owner=P, train_step=2) is Status.EXPIRED
    assert retry.count("math", Status.EXPIRED) == 1
    drop = ReplayBuffer(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=0), owner="replay-2")
    stale = store_group(traces, "b", model_step=0)
    assert await drop.put(stale, owner=P, train_step=2) is Status.EXPIRED
    assert len(drop) == 0
    assert store.sessions.list("replay-2") == store.sessions.list(P) == []
    retry.check_books()
    drop.check_books()


async def test_L29_each_count_is_handed_out_once(traces: TraceStore, buffer: ReplayBuffer) -> None:
    for i in range(3):
        await put(buffer, traces, f"a{i}", reward=float(i))
    await put(buffer, traces, "f", status=Status.FILTERED, reward=5.0)
    await put(buffer, traces, "p", status=Status.ABORTED, reward=None)
    first = (await buffer.take({"math": 1}, train_step=1, owner=L)).report
    assert first.tasks["math"].leftover == {"completed": 2, "aborted": 1}
    assert first.total.raw_reward_count == 8
    assert first.total.raw_reward_sum == 2 * (0 + 1 + 2 + 5)
    assert first.total.group_time_count == 5
    second = (await buffer.take({"math": 1}, train_step=1, owner=L)).report
    assert second.total.produced_samples == second.total.raw_reward_count == 0
    assert second.tasks["math"].leftover == {"completed": 1, "aborted": 1}


async def test_a_lent_group_is_produced_once_however_often_it_is_handed_in(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    await put(buffer, traces, "a", status=Status.ABORTED, reward=None)
    lent = buffer.lend("math", Status.ABORTED, owner=P)
    assert lent is not None
    buffer.check_books()
    assert store.sessions.list(P) == ["a-0", "a-1"]
    done = [r.evolve(status=Status.COMPLETED, reward=1.0) for r in lent.rollouts]
    await buffer.put(lent.with_rollouts(done), owner=P)
    buffer.check_books()
    assert buffer.accounts.ledger.task("math").produced == 2
    report = (await buffer.take({"math": 1}, train_step=1, owner=L)).report.total
    assert (report.produced_samples, report.produced_tokens) == (2, 12)


async def test_a_lent_group_that_is_put_again_as_another_is_refused_and_stays_lent(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    """It would be filed, and the books would break at its end."""
    await put(buffer, traces, "a", status=Status.ABORTED)
    lent = buffer.lend("math", Status.ABORTED, owner=P)
    assert lent is not None
    first, second = (r.evolve(status=Status.COMPLETED) for r in lent.rollouts)
    done = lent.with_rollouts([first, second])
    strange = store_group(traces, "b")
    for wrong, said in (
        (
            done.with_rollouts([first]),
            r"the sessions of its rollouts changed from \['a-0', 'a-1'\]",
        ),
        (done.with_rollouts([first, first]), r"to \['a-0', 'a-0'\]; put it again as it was lent"),
        (done.with_rollouts([first, second, strange.rollouts[0]]), "'a-1', 'b-0'"),
        (done.evolve(task="code"), "its task changed from 'math' to 'code'"),
        (done.evolve(prompt=Prompt("q", "math")), "its prompt changed from 'a' to 'q'"),
        (done.evolve(uid="c"), "group 'c' has session 'a-0', which was lent in group 'a'"),
        (
            strange.with_rollouts([*strange.rollouts, first]),
            "'b' has session 'a-0', which was lent",
        ),
    ):
        for status in (Status.COMPLETED, Status.FAILED):
            ended = wrong.with_rollouts([r.evolve(status=status) for r in wrong.rollouts])
            with pytest.raises(BadGroup, match=said):
                await buffer.put(ended, owner=P)
        assert set(store.sessions.list(P)) == {"a-0", "a-1", "b-0", "b-1"}
        buffer.check_books()
    assert buffer.accounts.ledger.total.produced == 2
    await buffer.put(done.evolve(prompt=None), owner=P)  # the buffer knows it
    batch = await buffer.take({"math": 1}, train_step=1, owner=L)
    assert batch.groups[0].prompt == lent.prompt
    traces.release(batch.session_ids, owner=L)
    buffer.check_books()


async def test_a_lent_group_is_given_up_as_a_whole_whatever_is_left_of_it(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    await put(buffer, traces, "a", status=Status.ABORTED)
    lent = buffer.lend("math", Status.ABORTED, owner=P)
    assert lent is not None
    buffer.discard(lent.with_rollouts(lent.rollouts[:1]), owner=P)
    assert len(store.sessions) == 0
    assert buffer.accounts.ledger.total.cancelled == 2
    buffer.check_books()
    assert await put(buffer, traces, "a") is Status.COMPLETED, "its sessions may be used again"
    buffer.close()


async def test_L07_what_a_closed_buffer_had_fallen_back_to_it_is_not_booked_as_trained(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    await put(buffer, traces, "a")
    batch = await buffer.take({"math": 1}, train_step=1, owner=L)
    store.sessions.transfer(batch.session_ids, src=L, dst=buffer.owner)  # as its heir does
    assert buffer.close() == 2
    buffer.check_books()
    assert buffer.accounts.ledger.total.trained == 0
    assert buffer.accounts.ledger.total.cancelled == 2


async def test_L26_only_who_has_a_group_can_give_it_up(
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    filed, taken, foreign = (store_group(traces, uid) for uid in ("filed", "taken", "foreign"))
    await buffer.put(taken, owner=P)
    batch = await buffer.take({"math": 1}, train_step=1, owner=L)
    await buffer.put(filed, owner=P)
    for group, owner, error in (
        (filed, P, BadGroup),
        (taken, P, BadGroup),
        (foreign, "other", NotOwner),
    ):
        with pytest.raises(error, match=group.uid):
            buffer.discard(group, owner=owner)
    assert buffer.accounts.ledger.total.produced == 4
    assert buffer.accounts.ledger.total.cancelled == 0
    buffer.discard(foreign, owner=P)
    assert traces.release(batch.session_ids, owner=L) == list(batch.session_ids)
    buffer.close()
    buffer.check_books()


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True])
async def test_a_wait_that_cannot_be_meant_is_refused_at_once(
    timeout: Any, buffer: ReplayBuffer
) -> None:
    with pytest.raises(ReplayError, match=f"the timeout is {timeout!r}; it is a number of seconds"):
        await buffer.take({"math": 1}, train_step=1, owner=L, timeout=timeout)
    with pytest.raises(ReplayError, match="a number of seconds"):
        await buffer.put(Group("a", rollouts=(Rollout("s"),)), owner=P, timeout=timeout)


@pytest.mark.parametrize("owner", ["replay", "", None])
async def test_groups_go_only_to_whom_the_buffer_can_tell_from_itself(
    owner: Any, buffer: ReplayBuffer
) -> None:
    with pytest.raises(ReplayError, match=f"a name of its own, not to {owner!r}"):
        await buffer.take({"math": 1}, train_step=1, owner=owner)
    with pytest.raises(ReplayError, match="a name of its own"):
        buffer.lend("math", Status.ABORTED, owner=owner)


async def test_L26_a_lost_rollout_shows_in_the_books_with_every_counter(
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    await put(buffer, traces, "a")
    buffer._index.remove("a")  # what a bug would do
    with pytest.raises(LedgerError, match=r"math: produced 2 = buffered 0 .* off by \+2"):
        buffer.check_books()


async def test_L07_the_batch_of_a_dead_learner_is_offered_again_in_its_old_place(
    store: Store, traces: TraceStore, buffer: ReplayBuffer
) -> None:
    for uid in ("a", "b", "c"):
        await put(buffer, traces, uid)
    batch = await buffer.take({"math": 2}, train_step=1, owner=L)
    offered, lost = buffer.owner_died(L)
    assert (offered, lost) == (2, [])
    assert store.sessions.list(L) == []
    again = await buffer.take({"math": 3}, train_step=1, owner=L)
    assert [g.uid for g in again.groups] == ["a", "b", "c"]
    assert batch.groups == again.groups[:2]
    buffer.check_books()


async def test_L07_a_learner_that_died_after_its_release_has_trained_its_batch(
    traces: TraceStore, buffer: ReplayBuffer
) -> None:
    await put(buffer, traces, "a")
    batch = await buffer.take({"math": 1}, train_step=1, owner=L)
    traces.release(batch.session_ids, owner=L)
    assert buffer.owner_died(L) == (0, [])
    assert len(buffer) == 0
    assert buffer.accounts.ledger.task("math").trained == 2
    buffer.check_books()
