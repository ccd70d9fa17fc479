"""What broke in the system that this one replaces, as scenarios with real processes.

Each, (a) to (j), runs twice: as the trainer does it, and, as a canary, with the old behaviour; the
canary must fail, or the scenario proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmstore import SessionReleased, Store, StoreFull
from shmstore.testing import temporary_store
from tests.trainer.lifecycle.kit import desk
from tests.trainer.lifecycle.players import Player
from trainer.engine.scripted import Script
from trainer.expiry import Expiry, ExpiryAction
from trainer.rollout import Batch, Status
from trainer.testing import make_segment, run_virtual

P, L = "producer-0", "learner"


@pytest.fixture
def producer(store: Store) -> Iterator[Player]:
    with Player(store, P) as player:
        yield player


@pytest.fixture
def learner(store: Store) -> Iterator[Player]:
    with Player(store, L, heir="replay") as player:
        yield player


@pytest.fixture
def driver(store: Store) -> Iterator[Player]:
    """Where the buffer lives."""
    with Player(store, "replay") as player:
        yield player


def _expect_canary(old: bool, error: type[BaseException] = AssertionError) -> Any:
    """The body must fail, and in this way, when the old behaviour is on, and only then."""
    return pytest.raises(error) if old else _Nothing()


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _batch_for(driver: Player, producer: Player, uids: list[str], take: int) -> Batch:
    driver.do("own_buffer")
    for uid in uids:
        driver.do("put", producer.do("make_group", uid))
    batch: Batch = driver.do("take", take, 1, L)
    return batch


both = pytest.mark.parametrize("old", [False, True], ids=["now", "canary"])


@both
def test_a_learner_clears_while_the_producer_inserts(
    store: Store, producer: Player, learner: Player, driver: Player, old: bool
) -> None:
    batch = _batch_for(driver, producer, ["g0", "g1"], take=2)
    producer.do("open_and_insert", "future")
    learner.do("train", list(batch.session_ids), old)
    with _expect_canary(old, SessionReleased):
        assert producer.do("insert", "future") == 1
        assert store.sessions.owner("future") == P
        assert store.sessions.list(L) == []


@both
def test_a_learner_clears_many_times_while_the_producer_runs(
    store: Store, producer: Player, learner: Player, driver: Player, old: bool
) -> None:
    driver.do("own_buffer")
    groups = [producer.do("make_group", f"g{i}") for i in range(20)]
    producer.begin("produce_many", 300)
    with _expect_canary(old, SessionReleased):
        for step, group in enumerate(groups, start=1):
            driver.do("put", group)
            batch = driver.do("take", 1, step, L)
            learner.do("train", list(batch.session_ids), old)
        assert producer.result() == 300
        assert len(store.sessions.list(P)) == 300


@both
def test_b_what_was_produced_meanwhile_is_consumed_and_checkpointed_later(
    store: Store, producer: Player, learner: Player, driver: Player, tmp_path: Path, old: bool
) -> None:
    batch = _batch_for(driver, producer, ["g0", "g1", "g2"], take=1)
    learner.do("clear", list(batch.session_ids), old)
    with _expect_canary(old, SessionReleased):
        driver.do("snapshot", tmp_path)
        later = driver.do("take", 2, 2, L)
        assert learner.do("train", list(later.session_ids), False) == [10] * 4
        with temporary_store("8MiB") as other, Player(other, "replay") as again:
            assert again.do("resume_buffer", tmp_path) == 2
            again.do("close_buffer")


@both
def test_c_evaluation_at_a_weight_sync_keeps_aborted_and_left_over_groups(
    store: Store, producer: Player, learner: Player, driver: Player, old: bool
) -> None:
    driver.do("own_buffer")
    driver.do("put", producer.do("make_group", "aborted", Status.ABORTED))
    driver.do("put", producer.do("make_group", "left-over"))
    with Player(store, "eval") as evaluator:
        evaluator.do("evaluate", old)
    with _expect_canary(old):
        assert len(store.sessions.list("replay")) == 4
        assert driver.do("lend", Status.ABORTED, P).uid == "aborted"
        assert producer.do("insert", "aborted-0") == 2
        batch = driver.do("take", 1, 2, L)
        assert learner.do("train", list(batch.session_ids), False) == [10, 10]


@both
def test_d_a_failed_group_is_never_counted_as_completed(
    store: Store, producer: Player, learner: Player, driver: Player, old: bool
) -> None:
    driver.do("own_buffer", "d" if old else "")
    groups = [producer.do("produce", f"g{i}", float(i % 2)) for i in range(4)]
    told = [driver.do("put", group) for group in groups]
    with _expect_canary(old):
        assert told == [Status.COMPLETED, Status.FAILED] * 2
        assert store.sessions.list(P) == []
        batch = driver.do("take", 2, 1, L)
        assert [group.uid for group in batch.groups] == ["g0", "g2"]
        lengths = learner.do("train", list(batch.session_ids), False)
        assert lengths == [r.n_tokens for r in batch.rollouts]
        books = driver.do("close_buffer")
        assert (books["trained"], books["failed"]) == (4, 4)


def _useless_groups(
    store: Store, producer: Player, learner: Player, driver: Player, n: int
) -> list[int]:
    """Put `n` groups of which most are useless, train the others; -> bytes in use, every tenth."""
    used: list[int] = []
    for i in range(n):
        status = (Status.FAILED, Status.FILTERED, Status.COMPLETED)[i % 3]
        driver.do("put", producer.do("make_group", f"g{i}", status))
        if status is Status.COMPLETED:
            batch = driver.do("take", 1, 1, L)
            learner.do("train", list(batch.session_ids), False)
        if i % 10 == 0:
            used.append(store.stats().used)
    return used


@both
def test_e_failed_and_filtered_groups_do_not_pile_up(old: bool) -> None:
    """At length: `python -m tests.trainer.lifecycle.soak`, a hundred thousand groups."""
    with (
        temporary_store("2MiB", max_objects=1 << 14, max_sessions=1 << 12) as store,
        Player(store, P) as producer,
        Player(store, L, heir="replay") as learner,
        Player(store, "replay") as driver,
    ):
        driver.do("own_buffer", "e" if old else "")
        with _expect_canary(old, StoreFull) as full:
            used = _useless_groups(store, producer, learner, driver, 1200)
            assert max(used[1:]) == min(used[1:])
            assert store.sessions.list() == []
            books = driver.do("close_buffer")
            assert (books["trained"], books["failed"], books["filtered"]) == (800, 800, 800)
        assert not old or full.type is StoreFull, "the memory is full, not a table"
        store.sessions.release(store.sessions.list(), owner="*")


@both
def test_f_two_wrappers_of_one_object_free_it_once(
    store: Store, producer: Player, learner: Player, driver: Player, old: bool
) -> None:
    name = producer.do("put_bytes", b"x" * 1000)
    freed = driver.do("free_by_name", [name, name], old)
    with _expect_canary(old):
        assert freed == 1
        later = store.put(b"y" * 1000)  # takes the place of the first
        assert [player.do("free_by_name", [name]) for player in (producer, learner)] == [0, 0]
        assert bytes(store.get(later)) == b"y" * 1000


@both
def test_g_expiry_by_drop_releases_in_one_call_and_never_under_the_lock(
    store: Store, producer: Player, learner: Player, driver: Player, old: bool
) -> None:
    driver.do("own_buffer", "g" if old else "", Expiry(ExpiryAction.DROP, max_staleness=0))
    for i in range(5):
        driver.do("put", producer.do("make_group", f"g{i}"))
    producer.begin("produce_many", 100)  # goes on meanwhile
    locked = driver.do("refresh", 2)
    assert producer.result() == 100
    with _expect_canary(old):
        assert locked == [False]
        assert store.sessions.list("replay") == []
        assert len(store.sessions.list(P)) == 100
        driver.do("put", producer.do("make_group", "fresh", Status.COMPLETED, 1), 2)
        batch = driver.do("take", 1, 2, L)
        assert learner.do("train", list(batch.session_ids), False) == [10, 10]
        assert driver.do("close_buffer")["expired_dropped"] == 10


@both
def test_h_a_new_attempt_after_expiry_cannot_meet_the_old_trace(
    store: Store, producer: Player, driver: Player, old: bool
) -> None:
    driver.do("own_buffer", "h" if old else "", Expiry(max_staleness=0))
    driver.do("put", producer.do("make_group", "g"))
    driver.do("refresh", 2)
    assert driver.do("lend", Status.EXPIRED, P) is not None
    with _expect_canary(old):
        assert producer.do("insert", "g-0") == 1  # right after the prompt
        assert producer.do("model_steps", "g-0") == {-1, 1}


@both
def test_i_lengths_are_checked_before_anything_is_released(
    producer: Player, learner: Player, driver: Player, old: bool
) -> None:
    batch = _batch_for(driver, producer, ["g"], take=1)
    ids = list(batch.session_ids)
    with _expect_canary(old, SessionReleased):
        lengths = learner.do("train_after_clearing", ids) if old else learner.do("train", ids, old)
        assert lengths == [r.n_tokens for r in batch.rollouts]
    assert driver.do("close_buffer")["trained"] == 2


@both
def test_j_cancellation_at_any_point_leaves_index_sessions_and_books_agreed(
    store: Store, producer: Player, learner: Player, driver: Player, old: bool
) -> None:
    def cancelled_after(n_turns: int) -> None:
        """The learner's take and three puts of the producer are cancelled in one turn of the
        driver's loop.
        """
        driver.do("own_buffer", "j" if old else "")
        groups = [producer.do("make_group", f"g{i}") for i in range(3)]
        filed, taken = driver.do("put_and_take_cancelled", groups, 2, n_turns, L)
        assert set(filed) == set(store.sessions.list("replay"))
        assert set(taken) == set(store.sessions.list(L))
        assert learner.do("train", taken, False) == [10] * len(taken)
        assert driver.do("close_buffer")["trained"] == len(taken)

    with _expect_canary(old):
        for n_turns in range(12):
            cancelled_after(n_turns)
            store.sessions.release(store.sessions.list(), owner="*")


def test_L07_a_killed_learner_loses_nothing_and_nothing_is_trained_twice(
    store: Store, producer: Player, driver: Player
) -> None:
    with Player(store, L, heir="replay") as first:
        batch = _batch_for(driver, producer, ["g0", "g1", "g2"], take=2)
        first.puppet.kill()
    store.sweep()
    assert store.sessions.list(L) == []
    assert set(batch.session_ids) <= set(store.sessions.list("replay"))
    assert driver.do("owner_died", L) == (2, [])
    with Player(store, L, heir="replay") as second:
        again = driver.do("take", 3, 1, L)
        assert [g.uid for g in again.groups] == ["g0", "g1", "g2"]
        assert second.do("train", list(again.session_ids), False) == [10] * 6
    assert driver.do("close_buffer")["trained"] == 6


def test_L07_without_being_told_the_next_take_finds_what_a_dead_learner_had(
    store: Store, producer: Player, driver: Player
) -> None:
    with Player(store, L, heir="replay") as first:
        batch = _batch_for(driver, producer, ["g0", "g1"], take=2)
        first.puppet.kill()
    again = driver.do("take", 2, 1, "learner-2")
    assert again.groups == batch.groups
    assert store.sessions.list("learner-2") == list(batch.session_ids)
    driver.do("close_buffer")


def test_L12_a_killed_producer_leaves_no_session_and_its_groups_in_the_buffer_stay(
    store: Store, driver: Player
) -> None:
    driver.do("own_buffer")
    with Player(store, P) as producer:
        driver.do("put", producer.do("make_group", "done"))
        producer.do("open_and_insert", "half")
        producer.begin("produce_many", 100_000)
        producer.puppet.kill()
    driver.do("owner_died", P)
    assert store.sessions.list() == ["done-0", "done-1"]
    assert len(driver.do("take", 1, 1, L)) == 1


def test_e_a_desk_with_an_engine_that_mostly_fails_stays_flat(store: Store) -> None:
    async def main() -> list[int]:
        used = []
        script = Script(token_s=0.1, failure_rate=0.5)
        async with desk(store, script=script) as made:
            for step in range(1, 60):
                await made.train(step)
                await made.dispatcher.set_steps(model_step=step)
                used.append(len(store.sessions.list()))
        return used

    used = run_virtual(main())
    assert max(used[30:]) <= max(used[:30])


def test_a_segment_of_the_report_size_fits_the_scenarios() -> None:
    """48 layers, top-8, as in a large mixture: 384 bytes of routing a token."""
    assert make_segment(512, layers=48, top_k=8).routed_experts.nbytes == 512 * 384  # type: ignore[union-attr]
