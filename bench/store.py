"""`python -m bench store`: the arena beside its floors and its peers.

Owns the list of parts and what each is compared with; the work itself is in `bench.objects`,
`bench.handover`, `bench.session_workload` and `bench.reclaim`. Figures to reach are those of two
cores; they stand in the rows as goals. Floors are measured in the same run, interleaved with our
own work where a ratio is what counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench import copies, floors, handover, objects, reclaim, session_workload
from bench.arenas import arena
from bench.objects import KIB, MIB
from bench.peers import ROOT, run_worker, run_workers
from bench.report import (
    BenchArgs,
    Report,
    Row,
    at_most,
    collect,
    lap,
    size_name,
)
from shmstore import ObjectRef, Store

PEERS_HERE = ("shared_memory", "raw_file")
PEERS_INSTALLED = ("lmdb", "iceoryx2", "ray")
MANY = 100_000


class Shmrl:
    """Our store as `bench.objects` sees it."""

    name = "shmrl"

    def __init__(self, store: Store) -> None:
        self.put: Callable[[objects.Bytes], ObjectRef] = store.put
        self.get: Callable[[ObjectRef], objects.Bytes] = store.get
        self.free: Callable[[ObjectRef], int] = store.free
        self._store = store

    def free_many(self, handles: Sequence[ObjectRef]) -> int:
        """One call for all of them."""
        return self._store.free(handles)


def main(args: BenchArgs) -> int:
    """Measures, prints, writes; returns the exit status."""
    report = Report("store", args)
    parts: dict[str, Callable[[Report], None]] = {
        "core": core_rows,
        "objects": object_rows,
        "drop": drop_rows,
        "small puts": small_put_rows,
        "copies": copy_rows,
        "hand-over": hand_over_rows,
        "sessions": session_rows,
        "reclaim": reclaim_rows,
        "state": state_rows,
        "tables": table_rows,
        "peers": peer_rows,
    }
    before = os.sched_getaffinity(0)
    for name, part in parts.items():
        if args.wants(name):
            part(report)
            os.sched_setaffinity(0, before)
    return report.finish()


def object_rows(report: Report) -> None:
    """Put, get + touch, free by size; the floor of a put is numpy's copy into a warm mapping."""
    sizes = objects.SIZES_QUICK if report.args.quick else objects.SIZES
    with arena(2 * max(sizes) + 64 * MIB) as store:
        report.add(*objects.object_rows(Shmrl(store), sizes, report.args.quick))
    for size_bytes in sizes:
        with floors.warm_mapping(size_bytes) as target:
            source = np.full(size_bytes, 7, dtype=np.uint8)
            batch, rounds = objects.ROUNDS[size_bytes]
            samples = collect(floors.numpy_copy(target, source, batch), rounds)
            report.add(samples.row(f"put {size_name(size_bytes)}", "floor: numpy copy"))


def drop_rows(report: Report) -> None:
    """An object that ends because its last reference goes."""
    value = np.full(KIB, 7, dtype=np.uint8)
    with arena(64 * MIB) as store:

        def drop() -> float:
            refs = [store.put(value) for _ in range(64)]
            begin = time.perf_counter_ns()
            refs.clear()
            return (time.perf_counter_ns() - begin) / 64

        report.add(collect(drop, 400).row("drop the last reference, 1 KiB", "shmrl"))


def small_put_rows(report: Report) -> None:
    """10,000 objects at once."""
    with arena(64 * MIB) as store:
        report.add(*objects.small_put_rows(Shmrl(store)))


def copy_rows(report: Report) -> None:
    """Large puts against memcpy in the same rounds: on one core, then with the pool on all."""
    report.add(*copies.rows(report.args.quick))
    if len(os.sched_getaffinity(0)) < 2:
        report.remark("one core only: the pool of copying threads cannot gain")


