"""Ray's actors at the same work as `bench.actors`: calls, arguments, spawning, death."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from bench.peers import emit
from bench.report import Row, Samples

NAME = f"Ray {ray.__version__}"
MIB = 1 << 20


@ray.remote(num_cpus=0)
class Echo:
    """What is called."""

    def nothing(self) -> None:
        """An empty method."""

    def take(self, value: Any) -> None:
        """Receives a value."""

    def pid(self) -> int:
        """To be killed."""
        return os.getpid()

    def forever(self) -> None:
        """Never answers."""
        signal.pause()


def laps(call: Callable[[], object], n: int) -> Samples:
    """`n` calls after a few unrecorded ones."""
    taken = []
    for turn in range(n + 20):
        begin = time.perf_counter_ns()
        call()
        if turn >= 20:
            taken.append(float(time.perf_counter_ns() - begin))
    return Samples(tuple(taken))


def main() -> int:
    """Measures and prints."""
    n = 200 if "--quick" in sys.argv else 1000
    begin = time.perf_counter()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    echo = Echo.remote()
    ray.get(echo.nothing.remote())
    rows = [Row("process start to first result", NAME, time.perf_counter() - begin)]
    rows.append(laps(lambda: ray.get(echo.nothing.remote()), n).row("empty call", NAME))
    begin = time.perf_counter()
    for _ in range(5):
        ray.get([echo.nothing.remote() for _ in range(1000)])
    rows.append(Row("1,000 in flight", NAME, 5000 / (time.perf_counter() - begin), "1/s"))
    array = np.ones(MIB // 8)
    taken = laps(lambda: ray.get(echo.take.remote(array)), n // 4)
    rows.append(taken.row("1 MiB array argument", NAME))
    ref = ray.put(np.ones(64 * MIB // 8))
    taken = laps(lambda: ray.get(echo.take.remote(ref)), n // 4)
    rows.append(taken.row("64 MiB ref argument", NAME))
    spawns = []
    for _ in range(5):
        begin_ns = time.perf_counter_ns()
        other = Echo.remote()
        ray.get(other.nothing.remote())
        spawns.append(float(time.perf_counter_ns() - begin_ns))
    rows.append(Samples(tuple(spawns)).row("spawn to first result", NAME))
    deaths = []
    for _ in range(5):
        victim = Echo.remote()
        pid = ray.get(victim.pid.remote())
        waiting = victim.forever.remote()
        time.sleep(0.05)  # a benchmark of a peer: let the call arrive
        begin_ns = time.perf_counter_ns()
        os.kill(pid, signal.SIGKILL)
        try:
            ray.get(waiting)
        except ray.exceptions.RayActorError:
            deaths.append(float(time.perf_counter_ns() - begin_ns))
    rows.append(Samples(tuple(deaths)).row("death notice", NAME))
    ray.shutdown()
    return emit(rows)


if __name__ == "__main__":
    raise SystemExit(main())
