"""Processes that die or stop at any moment: what the survivors find."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from shmstore import (
    ObjectFreed,
    ObjectRef,
    Store,
    StoreClosed,
    StoreExists,
    StoreNotFound,
)
from shmstore.testing import Puppet, PuppetDied, assert_sound, temporary_store, unique_name
from tests.shmstore.support import attach, fill, run_script


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
