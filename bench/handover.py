"""From one process to another: put begins -> the other process has touched the value.

Owns the hand-over through the arena. Two processes, each on a core of its own where there are two.
The producer hands out the ref of the object that it has yet to write (a draft's ref is known before
its seal), and the consumer waits in `get` on it: no other channel is needed. Each object carries
the producer's clock and the ref of the next one. CLOCK_MONOTONIC is one clock for all processes.

What is inside the clock: reserving the next object, writing the payload, the seal, the wake-up,
`get`, one byte of every page. After each object the consumer answers through a pipe, outside the
clock, and goes back into `get`; the producer, whom the answer has to wake, goes on. *Waiting*: the
consumer sleeps in the kernel as soon as it finds the object unsealed. *Spinning*: it spins.
"""

from __future__ import annotations

import multiprocessing
import struct
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bench.arenas import arena
from bench.floors import pinned
from bench.objects import touch
from bench.report import Samples, pin

if TYPE_CHECKING:
    from shmstore import Store
    from shmstore.draft import Draft

HEAD = struct.Struct("<q24s?")
ELAPSED = struct.Struct("<q")
WARM_UP = 20
WAIT_S = 30.0

_SPAWN = multiprocessing.get_context("spawn")


def _consume(arena: str, first: bytes, spin_s: float, answers: Connection) -> None:
    """The consumer process: follows the chain; after each object it sends the elapsed ns."""
    from shmstore import ObjectRef, Store

    pin(1)
    with Store.attach(arena, spin_s=spin_s) as store:
        answers.send_bytes(b"ready")
        name, last = first, False
        while not last:
            view = store.get(ObjectRef.from_bytes(name), timeout=WAIT_S)
            touch(view)
            now = time.perf_counter_ns()
            begun, name, last = HEAD.unpack_from(view[: HEAD.size])
            del view
            answers.send_bytes(ELAPSED.pack(now - begun))


def _answer(answers: Connection) -> bytes:
    if not answers.poll(WAIT_S):
        raise TimeoutError(f"the consumer said nothing for {WAIT_S} s")
    return answers.recv_bytes()


def _produce(
    store: Store, draft: Draft, value: npt.NDArray[np.uint8], n: int, answers: Connection
) -> list[float]:
    """Hands over `draft` and n - 1 objects after it; ns of each."""
    elapsed_ns = []
    payload = memoryview(value)
    for turn in range(n):
        begin = time.perf_counter_ns()
        following = store.build(value.nbytes)
        HEAD.pack_into(payload, 0, begin, bytes(following.ref), turn == n - 1)
        draft.array[:] = value
        ref = draft.seal()
        elapsed_ns.append(float(ELAPSED.unpack(_answer(answers))[0]))
        del ref  # held until it was read
        draft = following
    draft.discard()
    return elapsed_ns


def hand_over(size_bytes: int, n: int, spinning: bool) -> Samples:
    """`n` hand-overs of objects of `size_bytes`; ns from the put's begin to the last touch."""
    value = np.full(size_bytes, 7, dtype=np.uint8)
    capacity = max(64 << 20, 4 * size_bytes)
    near, far = _SPAWN.Pipe()
    with arena(capacity) as store:
        draft = store.build(size_bytes)
        consumer = _SPAWN.Process(
            target=_consume,
            args=(store.name, bytes(draft.ref), 1.0 if spinning else 0.0, far),
            daemon=True,
        )
        consumer.start()
        try:
            _answer(near)
            with pinned(0):
                elapsed_ns = _produce(store, draft, value, WARM_UP + n, near)
        finally:
            consumer.join(WAIT_S)
            if consumer.is_alive():
                consumer.kill()
                consumer.join()
            near.close()
            far.close()
    return Samples(tuple(elapsed_ns[WARM_UP:]))
