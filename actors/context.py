"""Where the running code is: which actor, for which call, until when.

Owns the context variable of the running call. `mailbox` sets it, `node` reads it to pass on the
deadline and the chain of waiting actors; users reach it through `actors.current()`.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from .errors import NotInActor

if TYPE_CHECKING:
    from .client import Client
    from .handle import Handle

__all__ = ["CURRENT_CALL", "ActorContext", "CallContext", "current", "set_process_actor"]


class ActorContext:
    """What an actor knows of itself: `actors.current()`."""

    def __init__(
        self,
        *,
        name: str,
        uid: int,
        incarnation: int,
        handle: Handle,
        runtime: Client,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.name = name
        self.uid = uid
        self.incarnation = incarnation  # 1, and one more after each restart
        self.handle = handle  # of this actor itself, to be passed to others
        self.runtime = runtime  # lookup, spawn, host, store
        self.rank = rank  # position in its team (spawn_many), else 0
        self.size = size

    @property
    def cancelled(self) -> bool:
        """True when the caller gave up on the running call; a long `def` method may look."""
        call = CURRENT_CALL.get()
        return call is not None and call.cancelled

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the deadline of the running call; None without one."""
        call = CURRENT_CALL.get()
        if call is None or not call.deadline_ns:
            return None
        return (call.deadline_ns - time.monotonic_ns()) / 1e9


class CallContext:
    """One running call. `active` ends with it, so that a task left behind inherits nothing."""

    __slots__ = ("active", "actor", "cancelled", "chain", "deadline_ns", "trace")

    def __init__(
        self,
        actor: ActorContext,
        chain: tuple[int, ...] = (),
        deadline_ns: int = 0,
        trace: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.actor = actor
        self.chain = chain  # actors that wait for this call, this actor last
        self.deadline_ns = deadline_ns  # CLOCK_MONOTONIC; 0 is none
        self.trace = trace
        self.active = True
        self.cancelled = False


CURRENT_CALL: ContextVar[CallContext | None] = ContextVar("actors_call", default=None)


class _Process:
    """The one actor of an actor process: for its threads and background tasks."""

    actor: ActorContext | None = None


def set_process_actor(actor: ActorContext) -> None:
    """Called once by an actor process, before `__init__` of the actor."""
    _Process.actor = actor


def current() -> ActorContext:
    """The actor whose code is running. Raises NotInActor elsewhere."""
    call = CURRENT_CALL.get()
    if call is not None:
        return call.actor
    if _Process.actor is not None:
        return _Process.actor
    raise NotInActor(
        "actors.current() was called outside an actor; in the driver use the Runtime object"
    )
