"""Everything that a user can get wrong raises the class that says so, and the store goes on."""

from __future__ import annotations

import math
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import (
    ArenaDamaged,
    BadName,
    BadRef,
    BadValue,
    LayoutMismatch,
    NotStorable,
    NotThereYet,
    ObjectRef,
    ObjectTooLarge,
    SessionReleased,
    Store,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreExists,
    StoreNotFound,
    StoreSuperseded,
    SystemRefused,
    _core,
    doctor,
    errors,
    headers,
    usage,
)
from shmstore.testing import Puppet, temporary_store, unique_name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../x", "-x", "a b", "ü", "x" * 65, "a\0b", 3, None, b"x"],
    ids=repr,
)
def test_a_wrong_arena_name_is_a_bad_name(name: Any) -> None:
    for call in (Store.attach, Store.create, Store.unlink):
        with pytest.raises(BadName):
            call(name)


@pytest.mark.parametrize(
    "capacity",
    [
        0,
        -1,
        1,
        4095,
        "0",
        "-5GiB",
        "4 parsecs",
        "",
        "GiB",
        1 << 60,
        "9999TiB",
        1.5,
        None,
        True,
        b"4",
    ],
    ids=repr,
)
def test_an_absurd_capacity_is_a_bad_value_and_makes_nothing(capacity: Any) -> None:
    name = unique_name()
    with pytest.raises(BadValue):
        Store.create(name, capacity)
    assert name not in Store.list()


def test_the_smallest_capacity_is_stated() -> None:
    with pytest.raises(BadValue, match=r"1048576|1 MiB"):
        Store.create(unique_name(), 4096)


@pytest.mark.parametrize("size", ["512MiB", "0.5GiB", " 512 mib ", "512M", 512 << 20])
def test_sizes_have_many_spellings(size: int | str) -> None:
    assert usage.parse_size(size) == 512 << 20
    assert usage.parse_size("1GB") == 10**9
    assert usage.format_size(512 << 20) == "512.0 MiB"


@pytest.mark.parametrize(
    "options",
    [
        {"max_objects": 0},
        {"max_objects": 1 << 40},
        {"max_sessions": -3},
        {"max_sessions": "many"},
        {"max_owners": 5000},
        {"spin_s": -1},
        {"spin_s": 5},
    ],
    ids=repr,
)
def test_table_sizes_out_of_range_are_bad_values(options: dict[str, Any]) -> None:
    with pytest.raises(BadValue):
        Store.create(unique_name(), "4MiB", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": "1" * 5000},
        {"capacity": float("nan")},
        {"max_objects": 15},
        {"max_objects": 1.0},
        {"max_objects": None},
        {"max_sessions": 1 << 40},
        {"max_attachments": 0},
        {"max_attachments": 1 << 40},
        {"max_owners": "x"},
        {"allow_pickle": "no"},
        {"directory": None},
        {"directory": 5},
        {"directory": ""},
        {"directory": "a\0b"},
        {"spin_s": float("nan")},
    ],
    ids=repr,
)
def test_a_wrong_option_is_a_bad_value_that_repeats_it(options: dict[str, Any]) -> None:
    name = unique_name()
    with pytest.raises(BadValue) as caught:
        Store.create(name, **{"capacity": "4MiB", **options})
    assert isinstance(caught.value, ValueError)
    assert name not in Store.list()


def test_a_folder_that_is_not_there_is_told_and_not_taken_for_an_empty_one() -> None:
    for call in (
        lambda: Store.list(directory="/no/such/folder"),
        lambda: Store.create(unique_name(), "4MiB", directory="/no/such/folder"),
        lambda: Store.attach("x", directory="/no/such/folder"),
        lambda: doctor.clean(directory="/no/such/folder"),
    ):
        with pytest.raises(SystemRefused, match="/no/such/folder") as caught:
            call()
        assert isinstance(caught.value, OSError)


NO_TIME = [-1, -0.5, float("nan"), -math.inf, "5", True, [], 1j, np.float64("nan")]


