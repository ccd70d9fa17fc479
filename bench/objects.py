"""Put, get and free of one process, the same work for every store.

Owns the definition of the work; `bench.store` runs it on shmrl and `bench.peers.store_*` on the
others, so that a row means the same whoever it is about. Standard library, numpy and
`bench.report` only.

A round at one size: `batch` values are put (clock 1), each is got and touched (clock 2), each is
freed (clock 3). A row's figure is one operation: a lap is the mean of its batch. *Touch* reads one
byte of every 4 KiB page. The values are numpy uint8 arrays whose pages are warm. Memory is warm
too: the first rounds, which pay for fresh pages, are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bench.report import Row, Samples, at_least, at_most, collector_off, size_name

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (KIB, 64 * KIB, MIB, 64 * MIB, GIB)
SIZES_QUICK = (KIB, 64 * KIB, MIB, 64 * MIB)
PAGE_BYTES = 4096
SMALL_PUTS = 10_000

# (batch, rounds) by size
ROUNDS = {
    KIB: (64, 400),
    64 * KIB: (8, 300),
    MIB: (1, 300),
    64 * MIB: (1, 25),
    GIB: (1, 7),
}

GOALS = {
    ("put", KIB): (at_most(1.1e-6),),
    ("get + touch", KIB): (at_most(1.5e-6),),
    ("free", KIB): (at_most(0.5e-6),),
}
SMALL_PUTS_GOALS = (at_least(600_000),)

Bytes = npt.NDArray[np.uint8]


class ObjectStore(Protocol):
    """What a store must offer to be measured here. `handle` is whatever names an object."""

    @property
    def name(self) -> str:
        """The subject of the rows."""

    @property
    def put(self) -> Callable[[Bytes], Any]:
        """Stores a copy of the value."""

    @property
    def get(self) -> Callable[[Any], Bytes]:
        """The value again."""

    @property
    def free(self) -> Callable[[Any], object]:
        """Ends the object."""

    def free_many(self, handles: Any) -> object:
        """Free all of them, in the cheapest way there is."""


def touch(array: Bytes) -> int:
    """Reads one byte of each page."""
    if array.nbytes <= PAGE_BYTES:
        return int(array[0])
    return int(array[::PAGE_BYTES].max())


def _round(store: ObjectStore, value: Bytes, batch: int) -> tuple[float, float, float]:
    """ns per (put, get + touch, free)."""
    put, get, free = store.put, store.get, store.free
    clock = time.perf_counter_ns
    begin = clock()
    handles = [put(value) for _ in range(batch)]
    is_put = clock()
    for handle in handles:
        touch(get(handle))
    is_got = clock()
    for handle in handles:
        free(handle)
    is_free = clock()
    return (is_put - begin) / batch, (is_got - is_put) / batch, (is_free - is_got) / batch


def measure(store: ObjectStore, size_bytes: int, rounds: int | None = None) -> dict[str, Samples]:
    """{"put": ..., "get + touch": ..., "free": ...} for one size."""
    batch, usual_rounds = ROUNDS[size_bytes]
    wanted = rounds or usual_rounds
    value = np.full(size_bytes, 7, dtype=np.uint8)
    if touch(value) != 7:
        raise AssertionError("the source is not what was written")
    laps: list[tuple[float, float, float]] = []
    with collector_off():
        for turn in range(3 + wanted):
            taken = _round(store, value, batch)
            if turn >= 3:
                laps.append(taken)
    puts, gets, frees = zip(*laps, strict=True)
    return {"put": Samples(puts), "get + touch": Samples(gets), "free": Samples(frees)}


def object_rows(store: ObjectStore, sizes: Sequence[int], quick: bool = False) -> list[Row]:
    """Rows of `measure` for each size, with the goals of our own store on ours only."""
    rows = []
    for size_bytes in sizes:
        rounds = max(5, ROUNDS[size_bytes][1] // 5) if quick else None
        for operation, samples in measure(store, size_bytes, rounds).items():
            goals = GOALS.get((operation, size_bytes), ()) if store.name == "shmrl" else ()
            work = f"{operation} {size_name(size_bytes)}"
            rows.append(samples.row(work, store.name, goals=goals))
    return rows


def small_put_rows(store: ObjectStore, puts: int = SMALL_PUTS, rounds: int = 10) -> list[Row]:
    """`puts` values of 1 KiB put one by one and kept, then freed together."""
    value = np.full(KIB, 7, dtype=np.uint8)
    put_laps, free_laps = [], []
    with collector_off():
        for turn in range(rounds + 1):
            put = store.put
            begin = time.perf_counter_ns()
            handles = [put(value) for _ in range(puts)]
            is_put = time.perf_counter_ns()
            store.free_many(handles)
            is_free = time.perf_counter_ns()
            del handles
            if turn:
                put_laps.append((is_put - begin) / puts)
                free_laps.append((is_free - is_put) / puts)
    taken = Samples(tuple(put_laps))
    goals = SMALL_PUTS_GOALS if store.name == "shmrl" else ()
    return [
        Row(
            "many puts of 1 KiB",
            store.name,
            1 / taken.median_s,
            unit="1/s",
            n=rounds,
            goals=goals,
            note=f"{puts:,} kept",
        ),
        Samples(tuple(free_laps)).row(
            "free many of 1 KiB, each", store.name, note=f"{puts:,} at once"
        ),
    ]
