"""`shmrl store` from a shell: looking, removing, clearing up after a death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from shmstore import Store
from tests import tree
from tests.contract.support import in_child


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
