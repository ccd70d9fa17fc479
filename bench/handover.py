"""From one process to another: put begins -> the other process has touched the value.

Owns the hand-over through the arena and, for a waiting consumer, its floor: a futex round trip
between the same two processes. Each is pinned to a core of its own where there are two. The
producer hands out the ref of the object that it has yet to write (a draft's ref is known before its
seal), and the consumer waits in `get` on it: no other channel is needed. Each object carries the
producer's clock and the ref of the next one. CLOCK_MONOTONIC is one clock for all processes.

What is inside the clock: reserving the next object, writing the payload, the seal, the wake-up,
`get`, one byte of every page. After each object the consumer answers through a pipe, outside the
clock, and goes back to wait. *Spinning*: the consumer spins in `get`.

*Waiting*: the consumer sleeps in the kernel. Every turn takes one hand-over and one round trip of
a word through futex(2), in turning order, so that both see the same machine. Before either, the
producer waits, running, until /proc says that the consumer sleeps, and `SETTLE_S` more, for its
core to go idle. Who was to sleep counts the voluntary switches of its thread around the wait; a
turn in which somebody did not sleep (it saw the word before it had gone to the kernel) is left out
whole. Without all this the two sides of a round trip can stay awake and pass words in 2 µs.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.arenas import arena
from bench.floors import Futex, echo_process, pinned
from bench.objects import touch
from bench.report import Samples, collector_off, pin

if TYPE_CHECKING:
    from shmstore import Store
    from shmstore.draft import Draft

HEAD = struct.Struct("<q24s?")  # the producer's clock, the next ref, whether it is the last
ANSWER = struct.Struct("<q??")  # ns of the hand-over; slept before it; slept before the round trip
WARM_UP = 20
WAIT_S = 30.0
SETTLE_S = 100e-6

_SPAWN = multiprocessing.get_context("spawn")
_HERE, _THERE = 0, 16  # words of the futex file, a cache line apart


def _sleeps() -> int:
    """How often this thread has given its core up of its own accord."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _hand_over_first(turn: int) -> bool:
    return turn % 2 == 0


def _consume(arena: str, first: bytes, words: str | None, answers: Connection) -> None:
    """The consumer process: follows the chain; after each object it sends an ANSWER."""
    from shmstore import ObjectRef, Store

    pin(1)
    futex = Futex(words) if words else None
    spin_s = 0.0 if words else 1.0

    def answer_word(turn: int) -> bool:
        if futex is None:
            return True
        before = _sleeps()
        futex.wait_while(_THERE, turn)
        futex.set_and_wake(_HERE, turn + 1)
        return _sleeps() > before

    with Store.attach(arena, spin_s=spin_s) as store:
        answers.send_bytes(b"ready")
        name, last, turn = first, False, 0
        while not last:
            word_slept = _hand_over_first(turn) or answer_word(turn)
            before = _sleeps()
            view = store.get(ObjectRef.from_bytes(name), timeout=WAIT_S)
            touch(view)
            now = time.perf_counter_ns()
            get_slept = _sleeps() > before
            begun, name, last = HEAD.unpack_from(view[: HEAD.size])
            del view
            if _hand_over_first(turn):
                word_slept = answer_word(turn)
            answers.send_bytes(ANSWER.pack(now - begun, get_slept, word_slept))
            turn += 1


def _answer(answers: Connection) -> bytes:
    if not answers.poll(WAIT_S):
        raise TimeoutError(f"the consumer said nothing for {WAIT_S} s")
    return answers.recv_bytes()


