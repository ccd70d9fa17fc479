"""Refs name objects in every process; objects end when nothing keeps them."""

from __future__ import annotations

import copy
import pickle
import uuid
from multiprocessing.connection import Connection

import numpy as np
import pytest

from shmstore import NotOwner, ObjectFreed, ObjectRef, Store, StoreError
from tests.contract.support import MIB, in_child


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
