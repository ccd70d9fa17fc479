"""Shared by the tests of the actors: no process and no run directory outlives a test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from actors.rundir import runs_root

# How long the kernel may take to finish a process that was killed.
_EXIT_WAIT_S = 5.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test: no child of ours, and no run directory that was not there before."""
    before = _runs()
    yield
    children = psutil.Process().children(recursive=True)
    psutil.wait_procs(children, timeout=_EXIT_WAIT_S)
    left = [p.cmdline() for p in children if p.is_running()]
    assert not left, f"processes left behind: {left}"
    assert _runs() - before == set(), "run directories left behind"


def _runs() -> set[str]:
    from os import getpid

    return {p.name for p in runs_root().iterdir() if f"-{getpid()}-" in p.name}


def wait_until_gone(pids: list[int], limit_s: float) -> list[int]:
    """The pids that are still alive (zombies count as gone) after at most `limit_s`."""
    end = time.monotonic() + limit_s
    left = list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if is_alive(pid)]
        if left:
            time.sleep(0.01)
    return left


def is_alive(pid: int) -> bool:
    """True for a process that runs (or is stopped), false for a zombie or nothing."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
