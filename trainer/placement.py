"""Which cores and threads each process of a run gets.

Two OpenMP teams that spin on the same cores slow each other by an order of magnitude, so each
computing process gets cores of its own, as many threads as cores, and no more. Pure arithmetic
and one system call; the plan is made by the driver, `pin` is called first thing in each computing
process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Cores", "plan_cores", "rest_device", "thread_environment"]


@dataclass(frozen=True)
class Cores:
    """The cores of one process; empty: not pinned. `threads` is what torch may use."""

    cores: tuple[int, ...]
    threads: int

    def pin(self) -> None:
        """Binds the calling process to its cores."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)


def plan_cores(
    wanted: Sequence[tuple[str, int]], available: Sequence[int], *, pin: bool
) -> dict[str, Cores]:
    """Hands out cores in the order of `wanted` (process name, threads).

    When there are fewer cores than threads, nobody is pinned and the kernel shares them out.
    """
    total = sum(threads for _, threads in wanted)
    if not pin or total > len(available):
        return {name: Cores((), threads) for name, threads in wanted}
    plan, at = {}, 0
    for name, threads in wanted:
        plan[name] = Cores(tuple(available[at : at + threads]), threads)
        at += threads
    return plan


def rest_device(device: str) -> None:
    """Returns memory that torch keeps cached on a GPU; nothing on the CPU."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def thread_environment(cores: Cores) -> dict[str, str]:
    """Environment of a computing process: libraries read it when they are loaded."""
    count = str(cores.threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, count) | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