def hand_over_rows(report: Report) -> None:
    """Waiting beside a futex round trip of the same two processes, and spinning."""
    n = 300 if report.args.quick else 1000
    for size_bytes in (KIB, MIB) if report.args.quick else (KIB, 64 * KIB, MIB, 64 * MIB):
        times = n if size_bytes <= MIB else 20
        work = f"hand-over {size_name(size_bytes)}"
        small = size_bytes == KIB
        taken, round_trips = handover.waiting(size_bytes, times)
        floor = "floor: futex round trip"
        report.add(
            round_trips.row(f"{work}, waiting", floor),
            taken.row(
                f"{work}, waiting",
                "shmrl",
                against=(floor, round_trips),
                goals=(at_most(1.1, "ratio"),) if small else (),
            ),
        )
        if len(os.sched_getaffinity(0)) < 2:
            report.remark("one core only: no spinning hand-over")
            continue
        spun = handover.spinning(size_bytes, times)
        goals = (at_most(6e-6),) if small else ()
        report.add(spun.row(f"{work}, spinning", "shmrl", goals=goals))


def session_rows(report: Report) -> None:
    """Releases under load, with every byte checked."""
    report.add(*session_workload.rows(40 if report.args.quick else 140))


def reclaim_rows(report: Report) -> None:
    """Bytes of the dead."""
    report.add(*reclaim.rows(3 if report.args.quick else 10))


def state_rows(report: Report) -> None:
    """stats() and check() with 100,000 objects."""
    value = np.zeros(64, dtype=np.uint8)
    with arena(64 * MIB) as store:
        held = [store.put(value) for _ in range(MANY)]
        stats = collect(lap(store.stats, 10), 30)
        check = collect(lap(store.check), 10, warm_up=1)
        if store.check() or store.stats().objects != MANY:
            raise AssertionError("the audit found something")
        work = f"with {MANY:,} objects"
        report.add(
            stats.row(f"stats() {work}", "shmrl", goals=(at_most(50e-6),)),
            check.row(f"check() {work}", "shmrl", goals=(at_most(50e-3),)),
        )
        store.free(held)


def table_rows(report: Report) -> None:
    """Bytes of tables per object: the difference of two arenas that differ only in max_objects."""
    few, many = 1 << 16, 1 << 20
    sizes = []
    for max_objects in (few, many):
        with arena(MIB, max_objects=max_objects) as store:
            sizes.append(Path(store.path).stat().st_size)
    per_object = (sizes[1] - sizes[0]) / (many - few)
    report.add(
        Row(
            "tables per object",
            "shmrl",
            per_object,
            unit="B",
            goals=(at_most(128),),
            note="entry, attachment, index and allocator; address space, memory only where used",
        )
    )


def core_rows(report: Report) -> None:
    """The C++ core's own figures and the machine's floors, from the executable beside it."""
    found = sorted(ROOT.glob("build/**/shmrl_bench_core"), key=lambda p: p.stat().st_mtime)
    if not found:
        report.remark(
            "no C++ rows: build/*/shmrl_bench_core is missing (`make bench-core` builds it)"
        )
        return
    done = subprocess.run(
        [str(found[-1]), "--json", *(["--quick"] if report.args.quick else [])],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode != 0:
        report.remark(f"no C++ rows: {found[-1].name} ended with {done.returncode}: {done.stderr}")
        return
    goals = {"hold+drop": (at_most(15e-9),), "build+seal+free": (at_most(250e-9),)}
    for fields in json.loads(done.stdout)["rows"]:
        row = Row(
            f"C++: {fields['work']}",
            fields.get("subject", "core"),
            fields["median_ns"] * 1e-9,
            p99=fields["p99_ns"] * 1e-9 if "p99_ns" in fields else None,
            n=fields.get("n", 1),
            goals=goals.get(fields["work"], ()),
        )
        report.add(row)


def peer_rows(report: Report) -> None:
    """The standard library and a raw file always; the others with --peers."""
    for peer in PEERS_HERE:
        rows, remarks = run_worker(f"store_{peer}", quick=report.args.quick)
        report.add(*rows)
        for remark in remarks:
            report.remark(remark)
    if report.args.peers:
        run_workers(report, "store", PEERS_INSTALLED)