@pytest.mark.parametrize("timeout", NO_TIME, ids=repr)
def test_a_timeout_is_a_number_of_seconds_and_nothing_happens_without(
    store: Store, timeout: Any
) -> None:
    ref = store.put(b"x")
    for call in (
        lambda: store.put(b"y", timeout=timeout),
        lambda: store.get(ref, timeout=timeout),
        lambda: store.build(4, "u1", timeout=timeout),
        lambda: store.buffer(ref, timeout=timeout),
    ):
        with pytest.raises(BadValue, match="timeout"):
            call()
    assert store.stats().objects == 1


# What is called, with what, and which class says so. "s" is a live session of "o"; REF is live.
LONG_HEAD = headers.pack(headers.Kind.BYTES, 1) + bytes(64)  # longer than it says
WRONG_CALLS: list[tuple[str, Callable[[Store, ObjectRef], Any], type[StoreError]]] = [
    ("transfer 5", lambda s, r: s.sessions.transfer(_any(5), "o", "p"), BadValue),
    ("transfer None", lambda s, r: s.sessions.transfer(_any(None), "o", "p"), BadValue),
    ("transfer a text", lambda s, r: s.sessions.transfer("s", "o", "p"), BadValue),
    ("transfer [5]", lambda s, r: s.sessions.transfer(["s", _any(5)], "o", "p"), BadName),
    ("transfer an empty id", lambda s, r: s.sessions.transfer(["s", ""], "o", "p"), BadName),
    ("transfer of owner 5", lambda s, r: s.sessions.transfer(["s"], _any(5), "p"), BadName),
    ("transfer to None", lambda s, r: s.sessions.transfer(["s"], "o", _any(None)), BadName),
    ("transfer to all", lambda s, r: s.sessions.transfer(["s"], "o", "*"), BadName),
    ("transfer strict=no", lambda s, r: s.sessions.transfer(["s"], "o", "p", _any("no")), BadValue),
    ("release None", lambda s, r: s.sessions.release(_any(None), "o"), BadValue),
    ("release a text", lambda s, r: s.sessions.release("s", "o"), BadValue),
    ("release bytes", lambda s, r: s.sessions.release(_any(b"s"), "o"), BadValue),
    ("release [None]", lambda s, r: s.sessions.release(["s", _any(None)], "o"), BadName),
    ("release 64 bytes", lambda s, r: s.sessions.release(["s", "x" * 64], "o"), BadName),
    ("release of owner 5", lambda s, r: s.sessions.release(["s"], _any(5)), BadName),
    ("release strict=1", lambda s, r: s.sessions.release(["s"], "o", _any(1)), BadValue),
    ("release_owned 5", lambda s, r: s.sessions.release_owned(_any(5)), BadName),
    ("release_owned all", lambda s, r: s.sessions.release_owned("*"), BadName),
    ("open 5", lambda s, r: s.sessions.open(_any(5), "o"), BadName),
    ("open for 5", lambda s, r: s.sessions.open("t", _any(5)), BadName),
    ("owner 5", lambda s, r: s.sessions.owner(_any(5)), BadName),
    ("owners of a text", lambda s, r: s.sessions.owners("s"), BadValue),
    ("owners of 5", lambda s, r: s.sessions.owners(["s", _any(5)]), BadName),
    ("owners of 64 bytes", lambda s, r: s.sessions.owners(["x" * 64]), BadName),
    ("nbytes of a text", lambda s, r: s.sessions.nbytes("s"), BadValue),
    ("nbytes of 5", lambda s, r: s.sessions.nbytes([_any(5)]), BadName),
    ("list 5", lambda s, r: s.sessions.list(_any(5)), BadName),
    ("list of nobody", lambda s, r: s.sessions.list(""), BadName),
    ("bind 5", lambda s, r: s.sessions.bind(_any(5)), BadName),
    ("bind to itself", lambda s, r: s.sessions.bind("o", "o"), BadName),
    ("bind with heir 5", lambda s, r: s.sessions.bind("o", _any(5)), BadName),
    ("attach 5", lambda s, r: s.sessions.attach("s", _any(5)), BadRef),
    ("attach to None", lambda s, r: s.sessions.attach(_any(None), r), BadName),
    ("attach parent -1", lambda s, r: s.sessions.attach("s", r, -1), BadValue),
    ("attach parent 1.5", lambda s, r: s.sessions.attach("s", r, _any(1.5)), BadValue),
    ("attach parent 2**70", lambda s, r: s.sessions.attach("s", r, 2**70), BadValue),
    ("attach parent 7", lambda s, r: s.sessions.attach("s", r, 7), BadValue),
    ("truncate -1", lambda s, r: s.sessions.truncate("s", -1), BadValue),
    ("truncate None", lambda s, r: s.sessions.truncate("s", _any(None)), BadValue),
    ("truncate 2**70", lambda s, r: s.sessions.truncate("s", 2**70), BadValue),
    ("objects 5", lambda s, r: s.sessions.objects(_any(5)), BadName),
    ("put session 5", lambda s, r: s.put(b"", session=_any(5)), BadName),
    ("put session empty", lambda s, r: s.put(b"", session=""), BadName),
    ("put session gone", lambda s, r: s.put(b"", session="gone"), SessionReleased),
    ("put parent alone", lambda s, r: s.put(b"", parent=0), BadValue),
    ("put parent 2**80", lambda s, r: s.put(b"", session="s", parent=2**80), BadValue),
    ("put parent 1.0", lambda s, r: s.put(b"", session="s", parent=_any(1.0)), BadValue),
    ("get a text", lambda s, r: s.get(_any("x")), BadRef),
    ("get copy=no", lambda s, r: s.get(r, copy=_any("no")), BadValue),
    ("get copy=1", lambda s, r: s.get(r, copy=_any(1)), BadValue),
    ("free 5", lambda s, r: s.free(_any(5)), BadRef),
    ("free a text", lambda s, r: s.free(_any("abc")), BadRef),
    ("free half", lambda s, r: s.free([r, _any(5)]), BadRef),
    ("free strict=None", lambda s, r: s.free(r, strict=_any(None)), BadValue),
    ("hold 5", lambda s, r: s.hold(_any(5)), BadRef),
    ("buffer 5", lambda s, r: s.buffer(_any(5)), BadRef),
    ("build -1", lambda s, r: s.build(-1, "u1"), BadValue),
    ("build None", lambda s, r: s.build(_any(None), "u1"), BadValue),
    ("build 1.5", lambda s, r: s.build(_any(1.5), "u1"), BadValue),
    ("build 2**70", lambda s, r: s.build(2**70, "u1"), BadValue),
    ("build 2**62", lambda s, r: s.build(2**62, "u1"), ObjectTooLarge),
    ("build 2**80", lambda s, r: s.build((2**40, 2**40), "u1"), ObjectTooLarge),
    ("build dtype zz", lambda s, r: s.build(1, "zz"), BadValue),
    ("build dtype object", lambda s, r: s.build(1, object), NotStorable),
    ("build session 5", lambda s, r: s.build(1, "u1", session=_any(5)), BadName),
    ("reserve -1", lambda s, r: s.reserve(-1), BadValue),
    ("reserve 2**65", lambda s, r: s.reserve(2**65), BadValue),
    ("reserve a text", lambda s, r: s.reserve(_any("x")), BadValue),
    ("put_parts 5", lambda s, r: s.put_parts(bytes(64), _any(5)), BadValue),
    ("put_parts junk", lambda s, r: s.put_parts(b"x" * 64, [b"1"]), BadValue),
    ("put_parts long", lambda s, r: s.put_parts(LONG_HEAD, [b"1"]), BadValue),
    ("put_parts [5]", lambda s, r: s.put_parts(bytes(64), [_any(5)]), NotStorable),
    ("put_stream None", lambda s, r: s.put_stream(_any(None)), BadValue),
    ("put_stream sort 5", lambda s, r: s.put_stream([], sort=_any(5)), BadValue),
]


