"""The store's interface by behaviour, bullet by bullet, as a stranger would try it.

Uses public names of `shmstore` only. Each test makes an arena of its own name and leaves nothing:
no object, no session, no child process, no file in /dev/shm.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import shmstore
from shmstore import (
    NotOwner,
    ObjectFreed,
    ObjectNotSealed,
    ObjectRef,
    SessionExists,
    SessionReleased,
    Store,
    StoreError,
    StoreFull,
)
from tests import tree

SPAWN = multiprocessing.get_context("spawn")
MIB = 1 << 20


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"contract-{uuid.uuid4().hex[:12]}"
    yield chosen
    if chosen in Store.list():
        Store.unlink(chosen)


@pytest.fixture
def store(name: str) -> Iterator[Store]:
    with Store.create(name, capacity="16MiB") as made:
        yield made
        for owner in list(made.stats().by_owner):
            made.sessions.release_owned(owner)


def in_child(target: Callable[..., Any], *args: Any) -> Any:
    """Runs `target(connection, *args)` in a process of its own; what it sent."""
    near, far = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(far, *args))
    process.start()
    far.close()
    try:
        assert near.poll(30), "the child said nothing"
        return near.recv()
    finally:
        near.close()
        process.join(30)
        assert process.exitcode is not None
        process.close()


# -- arenas ---------------------------------------------------------------------------------------


def test_create_attach_list_and_close(name: str) -> None:
    store = Store.create(name, capacity="4MiB", max_objects=1 << 10, max_sessions=1 << 8)
    assert name in Store.list()
    second = Store.attach(name)
    ref = store.put(np.arange(5))
    assert second.get(ref).tolist() == [0, 1, 2, 3, 4]
    second.close()
    second.close()
    with pytest.raises(StoreError):
        second.put(b"x")
    store.close()
    Store.unlink(name)
    assert name not in Store.list()
    with pytest.raises(StoreError):
        Store.attach(name)
    with pytest.raises(StoreError):
        Store.unlink(name)


def test_a_store_is_a_context_manager(name: str) -> None:
    with Store.create(name, capacity="4MiB") as store:
        assert store.check() == []
    with pytest.raises(StoreError):
        store.stats()


def test_create_over_a_live_arena_is_refused(store: Store, name: str) -> None:
    with pytest.raises(StoreError):
        Store.create(name, capacity="4MiB")


def test_unlink_takes_the_name_and_leaves_the_attached(name: str) -> None:
    with Store.create(name, capacity="4MiB") as store:
        ref = store.put(b"still here")
        Store.unlink(name)
        assert name not in Store.list()
        assert store.get(ref) == b"still here"
        with Store.create(name, capacity="4MiB") as successor:
            with pytest.raises(StoreError):
                successor.get(ref)
            assert store.get(ref) == b"still here"


@pytest.mark.parametrize("capacity", [-1, 0, "", "many", "12QiB", 1.5, None, 1 << 70, "4", True])
def test_an_absurd_capacity_is_refused(name: str, capacity: Any) -> None:
    with pytest.raises(StoreError):
        Store.create(name, capacity=capacity)


@pytest.mark.parametrize("bad", ["", "a/b", "../x", "x" * 300, "nul\0", ".hidden", 7])
def test_a_bad_arena_name_is_refused(bad: Any) -> None:
    with pytest.raises(StoreError):
        Store.create(bad, capacity="4MiB")
    with pytest.raises(StoreError):
        Store.attach(bad)


def test_spilling_is_refused_until_it_works(name: str) -> None:
    with pytest.raises(StoreError, match="spill"):
        Store.create(name, capacity="4MiB", spill_dir="/tmp")


def test_every_error_is_a_store_error() -> None:
    for error in (
        *(StoreFull, ObjectFreed, ObjectNotSealed, SessionReleased, SessionExists, NotOwner),
        shmstore.LayoutMismatch,
    ):
        assert issubclass(error, StoreError)


# -- values ---------------------------------------------------------------------------------------

RECORD = np.dtype([("a", "<i4"), ("b", "<f8", (2,))])
ARRAYS = {
    "int64": np.arange(12).reshape(3, 4),
    "zero-d": np.array(3.5),
    "empty": np.empty((0, 5), dtype=np.float32),
    "structured": np.zeros(3, dtype=RECORD),
    "datetime": np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
    "big-endian": np.arange(4, dtype=">i4"),
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "strided": np.arange(20)[::3],
    "reversed": np.arange(6)[::-1],
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "float16": np.arange(3, dtype=np.float16),
    "text": np.array(["a", "bc"]),
    "objects": np.array([{"a": 1}, None], dtype=object),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_comes_back_equal_with_its_dtype(store: Store, kind: str) -> None:
    given = ARRAYS[kind]
    got = store.get(store.put(given))
    assert got.dtype == given.dtype
    assert got.shape == given.shape
    assert np.array_equal(got, given, equal_nan=given.dtype.kind in "fcM")


OTHERS: dict[str, Any] = {
    "bytes": b"abc\0def",
    "no bytes": b"",
    "bytearray": bytearray(b"xyz"),
    "text": "grüße",
    "none": None,
    "nested": {"a": [1, 2.5, ("x", None)], "b": {"c": {1, 2}}},
    "with arrays": {"x": np.arange(1000), "y": [np.ones(3)]},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_picklable_value_comes_back_equal(store: Store, kind: str) -> None:
    given = OTHERS[kind]
    got = store.get(store.put(given))
    if kind == "with arrays":
        assert np.array_equal(got["x"], given["x"])
        assert np.array_equal(got["y"][0], given["y"][0])
    else:
        assert got == given


def test_a_memoryview_comes_back_equal(store: Store) -> None:
    assert store.get(store.put(memoryview(b"0123456789")[2:5])) == b"234"


ARROW = {
    "array": pa.array([1, None, 3]),
    "nested": pa.array([[1, 2], None, []], type=pa.list_(pa.int32())),
    "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
    "null": pa.nulls(4),
    "text": pa.array(["x", None, "yz"]),
    "batch": pa.record_batch({"t": [1, 2], "s": ["a", "b"]}),
    "table": pa.table({"t": [1, 2, 3]}),
    "chunked": pa.chunked_array([[1, 2], [3]]),
    "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    ),
}


@pytest.mark.parametrize("kind", ARROW)
def test_an_arrow_value_comes_back_equal(store: Store, kind: str) -> None:
    given = ARROW[kind]
    got = store.get(store.put(given))
    assert got.equals(given)
    assert (got.schema if kind in ("batch", "table") else got.type) == (
        given.schema if kind in ("batch", "table") else given.type
    )


def test_an_arrow_column_is_read_in_place(store: Store) -> None:
    ref = store.put(pa.record_batch({"t": np.arange(100_000)}))
    first, second = store.get(ref), store.get(ref)
    address = first.column(0).buffers()[1].address
    assert address == second.column(0).buffers()[1].address


def test_a_value_that_cannot_be_stored_says_so(store: Store) -> None:
    with pytest.raises(StoreError):
        store.put(threading.Lock())
    assert store.stats().objects == 0
    assert store.check() == []


def test_views_are_zero_copy_and_read_only(store: Store) -> None:
    ref = store.put(np.arange(1000))
    one, two = store.get(ref), store.get(ref)
    assert one.ctypes.data == two.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        one.flags.writeable = True


def test_payloads_are_aligned_to_64_bytes(store: Store) -> None:
    for n in (1, 17, 1000, 100_000):
        assert store.get(store.put(np.zeros(n, dtype=np.uint8))).ctypes.data % 64 == 0


def test_a_build_is_sealed_on_leaving_the_block(store: Store) -> None:
    with store.build((2, 3), "f4") as draft:
        draft.array[...] = 7
        with pytest.raises(ObjectNotSealed):
            store.get(draft.ref)
    assert store.get(draft.ref).tolist() == [[7, 7, 7], [7, 7, 7]]


def test_a_build_that_raises_is_discarded(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.build(8) as draft:
        raise ZeroDivisionError
    with pytest.raises(ObjectFreed):
        store.get(draft.ref)
    assert store.stats().objects == 0


def test_a_get_waits_for_the_seal(store: Store) -> None:
    draft = store.build(4)
    timer = threading.Timer(0.05, lambda: (draft.array.fill(9), draft.seal()))
    timer.start()
    assert store.get(draft.ref, timeout=10).tolist() == [9, 9, 9, 9]
    timer.join()


def test_a_get_that_waits_in_vain_says_not_sealed(store: Store) -> None:
    with store.build(4) as draft:
        with pytest.raises(ObjectNotSealed):
            store.get(draft.ref, timeout=0.01)
        draft.array[:] = 0


@pytest.mark.parametrize("timeout", [-1, math.nan, "soon"])
def test_an_absurd_time_out_is_refused(store: Store, timeout: Any) -> None:
    with pytest.raises(StoreError):
        store.put(b"x", timeout=timeout)


# -- refs -----------------------------------------------------------------------------------------


def test_a_ref_is_a_value(store: Store) -> None:
    one, two = store.put(b"a"), store.put(b"b")
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert hash(again) == hash(one)
    assert one != two
    assert (one < two) != (two < one)
    assert sorted({one, two, again}) == sorted([one, two])
    assert 16 <= len(bytes(one)) <= 32
    assert one.hex() == bytes(one).hex()
    assert one.alive
    assert one.nbytes >= 1
    assert copy.copy(one) == copy.deepcopy(one) == one


def _read(far: Connection, name: str, ref: ObjectRef) -> None:
    with Store.attach(name) as store:
        far.send((ref, hash(ref), store.get(ref).tolist(), ref.hex()))


def test_a_ref_names_the_object_in_every_process(store: Store, name: str) -> None:
    ref = store.put(np.arange(3))
    back, hashed, value, text = in_child(_read, name, ref)
    assert (back, hashed, value, text) == (ref, hash(ref), [0, 1, 2], ref.hex())


def test_a_stale_ref_is_an_error_never_other_bytes(store: Store) -> None:
    ref = store.put(np.full(1000, 1, dtype=np.uint8))
    name = pickle.loads(pickle.dumps(ref))
    assert store.free(ref) == 1
    others = [store.put(np.full(1000, 2, dtype=np.uint8)) for _ in range(50)]
    assert not name.alive
    for stale in (ref, name):
        with pytest.raises(ObjectFreed):
            store.get(stale)
    assert all(other.alive for other in others)


def test_a_ref_of_another_arena_is_refused(store: Store) -> None:
    elsewhere = f"contract-{uuid.uuid4().hex[:12]}"
    with Store.create(elsewhere, capacity="4MiB") as other:
        Store.unlink(elsewhere)
        ref = other.put(b"x")
        with pytest.raises(StoreError) as refused:
            store.get(ref)
        assert not isinstance(refused.value, ObjectFreed)


def test_an_object_lives_while_a_reference_holds_it(store: Store) -> None:
    ref = store.put(b"x" * 1000)
    name = pickle.loads(pickle.dumps(ref))
    twin = copy.copy(ref)
    del ref
    assert store.get(name) == b"x" * 1000
    del twin
    with pytest.raises(ObjectFreed):
        store.get(name)
    assert store.stats().objects == 0


def test_a_view_keeps_the_bytes_after_the_object_has_ended(store: Store) -> None:
    ref = store.put(np.full(MIB, 7, dtype=np.uint8))
    view = store.get(ref)
    store.free(ref)
    with pytest.raises(ObjectFreed):
        store.get(ref)
    del ref
    assert store.stats().deferred_bytes >= MIB
    fresh = [store.put(np.zeros(MIB, dtype=np.uint8)) for _ in range(8)]
    assert (view == 7).all()
    del view, fresh
    assert store.stats().deferred_bytes == 0
    assert store.stats().used == 0


def test_a_view_outlives_the_closed_store(name: str) -> None:
    with Store.create(name, capacity="4MiB") as store:
        view = store.get(store.put(np.arange(1000)))
    assert view.sum() == 499_500


def test_free_counts_what_it_ended(store: Store) -> None:
    refs = [store.put(b"x") for _ in range(4)]
    assert store.free(refs[0]) == 1
    assert store.free([refs[0], refs[1], refs[1]]) == 1
    assert store.free(refs) == 2
    assert store.free(refs) == 0
    assert store.free([]) == 0


def test_free_skips_what_a_session_holds(store: Store) -> None:
    store.sessions.open("s", owner="o")
    held = store.put(b"x", session="s")
    loose = store.put(b"y")
    assert store.free([held]) == 0
    with pytest.raises(NotOwner):
        store.free([loose, held], strict=True)
    assert loose.alive
    assert held.alive


# -- full -----------------------------------------------------------------------------------------


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


# -- sessions -------------------------------------------------------------------------------------


def test_sessions_hold_objects_with_their_parents(store: Store) -> None:
    sessions = store.sessions
    sessions.open("s-1", owner="producer-0")
    with pytest.raises(SessionExists):
        sessions.open("s-1", owner="producer-0")
    root = store.put(b"prompt", session="s-1")
    leaf = store.put(b"answer")
    assert sessions.attach("s-1", leaf, parent=0) == 1
    entries = sessions.objects("s-1")
    assert [entry.ref for entry in entries] == [root, leaf]
    assert [entry.parent for entry in entries] == [None, 0]
    assert sessions.owner("s-1") == "producer-0"
    assert sessions.list() == ["s-1"]
    assert sessions.list(owner="nobody") == []
    assert "s-1" in sessions
    assert "s-2" not in sessions
    assert len(sessions) == 1


def test_an_attached_object_lives_as_long_as_its_session(store: Store) -> None:
    store.sessions.open("s", owner="o")
    ref = store.put(b"x" * 100, session="s")
    name = bytes(ref)
    del ref
    again = ObjectRef.from_bytes(name)
    assert store.get(again) == b"x" * 100
    kept = store.get(again)
    assert store.sessions.release(["s"], owner="o") == ["s"]
    with pytest.raises(ObjectFreed):
        store.get(again)
    del kept
    assert store.stats().used == 0


def test_an_object_in_two_sessions_lives_until_the_last_lets_go(store: Store) -> None:
    for session in ("a", "b"):
        store.sessions.open(session, owner="o")
    ref = store.put(b"shared prompt", session="a")
    store.sessions.attach("b", ref)
    store.sessions.release(["a"], owner="o")
    assert ref.alive
    store.sessions.release(["b"], owner="o")
    assert not ref.alive


def test_a_released_session_is_never_resurrected(store: Store) -> None:
    store.sessions.open("s", owner="o")
    store.sessions.release(["s"], owner="o")
    ref = store.put(b"late")
    for insert in (
        lambda: store.sessions.attach("s", ref),
        lambda: store.put(b"late", session="s"),
        lambda: store.sessions.objects("s"),
        lambda: store.sessions.owner("s"),
    ):
        with pytest.raises(SessionReleased):
            insert()
    assert "s" not in store.sessions
    store.sessions.open("s", owner="o")
    assert store.sessions.objects("s") == []


def test_truncate_lets_go_of_the_tail(store: Store) -> None:
    store.sessions.open("s", owner="o")
    refs = [store.put(bytes([i]), session="s") for i in range(5)]
    assert store.sessions.truncate("s", keep=3) == 2
    assert [ref.alive for ref in refs] == [True, True, True, False, False]
    assert store.sessions.truncate("s", keep=3) == 0
    assert len(store.sessions.objects("s")) == 3


def test_transfer_moves_all_or_nothing(store: Store) -> None:
    sessions = store.sessions
    for session in ("a", "b", "c"):
        sessions.open(session, owner="replay")
    sessions.open("x", owner="eval")
    with pytest.raises(NotOwner, match="x"):
        sessions.transfer(["a", "x"], src="replay", dst="learner")
    assert sessions.owner("a") == "replay"
    assert sessions.transfer(["b", "a"], src="replay", dst="learner") == ["b", "a"]
    assert sessions.list(owner="learner") != []
    moved = sessions.transfer(["c", "x", "gone"], src="replay", dst="learner", strict=False)
    assert moved == ["c"]


def test_release_answers_what_it_released_in_the_order_asked_each_once(store: Store) -> None:
    sessions = store.sessions
    for session in ("a", "b", "c"):
        sessions.open(session, owner="learner")
    sessions.open("x", owner="replay")
    assert sessions.release(["c", "gone", "a", "c", "x"], owner="learner") == ["c", "a"]
    assert sessions.owner("x") == "replay"
    with pytest.raises(NotOwner):
        sessions.release(["b", "x"], owner="learner", strict=True)
    assert "b" in sessions
    assert sessions.release_owned("learner") == ["b"]
    assert sessions.release(["x"], owner="*") == ["x"]
    assert len(sessions) == 0


@pytest.mark.parametrize("bad", ["", "x" * 64, "nul\0", "é" * 32, 7, None])
def test_a_bad_session_id_is_refused(store: Store, bad: Any) -> None:
    with pytest.raises(StoreError):
        store.sessions.open(bad, owner="o")
    with pytest.raises(StoreError):
        store.sessions.open("fine", owner=bad)
    assert len(store.sessions) == 0


def test_the_longest_session_id_is_63_bytes(store: Store) -> None:
    longest = "é" * 31 + "x"
    store.sessions.open(longest, owner="o")
    assert store.sessions.list() == [longest]


def _die_as(far: Connection, name: str, owner: str, heir: str | None) -> None:
    store = Store.attach(name)
    store.sessions.bind(owner, heir=heir)
    store.sessions.open(f"{owner}-1", owner=owner)
    store.put(b"left behind", session=f"{owner}-1")
    loose = store.put(np.zeros(MIB, dtype=np.uint8))
    far.send(loose.hex())
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("heir", ["replay", None])
def test_sessions_of_the_dead_fall_to_the_heir_or_are_released(
    store: Store, name: str, heir: str | None
) -> None:
    loose = ObjectRef.from_hex(in_child(_die_as, name, "learner", heir))
    store.sweep()
    if heir:
        assert store.sessions.owner("learner-1") == heir
        assert store.get(store.sessions.objects("learner-1")[0].ref) == b"left behind"
    else:
        assert "learner-1" not in store.sessions
        assert store.stats().objects == 0
    with pytest.raises(ObjectFreed):
        store.get(loose)
    assert store.check() == []


# -- state ----------------------------------------------------------------------------------------


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


def _fork_child(store: Store, ref: ObjectRef, view: Any) -> int:
    """In a fork child: 0 when all is as promised."""
    if view.tolist() != [0, 1, 2]:
        return 1
    for use in (lambda: store.get(ref), lambda: store.put(b"x"), store.stats):
        try:
            use()
        except StoreError:
            continue
        return 2
    with Store.attach(store.name) as own:
        if own.get(ref).tolist() != [0, 1, 2]:
            return 3
    del view
    store.close()
    return 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_child_attaches_anew_and_the_parent_is_unharmed(store: Store) -> None:
    ref = store.put(np.arange(3))
    view = store.get(ref)
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = _fork_child(store, ref, view)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert view.tolist() == [0, 1, 2]
    assert store.get(ref).tolist() == [0, 1, 2]
    store.sweep()
    assert store.check() == []


# -- command line ---------------------------------------------------------------------------------


def shmrl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shmstore", *words],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_command_line_shows_an_arena(store: Store, name: str) -> None:
    store.put(b"x")
    listed = shmrl("ls", "--json")
    assert listed.returncode == 0, listed.stderr
    assert name in listed.stdout
    json.loads(listed.stdout)
    shown = shmrl("stat", name, "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)
    assert shmrl("check", name).returncode == 0
    assert shmrl("stat", "no-such-arena").returncode != 0


def test_the_command_line_removes_an_arena(name: str) -> None:
    Store.create(name, capacity="4MiB").close()
    removed = shmrl("rm", name)
    assert removed.returncode == 0, removed.stderr
    assert name not in Store.list()
    assert shmrl("rm", name).returncode != 0


def _leave_debris(far: Connection, name: str) -> None:
    store = Store.create(name, capacity="4MiB")
    store.put(b"x")
    far.send(True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_L28_doctor_finds_and_removes_what_a_killed_process_left(name: str) -> None:
    in_child(_leave_debris, name)
    deadline = time.monotonic() + 10
    while name not in shmrl("doctor", "--json").stdout:
        assert time.monotonic() < deadline, "doctor does not see the debris"
    assert name in Store.list()
    shmrl("doctor", "--clean")
    assert name not in Store.list()
    with Store.create(name, capacity="4MiB") as again:
        assert again.check() == []
