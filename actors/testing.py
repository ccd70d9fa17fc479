"""For tests of code that uses actors: faults on request, and a runtime inside one process.

Owns nothing at run time. `die_at` and `stop_at` end or stop this process at a named point of the
protocol (`faults.POINTS`); `drop` and `delay` lose or hold back frames that this process sends;
`LocalRuntime` runs actors in this process and loop, with everything but the processes. Tests only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import faults
from .errors import UsageError
from .local import LocalRuntime
from .messages import Kind

__all__ = ["LocalRuntime", "at_point", "delay", "die_at", "drop", "stop_at"]

_KIND_OFFSET = 4  # of the kind in a frame's header


def at_point(point: str, action: Callable[[], None], *, skip: int = 0) -> None:
    """Run `action` once in this process when it passes `point`, not counting `skip` passes.

    Replaces an earlier one. Raises UsageError for a point that does not exist.
    """
    if point not in faults.POINTS:
        raise UsageError(f"there is no point {point!r}; there are: {', '.join(faults.POINTS)}")
    left = skip

    def hook(passed: str) -> None:
        nonlocal left
        if passed != point:
            return
        if left:
            left -= 1
            return
        faults.set_hook(None)
        action()

    faults.set_hook(hook)


def die_at(point: str, *, skip: int = 0) -> None:
    """SIGKILL to this process at this point: nothing of it gets to clean up."""
    at_point(point, lambda: os.kill(os.getpid(), signal.SIGKILL), skip=skip)


def stop_at(point: str, *, skip: int = 0) -> None:
    """SIGSTOP to this process at this point; somebody else has to continue or kill it."""
    at_point(point, lambda: os.kill(os.getpid(), signal.SIGSTOP), skip=skip)


@contextmanager
def drop(kind: str, *, count: int = 1) -> Iterator[list[int]]:
    """Lose the next `count` frames of this kind ("RESULT", "CALL", ...) that this process sends.

    Yields a list that grows by one number for each frame lost.
    """
    with _outgoing(kind, faults.DROP, count) as hit:
        yield hit


@contextmanager
def delay(kind: str, seconds: float, *, count: int = 1) -> Iterator[list[int]]:
    """Hold back the next `count` frames of this kind for so long; later frames overtake them."""
    with _outgoing(kind, seconds, count) as hit:
        yield hit


@contextmanager
def _outgoing(kind: str, fate: float, count: int) -> Iterator[list[int]]:
    wanted = int(Kind[kind])
    hit: list[int] = []

    def decide(frame: bytes) -> float:
        if frame[_KIND_OFFSET] != wanted or len(hit) >= count:
            return 0.0
        hit.append(len(frame))
        return fate

    faults.set_outgoing(decide)
    try:
        yield hit
    finally:
        faults.set_outgoing(None)
