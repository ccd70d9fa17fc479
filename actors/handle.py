"""Handles: how code talks to an actor. `handle.method(args)` is a call.

Owns the caller's face: `Handle`, its methods and their options, `Team`. A handle is a small name,
not a connection: it can be pickled, stored in the actor's own state, and outlives restarts. Usable
from the node's loop, from other loops and from plain threads of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from . import faults
from .calls import (
    BlockingCall,
    CallFuture,
    ForeignCall,
    Pending,
    Stream,
    StreamState,
    TellCall,
)
from .codec import decoding_node
from .errors import ActorDied, NoSuchMethod, QueueFull, RuntimeClosed, UsageError
from .messages import NAME_BYTES_MAX, Kind, pack
from .method import MethodFlag
from .node import Node
from .peers import AGENT, timeout_of

__all__ = ["CallOptions", "Handle", "RemoteMethod", "Team"]

WhenDown = Literal["fail", "wait"]
_NO_ARGS: tuple[Any, ...] = ()
_RETRIES_MAX = 1000


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What `using` changes."""

    timeout_s: float | None = None
    group: str = ""
    retries: int = 0
    when_down: WhenDown = "fail"

    def __post_init__(self) -> None:
        timeout_s = self.timeout_s
        if timeout_s is not None and not (_is_number(timeout_s) and timeout_s > 0):
            raise UsageError(f"timeout must be a positive number of seconds, got {timeout_s!r}")
        if not (isinstance(self.retries, int) and 0 <= self.retries <= _RETRIES_MAX):
            raise UsageError(f"retries must be 0 to {_RETRIES_MAX}, got {self.retries!r}")
        if self.when_down not in ("fail", "wait"):
            raise UsageError(f'when_down must be "fail" or "wait", got {self.when_down!r}')
        if not isinstance(self.group, str) or len(self.group.encode()) > NAME_BYTES_MAX:
            raise UsageError(
                f"a group is a name of at most {NAME_BYTES_MAX} bytes, got {self.group!r}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Handle:
    """A name for one actor. Public methods of its class appear as attributes.

    `stop`, `kill`, `watch` and `method` belong to the handle; a method of the actor with one of
    these names is reached by `handle.method("stop")`. Beyond the actor's methods a handle has
    `name`, `uid`, `class_name`, `pid` (0 when not known) and `state` (as far as this process has
    heard: starting, up, restarting, stopping or dead), unless the actor has methods of these names.
    """

    def __init__(
        self, node: Node, uid: int, name: str, class_name: str, methods: dict[str, int]
    ) -> None:
        self._node = node
        self._peer = node.peer(uid, name)
        self._class_name = class_name
        self._methods = methods
        self._name = name
        self._uid = uid

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there yet: the found method is stored as an attribute.
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _FACTS and name not in self._methods:
            return _FACTS[name](self)
        method = self.method(name)
        self.__dict__[name] = method
        return method

    def method(self, name: str) -> RemoteMethod:
        """The method of this name. Raises NoSuchMethod, with the names there are, nearest first."""
        flags = self._methods.get(name)
        if flags is None:
            import difflib

            near = difflib.get_close_matches(name, self._methods, 3)
            near += sorted(self._methods.keys() - near)
            raise NoSuchMethod(
                f"actor {self._name!r} ({self._class_name}) has no public method {name!r};"
                f" there is: {', '.join(near)}"
            )
        return RemoteMethod(self, name, flags)

    async def stop(self, timeout: float | None = None) -> None:
        """End it in order: accepted calls finish, `on_stop` runs; killed after `timeout` s."""
        await self._hub("stop_actor", self._uid, timeout)

    async def kill(self) -> None:
        """SIGKILL to its process group, now. Returns when it is gone; whatever its `Restart` says,
        it does not restart."""
        await self._hub("kill_actor", self._uid)

    def watch(self) -> Stream:
        """`async for event in handle.watch()`: what happens to this actor (`Event`), from now on.

        The first event says how it is now ("started" when it is up), so that nothing can fall
        between looking and watching. Ends when the actor has ended for good.
        """
        return _hub_method(self._node, "watch_actor", MethodFlag.STREAM).stream(self._uid)

    def _hub(self, method: str, *args: Any) -> Any:
        return _hub_method(self._node, method)(*args)

    def __reduce__(self) -> Any:
        return (_rebuild, (self._uid, self._name, self._class_name, self._methods))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._uid == self._uid and other._node is self._node

    def __hash__(self) -> int:
        return hash((Handle, self._uid))

    def __repr__(self) -> str:
        return f"<Handle {self._name!r} #{self._uid} of {self._class_name}>"


_FACTS: dict[str, Callable[[Handle], Any]] = {
    "name": lambda handle: handle._name,
    "uid": lambda handle: handle._uid,
    "class_name": lambda handle: handle._class_name,
    "pid": lambda handle: handle._peer.pid,
    "state": lambda handle: handle._peer.state,
}


def _rebuild(uid: int, name: str, class_name: str, methods: dict[str, int]) -> Handle:
    """Unpickle a handle: it belongs to the process that received it."""
    node = decoding_node()
    if node is None:
        raise RuntimeClosed(
            f"a handle of actor {name!r} was unpickled outside a message; pass handles as"
            " arguments or results, or ask `runtime.lookup(name)`"
        )
    return Handle(node, uid, name, class_name, methods)


def hub_handle(node: Node) -> Handle:
    """The hub of the run (the agent of the driver), as seen from any process of it."""
    return Handle(node, AGENT, "hub", "Hub", {})


def agent_method(node: Node, uid: int, name: str) -> RemoteMethod:
    """A method of the agent of actor process `uid`; used by the hub, whose link is a socketpair."""
    handle = Handle.__new__(Handle)
    handle._node = node
    handle._peer = node.agent_peer(uid)
    handle._class_name, handle._methods = "Agent", {}
    handle._name, handle._uid = handle._peer.name, AGENT
    return RemoteMethod(handle, name, 0)


def _hub_method(node: Node, name: str, flags: int = 0) -> RemoteMethod:
    return RemoteMethod(hub_handle(node), name, flags)


class RemoteMethod:
    """One method of one actor, with options. Calling it sends the call at once.

    `await m(x)`; `m.result(x)` blocks a thread; `m.tell(x)` is one-way; `m.stream(x)` iterates;
    `m.using(timeout=5, group="io", retries=2, when_down="wait")` is the same method with options.
    """

    __slots__ = ("_flags", "_handle", "_name", "_name_bytes", "_node", "_options", "_peer")

    def __init__(
        self, handle: Handle, name: str, flags: int, options: CallOptions | None = None
    ) -> None:
        self._handle = handle
        self._node = handle._node
        self._peer = handle._peer
        self._name = name
        self._name_bytes = name.encode()
        self._flags = flags
        self._options = options

    def using(
        self,
        *,
        timeout: float | None = None,
        group: str | None = None,
        retries: int | None = None,
        when_down: WhenDown | None = None,
    ) -> RemoteMethod:
        """This method with other options; those not given stay as they are.

        `timeout` in seconds, covers retries too. `retries` counts repetitions after ActorDied and
        applies to methods marked idempotent only; others fail at once, and a note on the error
        says why. Raises UsageError.
        """
        options = self._options or CallOptions()
        changes: dict[str, Any] = {
            "timeout_s": timeout, "group": group, "retries": retries, "when_down": when_down,
        }  # fmt: skip
        given = {name: value for name, value in changes.items() if value is not None}
        return RemoteMethod(self._handle, self._name, self._flags, replace(options, **given))

    def __call__(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Send the call; the future is its answer. Cancelling it cancels the call.

        Raises NotSerializable, MessageTooLarge, CallTimeout (inherited deadline) before sending.
        """
        node = self._node
        loop = asyncio._get_running_loop()
        options = self._options
        if loop is not node.loop:
            return self._foreign_call(loop, args, kwargs)
        if options is not None and options.retries:
            return self._with_retries(node, options, args, kwargs)
        call = CallFuture(loop=loop)
        call.node = node
        timeout_s = self._fill(call, Kind.CALL, args, kwargs)
        node.submit(call, timeout_s)
        return call

    def result(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The answer, for a thread without a loop: blocks this thread only.

        `timeout` in seconds is of the call, not an argument of the method. Raises CallTimeout,
        and WouldBlockLoop on the thread of the runtime's loop.
        """
        node = self._node
        call = BlockingCall(node)
        call.label = self._label
        if node.on_loop_thread():
            call.wait(0)
        method = self.using(timeout=timeout) if timeout is not None else self
        timeout_s = method._fill(call, Kind.CALL, args, kwargs)
        node.call_threadsafe(node.submit, call, timeout_s)
        return call.wait(timeout_s)

    def tell(self, *args: Any, **kwargs: Any) -> None:
        """One-way: no answer, no error, at most once. Raises QueueFull when too much is under way.

        On the node's loop the limit is exact; from other threads it is checked when it arrives.
        """
        node = self._node
        call = TellCall()
        self._fill(call, Kind.TELL, args, kwargs)
        if not node.on_loop_thread():
            node.call_threadsafe(node.submit, call)
            return
        peer = self._peer
        if peer.in_flight + peer.waiting_live >= peer.in_flight_max:
            raise QueueFull(
                f"{peer.in_flight_max} messages are under way to actor {peer.name!r} already;"
                " await calls instead of telling, or tell less often"
            )
        node.submit(call)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Iterate a generator method: `async for item in h.method.stream(...)`."""
        node = self._node
        if asyncio._get_running_loop() is not node.loop:
            raise UsageError("a stream is read on the event loop of its runtime")
        state = StreamState(node.loop)
        timeout_s = self._fill(state, Kind.STREAM, args, kwargs)
        node.submit(state, timeout_s)
        return Stream(node, state)

    # ---- how ----------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"{self._handle._name}.{self._name}"

    def _fill(
        self, call: Pending, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float | None:
        """Pickle and frame the call; returns its timeout in seconds."""
        node = self._node
        options = self._options
        chain, deadline_ns, trace = node.inherited()
        if kind is Kind.TELL:
            chain, deadline_ns = (), 0
        timeout_s: float | None = None
        timeout_ns = 0
        group = b""
        waits = False
        if options is not None:
            timeout_s, group = options.timeout_s, options.group.encode()
            waits = options.when_down == "wait"
        if deadline_ns or timeout_s is not None:
            timeout_s, timeout_ns = timeout_of(timeout_s, deadline_ns)
        encoded = node.codec.encode_call(args, kwargs)
        call.call_id = node.next_call_id()
        if node.tracing is not None:
            trace = node.tracing.begin(call.call_id, self._label)
        call.peer = self._peer
        call.label = self._label
        call.keep = encoded.keep
        call.timer = None
        call.waits_when_down = waits
        call.abandoned = False
        call.frame = pack(
            kind, call.call_id, self._peer.uid, flags=encoded.flags, method=self._name_bytes,
            group=group, chain=chain, body=encoded.body, buffers=encoded.buffers,
            inline=encoded.inline, timeout_ns=timeout_ns, trace=trace,
        )  # fmt: skip
        if faults.hook is not None:
            faults.hook("call.encoded")
        return timeout_s

    def _foreign_call(
        self,
        loop: asyncio.AbstractEventLoop | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> asyncio.Future[Any]:
        if loop is None:
            raise UsageError(
                f"{self._label}(...) needs a running event loop; in a plain thread use"
                f" {self._label}.result(...)"
            )
        node = self._node
        call = ForeignCall(node, loop)
        timeout_s = self._fill(call, Kind.CALL, args, kwargs)
        node.call_threadsafe(node.submit, call, timeout_s)
        return call.future

    def _with_retries(
        self, node: Node, options: CallOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> asyncio.Future[Any]:
        once = RemoteMethod(self._handle, self._name, self._flags, replace(options, retries=0))
        again = RemoteMethod(
            self._handle, self._name, self._flags,
            replace(options, retries=0, when_down="wait", timeout_s=None),
        )  # fmt: skip
        idempotent = bool(self._flags & MethodFlag.IDEMPOTENT)

        async def attempts() -> Any:
            try:
                return await once(*args, **kwargs)
            except ActorDied as error:
                if not idempotent:
                    error.add_note(
                        f"not retried: {self._label} is not marked @actors.method(idempotent=True)"
                    )
                    raise
                last = error
            for _ in range(options.retries):
                try:
                    return await again(*args, **kwargs)
                except ActorDied as error:
                    last = error
            raise last

        async def bounded() -> Any:
            if options.timeout_s is None:
                return await attempts()
            from .errors import CallTimeout

            try:
                async with asyncio.timeout(options.timeout_s):
                    return await attempts()
            except CallTimeout:
                raise
            except TimeoutError as error:
                raise CallTimeout(
                    f"{self._label} did not answer within {options.timeout_s} s, retries included"
                ) from error

        return node.loop.create_task(bounded())

    def __getattr__(self, name: str) -> NoReturn:
        if name == "remote":
            raise NoSuchMethod(
                f"{self._label} has no .remote(): call it directly, `await handle.{self._name}(x)`;"
                " see docs/from_ray.md"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<RemoteMethod {self._label}>"


class Team:
    """Several actors of one class: `team.each.m(x)` asks all, `team.any.m(x)` the least busy."""

    def __init__(self, members: list[Handle]) -> None:
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Handle]:
        return iter(self.members)

    def __getitem__(self, index: int) -> Handle:
        return self.members[index]

    @property
    def each(self) -> _Each:
        """All members at once; the answer is the list of their answers, in order."""
        return _Each(self.members)

    @property
    def any(self) -> Handle:
        """The member with the fewest calls of this process under way (the first of equals)."""
        up = [m for m in self.members if m._peer.state != "dead"] or self.members
        return min(up, key=lambda m: m._peer.in_flight + m._peer.waiting_live)

    async def stop(self, timeout: float | None = None) -> None:
        """Stop all, the last started first."""
        for member in reversed(self.members):
            await member.stop(timeout)


class _Each:
    def __init__(self, members: list[Handle]) -> None:
        self._members = members

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        methods = [member.method(name) for member in self._members]

        def ask_all(*args: Any, **kwargs: Any) -> asyncio.Future[list[Any]]:
            return asyncio.gather(*(method(*args, **kwargs) for method in methods))

        return ask_all
