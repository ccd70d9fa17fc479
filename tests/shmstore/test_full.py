"""No room: who is told what, who waits, and who goes first."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import (
    BadValue,
    ObjectTooLarge,
    OutOfMemory,
    Store,
    StoreFull,
    TableFull,
    usage,
)
from shmstore.testing import Puppet, temporary_store

MIB = 1 << 20


def block(n_mib: float) -> np.ndarray[Any, Any]:
    return np.zeros(int(n_mib * MIB), "u1")


def test_store_full_says_how_much_is_free_in_which_pieces_and_who_holds_the_rest() -> None:
    with temporary_store("16MiB") as store, Puppet() as puppet:
        store.sessions.open("batch-1", owner="learner")
        store.put(block(4), session="batch-1")
        mine = store.put(block(3))

        def hold(state: Any, name: str) -> None:
            state["store"] = Store.attach(name)
            state["ref"] = state["store"].put(np.zeros(5 << 20, "u1"))

        puppet.call(hold, store.name)
        with pytest.raises(StoreFull) as caught:
            store.put(block(8))
        error = caught.value
        assert isinstance(error, MemoryError)
        assert error.needed >= 8 * MIB
        assert 3 * MIB < error.free < 5 * MIB
        assert error.largest_free <= error.free
        assert error.holders["learner"] >= 4 * MIB
        assert error.holders[f"process {puppet.pid} (references)"] >= 5 * MIB
        for word in ("learner", "largest free piece", "MiB", str(puppet.pid)):
            assert word in str(error)
        del mine
        store.sessions.release(["batch-1"], owner="learner")


def test_who_finds_the_queue_full_is_told_so() -> None:
    facts = dict.fromkeys(
        ("requested", "capacity", "free", "largest_free", "building_bytes", "deferred_bytes"), 0
    )
    for waiters in (255, 256):
        told = usage.store_full(
            "StoreFull", {**facts, "waiters": waiters, "owners": [], "clients": []}
        )
        assert f"{waiters} others wait for room" in str(told)
        assert ("the most that may" in str(told)) is (waiters == 256)


def test_an_object_larger_than_the_arena_fails_at_once_even_with_time() -> None:
    with temporary_store("4MiB") as store:
        with pytest.raises(ObjectTooLarge):
            store.put(block(5), timeout=math.inf)
        assert issubclass(ObjectTooLarge, StoreFull)


def test_the_capacity_is_the_limit_of_one_object_to_the_byte() -> None:
    limit = 4 << 20
    with temporary_store(limit) as store:
        store.sessions.open("s", owner="o")
        puts: dict[str, Callable[[int], Any]] = {
            "bytes": lambda n: store.put(bytes(n)),
            "array": lambda n: store.put(np.zeros(n, np.uint8)),
            "encoded": lambda n: store.put(bytearray(n)),
            "draft": lambda n: store.build(n, "u1").discard(),
            "draft in a session": lambda n: store.build(n, "u1", session="s").discard(),
            "parts": lambda n: store.put_stream([bytes(n)]),
        }
        for name, put in puts.items():
            put(limit)
            with pytest.raises(ObjectTooLarge, match=r"4,194,305 bytes.*4,194,304") as caught:
                put(limit + 1)
            assert (caught.value.needed, caught.value.capacity) == (limit + 1, limit), name


def test_a_put_waits_for_room_up_to_its_deadline() -> None:
    with temporary_store("8MiB") as store:
        first = store.put(block(6))
        with pytest.raises(StoreFull):
            store.put(block(4), timeout=0.05)
        timer = threading.Timer(0.05, store.free, [first])
        timer.start()
        second = store.put(block(4), timeout=30)
        timer.join()
        assert second.alive
        del second, first


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, "3", True, -math.inf, [1]], ids=repr)
def test_timeouts_that_are_none_are_refused(store: Store, timeout: Any) -> None:
    with pytest.raises(BadValue, match="timeout"):
        store.put(b"x", timeout=timeout)
    with pytest.raises(BadValue, match="timeout"):
        store.get(store.put(b"x"), timeout=timeout)


def test_timeouts_of_any_size_from_0_to_infinity_are_taken(store: Store) -> None:
    for timeout in (None, 0, 0.0, 1, 1e9, 10**30, math.inf, np.float64(2)):
        assert store.get(store.put(b"x", timeout=timeout), timeout=timeout) == b"x"


def test_small_puts_pass_a_large_one_that_waits_and_never_starve_it() -> None:
    with temporary_store("8MiB") as store, Puppet() as puppet:
        blocker = store.put(block(6))

        def wait_for_room(state: Any, name: str) -> bool:
            state["store"] = Store.attach(name)
            state["ref"] = state["store"].put(np.zeros(7 << 20, "u1"), timeout=30)
            return True

        puppet.begin(wait_for_room, store.name)
        while store.stats().counters.full_waits == 0:
            threading.Event().wait(0.002)

        def put_and_drop(times: int) -> None:
            for _ in range(times):
                store.put(block(1))  # one MiB is free, and somebody waits for seven

        put_and_drop(5)
        with pytest.raises(StoreFull, match="wait for room and come first"):
            put_and_drop(3)
        del blocker
        assert puppet.result()


def test_a_waiter_that_is_killed_does_not_hold_up_the_queue() -> None:
    with temporary_store("8MiB") as store, Puppet() as doomed:
        blocker = store.put(block(6))
        doomed.begin(
            lambda state, name: Store.attach(name).put(np.zeros(8 << 20, "u1"), timeout=60),
            store.name,
        )
        while store.stats().counters.full_waits == 0:
            threading.Event().wait(0.002)
        doomed.kill()
        late = store.put(block(1), timeout=20)
        assert late.alive
        del blocker, late


def test_every_waiter_gets_room_in_the_end() -> None:
    with temporary_store("8MiB") as store:
        done: list[int] = []

        def churn(seed: int) -> None:
            for _ in range(25):
                ref = store.put(block(1 + seed % 3), timeout=60)
                store.free(ref)
            done.append(seed)

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == list(range(8))


def test_bytes_under_a_view_of_an_ended_object_are_reported_as_deferred() -> None:
    with temporary_store("8MiB") as store:
        ref = store.put(block(5))
        view = store.get(ref)
        store.free(ref)
        with pytest.raises(StoreFull, match="ended but under live views"):
            store.put(block(6))
        del view
        del ref
        assert store.put(block(6)).alive


def test_tables_have_sizes_and_say_which_is_full() -> None:
    with temporary_store("4MiB", max_objects=16, max_sessions=16, max_owners=16) as store:
        refs = [store.put(i) for i in range(16)]
        with pytest.raises(TableFull, match="object"):
            store.put(17)
        with pytest.raises(TableFull, match="max_objects"):
            store.put(17, timeout=0.01)
        later = threading.Timer(0.05, refs.clear)
        later.start()
        assert store.put(17, timeout=60).alive  # as soon as there is a row
        later.join()
        for i in range(16):
            store.sessions.open(f"s-{i}", owner="me")
        with pytest.raises(TableFull, match="session"):
            store.sessions.open("one more", owner="me")
        store.sessions.release(store.sessions.list(), owner="me")
        for i in range(16):
            store.sessions.open(f"o-{i}", owner=f"owner-{i}")
        store.sessions.release(store.sessions.list(), owner="*")
        store.sessions.open("again", owner="owner-99")
        store.sessions.release(["again"], owner="*")


def fill(path: Path) -> None:
    """Write until the file system has no room left."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(MIB)):
            pass


