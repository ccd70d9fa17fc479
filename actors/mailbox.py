"""An actor in its process: takes calls in, runs them in order, answers.

Owns the actor's object, its groups and their threads, and the calls that wait or run here. Called
by `node` on the loop thread; methods of the user's class run on that loop (`async def`) or in the
thread of their group (`def`).

What it promises: calls of one caller to one group start in the order in which they were sent; a
call that waits (for its thread, or for a ref that is not sealed) holds up that caller's calls to
that group and nothing else; every call is answered once, or its caller is gone or has cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from . import faults
from .arguments import RefArguments
from .codec import Encoded
from .context import CURRENT_CALL, ActorContext, CallContext
from .errors import ActorDied, NoSuchMethod, NotSerializable, RuntimeClosed
from .inbound import Credits, GroupThread, Inbound, cycle_error
from .messages import HEADER_BYTES, Flag, Kind, pack, parse
from .method import DEFAULT_GROUP, Method, Shape, methods_of
from .node import Node
from .stats import MethodStats
from .transport import Link

__all__ = ["LocalActor"]

log = logging.getLogger("actors")

_REFS = int(Flag.REFS)


class LocalActor:
    """See the module. `obj` may be any object; its public methods can be called."""

    def __init__(self, node: Node, obj: Any, context: ActorContext, *, cycles: bool = True) -> None:
        self.uid = context.uid
        self.obj = obj
        self.context = context
        self.stats: dict[str, MethodStats] = {}
        self.stopping = False
        self._node = node
        self._cycles = cycles
        self._methods: dict[bytes, tuple[Method, Callable[..., Any], MethodStats]] = {}
        for name, method in methods_of(type(obj)).items():
            stats = self.stats[name] = MethodStats()
            self._methods[name.encode()] = (method, getattr(obj, name), stats)
        self._calls: dict[tuple[Link, int], Inbound] = {}
        self._lanes: dict[tuple[Link, str], deque[Inbound]] = {}
        # Per lane the last `def` call that was given to its thread: nothing behind it may start
        # before the thread has.
        self._handed: dict[tuple[Link, str], Inbound] = {}
        self._threads: dict[str, GroupThread] = {}
        self._extra_threads: set[GroupThread] = set()
        self._ref_arguments = RefArguments(node.loop, node.codec, self._advance)
        self._idle: asyncio.Event | None = None

    @classmethod
    async def create(
        cls,
        node: Node,
        actor_class: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: ActorContext,
    ) -> LocalActor:
        """Run `__init__`: on the loop if the class has `async` methods, else in their thread.

        Raises whatever `__init__` raises.
        """
        call = CallContext(context)
        shapes = {m.shape for m in methods_of(actor_class).values()}
        if shapes & {Shape.INLINE, Shape.ASYNC, Shape.ASYNC_STREAM}:
            token = CURRENT_CALL.set(call)
            try:
                return cls(node, actor_class(*args, **kwargs), context)
            finally:
                call.active = False
                CURRENT_CALL.reset(token)
        obj: Any = object.__new__(actor_class)
        actor = cls(node, obj, context)
        await actor.run_in_thread(call, lambda: obj.__init__(*args, **kwargs))
        return actor

    async def run_in_thread(self, call: CallContext, function: Callable[[], Any]) -> Any:
        """Run in the thread of the default group; for `__init__` and `on_stop`."""
        done: asyncio.Future[Any] = self._node.loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(value)
                else:
                    done.set_exception(error)

        def job() -> None:
            CURRENT_CALL.set(call)
            try:
                value = function()
            except SystemExit as error:
                self._node.call_threadsafe(self._exit, error)
            except BaseException as error:  # crosses to the loop, where it is raised
                self._node.call_threadsafe(finish, None, error)
            else:
                self._node.call_threadsafe(finish, value, None)
            call.active = False

        self._thread(DEFAULT_GROUP).run_first(job)
        return await done

    # ---- taking in ----------------------------------------------------------------------------

    def receive(self, link: Link, head: tuple[int, ...], frame: memoryview) -> None:
        """A CALL, TELL or STREAM frame for this actor."""
        kind, flags, call_id, timeout_ns = head[1], head[2], head[4], head[10]
        chain: tuple[int, ...] = ()
        group = b""
        if not flags and not head[3] and not head[7] and not head[8]:
            at = HEADER_BYTES + head[6]
            name = bytes(frame[HEADER_BYTES:at])
            body = frame[at:]
            parts = None
        else:
            parts = parse(head, frame)
            name, group, chain, body = parts.method, parts.group, parts.chain, parts.body
        found = self._methods.get(name)
        if found is None or self.stopping:
            self._reject(link, call_id, kind, name.decode(), flags)
            return
        method, function, _ = found
        ctx = CallContext(
            self.context,
            (*chain, self.uid) if self._cycles and kind != Kind.TELL else (),
            time.monotonic_ns() + timeout_ns if timeout_ns else 0,
            (head[11], head[12], head[13]),
        )
        try:
            if self._cycles and self.uid in chain and not method.reentrant:
                raise cycle_error(self.context.name, method, chain, self._node.peers)
            if not len(body) and not flags:
                args: tuple[Any, ...] = ()
                kwargs: dict[str, Any] = {}
            elif parts is None:
                args, kwargs = self._node.codec.decode(body)
            else:
                args, kwargs = self._node.codec.decode(body, flags, parts.buffers, parts.inline)
        except Exception as error:  # whatever unpickling raises belongs to the caller
            self._ack(link, call_id, flags)
            self._answer_error(link, call_id, kind, method.name, error)
            return
        self._ack(link, call_id, flags)
        lane = (link, group.decode() if group else method.group)
        if self._node.tracing is not None and self._cycles:
            function = self._node.tracing.wrap(function, self.context.name, method, ctx.trace)
        call = Inbound(link, call_id, kind, method, function, lane, ctx, args, kwargs)
        if flags & _REFS:
            self._ref_arguments.resolve(call)
        if self.uid in chain:
            self._start_apart(call)
        elif lane in self._lanes:
            self._calls[link, call_id] = call
            self._lanes[lane].append(call)
        elif not self._try_start(call):
            self._calls[link, call_id] = call
            self._lanes[lane] = deque([call])
            handed = self._handed.get(lane)
            if handed is not None and handed.begun:  # it began while we looked
                self._advance(lane)

    def _ack(self, link: Link, call_id: int, flags: int) -> None:
        """The refs of the arguments are held here now; the caller may let go of them."""
        if not flags & _REFS:
            return
        if faults.hook is not None:
            faults.hook("call.decoded")
        link.send(pack(Kind.ACK, call_id))
        if faults.hook is not None:
            faults.hook("call.acked")

    def _reject(self, link: Link, call_id: int, kind: int, name: str, flags: int) -> None:
        self._ack(link, call_id, flags)
        if self.stopping:
            error: Exception = ActorDied(self.context.name, "it is being stopped")
        else:
            known = ", ".join(sorted(self.stats)) or "none"
            error = NoSuchMethod(
                f"actor {self.context.name!r} has no public method {name!r}; it has: {known}"
            )
        self._answer_error(link, call_id, kind, name, error)

    # ---- order --------------------------------------------------------------------------------

    def _try_start(self, call: Inbound) -> bool:
        """Start the head of a lane; False when it has to wait."""
        if call.cancelled:
            return True
        if call.resolving:
            return False
        shape = call.method.shape
        in_thread = shape is Shape.SYNC or shape is Shape.SYNC_STREAM
        if self._handed and not in_thread:
            handed = self._handed.get(call.lane)
            if handed is not None and not handed.begun:
                return False
        if shape is Shape.INLINE and call.kind != Kind.STREAM:
            self._run_inline(call)
        elif in_thread:
            thread = self._thread(call.lane[1])
            if thread.busy:
                if not call.thread_waits:
                    call.thread_waits = True
                    thread.waiting.append(call.lane)
                return False
            self._calls[call.link, call.call_id] = call
            self._handed[call.lane] = call
            self._start_in_thread(thread, call)
        else:
            self._calls[call.link, call.call_id] = call
            self._start_task(call)
        return True

    def _advance(self, lane: tuple[Link, str]) -> None:
        calls = self._lanes.get(lane)
        if calls is None:
            return
        while calls:
            if not self._try_start(calls[0]):
                return
            done = calls.popleft()
            if done.task is None and done.started_ns == 0:
                self._calls.pop((done.link, done.call_id), None)
        self._lanes.pop(lane, None)

    def _start_apart(self, call: Inbound) -> None:
        """A reentrant call of a cycle: its own group may be what waits for it."""
        self._calls[call.link, call.call_id] = call
        shape = call.method.shape
        if shape is Shape.SYNC or shape is Shape.SYNC_STREAM:
            thread = GroupThread(f"{self.context.name}/reentrant", self._run_in_thread)
            self._extra_threads.add(thread)
            self._start_in_thread(thread, call)
            thread.stop()
        else:
            self._start_task(call)

    def _thread(self, group: str) -> GroupThread:
        thread = self._threads.get(group)
        if thread is None:
            name = f"{self.context.name}/{group}" if group else self.context.name
            thread = self._threads[group] = GroupThread(name, self._run_in_thread)
        return thread

    # ---- running ------------------------------------------------------------------------------

    def _run_inline(self, call: Inbound) -> None:
        """A coroutine that cannot suspend: run it here, now."""
        call.started_ns = time.perf_counter_ns()
        token = CURRENT_CALL.set(call.ctx)
        try:
            coroutine = call.function(*call.args, **call.kwargs)
            coroutine.send(None)
        except StopIteration as stop:
            self._finish(call, stop.value)
        except BaseException as error:  # a method's error is its caller's, whatever it is
            self._finish_error(call, error)
        else:
            coroutine.close()
            self._finish_error(call, RuntimeError("a method without await has suspended"))
        finally:
            CURRENT_CALL.reset(token)

    def _start_task(self, call: Inbound) -> None:
        call.started_ns = time.perf_counter_ns()
        run = self._run_stream(call) if call.kind == Kind.STREAM else self._run_async(call)
        call.task = self._node.loop.create_task(run)

    async def _run_async(self, call: Inbound) -> None:
        call.begun = True
        CURRENT_CALL.set(call.ctx)
        try:
            if call.method.shape is Shape.ASYNC_STREAM:
                raise TypeError(f"{call.method.name} is a generator; call it with .stream")
            value = await call.function(*call.args, **call.kwargs)
        except BaseException as error:  # a method's error is its caller's, whatever it is
            self._finish_error(call, error)
        else:
            self._finish(call, value)

    async def _run_stream(self, call: Inbound) -> None:
        """Drive an async generator; what is none is the caller's mistake."""
        call.begun = True
        CURRENT_CALL.set(call.ctx)
        call.credits = Credits()
        item = 0
        try:
            if call.method.shape is not Shape.ASYNC_STREAM:
                raise TypeError(f"{call.method.name} is not a generator; call it without .stream")
            generator = call.function(*call.args, **call.kwargs)
            try:
                async for value in generator:
                    await call.credits.take()
                    item += 1
                    self._send_item(call, item, self._node.codec.encode(value))
            finally:
                await generator.aclose()
        except BaseException as error:  # a method's error is its caller's, whatever it is
            self._finish_error(call, error)
        else:
            self._finish(call, None)

    def _send_item(self, call: Inbound, item: int, encoded: Encoded) -> None:
        if not call.cancelled:
            self._node.reply(call.link, Kind.ITEM, call.call_id, encoded, item)

    def _start_in_thread(self, thread: GroupThread, call: Inbound) -> None:
        call.started_ns = time.perf_counter_ns()
        if call.kind == Kind.STREAM:
            call.credits = Credits()
        thread.submit(call)

    def _run_in_thread(self, call: Inbound) -> None:
        """On the group's thread. Answers are pickled here too, so that the loop stays free."""
        call.begun = True
        if self._lanes:
            self._node.call_threadsafe(self._advance, call.lane)
        CURRENT_CALL.set(call.ctx)
        encoded: Encoded | None = None
        failure: BaseException | None = None
        try:
            if call.kind == Kind.STREAM:
                self._run_sync_stream(call)
                value = None
            else:
                value = call.function(*call.args, **call.kwargs)
                if call.method.shape is Shape.SYNC_STREAM:
                    raise TypeError(f"{call.method.name} is a generator; call it with .stream")
            if call.kind != Kind.TELL:
                encoded = self._node.codec.encode(value)
        except BaseException as error:  # a method's error is its caller's, whatever it is
            failure = error
        with contextlib.suppress(RuntimeClosed):  # the run ended meanwhile: nobody waits
            self._node.call_threadsafe(self._thread_done, call, encoded, failure)
        failure = None  # its traceback holds this frame, and with it the call's arguments

    def _run_sync_stream(self, call: Inbound) -> None:
        if call.method.shape is not Shape.SYNC_STREAM:
            raise TypeError(f"{call.method.name} is not a generator; call it without .stream")
        assert call.credits is not None
        for item, value in enumerate(call.function(*call.args, **call.kwargs), 1):
            if not call.credits.take_blocking(call.ctx):
                return
            encoded = self._node.codec.encode(value)
            self._node.call_threadsafe(self._send_item, call, item, encoded)

    def _thread_done(
        self, call: Inbound, encoded: Encoded | None, failure: BaseException | None
    ) -> None:
        """Back on the loop: answer, then let the next call have the thread."""
        if failure is not None:
            self._finish_error(call, failure)
        else:
            self._finish(call, None, encoded)
        thread = self._threads.get(call.lane[1])
        if thread is None or self.uid in call.ctx.chain[:-1]:
            self._extra_threads = {t for t in self._extra_threads if t.alive}
            return
        thread.busy = False
        if self._handed.get(call.lane) is call:
            del self._handed[call.lane]
        self._advance(call.lane)
        while thread.waiting and not thread.busy:
            lane = thread.waiting.popleft()
            calls = self._lanes.get(lane)
            if calls:
                calls[0].thread_waits = False
            self._advance(lane)

    # ---- answering ----------------------------------------------------------------------------

    def _finish(self, call: Inbound, value: Any, encoded: Encoded | None = None) -> None:
        self._over(call, failed=False)
        if call.kind == Kind.TELL:
            call.link.send(pack(Kind.DONE, call.call_id))
            return
        if call.cancelled or call.link.closed:
            return
        if encoded is None:
            if value is None:
                call.link.send(pack(Kind.RESULT, call.call_id))
                return
            try:
                encoded = self._node.codec.encode(value)
            except Exception as error:  # NotSerializable, or the store is full
                self._answer_error(call.link, call.call_id, call.kind, call.method.name, error)
                return
        self._node.reply(call.link, Kind.RESULT, call.call_id, encoded)

    def _finish_error(self, call: Inbound, error: BaseException) -> None:
        self._over(call, failed=True)
        if isinstance(error, SystemExit):
            self._exit(error)
        elif call.cancelled and isinstance(error, asyncio.CancelledError):
            pass  # the caller asked for it, and does not wait for an answer
        else:
            self._answer_error(call.link, call.call_id, call.kind, call.method.name, error)

    def _over(self, call: Inbound, *, failed: bool) -> None:
        call.ctx.active = False
        call.task = None
        self._calls.pop((call.link, call.call_id), None)
        self.stats[call.method.name].record(time.perf_counter_ns() - call.started_ns, failed)
        if self._idle is not None and not self._calls:
            self._idle.set()

    def _answer_error(
        self, link: Link, call_id: int, kind: int, name: str, error: BaseException
    ) -> None:
        if kind == Kind.TELL:
            log.error("%s.%s (told, nobody waits) raised", self.context.name, name, exc_info=error)
            link.send(pack(Kind.DONE, call_id))
        elif not link.closed:
            trace = str(error) if isinstance(error, NotSerializable) else None
            encoded = self._node.codec.encode_error(error, trace)
            link.send(pack(Kind.ERROR, call_id, body=encoded.body))

    def _exit(self, error: SystemExit) -> None:
        """sys.exit in a method ends the process, as it would anywhere else."""
        code = error.code if isinstance(error.code, int) else (0 if error.code is None else 1)
        if self._node.on_exit is not None:
            self._node.on_exit(code)

    # ---- cancelling, credits, end -------------------------------------------------------------

    def cancel(self, link: Link, call_id: int) -> None:
        """The caller gave up. A `def` method that runs cannot be stopped; it may look (context)."""
        call = self._calls.get((link, call_id))
        if call is not None:
            self._cancel(call)

    def _cancel(self, call: Inbound) -> None:
        call.cancelled = call.ctx.cancelled = True
        if call.credits is not None:
            call.credits.grant(1)
        if call.task is not None:
            call.task.cancel()
            if not call.begun:  # a task that is cancelled before its first step never runs at all
                self._over(call, failed=True)
        elif not call.started_ns:  # still in its lane
            self._calls.pop((call.link, call.call_id), None)
            self._advance(call.lane)

    def credit(self, link: Link, call_id: int, n: int) -> None:
        call = self._calls.get((link, call_id))
        if call is not None and call.credits is not None:
            call.credits.grant(n)

    def caller_gone(self, link: Link) -> None:
        """Nobody waits for these any more; the end of a caller is a cancellation of its calls."""
        gone = [c for c in self._calls.values() if c.link is link and c.kind != Kind.TELL]
        for call in gone:  # first all, so that ending one does not start the next
            call.cancelled = True
        for call in gone:
            self._cancel(call)

    @property
    def n_waiting(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    @property
    def n_running(self) -> int:
        return len(self._calls) - self.n_waiting

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls, wait for the accepted ones; cancel them at the deadline."""
        self.stopping = True
        own = asyncio.current_task()
        if any(c.task is not own for c in self._calls.values()):
            self._idle = asyncio.Event()
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                for call in list(self._calls.values()):
                    if call.task is not own:
                        self._cancel(call)
                return False
        return True

    def close(self) -> None:
        """Let the threads end; does not wait for a method that runs."""
        for thread in self._threads.values():
            thread.stop()
