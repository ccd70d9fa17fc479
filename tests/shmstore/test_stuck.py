"""A process that is stopped inside the arena: who must wait does so without the GIL, and is told.

The stopped process is real. It audits the arena again and again, which holds the arena's lock
nearly all the time, and is stopped until it is caught inside.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmstore import BadValue, ObjectRef, Store, StoreFull, StoreStuck
from shmstore.testing import Puppet, temporary_store
from tests.shmstore.support import ROOT, attach

LIMIT_S = 0.1
OBJECTS = 20_000
TRIES = 3000


def audit_for_ever(state: Any) -> None:
    while not state["store"].check():
        pass


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except StoreStuck:
        return True
    return False


@contextlib.contextmanager
def stopped_inside(store: Store) -> Iterator[Puppet]:
    """A puppet that SIGSTOP caught while it held the lock of the arena."""
    with Puppet() as puppet:
        puppet.call(attach, store.name)
        puppet.begin(audit_for_ever)
        for _ in range(TRIES):
            puppet.pause()
            if refused(store.stats):
                break
            puppet.resume()
            threading.Event().wait(0.003)  # on a loaded machine it needs a moment to run at all
        else:
            raise AssertionError("the puppet was never caught inside the lock")
        yield puppet
        puppet.resume()


class Ticker:
    """A thread that counts for as long as it gets the GIL."""

    def __init__(self) -> None:
        self.ticks = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        while not self._end.wait(0.002):
            self.ticks += 1

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_who_waits_for_a_stopped_process_lets_the_other_threads_run_and_is_told() -> None:
    with temporary_store("32MiB", max_objects=OBJECTS + 100, lock_limit_s=LIMIT_S) as store:
        sessions = store.sessions
        kept = [store.put(b"") for _ in range(OBJECTS)]
        loose = store.put(b"loose")
        viewed = store.put(memoryview(b"viewed"))
        view = store.get(viewed)
        sessions.open("s", owner="o")
        held = store.put(b"held", session="s")
        draft = store.build(4, "u1")
        attached = store.build(4, "u1", session="s")
        calls: dict[str, Callable[[], Any]] = {
            "put": lambda: store.put(b"new"),
            "put in a session": lambda: store.put(b"new", session="s"),
            "build": lambda: store.build(4, "u1"),
            "seal in a session": attached.seal,
            "free": lambda: store.free(loose),
            "free many": lambda: store.free(kept[:10]),
            "open": lambda: sessions.open("t", owner="o"),
            "attach": lambda: sessions.attach("s", loose),
            "objects": lambda: sessions.objects("s"),
            "truncate": lambda: sessions.truncate("s", 0),
            "transfer": lambda: sessions.transfer(["s"], "o", "p"),
            "release": lambda: sessions.release(["s"], "o"),
            "release_owned": lambda: sessions.release_owned("o"),
            "owner": lambda: sessions.owner("s"),
            "owners": lambda: sessions.owners(["s"]),
            "nbytes": lambda: sessions.nbytes(["s"]),
            "list": sessions.list,
            "len": lambda: len(sessions),
            "in": lambda: "s" in sessions,
            "bind": lambda: sessions.bind("o", heir="p"),
            "stats": store.stats,
            "check": store.check,
            "sweep": store.sweep,
        }
        with Ticker() as ticker:
            with stopped_inside(store) as puppet:
                for name, call in calls.items():
                    before = ticker.ticks
                    with pytest.raises(StoreStuck, match=rf"pid {puppet.pid}\b") as caught:
                        call()
                    assert ticker.ticks > before + 2, f"{name} kept the GIL while it waited"
                assert isinstance(caught.value, TimeoutError)
                # What needs no lock goes on: a get, a hold, a seal outside sessions.
                assert store.get(loose) == b"loose"
                assert store.get(held) == b"held"
                assert draft.seal().alive
                before = ticker.ticks
                del view, viewed  # the end of the object needs the lock, and nobody to tell
                assert ticker.ticks > before + 2, "a reference kept the GIL while it was dropped"
            assert sessions.owner("s") == "o"
            assert len(sessions.objects("s")) == 1
            assert sessions.release(["s"], "o") == ["s"]
        attached.discard()
        kept.clear()


def test_threads_that_meet_a_stopped_process_at_once_all_go_on_with_it() -> None:
    with temporary_store("32MiB", max_objects=OBJECTS + 5000, lock_limit_s=60) as store:
        kept = [store.put(b"") for _ in range(OBJECTS)]
        store.sessions.open("s", owner="o")
        sealed: list[ObjectRef] = []
        quick = Store.attach(store.name)  # shares the handle's limits: one client a process
        waiting = threading.Barrier(5)

        def work() -> None:
            waiting.wait()
            for _ in range(200):
                sealed.append(store.put(b"x"))
                store.sessions.attach("s", sealed[-1])

        with Puppet() as puppet:
            puppet.call(attach, store.name)
            puppet.begin(audit_for_ever)
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            waiting.wait()
            for _ in range(20):  # wherever it is caught, they wait or go on
                puppet.pause()
                threading.Event().wait(0.005)
                puppet.resume()
            for thread in threads:
                thread.join()
        assert len(store.sessions.objects("s")) == 800
        assert store.check() == []
        quick.close()
        store.sessions.release(["s"], "o")
        del kept


def test_a_full_arena_and_a_stopped_process_are_told_apart() -> None:
    with temporary_store("2MiB", max_objects=OBJECTS, lock_limit_s=LIMIT_S) as store:
        kept = [store.put(b"") for _ in range(OBJECTS // 2)]
        with stopped_inside(store), pytest.raises(StoreStuck):
            store.put(bytes(4 << 20), timeout=0.01)
        with pytest.raises(StoreFull):
            store.put(bytes(4 << 20))
        del kept


@pytest.mark.parametrize("limit", [-1, float("nan"), 1e9, "soon", None, True], ids=repr)
def test_a_lock_limit_is_a_number_of_seconds(limit: Any) -> None:
    with temporary_store("1MiB") as store, pytest.raises(BadValue, match="lock_limit_s"):
        Store.attach(store.name, lock_limit_s=limit)


def test_a_reservation_that_the_stopped_process_drove_out_of_the_queue_holds_up_nobody() -> None:
    with temporary_store("8MiB", max_objects=OBJECTS + 100, lock_limit_s=LIMIT_S) as store:
        kept = [store.put(b"") for _ in range(OBJECTS)]
        filler = store.put(bytes(4 << 20))
        driven_out: list[bool] = []

        def wait_for_room() -> None:
            driven_out.append(refused(lambda: store.put(bytes(3 << 20), timeout=60)))

        waiter = threading.Thread(target=wait_for_room)
        waiter.start()
        while store.stats().counters.full_waits == 0:
            threading.Event().wait(0.002)
        with stopped_inside(store):
            waiter.join()
        assert driven_out == [True]
        for _ in range(10):  # more bytes than might have passed it, had it stayed
            assert store.put(bytes(1 << 20)).alive
        with pytest.raises(StoreFull):  # takes a place in the queue, and so clears the other away
            store.put(bytes(3 << 20), timeout=0.01)
        assert store.check() == []
        del kept, filler


def test_a_draft_that_another_thread_seals_is_taken() -> None:
    with temporary_store("32MiB", max_objects=OBJECTS + 100, lock_limit_s=LIMIT_S) as store:
        kept = [store.put(b"") for _ in range(OBJECTS)]
        store.sessions.open("s", owner="o")
        draft = store.reserve(4, session="s")
        taken = False
        with stopped_inside(store):
            for _ in range(20):  # on a loaded machine one may pass unseen
                sealer = threading.Thread(target=refused, args=(draft.seal,))
                sealer.start()
                while sealer.is_alive() and not taken:
                    try:
                        draft.view()
                    except BadValue:
                        taken = True
                sealer.join()
                if taken:
                    break
        assert taken
        assert draft.seal().alive  # it was given back when the seal failed
        store.sessions.release(["s"], "o")
        del kept


def test_the_interpreter_ends_while_a_daemon_thread_waits_for_the_stopped_process() -> None:
    script = (
        "import atexit, sys, threading\n"
        "atexit.register(lambda: store.close())  # registered first, so it runs last\n"
        "from shmstore import Store\n"
        "store = Store.attach(sys.argv[1], lock_limit_s=1)\n"
        "print('attached', flush=True); sys.stdin.readline()\n"
        "threading.Thread(target=store.stats, daemon=True).start()\n"
        "threading.Event().wait(0.3)\n"
    )
    with temporary_store("32MiB", max_objects=OBJECTS + 100, lock_limit_s=LIMIT_S) as store:
        kept = [store.put(b"") for _ in range(OBJECTS)]
        with subprocess.Popen(
            [sys.executable, "-c", script, store.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            with stopped_inside(store):
                try:
                    _, errors = process.communicate("go\n", timeout=60)
                finally:
                    process.kill()
        assert (process.returncode, errors) == (0, "")
        store.sweep()
        assert store.stats().clients == 1
        del kept
