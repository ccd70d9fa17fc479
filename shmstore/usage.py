"""What the arena holds and what was done to it: the records that `Store.stats()` returns.

Owns `Stats` and its parts, plain immutable records that need neither an arena nor a handle, the
sentence of `StoreFull`, and the converters between byte counts and text. May be imported by
anybody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .errors import BadValue, ObjectTooLarge, StoreFull

_HOLDERS_NAMED_MAX = 12
_WAITERS_MAX = 256  # kWaitersMax of csrc/layout.h

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
_SIZE_CHARS_MAX = 40
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


class OwnerUsage(NamedTuple):
    """What one owner's sessions hold. An object attached to two of them counts twice."""

    sessions: int
    objects: int
    bytes: int


class ClientUsage(NamedTuple):
    """One process that has the arena open. `pins`: objects under its live views and drafts."""

    slot: int
    pid: int
    is_self: bool
    pins: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Events since the arena was created, over all processes. `counters["puts"]` works too."""

    puts: int
    gets: int
    frees: int
    discards: int
    reclaimed: int
    sessions_opened: int
    sessions_released: int
    sessions_transferred: int
    sweeps: int
    recoveries: int
    full_waits: int

    def __getitem__(self, name: str) -> int:
        count: int = asdict(self)[name]
        return count


@dataclass(frozen=True, slots=True)
class Stats:
    """A consistent picture of the arena. Sizes in bytes.

    used + free == capacity. `largest_free` is the largest object that fits without waiting;
    `committed` is what the file occupies in memory. `objects` have not ended (`building` of them
    are unsealed); `doomed` have ended but their `deferred_bytes` still lie under a live view.
    `pinned` counts (object, process) pairs with a live view or draft. `by_owner`: {owner:
    (sessions, objects, bytes)}.
    """

    name: str
    capacity: int
    used: int
    free: int
    largest_free: int
    committed: int
    objects: int
    building: int
    doomed: int
    sessions: int
    pinned: int
    deferred_bytes: int
    clients: int
    objects_max: int
    sessions_max: int
    owners_max: int
    attachments_max: int
    by_owner: Mapping[str, OwnerUsage]
    heirs: Mapping[str, str | None]
    by_client: tuple[ClientUsage, ...]
    counters: Counters

    def as_dict(self) -> dict[str, object]:
        """The same as plain dictionaries, for JSON."""
        plain = asdict(self)
        plain["by_owner"] = {owner: usage._asdict() for owner, usage in self.by_owner.items()}
        plain["by_client"] = [usage._asdict() for usage in self.by_client]
        return plain


class SweepReport(NamedTuple):
    """What one sweep repaired: dead clients, objects that ended, bytes back, sessions moved or
    ended."""

    clients: int
    objects: int
    bytes: int
    sessions_inherited: int
    sessions_released: int


def stats_from(name: str, raw: dict[str, Any]) -> Stats:
    """The record of what the core counted. `heirs` has the owners that some live process is bound
    to."""
    owners = raw.pop("by_owner")
    return Stats(
        name=name,
        by_owner={owner: OwnerUsage(*usage) for owner, *usage, _bound, _heir in owners if usage[0]},
        heirs={owner: heir or None for owner, *_usage, bound, heir in owners if bound},
        by_client=tuple(ClientUsage(*client) for client in raw.pop("by_client")),
        counters=Counters(*raw.pop("counters")),
        **raw,
    )


def store_full(class_name: str, facts: dict[str, Any]) -> StoreFull:
    """The exception for a reservation that found no room, with figures and holders in its
    sentence."""
    kind = {"StoreFull": StoreFull, "ObjectTooLarge": ObjectTooLarge}[class_name]
    holders = {owner: held for owner, _sessions, _objects, held in facts["owners"] if held}
    for _slot, pid, _objects, held, _pins, pinned in facts["clients"]:
        if held:
            holders[f"process {pid} (references)"] = held
        if pinned:
            holders[f"process {pid} (views)"] = pinned
    needed, free, largest = facts["requested"], facts["free"], facts["largest_free"]
    if kind is ObjectTooLarge:
        return kind(
            f"an object of {needed:,} bytes can never fit into an arena of "
            f"{facts['capacity']:,}: create it with more capacity",
            needed=needed,
            free=free,
            largest_free=largest,
            capacity=facts["capacity"],
        )
    held_text = ", ".join(
        f"{who} {format_size(held)}"
        for who, held in sorted(holders.items(), key=lambda item: -item[1])[:_HOLDERS_NAMED_MAX]
    )
    message = (
        f"no room for {format_size(needed)}: {format_size(free)} free of "
        f"{format_size(facts['capacity'])}, largest free piece {format_size(largest)}; "
        f"held by {held_text or 'nobody'}"
    )
    if facts["building_bytes"]:
        message += f"; under construction {format_size(facts['building_bytes'])}"
    if facts["deferred_bytes"]:
        message += f"; ended but under live views {format_size(facts['deferred_bytes'])}"
    if facts["waiters"]:
        message += f"; {facts['waiters']} others wait for room"
        if facts["waiters"] >= _WAITERS_MAX:
            message += ", the most that may"
        if needed <= largest:
            message += " and come first: as many bytes as they ask for have passed them"
    return kind(
        message,
        needed=needed,
        free=free,
        largest_free=largest,
        capacity=facts["capacity"],
        holders=holders,
    )


def parse_size(size: int | str, what: str = "capacity") -> int:
    """Bytes of `4096`, `"512MiB"`, `"4 GiB"`, `"1.5G"`; K, M, G, T alone are binary. BadValue
    otherwise."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise BadValue(
            f"{what} must be a count of bytes or a text such as '4GiB', not "
            f"{type(size).__name__} {size!r}"
        )
    if isinstance(size, int):
        n_bytes = size
    else:
        match = _SIZE.fullmatch(size) if len(size) <= _SIZE_CHARS_MAX else None
        if match is None or match[2].upper() not in _UNITS:
            raise BadValue(
                f"{what} {size[:_SIZE_CHARS_MAX]!r} is not understood; write bytes (4096) or "
                "a text such as '512MiB'"
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


__all__ = [
    "ClientUsage",
    "Counters",
    "OwnerUsage",
    "Stats",
    "SweepReport",
    "format_size",
    "parse_size",
]
