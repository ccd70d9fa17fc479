"""One call inside its actor, and the thread in which `def` methods run.

Owns the record of a call between its arrival and its answer, the credits of a stream, and the
threads of groups. Used by `mailbox` only, which decides when a call starts.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from .calls import STREAM_WINDOW
from .context import CallContext
from .errors import CallCycle
from .method import Method
from .peers import Peer
from .transport import Link

__all__ = ["Credits", "GroupThread", "Inbound", "cycle_error"]


class Inbound:
    """One call here. States: waiting in a lane, running, over."""

    __slots__ = (
        "args", "begun", "call_id", "cancelled", "credits", "ctx", "function", "kind", "kwargs",
        "lane", "link", "method", "resolving", "started_ns", "task", "thread_waits",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        call_id: int,
        kind: int,
        method: Method,
        function: Callable[..., Any],
        lane: tuple[Link, str],
        ctx: CallContext,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.link = link
        self.call_id = call_id
        self.kind = kind
        self.method = method
        self.function = function
        self.lane = lane
        self.ctx = ctx
        self.args = args
        self.kwargs = kwargs
        self.cancelled = False
        self.begun = False  # its thread, or its task, has really started it
        self.resolving = False  # some top-level ref is not sealed yet
        self.started_ns = 0
        self.task: asyncio.Task[None] | None = None
        self.thread_waits = False
        self.credits: Credits | None = None


class Credits:
    """Items that a stream may still send; the generator waits here when there are none."""

    def __init__(self) -> None:
        self.left = STREAM_WINDOW
        self.ready = asyncio.Event()
        self.lock = threading.Condition()  # for generators in threads

    def grant(self, n: int) -> None:
        with self.lock:
            self.left += n
            self.lock.notify_all()
        self.ready.set()

    async def take(self) -> None:
        while self.left <= 0:
            self.ready.clear()
            await self.ready.wait()
        self.left -= 1

    def take_blocking(self, ctx: CallContext) -> bool:
        """False when the caller is gone."""
        with self.lock:
            while self.left <= 0 and not ctx.cancelled:
                self.lock.wait()
            self.left -= 1
            return not ctx.cancelled


class GroupThread:
    """The thread in which the `def` methods of one group run, one at a time."""

    def __init__(self, name: str, run: Callable[[Inbound], None]) -> None:
        self.busy = False
        self.waiting: deque[tuple[Link, str]] = deque()  # lanes whose head wants this thread
        self._jobs: queue.SimpleQueue[Inbound | Callable[[], None] | None] = queue.SimpleQueue()
        self._run = run
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Inbound) -> None:
        self.busy = True
        self._jobs.put(call)

    def run_first(self, job: Callable[[], None]) -> None:
        """Run something that is not a call: `__init__` and `on_stop` share the methods' thread."""
        self._jobs.put(job)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End after the running call; does not wait."""
        self._jobs.put(None)

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Inbound):
                contextvars.copy_context().run(self._run, job)
            else:
                contextvars.copy_context().run(job)
            del job  # arguments and refs must not live until the next call


def cycle_error(
    name: str, method: Method, chain: tuple[int, ...], peers: Mapping[int, Peer]
) -> CallCycle:
    """The call would wait for the actor `name`, which waits for it; says on what way."""
    path = " -> ".join(peers[uid].name if uid in peers else f"#{uid}" for uid in chain)
    return CallCycle(
        f"{path} -> {name}.{method.name} would wait for itself; use tell, or mark the method"
        " @actors.method(reentrant=True)"
    )
