"""After kill -9: how soon a dead process's bytes are back, and what its death costs the others.

Owns the victim process. It holds 10,000 never-attached objects when it is killed; the survivor then
sweeps, or simply puts an object that fits only once they are gone. The clock starts at the
survivor's own call, after the kernel has reaped the victim: what lies between the signal and that
is the kernel's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import numpy as np

from bench.arenas import arena
from bench.report import Row, Samples, at_most

OBJECTS = 10_000
OBJECT_BYTES = 4 << 10
CAPACITY = 64 << 20
NEED_BYTES = 48 << 20  # more than what the victim leaves free
WAIT_S = 60.0

_SPAWN = multiprocessing.get_context("spawn")


def _hold(arena: str, answers: Connection) -> None:
    """The victim: holds its objects until it is killed."""
    from shmstore import Store

    store = Store.attach(arena)
    value = np.zeros(OBJECT_BYTES, dtype=np.uint8)
    held = [store.put(value) for _ in range(OBJECTS)]
    answers.send(len(held))
    answers.recv()
    raise AssertionError("the victim was not killed")


def _after_death(operation: str) -> tuple[float, float]:
    """(ns of the survivor's call, ns of the same call when nobody has died)."""
    value = np.zeros(NEED_BYTES, dtype=np.uint8)
    near, far = _SPAWN.Pipe()
    with arena(CAPACITY) as store:
        store.free(store.put(value))  # the pages are warm
        victim = _SPAWN.Process(target=_hold, args=(store.name, far), daemon=True)
        victim.start()
        near.recv()
        if victim.pid is None:
            raise AssertionError("the victim has no pid")
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        elapsed_ns = []
        for _ in range(2):
            begin = time.perf_counter_ns()
            if operation == "sweep":
                store.sweep()
            else:
                store.free(store.put(value))
            elapsed_ns.append(float(time.perf_counter_ns() - begin))
        if store.stats().objects or store.check():
            raise AssertionError(f"after the {operation}: {store.stats()}, {store.check()}")
        near.close()
        far.close()
    return elapsed_ns[0], elapsed_ns[1]


def rows(rounds: int) -> list[Row]:
    """Rows for a sweep, and for a put that needs the dead process's bytes."""
    sweeps = [_after_death("sweep") for _ in range(rounds)]
    puts = [_after_death("put") for _ in range(rounds)]
    extra = Samples(tuple(max(dead - alive, 1.0) for dead, alive in puts))
    note = f"{OBJECTS:,} objects of {OBJECT_BYTES >> 10} KiB"
    goal = (at_most(10e-3),)
    return [
        Samples(tuple(dead for dead, _ in sweeps)).row(
            "reclaim after kill -9, sweep", "shmrl", goals=goal, note=note
        ),
        extra.row(
            "reclaim after kill -9, added to the put that needs it",
            "shmrl",
            goals=goal,
            note=note,
        ),
    ]