def _any(value: Any) -> Any:
    """What the types forbid."""
    return value


@pytest.mark.parametrize(
    ("call", "error"),
    [(call, error) for _, call, error in WRONG_CALLS],
    ids=[c[0] for c in WRONG_CALLS],
)
def test_a_wrong_argument_is_refused_by_class_and_changes_nothing(
    store: Store, call: Callable[[Store, ObjectRef], Any], error: type[StoreError]
) -> None:
    store.sessions.open("s", owner="o")
    ref = store.put(b"x")
    with pytest.raises(error) as caught:
        call(store, ref)
    assert len(str(caught.value)) > 20
    stats = store.stats()
    assert (stats.objects, stats.sessions, store.sessions.owner("s")) == (1, 1, "o")
    assert store.sessions.objects("s") == []
    assert store.get(ref) == b"x"
    assert store.check() == []
    store.sessions.release(["s"], "o")


def test_spilling_is_not_there_yet_and_says_so() -> None:
    with pytest.raises(NotThereYet, match="spill_dir"):
        Store.create(unique_name(), "4MiB", spill_dir="/tmp")


def test_a_missing_a_taken_and_a_removed_name(store: Store) -> None:
    with pytest.raises(StoreNotFound) as caught:
        Store.attach("no-such-arena-anywhere")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(StoreNotFound):
        Store.unlink("no-such-arena-anywhere")
    with pytest.raises(StoreExists) as taken:
        Store.create(store.name, "4MiB")
    assert isinstance(taken.value, FileExistsError)


