"""Large puts against one-thread memcpy, in the same rounds.

Each case runs in a process of its own, because the pool of copying threads lives as long as its
process and inherits the cores on which it was made: bound to one core from its start, a process has
one core's worth of copying; on all cores it has the pool.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np

from bench import floors
from bench.arenas import arena
from bench.objects import GIB, MIB, touch
from bench.report import Row, Samples, at_most, interleave, pin, size_name

NEAR_MEMCPY = at_most(1 / 0.97, "ratio")
POOL_GAIN = at_most(1 / 1.5, "ratio")
FLOOR = "floor: memcpy, one thread"
WAIT_S = 120.0

_SPAWN = multiprocessing.get_context("spawn")


def _measure(size_bytes: int, one_core: bool, rounds: int, answers: Connection) -> None:
    """The measuring process: sends {subject: laps in ns}."""
    if one_core:
        pin(0)
    source = np.full(size_bytes, 7, dtype=np.uint8)
    with arena(size_bytes + 64 * MIB) as store, floors.warm_mapping(size_bytes) as target:

        def put() -> float:
            begin = time.perf_counter_ns()
            ref = store.put(source)
            elapsed_ns = time.perf_counter_ns() - begin
            if touch(store.get(ref)) != 7:
                raise AssertionError("the store gave back other bytes")
            store.free(ref)
            return elapsed_ns

        taken = interleave({"shmrl": put, FLOOR: floors.memcpy(target, source)}, rounds)
    answers.send({subject: samples.laps_ns for subject, samples in taken.items()})


def compare(size_bytes: int, one_core: bool, rounds: int) -> dict[str, Samples]:
    """{"shmrl": ..., FLOOR: ...}, round by round."""
    near, far = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_measure, args=(size_bytes, one_core, rounds, far), daemon=True)
    process.start()
    far.close()
    try:
        if not near.poll(WAIT_S):
            raise TimeoutError(f"no figures within {WAIT_S} s")
        laps = near.recv()
    finally:
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
            process.join()
        near.close()
    return {subject: Samples(tuple(values)) for subject, values in laps.items()}


def rows(quick: bool) -> list[Row]:
    """One core and all cores, 64 MiB and (not when quick) 1 GiB."""
    found = []
    cases = [(True, "one core", NEAR_MEMCPY)]
    if len(os.sched_getaffinity(0)) > 1:
        cases.append((False, "all cores", POOL_GAIN))
    for size_bytes in (64 * MIB,) if quick else (64 * MIB, GIB):
        rounds = 15 if quick or size_bytes == GIB else 41
        for one_core, where, goal in cases:
            taken = compare(size_bytes, one_core, rounds)
            work = f"put {size_name(size_bytes)}, warm, {where}"
            found += [
                taken["shmrl"].row(work, "shmrl", against=(FLOOR, taken[FLOOR]), goals=(goal,)),
                taken[FLOOR].row(work, FLOOR),
            ]
    return found
