"""Fixtures of the whole suite. Every test ends with no child process and no arena that it made.

Owns the two checks. An arena belongs to a test when its name carries this process's pid, as
`shmstore.testing.unique_name` makes it; arenas of others on the machine are left alone.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from shmstore import Store
from shmstore.testing import assert_empty, temporary_store

CHILD_EXIT_S_MAX = 10


@pytest.fixture(scope="session", autouse=True)
def imported_modules_are_not_garbage() -> None:
    """Collecting garbage walks all objects; those of imported modules (torch) take 0.3 s a time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def signals_are_answered() -> None:
    """A shell that starts the suite in the background, or under `nohup`, has it and all that it
    starts ignore these.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def is_multiprocessing_helper(child: psutil.Process) -> bool:
    """The resource tracker, which multiprocessing starts once and keeps for this process's life."""
    with suppress(psutil.NoSuchProcess):
        return any("resource_tracker" in word for word in child.cmdline())
    return False


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves a child process or an arena of its own."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in before and not is_multiprocessing_helper(child)
    ]
    _, alive = psutil.wait_procs(children, timeout=CHILD_EXIT_S_MAX)
    left = [f"{child.pid} {child.name()} {child.status()}" for child in alive]
    for child in alive:
        child.kill()
    arenas = [name for name in Store.list() if f"-{os.getpid()}-" in name]
    for name in arenas:
        Store.unlink(name)
    if left or arenas:
        pytest.fail(f"left behind: processes {left}, arenas {arenas}")


@pytest.fixture
def store() -> Iterator[Store]:
    """An arena of 64 MiB that must be sound and empty once the test's own references are gone."""
    with temporary_store("64MiB", max_objects=1 << 14, max_sessions=1 << 10) as made:
        yield made
        gc.collect()
        made.sessions.release(made.sessions.list(), owner="*")
        assert_empty(made)
