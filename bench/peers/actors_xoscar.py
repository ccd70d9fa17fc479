"""xoscar's actors at the same work as `bench.actors`: calls, many in flight, a large argument.

The actor lives in another process of its pool, not in the caller's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import xoscar
from xoscar.backends.allocate_strategy import ProcessIndex

from bench.peers import emit
from bench.report import Row, Samples

NAME = f"xoscar {version('xoscar')}"
MIB = 1 << 20


class Echo(xoscar.Actor):  # type: ignore[misc]
    """What is called."""

    async def nothing(self) -> None:
        """An empty method."""

    async def take(self, value: Any) -> None:
        """Receives a value."""


async def laps(call: Callable[[], Awaitable[object]], n: int) -> Samples:
    """`n` calls after a few unrecorded ones."""
    taken = []
    for turn in range(n + 20):
        begin = time.perf_counter_ns()
        await call()
        if turn >= 20:
            taken.append(float(time.perf_counter_ns() - begin))
    return Samples(tuple(taken))


async def measure() -> list[Row]:
    """All rows."""
    n = 200 if "--quick" in sys.argv else 1000
    begin = time.perf_counter()
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    echo = await xoscar.create_actor(
        Echo, address=pool.external_address, uid="echo", allocate_strategy=ProcessIndex(1)
    )  # fmt: skip
    await echo.nothing()
    rows = [Row("process start to first result", NAME, time.perf_counter() - begin)]
    rows.append((await laps(echo.nothing, n)).row("empty call", NAME))
    begin = time.perf_counter()
    for _ in range(5):
        await asyncio.gather(*(echo.nothing() for _ in range(1000)))
    rows.append(Row("1,000 in flight", NAME, 5000 / (time.perf_counter() - begin), "1/s"))
    array = np.ones(MIB // 8)
    rows.append((await laps(lambda: echo.take(array), n // 4)).row("1 MiB array argument", NAME))
    await pool.stop()
    return rows


def main() -> int:
    """Measures and prints."""
    return emit(asyncio.run(measure()))


if __name__ == "__main__":
    raise SystemExit(main())
