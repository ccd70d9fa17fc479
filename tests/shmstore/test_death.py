"""Processes that die, stop, fork or exit at any moment: what the survivors find (issue 2, point
5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import (
    ForkedStore,
    ObjectFreed,
    ObjectRef,
    Store,
    StoreClosed,
    StoreExists,
    StoreNotFound,
    TableFull,
)
from shmstore.testing import Puppet, PuppetDied, assert_sound, temporary_store, unique_name

REPO = Path(__file__).parents[2]


def attach(state: Any, name: str) -> None:
    state["store"] = Store.attach(name)


def fill(state: Any, n: int, size: int) -> ObjectRef:
    state["refs"] = [state["store"].put(bytes(size)) for _ in range(n)]
    first: ObjectRef = state["refs"][0]
    return first


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, to its natural end."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )


def test_the_bytes_of_a_killed_holder_come_back_to_whoever_needs_them() -> None:
    with temporary_store("8MiB") as store, Puppet() as puppet:
        puppet.call(attach, store.name)
        first = puppet.call(fill, 10_000, 500)
        assert store.stats().objects == 10_000
        puppet.kill()
        big = store.put(np.zeros(8 << 20, "u1"))  # no sweep: the put itself repairs
        assert not first.alive
        assert store.stats().objects == 1
        assert store.stats().counters.reclaimed >= 10_000
        del big


def test_a_builder_that_dies_frees_its_draft_and_wakes_who_waits(store: Store) -> None:
    with Puppet() as puppet:

        def build(state: Any, name: str) -> ObjectRef:
            attach(state, name)
            state["draft"] = state["store"].build(1 << 20)
            return state["draft"].ref  # type: ignore[no-any-return]

        ref = puppet.call(build, store.name)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                store.get(ref, timeout=60)
            except ObjectFreed as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        puppet.kill()
        waiter.join(20)
        assert len(errors) == 1
    assert_sound(store)
    assert store.stats().used == 0


def test_a_stopped_process_is_alive_and_never_reclaimed(store: Store) -> None:
    with Puppet() as puppet:
        puppet.call(attach, store.name)
        ref = puppet.call(fill, 3, 1000)
        puppet.pause()
        store.sweep()
        assert ref.alive
        assert store.stats().clients == 2
        puppet.resume()
        assert puppet.call(lambda state: len(state["store"].get(state["refs"][0]))) == 1000


def test_exit_between_build_and_seal_and_with_live_views_leaves_nothing(store: Store) -> None:
    for ending in ("os._exit(3)", "sys.exit(3)", "os.kill(os.getpid(), 11)"):
        ref = store.put(np.arange(100_000))
        result = run_script(
            "import os, sys\n"
            "from shmstore import Store, ObjectRef\n"
            "store = Store.attach(sys.argv[1])\n"
            "draft = store.build(100_000); array = draft.array\n"
            "view = store.get(ObjectRef.from_hex(sys.argv[2]))\n"
            "own = store.put(b'x' * 1000)\n"
            f"{ending}\n",
            store.name,
            ref.hex(),
        )
        assert result.returncode in (3, -signal.SIGSEGV), result.stderr
        store.sweep()
        stats = store.stats()
        assert (stats.objects, stats.pinned, stats.clients) == (1, 0, 1)
        assert int(store.get(ref)[-1]) == 99_999
        del ref
        assert_sound(store)


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


def mapped(store_path: str) -> int:
    """How many mappings of this process lie over the arena's file."""
    return Path("/proc/self/maps").read_text().count(store_path)


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


def test_create_and_attach_race_without_a_half_made_arena() -> None:
    name = unique_name()

    def race(state: Any, name: str, creates: bool) -> str:
        try:
            state["store"] = Store.create(name, "4MiB") if creates else Store.attach(name)
            return "ok"
        except (StoreExists, StoreNotFound) as error:
            return type(error).__name__

    with Puppet() as a, Puppet() as b, Puppet() as c:
        for round_ in range(15):
            for puppet, creates in ((a, True), (b, True), (c, False)):
                puppet.begin(race, f"{name}-{round_}", creates)
            answers = [a.result(), b.result(), c.result()]
            assert sorted(answers[:2]) == ["StoreExists", "ok"]
            assert answers[2] in ("ok", "StoreNotFound")
            Store.unlink(f"{name}-{round_}")


