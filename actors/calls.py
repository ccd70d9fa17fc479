"""Calls that wait for an answer, one class for each kind of caller.

Owns the state of a call between send and answer. `node` fills them in on its loop thread; the
caller holds one of: a future of the node's loop (`CallFuture`), a future of another loop
(`ForeignCall`), a blocked thread (`BlockingCall`), an async iterator (`Stream`), or nothing
(`TellCall`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from .errors import CallTimeout, RuntimeClosed, WouldBlockLoop

if TYPE_CHECKING:
    from .node import Node
    from .peers import Peer

__all__ = [
    "STREAM_WINDOW",
    "BlockingCall",
    "CallFuture",
    "ForeignCall",
    "Pending",
    "Stream",
    "StreamState",
    "TellCall",
]

# Items that a stream may have under way before its consumer has taken them.
STREAM_WINDOW = 256


class Pending(Protocol):
    """What `node` needs of a call in flight. All methods run on the node's loop thread."""

    call_id: int
    peer: Peer
    label: str  # "actor.method", for error texts
    frame: bytes | None  # None once it was handed to a link
    keep: tuple[object, ...]  # refs inside the frame, until they are handed to the link
    timer: asyncio.TimerHandle | None
    waits_when_down: bool
    abandoned: bool

    def settle(self, value: Any) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def item(self, value: Any) -> None: ...


class CallFuture(asyncio.Future[Any]):
    """A call of a coroutine on the node's own loop; cancelling it cancels the remote call."""

    __slots__ = (
        "abandoned", "call_id", "frame", "keep", "label", "node", "peer", "timer",
        "waits_when_down",
    )  # fmt: skip

    node: Node
    call_id: int
    peer: Peer
    label: str
    frame: bytes | None
    keep: tuple[object, ...]
    timer: asyncio.TimerHandle | None
    waits_when_down: bool
    abandoned: bool

    def cancel(self, msg: Any | None = None) -> bool:
        if super().cancel(msg):
            self.node.abandon(self.call_id)
            return True
        return False

    def settle(self, value: Any) -> None:
        if not self.done():
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        if not self.done():
            self.set_exception(error)

    def item(self, value: Any) -> None:
        """A call has no items; the node checks the kind before it gets here."""


class _Call:
    """Fields that the other kinds share."""

    def __init__(self) -> None:
        self.call_id = 0
        self.peer: Peer = None  # type: ignore[assignment]
        self.label = ""
        self.frame: bytes | None = None
        self.keep: tuple[object, ...] = ()
        self.timer: asyncio.TimerHandle | None = None
        self.waits_when_down = False
        self.abandoned = False

    def item(self, value: Any) -> None:
        """Only streams have items."""


class TellCall(_Call):
    """A message without an answer: only the count of those in flight wants to know its end."""

    def settle(self, value: Any) -> None:
        """Taken in."""

    def fail(self, error: BaseException) -> None:
        """Lost with the actor; a tell promises no more."""


class ForeignCall(_Call):
    """A call awaited on another event loop of this process."""

    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.future: asyncio.Future[Any] = loop.create_future()
        self._node = node
        self._loop = loop
        self.future.add_done_callback(self._on_done)

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._node.call_threadsafe(self._node.abandon, self.call_id)

    def settle(self, value: Any) -> None:
        self._hand_over(lambda: self.future.set_result(value))

    def fail(self, error: BaseException) -> None:
        self._hand_over(lambda: self.future.set_exception(error))

    def _hand_over(self, finish: Any) -> None:
        def on_their_loop() -> None:
            if not self.future.done():
                finish()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(on_their_loop)


class BlockingCall(_Call):
    """A call of a thread without a loop: `.result()`."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def settle(self, value: Any) -> None:
        self._value = value
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def wait(self, timeout_s: float | None) -> Any:
        """The answer. The thread sleeps; Ctrl-C interrupts it, and then the call is cancelled."""
        if self._node.on_loop_thread():
            raise WouldBlockLoop(
                f"{self.label}.result() was called on the event loop that has to bring the answer;"
                " await the call instead, or run this in a thread (asyncio.to_thread)"
            )
        try:
            arrived = self._done.wait(timeout_s)
        except BaseException:
            self._node.call_threadsafe(self._node.abandon, self.call_id)
            raise
        if not arrived:
            self._node.call_threadsafe(self._node.abandon, self.call_id)
            raise CallTimeout(f"{self.label} did not answer within {timeout_s} s")
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error  # or this frame and the error would hold each other


class StreamState(_Call):
    """The receiving end of a stream: what has arrived and was not taken yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.items: deque[Any] = deque()
        self.error: BaseException | None = None
        self.ended = False
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def settle(self, value: Any) -> None:
        self.ended = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ended = True
        self._wake()

    def item(self, value: Any) -> None:
        self.items.append(value)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def arrival(self) -> None:
        """Return when there is an item or the end."""
        while not self.items and not self.ended:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class Stream:
    """`async for item in actor.method.stream(...)`: items as they come, in order.

    The actor is at most `STREAM_WINDOW` items ahead. Leaving the loop early, or dropping the
    iterator, cancels the generator.
    """

    def __init__(self, node: Node, state: StreamState) -> None:
        self._node = node
        self._state = state
        self._taken = 0

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        state = self._state
        if not state.items:
            await state.arrival()
        if state.items:
            self._taken += 1
            if self._taken >= STREAM_WINDOW // 2 and not state.ended:
                self._node.grant(state, self._taken)
                self._taken = 0
            return state.items.popleft()
        error, state.error = state.error, None
        if error is None:
            raise StopAsyncIteration
        try:
            raise error
        finally:
            # The traceback holds this frame: without this the frame would hold the error in turn,
            # and everything its caller has in its variables would wait for the garbage collector.
            del error, state

    async def aclose(self) -> None:
        """Cancel the generator now."""
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if self._state.ended:
            return
        self._state.fail(RuntimeClosed("the stream was closed here"))
        if self._node.on_loop_thread():
            self._node.abandon(self._state.call_id)
        else:
            self._node.call_threadsafe(self._node.abandon, self._state.call_id)
