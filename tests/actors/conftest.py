"""Shared by the tests of the actors: no run directory outlives a test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import actors
from actors.rundir import runs_root


@pytest.fixture(autouse=True)
def no_run_left_behind() -> Iterator[None]:
    """After each test: no run directory that was not there before."""
    before = _runs()
    yield
    assert _runs() - before == set(), "run directories left behind"


def _runs() -> set[str]:
    return {p.name for p in runs_root().iterdir() if f"-{os.getpid()}-" in p.name}


async def death_is_known(actor: actors.Handle) -> None:
    """Call until the calls fail: from then on this process knows that the actor died."""
    with pytest.raises(actors.ActorDied):
        await _call_for_ever(actor)


async def _call_for_ever(actor: actors.Handle) -> None:
    while True:
        await actor.pid()


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
