"""Handles, threads, forks and signals within living processes."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from shmstore import ForkedStore, Store, StoreClosed
from shmstore.testing import Puppet, temporary_store
from tests.shmstore.support import attach, interrupt_when_waiting, mapped, run_script


def test_views_survive_the_closed_store_and_the_interpreters_end(store: Store) -> None:
    ref = store.put(np.arange(1000))
    result = run_script(
        "import sys, builtins, atexit\n"
        "from shmstore import Store, ObjectRef\n"
        "store = Store.attach(sys.argv[1])\n"
        "ref = store.hold(ObjectRef.from_hex(sys.argv[2]))\n"
        "view = store.get(ref)\n"
        "store.close(); store.close()\n"
        "assert view.sum() == 499500\n"
        "class Late:\n"
        "    def __init__(self, kept): self.kept = kept\n"
        "    def __del__(self): assert self.kept[0].sum() == 499500\n"
        "late = Late((view, ref)); builtins.never_collected = [view, ref, store]\n"
        "atexit.register(lambda: view.sum())\n",
        store.name,
        ref.hex(),
    )
    assert (result.returncode, result.stderr) == (0, "")
    store.sweep()
    assert store.stats().pinned == 0


def test_the_interpreter_ends_cleanly_while_daemon_threads_wait(store: Store) -> None:
    """They wait for a seal, for room, and copy: none may hold up or abort the exit."""
    result = run_script(
        "import sys, threading\n"
        "import numpy as np\n"
        "from shmstore import Store\n"
        "store = Store.attach(sys.argv[1]); draft = store.build(10)\n"
        "started = threading.Barrier(4)\n"
        "def wait(): started.wait(); store.get(draft.ref, timeout=float('inf'))\n"
        "def copy():\n"
        "    started.wait(); big = np.zeros(40 << 20, 'u1')\n"
        "    while True: store.put(big, timeout=60)\n"
        "for work in (wait, copy, copy): threading.Thread(target=work, daemon=True).start()\n"
        "started.wait(); threading.Event().wait(0.2); print('end')\n",
        store.name,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")
    store.sweep()
    assert store.stats().used == 0


def test_views_of_this_process_survive_close() -> None:
    with temporary_store("4MiB") as store:
        ref = store.put(np.arange(100))
        view = store.get(ref)
        name = store.name
        store.close()
        assert view.sum() == 4950
        with pytest.raises(StoreClosed):
            store.get(ref)
        with Store.attach(name) as again:
            assert again.stats().deferred_bytes > 0 or again.stats().objects == 1
            del view
            again.sweep()
            assert again.stats().used == 0


def test_close_gives_the_memory_back_at_once_or_with_the_last_view() -> None:
    with temporary_store("4MiB") as store:
        store.close()
        assert mapped(store.path) == 0
    with temporary_store("4MiB") as store:
        ref = store.put(np.arange(10))
        view = store.get(ref)
        store.close()
        assert mapped(store.path) > 0
        assert view.sum() == 45
        del view
        assert mapped(store.path) == 0
        del ref


def test_a_close_in_one_thread_ends_the_wait_of_another() -> None:
    with temporary_store("4MiB") as store:
        draft = store.build(10)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                store.get(draft.ref, timeout=60)
            except StoreClosed as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        threading.Event().wait(0.05)
        store.close()
        waiter.join(20)
        assert len(errors) == 1


def test_a_close_under_busy_threads_ends_their_calls_and_nothing_else() -> None:
    big = np.ones(1 << 20, "u1")
    for _ in range(10):
        with temporary_store("32MiB") as store:
            ready = threading.Barrier(5)
            ended: list[str] = []

            def work(store: Store, ready: threading.Barrier, ended: list[str]) -> None:
                ready.wait()
                try:
                    while True:
                        for value in (big, bytes(big), {"a": big}, b"small"):
                            kept = store.get(store.put(value, timeout=1), copy=value is big)
                            with store.build(1 << 20) as draft:
                                draft.array[...] = len(kept) % 7
                except StoreClosed as error:
                    ended.append(type(error).__name__)

            threads = [threading.Thread(target=work, args=(store, ready, ended)) for _ in range(4)]
            for thread in threads:
                thread.start()
            ready.wait()
            threading.Event().wait(0.02)
            store.close()
            for thread in threads:
                thread.join()
            assert ended == ["StoreClosed"] * 4
            assert mapped(store.path) == 0


def test_a_fork_child_gets_a_clear_error_and_attaches_anew_and_the_parent_is_unharmed(
    store: Store,
) -> None:
    ref = store.put(np.arange(1000))
    result = run_script(
        "import os, sys\n"
        "import numpy as np\n"
        "from shmstore import Store, ObjectRef, ForkedStore\n"
        "store = Store.attach(sys.argv[1])\n"
        "name = ObjectRef.from_hex(sys.argv[2])\n"
        "held = store.put(b'parent'); view = store.get(name); draft = store.build(10)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert view.sum() == 499500\n"
        "    for call in (lambda: store.get(name), lambda: store.put(1), store.stats, draft.seal,\n"
        "                 lambda: store.sessions.open('a', 'b'), lambda: store.free(held)):\n"
        "        try: call()\n"
        "        except ForkedStore: pass\n"
        "        else: os._exit(9)\n"
        "    with Store.attach(sys.argv[1]) as mine:\n"
        "        assert mine.get(name).sum() == 499500\n"
        "        own = mine.put(b'child')\n"
        "        assert mine.stats().clients == 3\n"
        "        del own\n"
        "    del view, held, draft, store\n"
        "    sys.exit(0)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert os.waitstatus_to_exitcode(status) == 0, status\n"
        "assert store.get(held) == b'parent' and view.sum() == 499500\n"
        "draft.array[...] = 1\n"
        "assert store.get(draft.seal()).sum() == 10\n"
        "assert store.stats().pinned == 1 and store.check() == []\n",
        store.name,
        ref.hex(),
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_fork_in_this_process_leaves_the_parent_whole(store: Store) -> None:
    ref = store.put(b"parent")
    child = os.fork()
    if child == 0:
        try:
            store.get(ref)
        except ForkedStore:
            del ref  # the inherited count is not this process's to drop
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get(ref) == b"parent"


def test_a_child_forked_while_a_thread_looks_for_signals_ends_by_itself(store: Store) -> None:
    result = run_script(
        "import os, signal, sys, threading, time, warnings\n"
        "from shmstore import Store\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # a fork beside threads\n"
        "store = Store.attach(sys.argv[1]); draft = store.build(10)\n"
        "def wait(): store.get(draft.ref, timeout=float('inf'))\n"
        "threading.Thread(target=wait, daemon=True).start(); threading.Event().wait(0.2)\n"
        "sys.setswitchinterval(60)  # the waiter, which looks for signals, does not get the GIL\n"
        "end = time.monotonic() + 0.2\n"
        "while time.monotonic() < end: pass\n"
        "child = os.fork()\n"
        "if child == 0: signal.alarm(30); sys.exit(0)\n"
        "sys.exit(os.waitpid(child, 0)[1] != 0)\n",
        store.name,
    )
    assert (result.returncode, result.stderr) == (0, "")
    store.sweep()


def test_a_fork_beside_a_close_that_waits_for_a_call_goes_on(store: Store) -> None:
    """The call wants the GIL, which os.fork keeps; the close waits for the call; the fork waits for
    the close. A long switch interval brings all three there."""
    done = run_script(
        "import os, sys, threading, warnings\n"
        "from shmstore import Store, StoreClosed\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # a fork beside threads\n"
        "store = Store.attach(sys.argv[1])\n"
        "draft = store.build(8)\n"
        "ends = []\n"
        "def wait():\n"
        "    try:\n"
        "        store.get(draft.ref, timeout=60)\n"
        "    except StoreClosed:\n"
        "        ends.append('told')\n"
        "waiter = threading.Thread(target=wait)\n"
        "waiter.start()\n"
        "closer = threading.Thread(target=store.close)\n"
        "sys.setswitchinterval(1000)  # from here on the GIL changes hands at waits only\n"
        "closer.start()  # waits until it runs, and it runs until it waits for the call\n"
        "closed_meanwhile = not closer.is_alive()\n"
        "sum(range(5_000_000))  # the call notices, and wants the GIL\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "closer.join()\n"
        "waiter.join()\n"
        "print(*ends, closed_meanwhile)\n",
        store.name,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "told False\n"


def test_threads_of_one_process_share_the_arena(store: Store) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(300):
                array = np.full(50 + i, seed)
                ref = store.put(array)
                assert store.get(ref).sum() == seed * (50 + i)
                if i % 3 == 0:
                    assert store.free(ref) == 1
        except BaseException as error:  # handed to the test below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.stats().objects == 0


def test_two_stores_in_one_process_do_not_mix() -> None:
    with temporary_store("4MiB") as left, temporary_store("4MiB") as right:
        a, b = left.put(b"left"), right.put(b"right")
        with Store.attach(left.name) as again:
            assert again.get(a) == b"left"
            assert again.client_slot == left.client_slot, "one slot a process"
        assert left.get(a) == b"left", "the other handle of the same arena was closed, not this"
        assert right.get(b) == b"right"
        del a, b


def test_ctrl_c_ends_a_blocking_get_and_a_blocking_put() -> None:
    with temporary_store("4MiB") as store, Puppet() as puppet:
        puppet.call(attach, store.name)

        def wait_for_seal(state: Any) -> None:
            draft = state["store"].build(10)
            state["store"].get(draft.ref, timeout=float("inf"))

        def wait_for_room(state: Any) -> None:
            state["store"].put(b"x" * (3 << 20), timeout=60)

        blocker = store.put(b"x" * (2 << 20))
        for call in (wait_for_seal, wait_for_room):
            puppet.begin(call)
            interrupt_when_waiting(puppet.pid)
            with pytest.raises(KeyboardInterrupt):
                puppet.result()
        assert puppet.call(lambda state: state["store"].check()) == []
        del blocker


def test_a_signal_handler_may_use_and_close_the_store_that_its_thread_waits_in() -> None:
    with temporary_store("4MiB") as store, Puppet() as puppet:

        def wait(state: Any, name: str) -> tuple[str, int]:
            mine = Store.attach(name)
            used: list[int] = []

            def handle(*_: Any) -> None:
                used.append(mine.get(mine.put(41)) + 1)
                mine.close()

            signal.signal(signal.SIGINT, handle)
            draft = mine.build(10)
            try:
                mine.get(draft.ref, timeout=60)
            except StoreClosed as error:
                return str(error), used[0]
            return "it went on", 0

        puppet.begin(wait, store.name)
        interrupt_when_waiting(puppet.pid)
        assert puppet.result() == ("the store was closed during this wait", 42)
        assert store.stats().clients == 1
