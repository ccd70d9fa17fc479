"""`python -m bench replay`: what the life of a rollout costs (buffer, traces, release, idle).

Every figure stands beside its floor from the same run, and the goals are ratios where a ratio says
it. Uses one arena of its own; needs about 1 GiB of shared memory, half of it for the buffer of
100,000 groups.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from bench.idle import count_idle_wakes
from bench.report import BenchArgs, Report, Row, Samples, at_most, collector_off, interleave, lap
from shmstore import Store
from shmstore.testing import temporary_store
from trainer.replay import ReplayBuffer
from trainer.rollout import Group, Rollout, Status
from trainer.testing import make_segment
from trainer.trace import TraceStore

P, L = "producer-0", "learner"
SMALL, LARGE = 100, 100_000
#: A segment of a large mixture: 512 tokens, 48 layers, top-8.
TOKENS, LAYERS, TOP_K = 512, 48, 8


def main(args: BenchArgs) -> int:
    """Run the parts that `args` asks for; the exit status of the report."""
    report = Report("replay", args)
    parts: dict[str, Callable[[Report, BenchArgs], None]] = {
        "put and take": _put_and_take,
        "release": _release,
        "insert": _insert,
        "export": _export,
        "idle": _idle,
    }
    for name, part in parts.items():
        if args.wants(name):
            part(report, args)
    return report.finish()


def _put_and_take(report: Report, args: BenchArgs) -> None:
    """One put and one take, with 100 groups in the buffer and with 100,000."""
    large = LARGE // 10 if args.quick else LARGE
    options = {"max_objects": 1 << 18, "max_sessions": 1 << 18}
    with temporary_store("512MiB", **options) as store:
        laps = asyncio.run(_measure_put_and_take(store, large, 200 if args.quick else 1000))
        store.sessions.release(store.sessions.list(), owner="*")
    small_name, large_name = f"{SMALL} groups", f"{large:,} groups"
    report.add(laps[0].row("put + take", small_name))
    goals = [at_most(1.5, "ratio")]
    report.add(laps[1].row("put + take", large_name, against=(small_name, laps[0]), goals=goals))


async def _measure_put_and_take(store: Store, large: int, n: int) -> list[Samples]:
    buffers = [ReplayBuffer(store, owner=f"replay-{size}") for size in (SMALL, large)]
    for buffer, size in zip(buffers, (SMALL, large), strict=True):
        for i in range(size):
            await buffer.put(_tiny_group(store, f"{buffer.owner}-{i}", i), owner=P, train_step=1)
    laps: list[list[float]] = [[], []]
    with collector_off():
        for turn in range(n):
            for which in (0, 1) if turn % 2 else (1, 0):
                buffer = buffers[which]
                group = _tiny_group(store, f"{buffer.owner}-new-{turn}", turn)
                begin = time.perf_counter_ns()
                await buffer.put(group, owner=P, train_step=1)
                batch = await buffer.take({"math": 1}, train_step=1, owner=L)
                laps[which].append(time.perf_counter_ns() - begin)
                store.sessions.release(batch.session_ids, owner=L)
    return [Samples(tuple(found)) for found in laps]


def _tiny_group(store: Store, uid: str, i: int) -> Group:
    store.sessions.open(uid, owner=P)
    store.put(b"x", session=uid)
    rollout = Rollout(
        uid,
        status=Status.COMPLETED,
        leaves=(0,),
        n_prompt_tokens=1,
        model_step_min=i % 50,
        model_step_max=50,
    )
    return Group(uid, "math", None, (rollout,))


def _release(report: Report, args: BenchArgs) -> None:
    """A learner's release of a batch: 64 sessions of 2 segments each."""
    segment = make_segment(TOKENS, layers=LAYERS, top_k=TOP_K)
    laps: list[float] = []
    with temporary_store("256MiB") as store:
        traces = TraceStore(store)
        ids = [f"s-{i}" for i in range(64)]
        with collector_off():
            for _ in range(20 if args.quick else 100):
                for session_id in ids:
                    traces.open(session_id, L)
                    traces.insert(session_id, segment)
                    traces.insert(session_id, segment, parent=0)
                begin = time.perf_counter_ns()
                released = traces.release(ids, owner=L)
                laps.append(time.perf_counter_ns() - begin)
                assert len(released) == 64
    report.add(
        Samples(tuple(laps)).row("release 64 sessions", "TraceStore", goals=[at_most(150e-6)])
    )


