"""Actors as another process sees them: states, the hub's notices, the record of a peer.

Owns the words in which a process hears of actors elsewhere. `node` keeps one `Peer` an actor;
`supervisor` writes the `Notice`s.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from .calls import Pending
from .errors import ActorDied, CallTimeout
from .transport import Link

__all__ = ["AGENT", "Notice", "Peer", "State", "timeout_of"]

# Every process answers to this actor number: its agent (in the driver: the hub).
AGENT = 0


class State:
    """States of an actor, as in notices and snapshots."""

    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DEAD = "dead"


@dataclass(frozen=True)
class Notice:
    """What the hub tells every node about an actor, in the order in which it happened.

    Answers of the hub carry one as well, and may be looked at later than news that came after
    them: `version` counts the changes of state, and what is older is no news.
    """

    uid: int
    name: str
    state: str
    node_uid: int  # process that it lives in: its own, or its host's
    incarnation: int
    address: str
    class_name: str = ""
    methods: tuple[tuple[str, int], ...] = ()
    pid: int = 0
    reason: str = ""
    exit_code: int | None = None
    stderr_tail: str = ""
    version: int = 0


class Peer:
    """An actor as this process sees it."""

    __slots__ = (
        "address", "class_name", "death", "in_flight", "in_flight_max", "incarnation", "link",
        "lost", "methods", "name", "node_uid", "pid", "state", "uid", "version", "waiting",
        "waiting_live",
    )  # fmt: skip

    def __init__(self, uid: int, name: str, in_flight_max: int) -> None:
        self.uid = uid
        self.name = name
        self.state = ""  # unknown until a notice or a lookup
        self.node_uid = uid
        self.incarnation = 0
        self.version = 0
        self.address = ""
        self.class_name = ""
        self.methods: tuple[tuple[str, int], ...] = ()
        self.pid = 0
        self.link: Link | None = None
        self.lost = 0  # incarnation whose link broke
        self.in_flight = 0
        self.in_flight_max = in_flight_max
        self.waiting: deque[Pending] = deque()
        self.waiting_live = 0  # of these, not abandoned
        self.death: tuple[str, int | None, str] | None = None

    def died(self) -> ActorDied:
        reason, exit_code, tail = self.death or ("it is not running", None, "")
        if self.state == State.RESTARTING:
            reason += '; it is being started again, and `using(when_down="wait")` waits for that'
        return ActorDied(self.name, reason, exit_code, tail)


def timeout_of(timeout_s: float | None, deadline_ns: int) -> tuple[float | None, int]:
    """Combine a call's own timeout with the inherited deadline: (seconds, ns), (None, 0) if none.

    Raises CallTimeout when the inherited deadline has passed already.
    """
    if deadline_ns:
        left_s = (deadline_ns - time.monotonic_ns()) / 1e9
        if left_s <= 0:
            raise CallTimeout("the deadline of the call that makes this call has passed")
        timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
    if timeout_s is None:
        return None, 0
    return timeout_s, max(1, int(timeout_s * 1e9))
