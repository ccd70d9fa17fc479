"""What lies around on this machine: arenas with and without living users, and their repair.

Owns the verdicts, not the arenas: the core lists and removes. Called by the command line and by
whoever wants a clean machine before a run. Never touches an arena that a live process uses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from . import _core
from .store import DIRECTORY, Store


class Condition(StrEnum):
    """What one arena file is."""

    LIVE = "live"  # at least one process has it
    DEBRIS = "debris"  # nobody has it: its users died or left without unlinking
    UNREADABLE = "unreadable"  # another version's, damaged, or not an arena


@dataclass(frozen=True, slots=True)
class Arena:
    """One arena of this user. Sizes in bytes; `age_s` since its creation, by the wall clock."""

    name: str
    path: str
    condition: Condition
    detail: str
    capacity: int
    file_bytes: int
    live_clients: int
    creator_pid: int
    age_s: float


def survey(*, directory: str = DIRECTORY) -> list[Arena]:
    """All arenas of this user, by name."""
    return [_arena(facts) for facts in sorted(_core.arenas(directory), key=lambda a: a["name"])]


def clean(*, directory: str = DIRECTORY) -> list[Arena]:
    """Remove debris and leftovers of crashed creates; returns what was removed."""
    return [_arena(facts) for facts in _core.arenas(directory, remove_debris=True)]


def audit(name: str, *, directory: str = DIRECTORY) -> list[str]:
    """Sweep and check one living arena; [] when it is sound."""
    with Store.attach(name, directory=directory) as store:
        store.sweep()
        return store.check()


def _arena(facts: _core.ArenaFacts) -> Arena:
    if facts["status"] != "ok":
        condition = Condition.UNREADABLE
    else:
        condition = Condition.LIVE if facts["live_clients"] else Condition.DEBRIS
    created_s = facts["created_unix_ns"] / 1e9
    return Arena(
        name=facts["name"] or "(none)",
        path=facts["path"],
        condition=condition,
        detail=facts["detail"],
        capacity=facts["capacity"],
        file_bytes=facts["file_bytes"],
        live_clients=facts["live_clients"],
        creator_pid=facts["creator_pid"],
        age_s=max(0.0, time.time() - created_s) if created_s else 0.0,
    )


__all__ = ["Arena", "Condition", "audit", "clean", "survey"]
