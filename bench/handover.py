"""From one process to another: put begins -> the other process has touched the value.

Owns the hand-over through the arena. Two processes, each on a core of its own where there are two.
The producer hands out the ref of the object that it has yet to write (a draft's ref is known before
its seal), and the consumer waits in `get` on it: no other channel is needed. Each object carries
the producer's clock and the ref of the next one. CLOCK_MONOTONIC is one clock for all processes.

What is inside the clock: reserving the next object, writing the payload, the seal, the wake-up,
`get`, one byte of every page. *Waiting*: the consumer sleeps in the kernel (no spinning) and the
producer pauses long enough between two objects for it to fall asleep. *Spinning*: it spins.
"""

from __future__ import annotations

import math
import multiprocessing
import struct
import time
import uuid
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bench.floors import pinned
from bench.objects import touch
from bench.report import Samples, pin

if TYPE_CHECKING:
    from shmstore.draft import Draft

    from shmstore import Store

HEAD = struct.Struct("<q24s?")
PAUSE_S = 400e-6  # longer than the consumer needs to fall asleep again
WARM_UP = 20
WAIT_S = 30.0

_SPAWN = multiprocessing.get_context("spawn")


def _consume(arena: str, first: bytes, spin_s: float, answers: Connection) -> None:
    """The consumer process: follows the chain, sends the list of elapsed ns at its end."""
    from shmstore import ObjectRef, Store

    pin(1)
    elapsed_ns = []
    with Store.attach(arena, spin_s=spin_s) as store:
        answers.send(True)
        name = first
        while True:
            view = store.get(ObjectRef.from_bytes(name), timeout=WAIT_S)
            touch(view)
            now = time.perf_counter_ns()
            begun, name, last = HEAD.unpack_from(view[: HEAD.size])
            del view
            if last:
                break
            elapsed_ns.append(float(now - begun))
    answers.send(elapsed_ns)


def _produce(store: Store, draft: Draft, value: npt.NDArray[np.uint8], n: int) -> None:
    """Seals `draft` and n objects after it, the last of which only ends the chain."""
    held = []
    for turn in range(n + 1):
        time.sleep(PAUSE_S)
        begin = time.perf_counter_ns()
        following = store.build(value.nbytes)
        head = HEAD.pack(begin, bytes(following.ref), turn == n)
        value[: HEAD.size] = np.frombuffer(head, dtype=np.uint8)
        draft.array[:] = value
        held.append(draft.seal())
        draft = following
        if len(held) > 2:  # the consumer has gone on to a later object
            held.pop(0)
    draft.discard()
    time.sleep(0.1)  # the consumer reads the last object before its ref goes


def hand_over(size_bytes: int, n: int, spinning: bool) -> Samples:
    """`n` hand-overs of objects of `size_bytes`; ns from the put's begin to the last touch."""
    from shmstore import Store

    name = f"bench-{uuid.uuid4().hex[:12]}"
    value = np.full(size_bytes, 7, dtype=np.uint8)
    capacity = max(64 << 20, 4 * size_bytes)
    near, far = _SPAWN.Pipe()
    with Store.create(name, capacity) as store:
        draft = store.build(size_bytes)
        consumer = _SPAWN.Process(
            target=_consume,
            args=(name, bytes(draft.ref), 1.0 if spinning else 0.0, far),
            daemon=True,
        )
        consumer.start()
        try:
            near.recv()
            with pinned(0):
                _produce(store, draft, value, WARM_UP + n)
            if not near.poll(WAIT_S):
                raise TimeoutError(f"the consumer did not finish within {WAIT_S} s")
            elapsed_ns = near.recv()
        finally:
            consumer.join(WAIT_S)
            if consumer.is_alive():
                consumer.kill()
                consumer.join()
            near.close()
            far.close()
    if len(elapsed_ns) != WARM_UP + n or math.isnan(sum(elapsed_ns)):
        raise AssertionError(f"{len(elapsed_ns)} hand-overs arrived of {WARM_UP + n}")
    return Samples(tuple(elapsed_ns[WARM_UP:]))
