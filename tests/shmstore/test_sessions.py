"""Sessions and owners: lifecycle L01 to L05, from one process and from several at once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from shmstore import (
    BadName,
    BadValue,
    NotOwner,
    ObjectFreed,
    ObjectRef,
    SessionExists,
    SessionReleased,
    Store,
)
from shmstore.testing import Puppet


def attach_puppet(state: Any, name: str) -> None:
    state["store"] = Store.attach(name)


def test_L01_a_transfer_moves_all_ids_or_none(store: Store) -> None:
    s = store.sessions
    for i in range(3):
        s.open(f"s-{i}", owner="replay")
    s.open("foreign", owner="producer-0")
    with pytest.raises(NotOwner, match="producer-0") as caught:
        s.transfer(["s-0", "foreign", "s-1"], src="replay", dst="learner")
    assert caught.value.ids == ("foreign",)
    assert [s.owner(f"s-{i}") for i in range(3)] == ["replay"] * 3
    with pytest.raises(NotOwner, match="not a live session"):
        s.transfer(["s-0", "never"], src="replay", dst="learner")
    assert s.owner("s-0") == "replay"
    assert s.transfer(["s-2", "s-0", "s-2"], src="replay", dst="learner") == ["s-2", "s-0"]
    assert s.transfer(["s-1", "foreign", "gone"], src="replay", dst="x", strict=False) == ["s-1"]
    assert sorted(s.list("learner")) == ["s-0", "s-2"]


def test_owners_and_bytes_of_many_sessions_are_asked_for_at_once(store: Store) -> None:
    s = store.sessions
    for name, owner in (("a", "one"), ("b", "two"), ("c", "one")):
        s.open(name, owner=owner)
    shared = store.put(bytes(1000))
    own = store.put(bytes(10), session="a")
    for name in ("a", "b"):
        s.attach(name, shared)
    s.release(["c"], owner="one")
    assert s.owners(["b", "c", "a", "never", "a"]) == ["two", None, "one", None, "one"]
    assert s.owners([]) == []
    assert s.nbytes(["a", "b", "a"]) == shared.nbytes + own.nbytes, "the shared object once"
    assert s.nbytes(["b"]) == shared.nbytes
    assert s.nbytes([]) == 0
    with pytest.raises(SessionReleased):
        s.nbytes(["a", "c"])


def test_L01_every_session_has_one_owner_while_processes_pull_at_it(store: Store) -> None:
    s = store.sessions
    names = [f"s-{i}" for i in range(40)]
    for name in names:
        s.open(name, owner="a")

    def pull(state: Any, ids: list[str], src: str, dst: str, rounds: int) -> int:
        won = 0
        for _ in range(rounds):
            won += len(state["store"].sessions.transfer(ids, src, dst, strict=False))
            won += len(state["store"].sessions.transfer(ids, dst, src, strict=False))
        return won

    with Puppet() as left, Puppet() as right:
        for puppet in (left, right):
            puppet.call(attach_puppet, store.name)
        left.begin(pull, names, "a", "left", 200)
        right.begin(pull, names, "a", "right", 200)
        assert left.result() + right.result() > 0
    assert sorted(name for owner in ("a", "left", "right") for name in s.list(owner)) == sorted(
        names
    )
    assert store.stats().sessions == 40


def test_L02_an_attached_object_lives_exactly_as_long_as_a_session_holds_it(store: Store) -> None:
    s = store.sessions
    s.open("a", owner="me")
    s.open("b", owner="me")
    ref = store.put(np.arange(10))
    assert s.attach("a", ref) == 0
    assert s.attach("b", ref, parent=None) == 0
    name = ObjectRef.from_bytes(bytes(ref))
    del ref
    assert name.alive, "no reference is left, but two sessions hold it"
    assert s.release(["a"], owner="me") == ["a"]
    counted = store.hold(name)
    assert s.release(["b"], owner="me") == ["b"]
    assert not name.alive, "a reference does not keep what sessions have let go"
    assert not counted.alive
    with pytest.raises(ObjectFreed):
        store.get(name)
    assert store.stats().used == 0


def test_L02_free_skips_what_a_session_holds(store: Store) -> None:
    s = store.sessions
    s.open("a", owner="me")
    held, loose = store.put(b"held", session="a"), store.put(b"loose")
    assert store.free([held, loose]) == 1
    assert held.alive
    loose = store.put(b"loose")
    with pytest.raises(NotOwner):
        store.free([loose, held], strict=True)
    assert loose.alive, "strict: nothing was freed"


def test_L03_release_returns_what_it_released_in_order_each_once(store: Store) -> None:
    s = store.sessions
    for name in ("a", "b", "c"):
        s.open(name, owner="learner")
    s.open("other", owner="producer")
    asked = ["c", "unknown", "a", "c", "other", "a"]
    assert s.release(asked, owner="learner") == ["c", "a"]
    assert s.release(asked, owner="learner") == []
    assert s.release(["b", "nobody"], owner="learner", strict=True) == ["b"], "unknown: no error"
    assert "other" in s
    assert len(s) == 1


def test_L03_two_releasers_get_each_id_once(store: Store) -> None:
    s = store.sessions

    def release(state: Any, ids: list[str]) -> list[str]:
        released: list[str] = state["store"].sessions.release(ids, owner="learner")
        return released

    with Puppet() as left, Puppet() as right:
        for puppet in (left, right):
            puppet.call(attach_puppet, store.name)
        for round_ in range(30):
            names = [f"{round_}-{i}" for i in range(64)]
            for name in names:
                s.open(name, owner="learner")
            left.begin(release, names)
            right.begin(release, names[::-1])
            first, second = left.result(), right.result()
            assert sorted(first + second) == sorted(names)
            assert first == [name for name in names if name in first]


def test_L03_two_threads_get_each_id_once(store: Store) -> None:
    s = store.sessions
    names = [f"s-{i}" for i in range(500)]
    for name in names:
        s.open(name, owner="o")
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda: [got.extend(s.release([n], owner="o")) for n in names])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(names)


def test_L04_nobody_releases_what_somebody_else_owns(store: Store) -> None:
    s = store.sessions
    s.open("mine", owner="learner")
    s.open("theirs", owner="producer")
    ref = store.put(b"x", session="theirs")
    assert s.release(["theirs"], owner="learner") == []
    with pytest.raises(NotOwner, match="'theirs' is owned by 'producer'") as caught:
        s.release(["mine", "theirs"], owner="learner", strict=True)
    assert caught.value.ids == ("theirs",)
    assert "mine" in s
    assert ref.alive
    assert s.release_owned("learner") == ["mine"]
    assert s.release_owned("learner") == []
    assert s.release_owned("nobody") == []
    assert s.release(["theirs"], owner="*") == ["theirs"]
    assert not ref.alive


def test_L05_a_borrowed_reference_does_not_end_an_object(store: Store) -> None:
    s = store.sessions
    s.open("s", owner="me")
    store.put(b"x", session="s")
    (entry,) = s.objects("s")
    assert not entry.ref.counted
    assert store.free(entry.ref) == 0
    del entry
    assert store.get(s.objects("s")[0].ref) == b"x"


def test_a_late_insert_never_resurrects_a_released_session(store: Store) -> None:
    s = store.sessions
    s.open("s", owner="me")
    ref = store.put(b"late")
    draft = store.build(10, "u1", session="s")
    s.release(["s"], owner="me")
    with pytest.raises(SessionReleased):
        s.attach("s", ref)
    with pytest.raises(SessionReleased):
        store.put(b"y", session="s")
    with pytest.raises(SessionReleased):
        draft.seal()
    draft.discard()
    s.open("s", owner="you")
    assert s.objects("s") == []
    assert s.owner("s") == "you"
    assert store.stats().objects == 1


def test_leaving_a_block_whose_session_is_gone_discards_the_draft(store: Store) -> None:
    store.sessions.open("s", owner="me")
    draft = store.build(1 << 20, session="s")
    with pytest.raises(SessionReleased) as caught, draft:
        store.sessions.release(["s"], owner="me")
    assert caught.value.__traceback__ is not None, "the traceback, and the draft with it, is alive"
    assert store.stats().used == 0


def test_a_draft_of_an_old_session_is_not_attached_to_its_namesake(store: Store) -> None:
    s = store.sessions
    s.open("s", owner="me")
    draft = store.build(10, "u1", session="s")
    s.release(["s"], owner="me")
    s.open("s", owner="me")
    with pytest.raises(SessionReleased):
        draft.seal()
    draft.discard()
    assert s.objects("s") == []


def test_open_refuses_a_living_id_and_questions_about_dead_ones_raise(store: Store) -> None:
    s = store.sessions
    s.open("s", owner="me")
    with pytest.raises(SessionExists):
        s.open("s", owner="you")
    for question in (s.objects, s.owner, lambda name: s.truncate(name, 0)):
        with pytest.raises(SessionReleased):
            question("never")
    assert "never" not in s
    assert 3 not in s


def test_truncate_keeps_the_first_entries_and_ends_the_rest(store: Store) -> None:
    s = store.sessions
    s.open("s", owner="me")
    refs = [store.put(i, session="s", parent=i - 1 if i else None) for i in range(5)]
    assert s.truncate("s", keep=3) == 2
    assert [entry.ref for entry in s.objects("s")] == refs[:3]
    assert [entry.parent for entry in s.objects("s")] == [None, 0, 1]
    assert [ref.alive for ref in refs] == [True] * 3 + [False] * 2
    assert s.truncate("s", keep=9) == 0
    assert s.attach("s", store.put("new"), parent=2) == 3
    with pytest.raises(BadValue):
        s.truncate("s", keep=-1)
    with pytest.raises(BadValue):
        s.attach("s", refs[0], parent=99)
    assert s.truncate("s", keep=0) == 4
    assert store.stats().objects == 0


def test_a_shared_prompt_is_stored_once_and_lives_until_the_last_session(store: Store) -> None:
    s = store.sessions
    prompt = store.put(np.arange(1000))
    for i in range(8):
        s.open(f"r-{i}", owner="p")
        s.attach(f"r-{i}", prompt)
    assert store.stats().objects == 1
    assert s.release([f"r-{i}" for i in range(7)], owner="p")
    assert prompt.alive
    s.release(["r-7"], owner="p")
    assert not prompt.alive


def test_ids_are_63_bytes_of_utf8_and_everything_else_is_a_bad_name(store: Store) -> None:
    s = store.sessions
    longest = "ü" * 31 + "x"
    s.open(longest, owner=longest)
    assert s.list() == [longest]
    for bad in ("", "x" * 64, "ü" * 32, "a\0b", "\ud800", 3, None, b"s"):
        with pytest.raises(BadName):
            s.open(bad, owner="o")  # type: ignore[arg-type]
        with pytest.raises(BadName):
            s.open("fine", owner=bad)  # type: ignore[arg-type]
    for use in (lambda: s.open("x", owner="*"), lambda: s.bind("*"), lambda: s.bind("a", heir="a")):
        with pytest.raises(BadName):
            use()
    with pytest.raises(BadValue, match="list of session ids"):
        s.release("abc", owner="o")
    assert len(s) == 1


def test_list_is_by_owner_and_stats_count_what_owners_hold(store: Store) -> None:
    s = store.sessions
    s.open("a", owner="x")
    s.open("b", owner="y")
    store.put(np.zeros(1000, "u1"), session="b")
    assert s.list("x") == ["a"]
    assert sorted(s.list()) == ["a", "b"]
    assert s.list("nobody") == []
    usage = store.stats().by_owner
    assert usage["x"][:2] == (1, 0)
    assert usage["y"].sessions == 1
    assert usage["y"].bytes >= 1000
    s.transfer(["b"], "y", "x")
    assert store.stats().by_owner["x"].objects == 1
    assert "y" not in store.stats().by_owner


@pytest.mark.parametrize("end", ["kill", "close"])
def test_sessions_fall_to_the_heir_when_the_last_bound_process_is_gone(
    store: Store, end: str
) -> None:
    s = store.sessions

    def bind(state: Any, name: str) -> None:
        attach_puppet(state, name)
        state["store"].sessions.bind("learner", heir="replay")
        state["store"].sessions.bind("producer", heir=None)

    def leave(state: Any) -> None:
        state["store"].close()

    with Puppet() as first, Puppet() as second:
        for puppet in (first, second):
            puppet.call(bind, store.name)
        s.open("batch", owner="learner")
        s.open("open", owner="producer")
        ref = store.put(b"x", session="open")
        first.kill() if end == "kill" else first.call(leave)
        store.sweep()
        assert s.owner("batch") == "learner", "one process is still bound"
        assert ref.alive
        second.kill() if end == "kill" else second.call(leave)
        store.sweep()
        assert s.owner("batch") == "replay"
        assert "open" not in s
        assert not ref.alive


def test_an_heir_that_nobody_is_bound_to_simply_owns(store: Store) -> None:
    with Puppet() as puppet:

        def bind(state: Any, name: str) -> None:
            attach_puppet(state, name)
            state["store"].sessions.bind("a", heir="b")
            state["store"].sessions.open("s", owner="a")

        puppet.call(bind, store.name)
        puppet.kill()
    assert store.sessions.owner("s") == "b", "without an explicit sweep"


def test_heirs_of_each_other_that_die_together_leave_nothing(store: Store) -> None:
    def act_as(state: Any, name: str, owner: str, heir: str) -> None:
        state["store"] = Store.attach(name)
        state["store"].sessions.open(f"of {owner}", owner)
        state["store"].sessions.bind(owner, heir=heir)

    with Puppet() as one, Puppet() as other:
        one.call(act_as, store.name, "a", "b")
        other.call(act_as, store.name, "b", "a")
        assert len(store.sessions) == 2
        other.kill()  # nobody looks, and so repairs, between the two deaths
        one.kill()
        assert store.sessions.list() == []
        assert store.check() == []
