"""Named points at which a test may stop, delay or kill the runtime.

Owns one hook per process; `actors.testing` sets it. In production it is None, and a point costs
one comparison. The names are listed here so that a test cannot wait for a point that is not there.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["POINTS", "hook", "set_hook"]

POINTS = (
    "call.encoded",  # caller: arguments pickled, refs held, nothing sent
    "call.sent",  # caller: frame handed to the link
    "call.received",  # actor: frame here, nothing unpickled
    "call.decoded",  # actor: refs held here, ACK not sent
    "call.acked",  # actor: ACK handed to the link
    "reply.encoded",  # actor: result pickled, refs held, nothing sent
    "reply.sent",  # actor: frame handed to the link
    "reply.received",  # caller: frame here, nothing unpickled
    "reply.decoded",  # caller: refs held here, ACK not sent
    "reply.acked",  # caller: ACK handed to the link
)

hook: Callable[[str], None] | None = None


def set_hook(function: Callable[[str], None] | None) -> None:
    """Call `function(point)` at each point from now on; None to stop."""
    global hook
    hook = function


# What `outgoing` answers for a frame that is to be lost.
DROP = float("inf")

outgoing: Callable[[bytes], float] | None = None


def set_outgoing(function: Callable[[bytes], float] | None) -> None:
    """Ask `function(frame)` for the fate of each frame: 0 sends it, DROP loses it, else seconds."""
    global outgoing
    outgoing = function
