"""Two processes hand routed experts over through the arena, and one of them is killed.

A producer opens sessions and puts, for each, a group's shared prompt and its own segment: the
routed experts of 512 tokens of a mixture-of-experts model (48 layers, top-8, `uint8`: 192 KiB).
Only session ids travel over the pipe, and one word back. The learner takes a batch (one atomic
transfer), looks at every page, checks the bytes, and releases exactly that batch. At the end the
producer is killed with an open session and a half-written object, and the arena shows what that
costs. Run it: `python examples/handover.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from shmstore import Store
from shmstore.usage import format_size

TOKENS, LAYERS, TOP_K, EXPERTS = 512, 48, 8, 128
GROUP, GROUPS_IN_BATCH = 8, 8


def produce(name: str, pipe: Connection, n_groups: int) -> None:
    """Open sessions, put segments, say the ids; then wait, with work half done, to be killed."""
    rng = np.random.default_rng(0)
    with Store.attach(name) as store:
        sessions = store.sessions
        sessions.bind("producer")  # no heir: what is open when this process dies is released
        routed = rng.integers(0, EXPERTS, (TOKENS, LAYERS, TOP_K), dtype=np.uint8)
        for group in range(n_groups):
            prompt = store.put(np.arange(64, dtype=np.int32), timeout=60)
            ids = [f"g{group}-r{rollout}" for rollout in range(GROUP)]
            for i, session in enumerate(ids):
                sessions.open(session, owner="producer")
                sessions.attach(session, prompt)  # stored once, held by all eight
                routed[0, 0, 0] = i
                begun_ns = time.monotonic_ns()
                store.put(routed, session=session, timeout=60, parent=0)
                pipe.send((session, begun_ns))
                pipe.recv_bytes()  # taken: the next time is of one hand-over, not of a queue
            sessions.transfer(ids, src="producer", dst="replay")
            pipe.send(None)
        sessions.open("never finished", owner="producer")
        store.put(routed, session="never finished")
        draft = store.build((1 << 20,), "u1")
        pipe.send("half done")
        signal.pause()
        draft.discard()


def learn(store: Store, pipe: Connection, n_groups: int) -> dict[str, list[float]]:
    """Take batches of groups, touch every page, check, release. Returns seconds by kind."""
    times: dict[str, list[float]] = {"hand-over": [], "transfer": [], "release": []}
    batch: list[str] = []
    for group in range(n_groups):
        ids: list[str] = []
        while (message := pipe.recv()) is not None:
            session, begun_ns = message
            routed = store.get(store.sessions.objects(session)[1].ref)
            touched = int(routed.reshape(-1)[::4096].sum())
            times["hand-over"].append((time.monotonic_ns() - begun_ns) / 1e9)
            pipe.send_bytes(b"taken")
            assert touched >= 0
            assert routed[0, 0, 0] == len(ids)
            ids.append(session)
        batch += ids
        if len(batch) == GROUP * GROUPS_IN_BATCH or group == n_groups - 1:
            begun = time.perf_counter()
            store.sessions.transfer(batch, src="replay", dst="learner")
            moved = time.perf_counter()
            released = store.sessions.release(batch, owner="learner", strict=True)
            times["transfer"].append(moved - begun)
            times["release"].append(time.perf_counter() - moved)
            assert released == batch
            batch = []
    return times


def main() -> None:
    """Run both roles and print what was measured."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--groups", type=int, default=64)
    n_groups = parser.parse_args().groups
    name = f"handover-{os.getpid()}"
    with Store.create(name, "256MiB") as store:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        producer = context.Process(target=produce, args=(name, theirs, n_groups))
        producer.start()
        try:
            begun = time.perf_counter()
            times = learn(store, ours, n_groups)
            wall_s = time.perf_counter() - begun
            report(times, wall_s, n_groups)
            assert ours.recv() == "half done"
            show_a_death(store, producer)
        finally:
            producer.kill()
            producer.join()
            Store.unlink(name)


def report(times: dict[str, list[float]], wall_s: float, n_groups: int) -> None:
    """One line a figure: median and p99."""
    n_sessions = n_groups * GROUP
    payload = n_sessions * TOKENS * LAYERS * TOP_K
    print(
        f"{n_sessions} sessions of {TOKENS} tokens x {LAYERS} layers x top-{TOP_K} "
        f"({format_size(TOKENS * LAYERS * TOP_K)} each): {n_sessions / wall_s:,.0f} sessions/s, "
        f"{format_size(int(payload / wall_s))}/s from process to process"
    )
    for kind, text in (
        ("hand-over", "put begins -> told by a pipe, every page touched by the learner"),
        ("transfer", f"transfer of up to {GROUP * GROUPS_IN_BATCH} sessions, one atomic step"),
        ("release", f"release of up to {GROUP * GROUPS_IN_BATCH} sessions and their objects"),
    ):
        ordered = sorted(times[kind])
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        print(f"{text}: median {statistics.median(ordered) * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us")


def show_a_death(store: Store, producer: multiprocessing.process.BaseProcess) -> None:
    """Kill the producer and show that its half-done work is gone and the books are empty."""
    before = store.stats()
    assert producer.pid is not None
    os.kill(producer.pid, signal.SIGKILL)
    producer.join()
    begun = time.perf_counter()
    store.sweep()
    took_s = time.perf_counter() - begun
    after = store.stats()
    print(
        f"kill -9 of the producer with {format_size(before.used)} in {before.sessions} open "
        f"session and a draft: repaired in {took_s * 1e6:.0f} us, "
        f"{after.sessions} sessions, {format_size(after.used)} left"
    )
    problems = store.check()
    if problems or after.used:
        raise SystemExit(f"the arena is not empty or not sound: {problems}")
    print("audit: sound")


if __name__ == "__main__":
    main()
