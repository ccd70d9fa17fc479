"""A full arena is an answer; stats and check say what is in it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shmstore import Store, StoreError, StoreFull
from tests.contract.support import MIB


def test_full_is_an_answer_with_its_facts(name: str) -> None:
    with Store.create(name, capacity="4MiB") as store:
        store.sessions.open("s", owner="hoarder")
        store.put(np.zeros(3 * MIB, dtype=np.uint8), session="s")
        with pytest.raises(StoreFull) as full:
            store.put(np.zeros(2 * MIB, dtype=np.uint8))
        assert "hoarder" in str(full.value)
        assert isinstance(full.value, StoreError)
        with pytest.raises(StoreFull):
            store.put(np.zeros(2 * MIB, dtype=np.uint8), timeout=0.01)
        store.sessions.release(["s"], owner="hoarder")
        assert store.put(np.zeros(2 * MIB, dtype=np.uint8)).alive


def test_a_put_waits_for_room(name: str) -> None:
    with Store.create(name, capacity="4MiB") as store:
        hoard = [store.put(np.zeros(3 * MIB, dtype=np.uint8))]
        timer = threading.Timer(0.05, hoard.clear)
        timer.start()
        assert store.put(np.zeros(2 * MIB, dtype=np.uint8), timeout=30).alive
        timer.join()


def test_an_object_as_large_as_the_arena_fits(name: str) -> None:
    with Store.create(name, capacity="4MiB") as store:
        view = store.get(store.put(np.ones(4 * MIB, dtype=np.uint8)))
        assert view.sum() == 4 * MIB
        with pytest.raises(StoreError, match=r"\d"):
            store.put(np.ones(64 * MIB, dtype=np.uint8), timeout=30)


def test_stats_tell_who_holds_what(store: Store) -> None:
    store.sessions.open("s", owner="producer-0")
    store.put(np.zeros(1000, dtype=np.uint8), session="s")
    ref = store.put(np.zeros(2000, dtype=np.uint8))
    view = store.get(ref)
    stats = store.stats()
    assert stats.capacity >= 16 * MIB
    assert stats.used + stats.free == stats.capacity
    assert stats.used >= 3000
    assert 0 < stats.largest_free <= stats.free
    assert (stats.objects, stats.sessions, stats.clients) == (2, 1, 1)
    assert stats.pinned == 1
    sessions, objects, n_bytes = stats.by_owner["producer-0"]
    assert (sessions, objects) == (1, 1)
    assert n_bytes >= 1000
    for counter in ("puts", "gets", "frees", "reclaimed"):
        assert stats.counters[counter] >= 0
    assert stats.counters["puts"] == 2
    del view


def test_the_audit_of_a_sound_arena_is_empty(store: Store) -> None:
    held = [store.put(np.zeros(n, dtype=np.uint8)) for n in (0, 1, 100, 5000, 200_000)]
    store.sessions.open("s", owner="o")
    store.put(b"x", session="s")
    store.free(held[2])
    assert store.check() == []
