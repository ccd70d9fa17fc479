"""What hurt most in the system that we replace: releases by a learner while a producer inserts.

Owns the work on our arena. One process opens sessions of 8 arrays of 384 KiB (48 layers × top-8 of
1,024 tokens, uint8) as fast as it can and hands each to `replay`; another waits until 256 are
live, takes the 64 oldest (`transfer` to `learner`), releases them in one call (timed), and so on.
The producer waits only for room: the arena holds 512 sessions. It has filled and emptied the arena
once before the clock starts: fresh pages cost more than anything that is measured here.

Afterwards every array of every session that is left is compared byte for byte with what its
producer wrote, and the ids with what was inserted less what was released. A byte or an id that is
wrong fails the benchmark: a fast release that harms the producer is worth nothing.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event, Semaphore
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bench.arenas import arena
from bench.floors import pinned
from bench.report import Row, Samples, at_least, at_most, collector_off, pin

if TYPE_CHECKING:
    from shmstore import Store

ARRAYS = 8
ARRAY_BYTES = 384 << 10
LIVE = 256
LIVE_MAX = 512
BATCH = 64
CAPACITY = LIVE_MAX * ARRAYS * ARRAY_BYTES + (64 << 20)
WAIT_S = 60.0

_SPAWN = multiprocessing.get_context("spawn")


def pattern() -> npt.NDArray[np.uint8]:
    """What all arrays share; `stamp` makes each its own."""
    return np.random.default_rng(7).integers(0, 256, ARRAY_BYTES, dtype=np.uint8)


def stamp(array: npt.NDArray[np.uint8], session: int, index: int) -> None:
    """Writes the session's and the array's number at the start, the middle and the end."""
    words = array.view(np.uint64)
    words[0], words[words.size // 2], words[-1] = session, session * ARRAYS + index, index


def _warm_up(store: Store, value: npt.NDArray[np.uint8]) -> None:
    """Fills the arena once and empties it: the pages exist, and this process has them mapped."""
    from shmstore import StoreFull

    store.sessions.open("warm-up", owner="producer")
    try:
        for _ in range(LIVE_MAX * ARRAYS):
            store.put(value, session="warm-up")
    except StoreFull:
        pass  # full is what was wanted
    store.sessions.release(["warm-up"], owner="producer")


def _produce(arena: str, ready: Semaphore, stop: Event, answers: Connection) -> None:
    """The producer process. Sends (sessions inserted, seconds) when it was told to stop."""
    from shmstore import Store, StoreFull

    pin(1)
    value = pattern()
    inserted = 0
    with Store.attach(arena) as store, collector_off():
        sessions = store.sessions
        _warm_up(store, value)
        answers.send(True)
        begin = time.perf_counter()
        while not stop.is_set():
            name = f"session-{inserted}"
            sessions.open(name, owner="producer")
            try:
                for index in range(ARRAYS):
                    stamp(value, inserted, index)
                    store.put(value, session=name, timeout=WAIT_S)
            except StoreFull:
                sessions.release([name], owner="producer")
                if not stop.is_set():
                    raise
                break
            sessions.transfer([name], src="producer", dst="replay")
            inserted += 1
            if inserted % BATCH == 0:
                ready.release()
        answers.send((inserted, time.perf_counter() - begin))
        answers.recv()  # stay attached until the audit is over


@dataclass(frozen=True)
class Outcome:
    """What one run measured."""

    releases: Samples
    transfers: Samples
    sessions_per_s: float
    quiet: Samples
    live_at_end: int


def damage(store: Store, expected_ids: list[str]) -> list[str]:
    """What is wrong with the sessions that are left; [] when every byte is right."""
    problems = []
    live = store.sessions.list("replay")
    if live != expected_ids:
        problems.append(f"{len(live)} sessions are live, {len(expected_ids)} should be")
    expected = pattern()
    for name in live:
        number = int(name.rpartition("-")[2])
        entries = store.sessions.objects(name)
        if len(entries) != ARRAYS:
            problems.append(f"{name} has {len(entries)} arrays")
        for index, entry in enumerate(entries):
            stamp(expected, number, index)
            if not np.array_equal(store.get(entry.ref), expected):
                problems.append(f"array {index} of {name} was harmed")
    return problems


def run(batches: int) -> Outcome:
    """Releases `batches` times 64 sessions under the producer, then quietly, then audits."""
    ready, stop = _SPAWN.Semaphore(0), _SPAWN.Event()
    near, far = _SPAWN.Pipe()
    with arena(CAPACITY) as store:
        producer = _SPAWN.Process(target=_produce, args=(store.name, ready, stop, far), daemon=True)
        producer.start()
        try:
            if not near.poll(WAIT_S):
                raise TimeoutError("the producer did not warm up")
            near.recv()
            with pinned(0), collector_off():
                transfers, releases = _learn(store, ready, batches)
            stop.set()
            released = batches * BATCH
            spare = [f"session-{i}" for i in range(released, released + BATCH)]
            store.sessions.release(spare, owner="replay")  # a producer that waits for room goes on
            released += BATCH
            if not near.poll(WAIT_S):
                raise TimeoutError("the producer did not stop")
            inserted, seconds = near.recv()
            left = [f"session-{i}" for i in range(released, inserted)]
            quiet: list[float] = []
            while len(left) >= LIVE // 2 + BATCH and len(quiet) < 4:
                taken, left = left[:BATCH], left[BATCH:]
                begin = time.perf_counter_ns()
                store.sessions.release(taken, owner="replay")
                quiet.append(float(time.perf_counter_ns() - begin))
            problems = damage(store, left) + store.check()
            if problems:
                raise AssertionError("; ".join(problems[:5]))
            store.sessions.release_owned("replay")
            near.send(True)
        finally:
            producer.join(5)
            if producer.is_alive():
                producer.kill()
                producer.join()
            near.close()
            far.close()
    return Outcome(
        Samples(tuple(releases)),
        Samples(tuple(transfers)),
        inserted / seconds,
        Samples(tuple(quiet)),
        len(left),
    )


def _learn(store: Store, ready: Semaphore, batches: int) -> tuple[list[float], list[float]]:
    """ns of each (transfer, release), after four unrecorded batches that warm the memory up."""
    sessions = store.sessions
    for _ in range(LIVE // BATCH):
        if not ready.acquire(timeout=WAIT_S):
            raise TimeoutError("the producer did not fill the arena")
    transfers, releases = [], []
    for batch in range(batches):
        if not ready.acquire(timeout=WAIT_S):
            raise TimeoutError("the producer stands still")
        names = [f"session-{i}" for i in range(batch * BATCH, (batch + 1) * BATCH)]
        begin = time.perf_counter_ns()
        sessions.transfer(names, src="replay", dst="learner")
        is_moved = time.perf_counter_ns()
        gone = sessions.release(names, owner="learner")
        is_released = time.perf_counter_ns()
        if gone != names:
            raise AssertionError(f"{len(gone)} sessions of {len(names)} were released")
        transfers.append(float(is_moved - begin))
        releases.append(float(is_released - is_moved))
    warm = LIVE_MAX // BATCH if batches > 2 * LIVE_MAX // BATCH else 0
    return transfers[warm:], releases[warm:]


def rows(batches: int) -> list[Row]:
    """The workload's rows; AssertionError where a byte or an id was wrong."""
    taken = run(batches)
    work = f"{BATCH} sessions × {ARRAYS} objects"
    checked = f"{taken.live_at_end} sessions left compared byte for byte: none harmed"
    return [
        taken.releases.row(
            f"release {work}, producer at full speed",
            "shmrl",
            goals=(at_most(100e-6), at_most(1e-3, "p99")),
            note=checked,
        ),
        taken.transfers.row(f"transfer {BATCH} sessions, producer at full speed", "shmrl"),
        taken.quiet.row(f"release {work}, quiet", "shmrl"),
        Row(
            "sessions inserted while released",
            "shmrl",
            taken.sessions_per_s,
            unit="1/s",
            n=taken.releases.n,
            goals=(at_least(2000),),
            note=f"{taken.sessions_per_s * ARRAYS * ARRAY_BYTES / 2**30:.1f} GiB/s",
        ),
    ]