def test_a_crash_during_create_leaves_nothing_that_the_next_create_trips_over() -> None:
    name = unique_name()
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
        with Puppet() as puppet:
            puppet.call(lambda state: __import__("shmstore") and None)
            puppet.begin(lambda state, n: state.update(s=Store.create(n, "64MiB")), name)
            threading.Event().wait(delay_s)
            puppet.kill()
        with Store.create(name, "4MiB") as store:
            assert store.check() == []
            assert store.capacity == 4 << 20
        Store.unlink(name)
    assert name not in Store.list()


def test_a_name_can_be_used_again_right_after_a_kill() -> None:
    name = unique_name()
    with Puppet() as puppet:
        puppet.call(lambda state, n: state.update(s=Store.create(n, "4MiB")), name)
        with pytest.raises(StoreExists):
            Store.create(name, "4MiB")
        puppet.kill()
        with Store.create(name, "8MiB") as store:
            assert store.capacity == 8 << 20
            with Puppet() as second:
                second.call(attach, name)
                assert store.stats().clients == 2
    Store.unlink(name)


def test_the_255th_client_joins_and_one_more_is_told_so() -> None:
    """Clients are processes; fork makes them cheap."""
    with temporary_store("4MiB") as store:
        result = run_script(
            "import os, sys\n"
            "from shmstore import Store, TableFull\n"
            "gate_r, gate_w = os.pipe(); done_r, done_w = os.pipe(); children = []\n"
            "for i in range(254):\n"
            "    pid = os.fork()\n"
            "    if pid == 0:\n"
            "        os.close(gate_w); s = Store.attach(sys.argv[1]); os.write(done_w, b'x')\n"
            "        os.read(gate_r, 1); os._exit(0)\n"
            "    children.append(pid)\n"
            "n = 0\n"
            "while n < 254: n += len(os.read(done_r, 254))\n"
            "try: Store.attach(sys.argv[1])\n"
            "except TableFull as error: print(error)\n"
            "else: print('joined')\n"
            "os.kill(children[7], 9); os.waitpid(children[7], 0)\n"
            "with Store.attach(sys.argv[1]) as store: print(store.stats().clients)\n"
            "os.close(gate_w)\n"
            "for pid in children[:7] + children[8:]: os.waitpid(pid, 0)\n",
            store.name,
        )
        assert result.returncode == 0, result.stderr
        refused, clients = result.stdout.splitlines()
        assert "255" in refused
        assert clients == "255"
        store.sweep()
        assert store.stats().clients == 1


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


def interrupt_when_waiting(pid: int) -> None:
    """SIGINT once the main thread sleeps in the kernel, outside of a pipe read."""
    for _ in range(2000):
        wait_channel = Path(f"/proc/{pid}/syscall").read_text().split()[0]
        if wait_channel == FUTEX:
            os.kill(pid, signal.SIGINT)
            return
        threading.Event().wait(0.005)
    raise AssertionError("the puppet never waited on a futex")


FUTEX = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]


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


def test_a_puppet_that_dies_inside_a_call_is_told(store: Store) -> None:
    with Puppet() as puppet, pytest.raises(PuppetDied) as caught:
        puppet.call(lambda state: os.kill(os.getpid(), 9))
    assert caught.value.exit_code == -9


def test_an_abandoned_handle_is_dead_to_everybody_else(store: Store) -> None:
    with Puppet() as puppet:

        def abandon(state: Any, name: str) -> str:
            attach(state, name)
            fill(state, 100, 1000)
            state["store"].abandon()
            try:
                state["store"].put(1)
            except StoreClosed as error:
                return type(error).__name__
            return "went on"

        assert puppet.call(abandon, store.name) == "StoreClosed"
        store.sweep()
        assert store.stats().clients == 1
        assert store.stats().objects == 0
    assert TableFull
