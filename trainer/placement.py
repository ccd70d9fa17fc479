"""Which cores, threads and device each process of a run gets.

Two OpenMP teams that spin on the same cores slow each other by an order of magnitude, so each
computing process gets cores of its own, as many threads as cores, and no more. Of the devices it
sees the one that the configuration names, or none; two processes may see the same one and share its
memory. Pure arithmetic and one system call; the plan is made by the driver, `pin` is called first
thing in each computing process, `keep_for_good` when it is ready to compute.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import ConfigError

__all__ = [
    "Cores",
    "cuda_number",
    "keep_for_good",
    "own_device",
    "plan_cores",
    "plan_devices",
    "replica_devices",
    "rest_device",
    "shared_environment",
    "thread_environment",
]


_OBJECTS_A_COLLECTION = 20_000
"""New containers until the collector looks at them; a step of 64 rollouts makes about 4,000."""
_THREADS_THAT_REST = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


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


def cuda_number(device: str) -> int | None:
    """1 of `cuda:1`, 0 of `cuda`, None of `cpu`. Raises ConfigError on any other name."""
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", device)
    if found is None:
        raise ConfigError(f"device is {device!r}; give cpu, cuda or cuda:N")
    return None if device == "cpu" else int(found[1] or 0)


def plan_devices(wanted: Sequence[tuple[str, str]], there: Sequence[str]) -> dict[str, str]:
    """What each process may see, as CUDA reads it (`CUDA_VISIBLE_DEVICES`).

    wanted: (process name, device), such as ("learner", "cuda:1"); there: what CUDA calls the
    devices of the machine, in the order in which the configuration counts them. Raises ConfigError
    that names every device that is not there.
    """
    numbers = {name: cuda_number(device) for name, device in wanted}
    missing = [
        f"{name} needs cuda:{number}"
        for name, number in numbers.items()
        if number is not None and number >= len(there)
    ]
    if missing:
        have = ", ".join(["cpu", *(f"cuda:{number}" for number in range(len(there)))])
        raise ConfigError(
            f"{'; '.join(missing)}; this run may use {have}. Change learner.device, engine.device "
            "or engine.replicas, or CUDA_VISIBLE_DEVICES, which says what a run may use"
        )
    return {name: "" if number is None else there[number] for name, number in numbers.items()}


def replica_devices(device: str, count: int) -> list[str]:
    """The devices of so many engines: the one that is named, and those that follow it."""
    number = cuda_number(device)
    if number is None:
        return [device] * count
    return [f"cuda:{number + index}" for index in range(count)]


def own_device(device: str) -> str:
    """What a process of the run calls its device: it sees no other."""
    return "cpu" if cuda_number(device) is None else "cuda:0"


def keep_for_good() -> None:
    """What the process has loaded and built so far stays: the collector skips it from now on. A
    full collection over torch and a model takes 250 ms of the thread that computes.

    One is made first: garbage that is frozen is never freed, and tensors may hang on it. Later ones
    are rare, for a step makes thousands of objects and hardly a cycle: with Python's threshold the
    collector took a tenth of the time that a rollout takes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_A_COLLECTION, *gc.get_threshold()[1:])


def rest_device(device: str) -> None:
    """Returns memory that torch keeps cached on a GPU; nothing on the CPU."""
    if cuda_number(device) is not None:
        import torch

        torch.cuda.empty_cache()


def thread_environment(cores: Cores) -> dict[str, str]:
    """Environment of a computing process, for libraries that it loads itself and what it starts."""
    count = str(cores.threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, count) | _THREADS_THAT_REST


def shared_environment(threads: int) -> dict[str, str]:
    """Environment in which the libraries are loaded that all processes of a run share by a fork.

    threads: the most that any of them uses; each says its own number to torch. OpenBLAS, which
    serves numpy alone, gets one, because it starts the others when it is loaded.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    } | _THREADS_THAT_REST
