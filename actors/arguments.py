"""Top-level refs among the arguments of a call become values before the call starts.

Owns the wait for objects that are not sealed yet. Used by `mailbox` on its loop; the wait itself is
in a thread, so that it holds up one lane of calls and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from .codec import Codec
from .errors import CallTimeout
from .inbound import Inbound
from .method import Method, Shape

__all__ = ["RefArguments"]

# The store wakes a waiter by the seal, not by our cancellation: a thread that waits comes up for
# that after this long at most.
_WAIT_SLICE_S = 0.5


class RefArguments:
    """Of one actor. `on_ready(lane)` is called when a call that waited may start."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        codec: Codec,
        on_ready: Callable[[tuple[Any, str]], None],
    ) -> None:
        self._loop = loop
        self._codec = codec
        self._on_ready = on_ready
        self._tasks: set[asyncio.Task[None]] = set()

    def resolve(self, call: Inbound) -> None:
        """Fill in the values now, or mark the call as `resolving` and do it as soon as possible."""
        is_ref = self._codec.is_ref
        if not any(is_ref(a) for a in (*call.args, *call.kwargs.values())):
            return
        from shmstore import ObjectNotSealed

        try:
            self._fill(call, None)
        except ObjectNotSealed:
            call.resolving = True
            task = self._loop.create_task(self._wait(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        except Exception as error:  # freed, or not of this arena: the caller's error
            spoil(call, error)

    def _fill(self, call: Inbound, timeout_s: float | None) -> None:
        codec = self._codec

        def value_of(arg: Any) -> Any:
            return codec.get(arg, timeout_s) if codec.is_ref(arg) else arg

        args = tuple(value_of(a) for a in call.args)
        call.kwargs = {name: value_of(a) for name, a in call.kwargs.items()}
        call.args = args

    async def _wait(self, call: Inbound) -> None:
        try:
            await self._loop.run_in_executor(None, self._wait_blocking, call)
        except Exception as error:  # freed, or the store closed: the caller's error
            spoil(call, error)
        call.resolving = False
        self._on_ready(call.lane)

    def _wait_blocking(self, call: Inbound) -> None:
        """In a thread of the executor, until sealed, cancelled, or past the deadline."""
        from shmstore import ObjectNotSealed

        deadline_ns = call.ctx.deadline_ns
        while not call.cancelled and not call.link.closed:
            slice_s = _WAIT_SLICE_S
            if deadline_ns:
                slice_s = min(slice_s, (deadline_ns - time.monotonic_ns()) / 1e9)
                if slice_s <= 0:
                    raise CallTimeout(
                        f"an argument of {call.method.name} was not sealed before the deadline"
                    )
            try:
                self._fill(call, slice_s)
                return
            except ObjectNotSealed:
                continue


def spoil(call: Inbound, error: BaseException) -> None:
    """Its arguments cannot be had: it keeps its place in the order, and raises there."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    call.function = fail
    call.args, call.kwargs = (), {}
    call.method = Method(call.method.name, Shape.INLINE, call.method.group, False, True)