def test_an_unlinked_arena_works_on_for_those_who_have_it() -> None:
    with temporary_store("4MiB") as store:
        ref = store.put(b"x")
        Store.unlink(store.name)
        assert store.name not in Store.list()
        with pytest.raises(StoreNotFound):
            Store.attach(store.name)
        assert store.get(ref) == b"x"


def test_a_late_unlink_does_not_take_the_successors_name() -> None:
    with temporary_store("4MiB") as old:
        Store.unlink(old.name)
        with Puppet() as puppet:
            puppet.call(lambda state, n: state.update(s=Store.create(n, "4MiB")), old.name)
            with pytest.raises(StoreSuperseded):
                Store.unlink(old.name)
            assert old.name in Store.list()
            puppet.call(lambda state, n: Store.unlink(n), old.name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_arena_is_denied_and_a_name_of_ones_own_is_not_taken_by_it() -> None:
    stranger = 12345

    def become(state: Any, uid: int) -> None:
        os.setegid(uid)
        os.seteuid(uid)

    with temporary_store("4MiB") as store, Puppet() as puppet:
        puppet.call(become, stranger)
        for refused in (Store.attach, Store.unlink):
            with pytest.raises(StoreDenied, match="of user 0") as caught:
                puppet.call(lambda state, call, name: call(name) and None, refused, store.name)
            assert isinstance(caught.value, PermissionError)
            assert isinstance(caught.value, StoreNotFound)
        puppet.call(lambda state, name: state.update(s=Store.create(name, "4MiB")), store.name)
        puppet.call(lambda state, name: Store.unlink(name), store.name)
        assert store.put(b"unharmed").alive


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_file_that_another_user_put_under_ones_own_name_is_denied() -> None:
    with temporary_store("4MiB") as store:
        path = store.path
        os.chown(path, 12345, 12345)
        try:
            with Puppet() as puppet, pytest.raises(StoreDenied, match="belongs to user 12345"):
                puppet.call(lambda state, n: Store.attach(n) and None, store.name)
        finally:
            os.chown(path, 0, 0)


def copy_of(store: Store, name: str) -> Path:
    """A byte-for-byte copy of an arena's file under another arena name."""
    path = Path(store.path)
    target = path.with_name(path.name.replace(store.name, name))
    target.write_bytes(path.read_bytes())
    target.chmod(0o600)
    return target


def test_a_file_that_is_no_arena_is_damaged_and_of_another_version_a_mismatch() -> None:
    name = unique_name()
    with temporary_store("2MiB", max_objects=64, max_sessions=16) as store:
        store.put(b"x")
        target = copy_of(store, name)
    try:
        whole = target.read_bytes()
        for damage in (b"", b"short", bytes(len(whole)), whole[:4096], b"\xff" * len(whole)):
            target.write_bytes(damage)
            with pytest.raises((ArenaDamaged, LayoutMismatch)):
                Store.attach(name)
        version = struct.pack("<I", _core.LAYOUT_VERSION)
        place = whole.index(version, 8, 64)
        target.write_bytes(whole[:place] + struct.pack("<I", 9999) + whole[place + 4 :])
        with pytest.raises(LayoutMismatch, match="9999"):
            Store.attach(name)
    finally:
        Store.unlink(name)


def test_scribbled_arenas_raise_and_never_crash_or_hang() -> None:
    """Random bytes over a copy, then every read: an error of ours or an answer, in a puppet."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    name = unique_name()
    with temporary_store("1MiB", max_objects=64, max_sessions=16) as store:
        store.sessions.open("s", owner="o")
        refs = [store.put(np.arange(50), session="s") for _ in range(5)] + [store.put({"a": b"x"})]
        names = [bytes(ref) for ref in refs]
        target = copy_of(store, name)
        whole = bytearray(target.read_bytes())
        del refs
        store.sessions.release(["s"], owner="o")

    def poke(state: Any, name: str, names: list[bytes]) -> int:
        failures = 0
        try:
            with Store.attach(name) as store:
                for raw in names:
                    for call in (store.get, store.hold, store.free):
                        try:
                            call(ObjectRef.from_bytes(raw))
                        except StoreError:
                            failures += 1
                for act in (store.check, store.stats, store.sweep, lambda: store.put(b"y")):
                    try:
                        act()
                    except StoreError:
                        failures += 1
        except StoreError:
            failures += 1
        return failures

    rng = random.Random(seed)
    try:
        with Puppet() as puppet:
            for _ in range(60):
                damaged = bytearray(whole)
                for _ in range(rng.choice((1, 4, 64))):
                    at = rng.randrange(64, min(len(damaged), 256 << 10))
                    damaged[at] = rng.randrange(256)
                target.write_bytes(damaged)
                puppet.call(poke, name, names)
    finally:
        Store.unlink(name)


def test_forged_damaged_and_foreign_refs_are_bad_refs(store: Store) -> None:
    ref = store.put(b"x")
    raw = bytearray(bytes(ref))
    for at in range(24):
        forged = bytearray(raw)
        forged[at] ^= 0x40
        with pytest.raises(BadRef):
            store.get(ObjectRef.from_bytes(bytes(forged)))
    for bad in (b"", b"x" * 23, b"x" * 24, b"x" * 25):
        with pytest.raises(BadRef):
            ObjectRef.from_bytes(bad)
    for text in ("", "zz" * 24, "00" * 23, ref.hex()[:-1]):
        with pytest.raises(BadRef):
            ObjectRef.from_hex(text)
    for wrong in (None, 3, "text", ref.hex(), bytes(ref), [ref]):
        with pytest.raises(BadRef):
            store.get(wrong)  # type: ignore[arg-type]
    for wrong in (3, [3], [ref, "x"], None):
        with pytest.raises(BadRef):
            store.free(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ObjectRef()
    assert store.get(ref) == b"x"


def test_a_closed_and_a_never_opened_store_say_so() -> None:
    with temporary_store("4MiB") as store:
        ref = store.put(1)
        store.close()
        for call in (
            lambda: store.get(ref),
            lambda: store.put(1),
            lambda: store.free(ref),
            store.stats,
            store.check,
            store.sweep,
            lambda: store.build(1),
            lambda: store.sessions.open("a", "b"),
            lambda: store.sessions.list(),
        ):
            with pytest.raises(StoreClosed):
                call()
        assert "not open" in repr(store)
    with pytest.raises(StoreClosed, match=r"Store\.create"):
        Store().put(1)


def test_errors_are_one_tree_whose_drawing_is_true() -> None:
    classes = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(cls, errors.StoreError) for cls in classes)
    assert errors.__doc__ is not None
    drawn = {line.split("──")[1].split()[0] for line in errors.__doc__.splitlines() if "──" in line}
    assert drawn == set(errors.__all__) - {"StoreError"}
    for cls in classes:
        if cls is errors.StoreError:
            continue
        parents = [base for base in cls.__bases__ if issubclass(base, errors.StoreError)]
        assert len(parents) == 1


def test_errors_can_be_pickled_with_their_facts() -> None:
    import pickle

    full = errors.StoreFull("m", needed=1, free=2, largest_free=3, holders={"a": 4})
    again = pickle.loads(pickle.dumps(full))
    assert (str(again), again.needed, again.holders) == ("m", 1, {"a": 4})
    assert pickle.loads(pickle.dumps(errors.NotOwner("m", ("a",)))).ids == ("a",)
