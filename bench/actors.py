"""`python -m bench actors`: calls, streams, spawning, memory and death beside floors and peers.

Owns the list of parts. Ours runs across two cores: the caller on the first, the actor on the last,
as the raw ZeroMQ and Unix-socket floors do. The empty call and its floor alternate call by call, so
that noise hits both alike. Figures to reach stand in the rows as goals.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import actors
from bench import floors
from bench.actor_classes import IN_FLIGHT, Caller, Echo, burst, laps
from bench.peers import ROOT, run_workers
from bench.report import BenchArgs, Report, Row, Samples, at_least, at_most, collector_off

MIB = 1 << 20
PEERS = ("ray", "xoscar")


def main(args: BenchArgs) -> int:
    """Measures, prints, writes; returns the exit status."""
    report = Report("actors", args)
    parts: dict[str, Callable[[Report], Any]] = {
        "empty call": empty_call,
        "in flight": in_flight,
        "arguments": arguments,
        "stream": stream,
        "lanes": lanes,
        "spawn": spawn,
        "process start": process_start,
        "memory": memory,
        "death": death,
    }
    before = os.sched_getaffinity(0)
    for name, part in parts.items():
        if args.wants(name):
            actors.run(part(report))
            os.sched_setaffinity(0, before)
            gc.collect()
    if args.peers:
        run_workers(report, "actors", PEERS)
    return report.finish()


def runtime(**options: Any) -> actors.Runtime:
    """A run whose actors may have the last core for themselves."""
    return actors.Runtime(cpus=[max(os.sched_getaffinity(0))], **options)


def n_of(report: Report, n: int) -> int:
    return n // 5 if report.args.quick else n


async def empty_call(report: Report) -> None:
    """Async to async against raw ZeroMQ, call by call in turn; then a thread, then `def`."""
    n = n_of(report, 3000)
    socket = floors.unix_socket_round_trip(n)
    report.add(socket.row("empty call", "floor: Unix socket, blocking"))
    async with runtime() as rt:
        echo = await rt.spawn(Echo, cpus=1)
        with floors.zmq_round_trip_lap() as zmq_lap:
            ours, task, theirs = [], [], []
            await laps(echo.nothing, 200)
            with collector_off():
                for _ in range(n):
                    for call, taken in ((echo.nothing, ours), (echo.awaits, task)):
                        begin = time.perf_counter_ns()
                        await call()
                        taken.append(time.perf_counter_ns() - begin)
                    theirs.append(zmq_lap())
        zmq = Samples(tuple(theirs))
        report.add(
            zmq.row("empty call", "raw pyzmq, blocking"),
            Samples(tuple(ours)).row(
                "empty call", "shmrl, async to async", against=("raw pyzmq, blocking", zmq),
                goals=[at_most(1.1, "ratio")],
            ),
            Samples(tuple(task)).row(
                "empty call", "shmrl, a method that awaits", against=("raw pyzmq, blocking", zmq)
            ),
        )  # fmt: skip
        threads = await laps(echo.nothing_in_thread, n)
        report.add(Samples(tuple(threads)).row("empty call", "shmrl, `def` method"))

        def blocking() -> list[int]:
            taken = []
            for _ in range(n):
                begin = time.perf_counter_ns()
                echo.nothing.result()
                taken.append(time.perf_counter_ns() - begin)
            return taken

        sync = await asyncio.to_thread(blocking)
        report.add(Samples(tuple(sync)).row("empty call", "shmrl, `.result()` of a thread"))


async def in_flight(report: Report) -> None:
    """One caller with 1,000 calls at once; two callers."""
    n = n_of(report, 30_000)
    raw = floors.zmq_in_flight(IN_FLIGHT)
    work = f"{IN_FLIGHT:,} in flight"
    report.add(Row(work, "raw pyzmq, blocking", 1 / raw.median_s, "1/s", n=raw.n))
    async with runtime() as rt:
        echo = await rt.spawn(Echo, cpus=1)
        await burst(echo, 3000)
        rate = await burst(echo, n)
        report.add(Row(work, "shmrl", rate, "1/s", n=n, goals=(at_least(40_000),)))
        callers = [await rt.spawn(Caller, echo) for _ in range(2)]
        rates = await asyncio.gather(*(c.in_flight(n) for c in callers))
        report.add(Row(f"2 callers, {work}", "shmrl", sum(rates), "1/s", n=n, note="both together"))


async def arguments(report: Report) -> None:
    """A large array as an argument, and a larger one by reference."""
    n = n_of(report, 1000)
    async with runtime(store="512MiB", name=f"bench-{os.getpid()}") as rt:
        echo = await rt.spawn(Echo, cpus=1)
        array = np.ones(MIB // 8)
        taken = await laps(lambda: echo.take(array), n)
        report.add(
            Samples(tuple(taken)).row(
                "1 MiB array argument", "shmrl", goals=[at_most(250e-6)], note="put, call, view"
            )
        )
        ref = rt.store.put(np.ones(64 * MIB // 8))
        taken = await laps(lambda: echo.take(ref), n)
        report.add(
            Samples(tuple(taken)).row("64 MiB ref argument", "shmrl", goals=[at_most(150e-6)])
        )
        taken = await laps(lambda: echo.touch(ref), n // 10)
        report.add(Samples(tuple(taken)).row("64 MiB ref argument, touched", "shmrl"))
        for size in (4, 16, 32, 64, 256):
            await threshold(report, echo, size * 1024, n)


async def threshold(report: Report, echo: actors.Handle, size_bytes: int, n: int) -> None:
    """The same array inside the frame and through the store: where `STORE_BYTES_MIN` comes from."""
    from actors import codec

    array = np.ones(size_bytes // 8)
    work = f"{size_bytes // 1024} KiB array argument"
    before = codec.STORE_BYTES_MIN
    try:
        for limit, subject in ((1 << 40, "inside the frame"), (0, "through the store")):
            codec.STORE_BYTES_MIN = limit
            taken = await laps(lambda: echo.take(array), n // 2)
            report.add(Samples(tuple(taken)).row(work, f"shmrl, {subject}"))
    finally:
        codec.STORE_BYTES_MIN = before


async def stream(report: Report) -> None:
    """10,000 items, one after the other."""
    async with runtime() as rt:
        echo = await rt.spawn(Echo, cpus=1)
        rates = []
        for _ in range(5):
            begin = time.perf_counter()
            n = 0
            async for _item in echo.items.stream(10_000):
                n += 1
            rates.append(n / (time.perf_counter() - begin))
        report.add(Row("stream of 10,000 items", "shmrl", statistics.median(rates), "1/s", n=5))


async def lanes(report: Report) -> None:
    """The same calls between two actors, over the Unix lane and over ZeroMQ with CURVE."""
    n = n_of(report, 2000)
    for transport, subject in (("unix", "Unix socket"), ("tcp", "ZeroMQ, CURVE, tcp")):
        async with runtime(transport=transport) as rt:
            echo = await rt.spawn(Echo, cpus=1)
            caller = await rt.spawn(Caller, echo)
            taken = await caller.one_at_a_time(n)
            report.add(Samples(tuple(taken)).row("empty call between actors", f"shmrl, {subject}"))
            rate = await caller.in_flight(10 * n)
            report.add(
                Row(f"{IN_FLIGHT:,} in flight between actors", f"shmrl, {subject}", rate, "1/s")
            )


async def spawn(report: Report) -> None:
    """From the call of `spawn` to the first answer of the new actor, in a running runtime."""
    taken = []
    async with actors.Runtime() as rt:
        await rt.spawn(Echo)
        for _ in range(20):
            begin = time.perf_counter_ns()
            echo = await rt.spawn(Echo)
            await echo.nothing()
            taken.append(time.perf_counter_ns() - begin)
            await echo.stop()
    row = Samples(tuple(taken)).row("spawn to first result", "shmrl", goals=[at_most(60e-3)])
    report.add(row)


_PROGRAM = """
import actors
class W:
    async def work(self): return 1