def test_a_full_shm_is_an_error_and_not_a_bus_error(small_tmpfs: str) -> None:
    with pytest.raises(OutOfMemory, match="67108864") as refused:
        Store.create("small", "80MiB", directory=small_tmpfs, max_objects=1024)
    assert isinstance(refused.value, MemoryError)
    store = Store.create("small", "48MiB", directory=small_tmpfs, max_objects=1024)
    refs = [store.put(block(1))]
    hog = Path(small_tmpfs, "hog")
    fill(hog)  # somebody else fills the file system after the create
    try:
        with pytest.raises((OutOfMemory, StoreFull)) as caught:
            refs.extend(store.put(block(1)) for _ in range(64))
        assert isinstance(caught.value, MemoryError)
        assert all(store.get(ref)[-1] == 0 for ref in refs)
        refs.clear()
        assert store.check() == []
        assert store.put(block(1)).alive
        hog.unlink()
        assert store.put(block(40)).alive, "room that the machine has again can be used again"
    finally:
        store.close()
        Store.unlink("small", directory=small_tmpfs)


@pytest.fixture
def small_tmpfs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tmpfs of 64 MiB; skips where mounting is not allowed."""
    import subprocess

    folder = tmp_path_factory.mktemp("shm")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield str(folder)
    subprocess.run(["umount", str(folder)], check=True)
