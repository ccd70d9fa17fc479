"""Which devices and cores an actor gets. Owns the driver's book of what is free.

Used by `supervisor`. Devices are handed out whole and never twice; asking for more than there is
fails at once and says what there is. Nothing here imports torch or touches a device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import PlacementError, UsageError

__all__ = ["Book", "Placement", "detect_gpus"]


@dataclass(frozen=True)
class Placement:
    """What one actor holds: device numbers, and core numbers (empty: it floats over all)."""

    gpus: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()


def detect_gpus() -> tuple[str, ...]:
    """Device numbers of the NVIDIA devices of this machine, from files: no driver call.

    The driver lists them in /proc; some sandboxes have only the device files.
    """
    folder = Path("/proc/driver/nvidia/gpus")
    listed = folder.iterdir() if folder.is_dir() else Path("/dev").glob("nvidia[0-9]*")
    return tuple(str(i) for i in range(len(list(listed))))


class Book:
    """Free and taken devices and cores. Groups (`reserve`) are sub-books cut out of it."""

    def __init__(
        self, gpus: int | Sequence[int | str] | None = None, cpus: Sequence[int] | None = None
    ) -> None:
        if gpus is None:
            self.gpus = detect_gpus()
        elif isinstance(gpus, int):
            if gpus < 0:
                raise UsageError(f"gpus must be a count or a list of device numbers, got {gpus}")
            self.gpus = tuple(str(i) for i in range(gpus))
        else:
            self.gpus = tuple(str(g) for g in gpus)
        self.cpus = tuple(sorted(os.sched_getaffinity(0) if cpus is None else cpus))
        self._free_gpus = list(self.gpus)
        self._free_cpus = list(self.cpus)

    @property
    def free_gpus(self) -> tuple[str, ...]:
        return tuple(self._free_gpus)

    @property
    def free_cpus(self) -> tuple[int, ...]:
        return tuple(self._free_cpus)

    def take(self, who: str, n_gpus: int, n_cpus: int) -> Placement:
        """Reserve; nothing is taken unless all of it is there. Raises PlacementError."""
        for what, n in (("gpus", n_gpus), ("cpus", n_cpus)):
            if not isinstance(n, int) or n < 0:
                raise UsageError(f"{who}: {what} must be a whole number from 0 on, got {n!r}")
        if n_gpus > len(self._free_gpus) or n_cpus > len(self._free_cpus):
            asked = (("GPU", n_gpus, self.gpus, self._free_gpus),
                     ("core", n_cpus, self.cpus, self._free_cpus))  # fmt: skip
            raise PlacementError(
                "; ".join(
                    f"{who} asks for {_count(n, what)}; {_there_are(what, len(there), free)}"
                    for what, n, there, free in asked
                    if n > len(free)
                )
            )
        placement = Placement(tuple(self._free_gpus[:n_gpus]), tuple(self._free_cpus[:n_cpus]))
        del self._free_gpus[:n_gpus]
        del self._free_cpus[:n_cpus]
        return placement

    def give_back(self, placement: Placement) -> None:
        """Return what `take` gave."""
        self._free_gpus = sorted({*self._free_gpus, *placement.gpus}, key=self.gpus.index)
        self._free_cpus = sorted({*self._free_cpus, *placement.cpus})

    def cut(self, who: str, n_gpus: int, n_cpus: int) -> Book:
        """A sub-book with these devices and cores, for a group of actors."""
        taken = self.take(who, n_gpus, n_cpus)
        return Book(taken.gpus, taken.cpus)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _there_are(what: str, n: int, free: Sequence[object]) -> str:
    if not n:
        return "there is none that this run may use"
    names = ", ".join(map(str, free)) or "none"
    return f"of {n} {what}s {len(free)} are free ({names})"
