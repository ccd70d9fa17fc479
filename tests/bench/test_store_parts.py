"""The store benchmark keeps its word: what it says it checked, it checked. No speed is judged."""

from __future__ import annotations

import numpy as np
import pytest

from bench import handover, objects, reclaim, session_workload
from bench.arenas import arena
from bench.store import Shmrl
from shmstore import Store

MIB = 1 << 20


def insert(store: Store, number: int, harm: int | None = None) -> str:
    """A session as the workload's producer writes it; array `harm` has one wrong byte."""
    name = f"session-{number}"
    value = session_workload.pattern()
    store.sessions.open(name, owner="replay")
    for index in range(session_workload.ARRAYS):
        session_workload.stamp(value, number, index)
        written = value.copy()
        if index == harm:
            written[12_345] ^= 1
        store.put(written, session=name)
    return name


def test_the_audit_of_the_session_workload_finds_a_single_wrong_byte() -> None:
    with arena(32 * MIB) as store:
        names = [insert(store, 0), insert(store, 1)]
        assert session_workload.damage(store, names) == []
        names.append(insert(store, 2, harm=5))
        assert session_workload.damage(store, names) == ["array 5 of session-2 was harmed"]
        store.sessions.release_owned("replay")


def test_the_audit_of_the_session_workload_finds_a_lost_session() -> None:
    with arena(32 * MIB) as store:
        names = [insert(store, 0), insert(store, 1)]
        store.sessions.release(names[:1], owner="replay")
        assert session_workload.damage(store, names) == ["1 sessions are live, 2 should be"]
        store.sessions.release_owned("replay")


def test_a_round_of_objects_leaves_nothing() -> None:
    with arena(8 * MIB) as store:
        rows = objects.object_rows(Shmrl(store), (objects.KIB,), quick=True)
        rows += objects.small_put_rows(Shmrl(store), puts=100, rounds=2)
        assert {row.work for row in rows} >= {"put 1 KiB", "free 1 KiB", "many puts of 1 KiB"}
        assert all(row.median > 0 for row in rows)
        assert store.stats().objects == 0


def test_every_hand_over_to_a_spinning_consumer_arrives() -> None:
    samples = handover.spinning(objects.KIB, 5)
    assert samples.n == 5
    assert min(samples.laps_ns) > 0


def test_a_waiting_hand_over_and_its_floor_are_of_the_same_turns() -> None:
    taken, round_trips = handover.waiting(objects.KIB, 20)
    assert taken.n == round_trips.n >= 10
    assert min(*taken.laps_ns, *round_trips.laps_ns) > 0


def test_turns_in_which_nobody_slept_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_sleeps", lambda: 0)  # here; the consumer is another process
    with pytest.raises(AssertionError, match="did both sleep"):
        handover.waiting(objects.KIB, 5)


def test_reclaim_measures_both_ways_of_coming_back() -> None:
    rows = reclaim.rows(rounds=1)
    assert [row.n for row in rows] == [1, 1]
    assert all(np.isfinite(row.median) for row in rows)