async def main():
    async with actors.Runtime() as rt:
        w = await rt.spawn(W)
        assert await w.work() == 1
        print("first", flush=True)
        {more}
actors.run(main())
"""


def _program(more: str) -> list[str]:
    return [sys.executable, "-c", _PROGRAM.format(more=more)]


async def process_start(report: Report) -> None:
    """From the start of a Python process to the first answer of its first actor."""
    # As installed: with compiled modules, which an environment may forbid Python to write.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    taken = []
    for turn in range(9):
        begin = time.perf_counter_ns()
        child = subprocess.Popen(_program("pass"), stdout=subprocess.PIPE, cwd=ROOT, env=env)
        assert child.stdout is not None
        child.stdout.readline()
        if turn:
            taken.append(time.perf_counter_ns() - begin)
        child.communicate()
    row = Samples(tuple(taken)).row(
        "process start to first result", "shmrl", goals=[at_most(300e-3)]
    )
    report.add(row)


async def memory(report: Report) -> None:
    """Proportional set size of driver, template and one idle actor together."""
    child = subprocess.Popen(
        _program("import asyncio; await asyncio.Event().wait()"),
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    child.stdout.readline()
    tree = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    total = sum(pss_bytes(process.pid) for process in tree)
    child.kill()
    child.communicate()
    report.add(
        Row(
            "idle memory (PSS)", "shmrl", total, "B", goals=(at_most(60 * MIB),),
            note=f"{len(tree)} processes: driver, template, one actor",
        )
    )  # fmt: skip


def pss_bytes(pid: int) -> int:
    """From /proc, in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


async def death(report: Report) -> None:
    """From kill -9 to the exception at a caller that waits."""
    taken = []
    async with actors.Runtime() as rt:
        for _ in range(20):
            echo = await rt.spawn(Echo)
            pid = await echo.pid()
            waiting = echo.forever()
            await echo.nothing()
            begin = time.perf_counter_ns()
            os.kill(pid, signal.SIGKILL)
            try:
                await waiting
            except actors.ActorDied:
                taken.append(time.perf_counter_ns() - begin)
    report.add(Samples(tuple(taken)).row("death notice", "shmrl", goals=[at_most(5e-3)]))
