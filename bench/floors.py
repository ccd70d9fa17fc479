"""What the machine itself can do, measured from Python: the lower bounds of the other benchmarks.

Each function returns `Samples` or a `Lap`, so that a benchmark can interleave a floor with its own
work. Round trips run against a process of their own, pinned to the other core where there are
two. Nothing here imports shmrl.

A *round trip* is: this process wakes the other, the other wakes this one. With both asleep in
between it costs two wake-ups, which on a virtual machine with an idle core is nearly all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import multiprocessing.pool
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.report import Lap, Samples, collect, pin

if TYPE_CHECKING:
    import zmq

MESSAGE = b"x" * 64
STOP = b"stop" + b"\0" * 60
WAIT_S = 10.0

_SPAWN = multiprocessing.get_context("spawn")
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


# ---------------------------------------------------------------------------------------------
# Memory


@contextlib.contextmanager
def warm_mapping(size_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
    """A shared mapping in /dev/shm, every page touched, as a writable uint8 array."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        mapping = mmap.mmap(file.fileno(), size_bytes)
        array = np.frombuffer(mapping, dtype=np.uint8)
        array[:] = 1
        yield array
        del array
        with contextlib.suppress(BufferError):  # a lap still refers to it: freed with the lap
            mapping.close()


def memcpy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], inner: int = 1) -> Lap:
    """A lap of libc's memcpy, one thread, from `source` into `target` (same length)."""
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    copy.restype = ctypes.c_void_p
    to, origin, size_bytes = target.ctypes.data, source.ctypes.data, source.nbytes

    def run() -> float:
        begin = time.perf_counter_ns()
        for _ in range(inner):
            copy(to, origin, size_bytes)
        return (time.perf_counter_ns() - begin) / inner

    run.keeps = (target, source)  # type: ignore[attr-defined]  # the addresses above are theirs
    return run


def numpy_copy(target: npt.NDArray[Any], source: npt.NDArray[Any], inner: int = 1) -> Lap:
    """A lap of `target[:] = source`: the cheapest copy that Python code can write itself."""

    def run() -> float:
        begin = time.perf_counter_ns()
        for _ in range(inner):
            target[:] = source
        return (time.perf_counter_ns() - begin) / inner

    return run


# ---------------------------------------------------------------------------------------------
# Time


def lost_share(seconds: float) -> float:
    """Share of the time of threads that only compute, one on each of two cores at once, in which
    the machine ran something else there: the kernel, other processes. None of ours computes.
    """
    with multiprocessing.pool.Pool(2, context=_SPAWN) as pool:
        return sum(pool.map(_compute, [(0, seconds), (1, seconds)], chunksize=1)) / 2


def _compute(where: tuple[int, float]) -> float:
    core, seconds = where
    pin(core)
    begin, begin_cpu = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - begin) < seconds:
        pass
    return 1.0 - (time.thread_time() - begin_cpu) / passed


# ---------------------------------------------------------------------------------------------
# Round trips


@contextlib.contextmanager
def echo_process(target: Callable[..., None], *args: Any) -> Iterator[BaseProcess]:
    """A process that answers until it is told to stop; ended and reaped on the way out."""
    process = _SPAWN.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """This process on one core inside the block, and back to where it was."""
    before = os.sched_getaffinity(0)
    pin(core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _echo_socket(link: socket.socket) -> None:
    pin(1)
    while (message := link.recv(64)) and message != STOP:
        link.send(message)


def unix_socket_round_trip(n: int = 2000) -> Samples:
    """64 bytes over a Unix stream socket and back, blocking."""
    near, far = socket.socketpair()
    near.settimeout(WAIT_S)
    with near, far, echo_process(_echo_socket, far), pinned(0):

        def trip() -> float:
            begin = time.perf_counter_ns()
            near.send(MESSAGE)
            near.recv(64)
            return time.perf_counter_ns() - begin

        samples = collect(trip, n, warm_up=200)
        near.send(STOP)
    return samples


class Futex:
    """Two 32-bit words in a shared file, waited on with the system call. From Python: one ctypes
    call (about 1 µs) lies on top of the kernel's own time."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), 4096)
        self.words = np.frombuffer(self._mapping, dtype=np.uint32, count=32)
        self._base = self.words.ctypes.data
        self._number = _SYS_FUTEX[platform.machine()]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._limit = _Timespec(int(WAIT_S), 0)

    def set_and_wake(self, index: int, value: int) -> None:
        """Stores `value` and wakes one waiter."""
        self.words[index] = value
        self._call(
            ctypes.c_long(self._number),
            ctypes.c_void_p(self._base + 4 * index),
            _FUTEX_WAKE,
            1,
            None,
        )

    def wait_while(self, index: int, value: int) -> None:
        """Returns when the word differs from `value`; TimeoutError after `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        while self.words[index] == value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"futex word {index} stayed {value} for {WAIT_S} s")
            self._call(
                ctypes.c_long(self._number),
                ctypes.c_void_p(self._base + 4 * index),
                _FUTEX_WAIT,
                ctypes.c_uint32(value),
                ctypes.byref(self._limit),
            )


def _echo_zmq(address: str) -> None:
    import zmq

    pin(1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.rcvtimeo = int(WAIT_S * 1000)
        router.bind(address)
        while True:
            sender, message = router.recv_multipart()
            if message == STOP:
                return
            router.send_multipart((sender, message))


@contextlib.contextmanager
def _zmq_dealer(queue_max: int) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER whose messages a ROUTER in another process sends back; STOP goes out at the end."""
    import zmq

    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'echo'}"
        with (
            echo_process(_echo_zmq, address),
            zmq.Context() as context,
            context.socket(zmq.DEALER) as dealer,
        ):
            dealer.rcvtimeo = int(WAIT_S * 1000)
            dealer.sndhwm = dealer.rcvhwm = queue_max
            dealer.linger = 1000
            dealer.connect(address)
            try:
                yield dealer
            finally:
                dealer.send(STOP)


@contextlib.contextmanager
def zmq_round_trip_lap() -> Iterator[Lap]:
    """A lap of raw pyzmq: 64 bytes DEALER to ROUTER and back over ipc://, blocking, no asyncio."""
    with _zmq_dealer(queue_max=1000) as dealer, pinned(0):

        def trip() -> float:
            begin = time.perf_counter_ns()
            dealer.send(MESSAGE)
            dealer.recv()
            return time.perf_counter_ns() - begin

        yield trip


def zmq_round_trip(n: int = 2000) -> Samples:
    """`zmq_round_trip_lap` repeated."""
    with zmq_round_trip_lap() as trip:
        return collect(trip, n, warm_up=200)


def zmq_in_flight(calls: int = 1000, rounds: int = 20) -> Samples:
    """Raw pyzmq, `calls` messages sent before the first answer is read; ns per message."""
    with _zmq_dealer(queue_max=2 * calls) as dealer:

        def burst() -> float:
            begin = time.perf_counter_ns()
            for _ in range(calls):
                dealer.send(MESSAGE)
            for _ in range(calls):
                dealer.recv()
            return (time.perf_counter_ns() - begin) / calls

        return collect(burst, rounds)
