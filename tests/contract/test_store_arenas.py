"""The life of an arena by its name: create, attach, close, unlink, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shmstore
from shmstore import (
    NotOwner,
    ObjectFreed,
    ObjectNotSealed,
    SessionExists,
    SessionReleased,
    Store,
    StoreError,
    StoreFull,
)


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