class _Asleep:
    """Waits, running, until a process of one thread sleeps in the kernel and its core is idle."""

    def __init__(self, pid: int) -> None:
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self._stat)

    def wait(self) -> None:
        """TimeoutError after `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        while os.pread(self._stat, 512, 0).rpartition(b")")[2].split()[0] != b"S":
            if time.monotonic() > deadline:
                raise TimeoutError(f"the consumer did not go to sleep for {WAIT_S} s")
        settled = time.perf_counter() + SETTLE_S
        while time.perf_counter() < settled:
            pass


class _Producer:
    """The producer's side: a chain of drafts, each named in the object before it."""

    def __init__(
        self, store: Store, draft: Draft, value: npt.NDArray[np.uint8], answers: Connection
    ) -> None:
        self._store, self._draft, self._value, self._answers = store, draft, value, answers
        self._payload = memoryview(value)

    def hand_over(self, last: bool) -> Any:
        """Seals the draft; returns the ref, to be held until the consumer has answered."""
        begin = time.perf_counter_ns()
        following = self._store.build(self._value.nbytes)
        HEAD.pack_into(self._payload, 0, begin, bytes(following.ref), last)
        self._draft.array[:] = self._value
        ref = self._draft.seal()
        self._draft = following
        return ref

    def spinning(self, turns: int) -> Samples:
        """Hand-overs to a consumer that spins."""
        taken = []
        for turn in range(turns):
            ref = self.hand_over(turn == turns - 1)
            taken.append(float(ANSWER.unpack(_answer(self._answers))[0]))
            del ref
        self._draft.discard()
        return Samples(tuple(taken[WARM_UP:]))

    def waiting(self, turns: int, futex: Futex, consumer: _Asleep) -> tuple[Samples, Samples]:
        """Hand-overs to a consumer that sleeps, and the round trips of the same turns."""
        taken, trips = [], []

        def round_trip(turn: int) -> tuple[float, bool]:
            consumer.wait()
            before = _sleeps()
            begin = time.perf_counter_ns()
            futex.set_and_wake(_THERE, turn + 1)
            futex.wait_while(_HERE, turn)
            return float(time.perf_counter_ns() - begin), _sleeps() > before

        for turn in range(turns):
            if not _hand_over_first(turn):
                trip_ns, near_slept = round_trip(turn)
            consumer.wait()
            ref = self.hand_over(turn == turns - 1)
            if _hand_over_first(turn):
                trip_ns, near_slept = round_trip(turn)
            taken_ns, get_slept, word_slept = ANSWER.unpack(_answer(self._answers))
            del ref
            if turn >= WARM_UP and near_slept and get_slept and word_slept:
                taken.append(float(taken_ns))
                trips.append(trip_ns)
        self._draft.discard()
        if 2 * len(taken) < turns - WARM_UP:
            raise AssertionError(f"in only {len(taken)} of {turns - WARM_UP} turns did both sleep")
        return Samples(tuple(taken)), Samples(tuple(trips))


@contextmanager
def _pair(size_bytes: int, words: str | None) -> Iterator[tuple[_Producer, int]]:
    """A producer here and a consumer process, whose pid comes second."""
    near, far = _SPAWN.Pipe()
    with near, far, arena(max(64 << 20, 4 * size_bytes)) as store:
        draft = store.build(size_bytes)
        name = bytes(draft.ref)
        with echo_process(_consume, store.name, name, words, far) as consumer:
            _answer(near)
            with pinned(0), collector_off():
                value = np.full(size_bytes, 7, dtype=np.uint8)
                yield _Producer(store, draft, value, near), consumer.pid or 0


def spinning(size_bytes: int, n: int) -> Samples:
    """`n` hand-overs of objects of `size_bytes` to a consumer that spins."""
    with _pair(size_bytes, None) as (producer, _):
        return producer.spinning(WARM_UP + n)


def waiting(size_bytes: int, n: int) -> tuple[Samples, Samples]:
    """Up to `n` hand-overs of objects of `size_bytes` to a consumer that sleeps, and the futex
    round trips of the same turns; AssertionError where in most turns somebody did not sleep."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        with _pair(size_bytes, file.name) as (producer, pid):
            consumer = _Asleep(pid)
            try:
                return producer.waiting(WARM_UP + n, Futex(file.name), consumer)
            finally:
                consumer.close()
