"""The actors that `bench.actors` calls, and how a caller times its calls.

Apart from the benchmark, because an actor's process imports the module of its class: this one
imports no numpy, so that spawning is measured and not importing.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import actors

__all__ = ["IN_FLIGHT", "Caller", "Echo", "burst", "laps"]

IN_FLIGHT = 1000


class Echo:
    """What is called."""

    async def nothing(self) -> None:
        """An empty async method that cannot suspend."""

    async def awaits(self) -> None:
        """An empty async method that needs a task."""
        await asyncio.sleep(0)

    def nothing_in_thread(self) -> None:
        """An empty `def` method."""

    async def take(self, value: Any) -> None:
        """Receive a value and leave it alone."""

    async def touch(self, value: Any) -> float:
        """Read one element of each 4 KiB."""
        return float(value[::512].sum())

    async def items(self, n: int) -> AsyncIterator[int]:
        """A stream."""
        for i in range(n):
            yield i

    async def forever(self) -> None:
        """Never answers."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """To be killed."""
        return os.getpid()


class Caller:
    """Calls from another actor: the lane between two actor processes."""

    def __init__(self, target: actors.Handle) -> None:
        self.target = target

    async def one_at_a_time(self, n: int) -> list[int]:
        """Durations in ns."""
        return await laps(self.target.nothing, n)

    async def in_flight(self, n: int) -> float:
        """Calls a second."""
        return await burst(self.target, n)


async def laps(call: Callable[[], Awaitable[Any]], n: int, warm_up: int = 100) -> list[int]:
    """`n` durations in ns of `await call()`, after some unrecorded ones."""
    taken = []
    gc.collect()
    gc.disable()
    try:
        for turn in range(warm_up + n):
            begin = time.perf_counter_ns()
            await call()
            if turn >= warm_up:
                taken.append(time.perf_counter_ns() - begin)
    finally:
        gc.enable()
    return taken


async def burst(target: actors.Handle, n: int) -> float:
    """Calls a second, `IN_FLIGHT` at once, median of several rounds."""
    rates = []
    for _ in range(max(3, n // IN_FLIGHT)):
        begin = time.perf_counter()
        await asyncio.gather(*[target.nothing() for _ in range(IN_FLIGHT)])
        rates.append(IN_FLIGHT / (time.perf_counter() - begin))
    return statistics.median(rates)
