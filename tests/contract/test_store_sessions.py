"""Sessions hold objects, have one owner, and change hands or end in one step."""

from __future__ import annotations

from typing import Any

import pytest

from shmstore import (
    NotOwner,
    ObjectFreed,
    ObjectRef,
    SessionExists,
    SessionReleased,
    Store,
    StoreError,
)


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
