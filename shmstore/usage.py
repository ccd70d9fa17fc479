"""What the arena holds and what was done to it: the records that `Store.stats()` returns.

Owns `Stats`, `OwnerUsage`, `ClientUsage` and `Counters`, plain immutable records that need neither
an arena nor a handle, and the two converters between byte counts and text. May be imported by anybody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from .errors import BadValue

_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KIB": 1 << 10,
    "KB": 10**3,
    "M": 1 << 20,
    "MIB": 1 << 20,
    "MB": 10**6,
    "G": 1 << 30,
    "GIB": 1 << 30,
    "GB": 10**9,
    "T": 1 << 40,
    "TIB": 1 << 40,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


class OwnerUsage(NamedTuple):
    """What one owner's sessions hold. An object in sessions of two owners counts for both."""

    sessions: int
    objects: int
    bytes: int


class ClientUsage(NamedTuple):
    """What one process keeps in the arena through references (holds) and live views (pins)."""

    slot: int
    pid: int
    holds: int
    pins: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Events since the arena was created, over all processes. `counters["puts"]` works too."""

    puts: int = 0
    gets: int = 0
    frees: int = 0
    reclaimed: int = 0
    recoveries: int = 0
    full: int = 0

    def __getitem__(self, name: str) -> int:
        return asdict(self)[name]


@dataclass(frozen=True, slots=True)
class Stats:
    """A consistent picture of the arena. All sizes in bytes.

    used + free == capacity. `largest_free` is the largest object that fits without waiting.
    `pinned` counts objects under a live view or a draft; `deferred_bytes` are those of ended objects
    that still lie under one. `by_owner` maps each owner of a live session to (sessions, objects, bytes).
    """

    name: str
    capacity: int
    used: int
    free: int
    largest_free: int
    objects: int
    objects_max: int
    sessions: int
    sessions_max: int
    pinned: int
    deferred_bytes: int
    clients: int
    clients_max: int
    by_owner: Mapping[str, OwnerUsage] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)

    def as_dict(self) -> dict[str, object]:
        """The same as plain dictionaries, for JSON."""
        plain = asdict(self)
        plain["by_owner"] = {owner: usage._asdict() for owner, usage in self.by_owner.items()}
        return plain


def parse_size(size: int | str, what: str = "capacity") -> int:
    """Bytes of `4096`, `"512MiB"`, `"4 GiB"`, `"1.5G"`; K, M, G, T alone are binary. BadValue otherwise."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise BadValue(
            f"{what} must be a count of bytes or a text such as '4GiB', not {type(size).__name__} {size!r}"
        )
    if isinstance(size, int):
        n_bytes = size
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in _UNITS:
            raise BadValue(
                f"{what} {size!r} is not understood; write bytes (4096) or a text such as '512MiB' or '4GiB'"
            )
        n_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if n_bytes <= 0:
        raise BadValue(f"{what} must be positive, not {size!r}")
    return n_bytes


def format_size(n_bytes: int) -> str:
    """Short binary text for people: 1536 -> '1.5 KiB'."""
    amount = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{n_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


__all__ = ["ClientUsage", "Counters", "OwnerUsage", "Stats", "format_size", "parse_size"]