def _insert(report: Report, args: BenchArgs) -> None:
    """A segment of 192 KiB of routing, beside a plain put of as many bytes into a session.

    In cache: eight in turn over the same warm pages, where the copy costs least and everything else
    shows most. In memory: 256 in turn, as in a run, where each segment lies in pages that left the
    cache long ago.
    """
    segment = make_segment(TOKENS, layers=LAYERS, top_k=TOP_K, text="x" * 2000)
    with temporary_store("128MiB") as store:
        traces = TraceStore(store)
        traces.open("probe", P)
        traces.insert("probe", segment)
        plain = np.zeros(traces.nbytes("probe"), np.uint8)
        traces.release(["probe"], owner=P)
        for where, inner, n in (("in cache", 8, 400), ("in memory", 256, 40)):
            both = interleave(
                {
                    "insert": _in_session(traces, inner, lambda: traces.insert("s", segment)),
                    "put": _in_session(traces, inner, lambda: store.put(plain, session="s")),
                },
                n=n // 8 if args.quick else n,
            )
            work = f"insert 512 tokens, 48 x 8, {where}"
            report.add(both["put"].row(work, "plain put"))
            report.add(
                both["insert"].row(
                    work,
                    "TraceStore",
                    against=("plain put", both["put"]),
                    goals=[at_most(1.3, "ratio")],
                )
            )


def _in_session(traces: TraceStore, inner: int, work: Callable[[], object]) -> Callable[[], float]:
    """A lap of `inner` calls into a fresh session."""
    timed = lap(work, inner=inner)

    def run() -> float:
        traces.open("s", P)
        elapsed = timed()
        traces.release(["s"], owner=P)
        return elapsed

    return run


def _export(report: Report, args: BenchArgs) -> None:
    """A trace of 20 turns, beside one copy of the same arrays."""
    with temporary_store("64MiB") as store:
        traces = TraceStore(store)
        traces.open("s", P)
        node = None
        for turn in range(20):
            step = None if turn % 2 == 0 else 1
            segment = make_segment(128, model_step=step, layers=LAYERS, top_k=TOP_K)
            node = traces.insert("s", segment, parent=node)
        trace = traces.export("s", node=node)
        arrays = [trace.token_ids, trace.labels, trace.logprobs, trace.model_steps]
        assert trace.routed_experts is not None
        arrays.append(trace.routed_experts)
        both = interleave(
            {
                "export": lap(lambda: traces.export("s", node=node)),
                "copy": lap(lambda: [array.copy() for array in arrays]),
            },
            n=50 if args.quick else 400,
        )
        copied = _bytes_allocated(lambda: traces.export("s", node=node))
        traces.release(["s"], owner=P)
    nbytes = sum(array.nbytes for array in arrays)
    report.add(both["copy"].row("export 20 turns, 2560 tokens", "one copy"))
    report.add(
        both["export"].row(
            "export 20 turns, 2560 tokens",
            "TraceStore",
            against=("one copy", both["copy"]),
            note="the rest is 20 segments at a few microseconds each",
        )
    )
    report.add(
        Row(
            "export 20 turns, bytes allocated",
            "TraceStore",
            copied / nbytes,
            "x",
            goals=(at_most(1.1),),
            note="1.0: each byte is copied once",
        )
    )


def _bytes_allocated(work: Callable[[], object]) -> int:
    """Most memory that Python and numpy held at once while `work` ran; the result is kept."""
    tracemalloc.start()
    kept = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return peak


def _idle(report: Report, args: BenchArgs) -> None:
    """How often the loop's thread wakes in a second in which a taker, a putter and a producer
    wait.
    """
    wakes, counted = count_idle_wakes(0.2 if args.quick else 1.0)
    row = Row("idle second", "wake-ups", wakes, "count", goals=(at_most(0),), note=counted)
    report.add(row)
