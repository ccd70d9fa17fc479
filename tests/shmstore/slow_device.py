"""A device in place of CUDA, for tests: as strict as CUDA about memory, and slower about copies.

Owns the double of `shmstore.copies._Cuda`. A copy happens when somebody waits for a mark behind it,
and marks are reached when the test says so: bytes that were given back too early are wrong here,
every time. "Device memory" is the CPU's.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shmstore import copies

WAIT_S = 30.0


class SlowDevice:
    """Registers memory and copies as CUDA would, on the CPU."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # address -> bytes
        self.asked: list[int] = []
        self.refuses: Callable[[int], bool] = lambda number: False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.failed = False  # from then on nothing is copied, and every wait raises
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._done = 0
        self._lock = threading.Lock()

    def register(self, address: int, n_bytes: int) -> bool:
        self.asked.append(address)
        assert n_bytes > 0, "CUDA refuses nothing of nothing"
        assert all(
            address + n_bytes <= at or at + size <= address for at, size in self.registered.items()
        ), "registered twice"
        assert _is_writable(address, n_bytes), "CUDA locks only what the process may write"
        if self.refuses(len(self.asked)):
            return False
        self.registered[address] = n_bytes
        return True

    def unregister(self, address: int) -> None:
        del self.registered[address]
        assert self._done == len(self._queue), "given back while a copy was under way"

    def copy(self, sink: torch.Tensor, source: torch.Tensor) -> None:
        for tensor in (sink, source):
            first = tensor.data_ptr()
            ends = (first, first + max(tensor.nbytes, 1) - 1)
            assert self._registration_of(ends[0]) == self._registration_of(ends[1]), (
                "CUDA refuses a copy of bytes of which some are registered, or in two pieces"
            )
        self._queue.append((sink, source))

    def _registration_of(self, address: int) -> int | None:
        for at, size in self.registered.items():
            if at <= address < at + size:
                return at
        return None

    def mark(self) -> Any:
        return SimpleNamespace(synchronize=partial(self._reach, len(self._queue)))

    def _reach(self, upto: int) -> None:
        assert self.goes_on.wait(WAIT_S)
        with self._lock:
            if self.failed:
                self._done = len(self._queue)
                raise RuntimeError("the device failed")
            for sink, source in self._queue[self._done : upto]:
                sink.copy_(source)
            self._done = max(self._done, upto)


def _is_writable(address: int, n_bytes: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            place, mode = line.split()[:2]
            first, last = (int(end, 16) for end in place.split("-"))
            if first <= address and address + n_bytes <= last:
                return mode.startswith("rw")
    return False


@contextmanager
def slow_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDevice]:
    """In place of CUDA within the block; by its end every registration was given back."""
    double = SlowDevice()
    monkeypatch.setattr(copies, "_cuda", lambda torch, target: double)
    monkeypatch.setattr(copies, "_refusal_said", True)
    yield double
    double.goes_on.set()
    gc.collect()
    assert copies._arenas == {}
    assert double.registered == {}


def settle() -> None:
    """Until everything that has ended was let go of."""
    if copies._janitor is not None:
        copies._janitor.submit(lambda: None).result(WAIT_S)
