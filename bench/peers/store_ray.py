"""Ray: its object store by `ray.put`/`ray.get`, and the session workload with an actor and a dict.

A free is the drop of the last reference: recent Ray has no call that frees an object, and the bytes
return up to a second later, so large objects are measured with few rounds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from bench.objects import MIB, SIZES_QUICK, Bytes, object_rows, small_put_rows
from bench.peers import emit
from bench.report import Row, Samples

ARRAYS, ARRAY_BYTES, LIVE, BATCH = 8, 384 << 10, 256, 64


class Ray:
    """Objects are ObjectRefs."""

    name = f"Ray {ray.__version__}"

    def put(self, value: Bytes) -> list[Any]:
        """In a list, so that `free` can drop the reference itself."""
        return [ray.put(value)]

    def get(self, handle: list[Any]) -> Bytes:
        """Zero-copy, read-only."""
        array: Bytes = ray.get(handle[0])
        return array

    def free(self, handle: list[Any]) -> None:
        """Drops the last reference."""
        handle.clear()

    def free_many(self, handles: Sequence[list[Any]]) -> None:
        """Drops them all."""
        for handle in handles:
            handle.clear()


@ray.remote(num_cpus=0)
class Table:
    """The trace sessions as they are kept in systems built on Ray: ids to references."""

    def __init__(self) -> None:
        self._sessions: dict[str, list[Any]] = {}

    def insert(self, name: str, refs: list[Any]) -> int:
        """Keeps the references; how many sessions there are."""
        self._sessions[name] = refs
        return len(self._sessions)

    def release(self, names: list[str]) -> int:
        """Drops the references of these sessions; how many there were."""
        return sum(self._sessions.pop(name, None) is not None for name in names)

    def count(self) -> int:
        """How many sessions are live."""
        return len(self._sessions)


@ray.remote(num_cpus=0)
class Producer:
    """Inserts sessions as fast as it can until it is told to stop."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._stop = False

    def run(self, first: int, n: int) -> int:
        """Inserts `n` sessions; how many are live."""
        value = np.random.default_rng(7).integers(0, 256, ARRAY_BYTES, dtype=np.uint8)
        live = 0
        for session in range(first, first + n):
            refs = []
            for index in range(ARRAYS):
                value[:8] = index
                refs.append(ray.put(value))
            live = ray.get(self._table.insert.remote(f"session-{session}", refs))
        return live


def session_rows(batches: int) -> list[Row]:
    """Release of 64 sessions in one call, while the producer inserts the next 64."""
    table = Table.remote()
    producer = Producer.remote(table)
    ray.get(producer.run.remote(0, LIVE))
    laps = []
    inserted, begin = LIVE, time.perf_counter()
    for batch in range(batches):
        running = producer.run.remote(inserted, BATCH)
        time.sleep(0.05)  # the producer is in the middle of its batch
        names = [f"session-{i}" for i in range(batch * BATCH, (batch + 1) * BATCH)]
        start = time.perf_counter_ns()
        released = ray.get(table.release.remote(names))
        laps.append(float(time.perf_counter_ns() - start))
        if released != BATCH:
            raise AssertionError(f"{released} of {BATCH} were released")
        ray.get(running)
        inserted += BATCH
    per_s = (inserted - LIVE) / (time.perf_counter() - begin)
    work = f"{BATCH} sessions × {ARRAYS} objects"
    return [
        Samples(tuple(laps)).row(f"release {work}, producer at full speed", Ray.name),
        Row("sessions inserted while released", Ray.name, per_s, unit="1/s", n=batches),
    ]


def main() -> int:
    """Rows of put, get, free, many small puts, and the session workload."""
    quick = "--quick" in sys.argv
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        num_cpus=2,
        object_store_memory=4096 * MIB,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        store = Ray()
        rows = object_rows(store, SIZES_QUICK, quick=True)
        rows += small_put_rows(store, puts=2_000 if quick else 10_000, rounds=3)
        rows += session_rows(10 if quick else 40)
    finally:
        ray.shutdown()
    return emit(rows)


if __name__ == "__main__":
    sys.exit(main())
