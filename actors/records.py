"""What the supervisor knows of an actor: how it was asked for, how it is, what happened to it.

Owns `Spec` (a request to spawn, as it travels to the hub), `Record` (one actor over all its
incarnations), `Restart` and `Event` (both public). Data only; `supervisor` acts on it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from .codec import Blob
from .errors import UsageError
from .logs import LogPump
from .peers import Notice, State
from .placement import Book, Placement

__all__ = ["Event", "Record", "Restart", "RunConfig", "Spec", "reason_of"]


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after a death, at most `max` times within `within` seconds."""

    max: int = 3
    within: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.max, int) or self.max < 0:
            raise UsageError(f"Restart(max=...) is a whole number from 0 on, got {self.max!r}")
        if not self.within > 0:
            raise UsageError(f"Restart(within=...) is a positive time in s, got {self.within!r}")


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to an actor.

    `kind`: started, died, restarted, gave_up (after the last `died`: too many in the window),
    stopped.
    """

    kind: str
    name: str
    uid: int
    incarnation: int
    pid: int
    reason: str = ""
    exit_code: int | None = None
    stderr_tail: str = ""
    time_s: float = field(default_factory=time.time)

    @property
    def final(self) -> bool:
        """No other event of this actor will follow."""
        return self.kind in ("stopped", "gave_up") or (self.kind == "died" and not self.more)

    more: bool = False  # died, and an event says what becomes of it: restarted or gave_up


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything that is needed to start an actor, and to start it again."""

    name: str
    class_name: str
    methods: tuple[tuple[str, int], ...]
    blob: Blob
    restart: Restart | None = None
    gpus: int = 0
    cpus: int = 0
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    log: str | None = None
    memory_bytes: int = 0
    detached: bool = False
    rank: int = 0
    size: int = 1
    sys_path: tuple[str, ...] = ()
    hints: tuple[tuple[str, str | None], ...] = ()
    group: str = ""  # name of a reservation


class Record:
    """One actor, over all its incarnations."""

    def __init__(self, uid: int, spec: Spec, owner_uid: int) -> None:
        self.uid = uid
        self.spec = spec
        self.owner_uid = owner_uid
        self.node_uid = uid
        self.state = State.STARTING
        self.incarnation = 0
        self.version = 0  # changes of state
        self.pid = 0
        self.address = ""
        self.started_s = time.time()
        self.restarts = 0
        self.placement = Placement()
        self.book: Book | None = None
        self.deaths: deque[float] = deque()
        self.doom = ""  # reason that we give for a kill of ours
        self.final = False  # do not start it again
        self.stopping = False
        self.exit: asyncio.Future[None] | None = None  # of this incarnation
        self.pumps: list[LogPump] = []
        self.reason = ""
        self.exit_code: int | None = None
        self.stderr_tail = ""
        self.hosted = False
        self.waiters: list[asyncio.Future[None]] = []  # for the next change of state

    @property
    def first_start(self) -> bool:
        """Its first `__init__` has not returned yet: a failure now is the failure of `spawn`."""
        return self.state == State.STARTING

    @property
    def alive(self) -> bool:
        return self.state != State.DEAD

    def forget_arguments(self) -> None:
        """It will not be started again: what `__init__` was given may go, refs included."""
        self.spec = replace(self.spec, blob=Blob(b""))

    def notice(self) -> Notice:
        return Notice(
            self.uid, self.spec.name, self.state, self.node_uid, self.incarnation, self.address,
            self.spec.class_name, self.spec.methods, self.pid, self.reason, self.exit_code,
            self.stderr_tail, self.version,
        )  # fmt: skip

    def event(self, kind: str, *, more: bool = False) -> Event:
        return Event(
            kind, self.spec.name, self.uid, self.incarnation, self.pid, self.reason,
            self.exit_code, self.stderr_tail, more=more,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What every actor process of the run is told."""

    token: str
    arena: str | None
    in_flight_max: int
    log_dir: Path | None
    forward_logs: bool
    listen: str = ""  # "tcp://HOST"; empty: a Unix socket in the run's directory
    keys: tuple[str, str] | None = None  # CURVE, for tcp
    tracing: bool = False


def reason_of(exit_code: int | None) -> str:
    if exit_code is None:
        return "its process is gone (exit status unknown)"
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"its process exited with status {exit_code}"
