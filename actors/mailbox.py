"""An actor in its process: takes calls in, runs them in order, answers.

Owns the actor's object, its groups and their threads, and the calls that wait or run here. Called by
`node` on the loop thread; methods of the user's class run on that loop (`async def`) or in the
thread of their group (`def`).

What it promises: calls of one caller to one group start in the order in which they were sent; a
call that waits (for its thread, or for a ref that is not sealed) holds up that caller's calls to
that group and nothing else; every call is answered once, or its caller is gone or has cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import faults
from .calls import STREAM_WINDOW
from .codec import Encoded
from .context import CURRENT_CALL, ActorContext, CallContext
from .errors import ActorDied, CallCycle, NoSuchMethod, NotSerializable
from .messages import HEADER_BYTES, Flag, Kind, pack, parse
from .method import DEFAULT_GROUP, Method, Shape, methods_of
from .stats import MethodStats

if TYPE_CHECKING:
    from .node import Node
    from .transport import Link

__all__ = ["LocalActor"]

log = logging.getLogger("actors")

_REFS = int(Flag.REFS)


class _Inbound:
    """One call here. States: waiting in a lane, running, over."""

    __slots__ = (
        "args", "begun", "call_id", "cancelled", "credits", "ctx", "function", "kind", "kwargs", "lane",
        "link", "method", "resolving", "started_ns", "task", "thread_waits",
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
        self.begun = False  # its thread has really started it
        self.resolving = False  # some top-level ref is not sealed yet
        self.started_ns = 0
        self.task: asyncio.Task[None] | None = None
        self.thread_waits = False
        self.credits: _Credits | None = None


class _Credits:
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


class _GroupThread:
    """The thread in which the `def` methods of one group run, one at a time."""

    def __init__(self, name: str, run: Callable[[_Inbound], None]) -> None:
        self.busy = False
        self.waiting: deque[tuple[Link, str]] = deque()  # lanes whose head wants this thread
        self._jobs: queue.SimpleQueue[_Inbound | Callable[[], None] | None] = queue.SimpleQueue()
        self._run = run
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: _Inbound) -> None:
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
            if isinstance(job, _Inbound):
                contextvars.copy_context().run(self._run, job)
            else:
                contextvars.copy_context().run(job)
            del job  # arguments and refs must not live until the next call


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
        self._calls: dict[tuple[Link, int], _Inbound] = {}
        self._lanes: dict[tuple[Link, str], deque[_Inbound]] = {}
        # Per lane the last `def` call that was given to its thread: nothing behind it may start
        # before the thread has.
        self._handed: dict[tuple[Link, str], _Inbound] = {}
        self._threads: dict[str, _GroupThread] = {}
        self._extra_threads: set[_GroupThread] = set()
        self._resolvers: set[asyncio.Task[None]] = set()
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
        actor = cls(node, actor_class.__new__(actor_class), context)
        await actor.run_in_thread(call, lambda: actor_class.__init__(actor.obj, *args, **kwargs))
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
            except BaseException as error:
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
                raise self._cycle(method, chain)
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
        call = _Inbound(link, call_id, kind, method, function, lane, ctx, args, kwargs)
        if flags & _REFS:
            self._resolve_top(call)
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

    def _cycle(self, method: Method, chain: tuple[int, ...]) -> CallCycle:
        peers = self._node.peers
        path = " -> ".join(peers[uid].name if uid in peers else f"#{uid}" for uid in chain)
        return CallCycle(
            f"{path} -> {self.context.name}.{method.name} would wait for itself; use tell, or mark"
            " the method @actors.method(reentrant=True)"
        )

    # ---- refs as arguments --------------------------------------------------------------------

    def _resolve_top(self, call: _Inbound) -> None:
        """Top-level refs become values; those that are not sealed yet are awaited in a thread."""
        codec = self._node.codec
        if not any(codec.is_ref(a) for a in (*call.args, *call.kwargs.values())):
            return
        from shmstore import ObjectNotSealed

        try:
            self._fill_refs(call, None)
        except ObjectNotSealed:
            call.resolving = True
            task = self._node.loop.create_task(self._await_refs(call))
            self._resolvers.add(task)
            task.add_done_callback(self._resolvers.discard)
        except Exception as error:  # freed, or not of this arena: the caller's error
            self._spoil(call, error)

    def _fill_refs(self, call: _Inbound, timeout_s: float | None) -> None:
        codec = self._node.codec

        def value_of(arg: Any) -> Any:
            return codec.get(arg, timeout_s) if codec.is_ref(arg) else arg

        args = tuple(value_of(a) for a in call.args)
        call.kwargs = {name: value_of(a) for name, a in call.kwargs.items()}
        call.args = args

    async def _await_refs(self, call: _Inbound) -> None:
        """Wait for the seals off the loop, in slices so that a cancelled call lets its thread go."""
        from shmstore import ObjectNotSealed

        deadline_ns = call.ctx.deadline_ns

        def wait() -> None:
            while not call.cancelled and not call.link.closed:
                slice_s = _REF_WAIT_SLICE_S
                if deadline_ns:
                    slice_s = min(slice_s, (deadline_ns - time.monotonic_ns()) / 1e9)
                    if slice_s <= 0:
                        return
                try:
                    self._fill_refs(call, slice_s)
                    return
                except ObjectNotSealed:
                    continue

        try:
            await self._node.loop.run_in_executor(None, wait)
        except Exception as error:
            self._spoil(call, error)
        call.resolving = False
        self._advance(call.lane)

    def _spoil(self, call: _Inbound, error: BaseException) -> None:
        """Its arguments cannot be had: keep its place in the order, but raise instead of running."""

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        call.function = fail
        call.args, call.kwargs = (), {}
        call.method = Method(call.method.name, Shape.INLINE, call.method.group, False, True)

    # ---- order --------------------------------------------------------------------------------

    def _try_start(self, call: _Inbound) -> bool:
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

    def _start_apart(self, call: _Inbound) -> None:
        """A reentrant call of a cycle: its own group may be what waits for it."""
        self._calls[call.link, call.call_id] = call
        shape = call.method.shape
        if shape is Shape.SYNC or shape is Shape.SYNC_STREAM:
            thread = _GroupThread(f"{self.context.name}/reentrant", self._run_in_thread)
            self._extra_threads.add(thread)
            self._start_in_thread(thread, call)
            thread.stop()
        else:
            self._start_task(call)

    def _thread(self, group: str) -> _GroupThread:
        thread = self._threads.get(group)
        if thread is None:
            name = f"{self.context.name}/{group}" if group else self.context.name
            thread = self._threads[group] = _GroupThread(name, self._run_in_thread)
        return thread

    # ---- running ------------------------------------------------------------------------------

    def _run_inline(self, call: _Inbound) -> None:
        """A coroutine that cannot suspend: run it here, now."""
        call.started_ns = time.perf_counter_ns()
        token = CURRENT_CALL.set(call.ctx)
        try:
            coroutine = call.function(*call.args, **call.kwargs)
            coroutine.send(None)
        except StopIteration as stop:
            self._finish(call, stop.value)
        except BaseException as error:
            self._finish_error(call, error)
        else:
            coroutine.close()
            self._finish_error(call, RuntimeError("a method without await has suspended"))
        finally:
            CURRENT_CALL.reset(token)

    def _start_task(self, call: _Inbound) -> None:
        call.started_ns = time.perf_counter_ns()
        run = self._run_stream(call) if call.kind == Kind.STREAM else self._run_async(call)
        call.task = self._node.loop.create_task(run)

    async def _run_async(self, call: _Inbound) -> None:
        CURRENT_CALL.set(call.ctx)
        try:
            value = await call.function(*call.args, **call.kwargs)
        except BaseException as error:
            self._finish_error(call, error)
        else:
            self._finish(call, value)

    async def _run_stream(self, call: _Inbound) -> None:
        """Drive an async generator (or a plain coroutine, as a stream of one item)."""
        CURRENT_CALL.set(call.ctx)
        call.credits = _Credits()
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
        except BaseException as error:
            self._finish_error(call, error)
        else:
            self._finish(call, None)

    def _send_item(self, call: _Inbound, item: int, encoded: Encoded) -> None:
        if not call.cancelled:
            self._node.reply(call.link, Kind.ITEM, call.call_id, encoded, item)

    def _start_in_thread(self, thread: _GroupThread, call: _Inbound) -> None:
        call.started_ns = time.perf_counter_ns()
        if call.kind == Kind.STREAM:
            call.credits = _Credits()
        thread.submit(call)

    def _run_in_thread(self, call: _Inbound) -> None:
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
        except BaseException as error:
            failure = error
        self._node.call_threadsafe(self._thread_done, call, encoded, failure)

    def _run_sync_stream(self, call: _Inbound) -> None:
        if call.method.shape is not Shape.SYNC_STREAM:
            raise TypeError(f"{call.method.name} is not a generator; call it without .stream")
        assert call.credits is not None
        item = 0
        for value in call.function(*call.args, **call.kwargs):
            if not call.credits.take_blocking(call.ctx):
                return
            item += 1
            encoded = self._node.codec.encode(value)
            self._node.call_threadsafe(self._send_item, call, item, encoded)

    def _thread_done(
        self, call: _Inbound, encoded: Encoded | None, failure: BaseException | None
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

    def _finish(self, call: _Inbound, value: Any, encoded: Encoded | None = None) -> None:
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

    def _finish_error(self, call: _Inbound, error: BaseException) -> None:
        self._over(call, failed=True)
        if isinstance(error, SystemExit):
            self._exit(error)
        elif call.cancelled and isinstance(error, asyncio.CancelledError):
            pass  # the caller asked for it, and does not wait for an answer
        else:
            self._answer_error(call.link, call.call_id, call.kind, call.method.name, error)

    def _over(self, call: _Inbound, *, failed: bool) -> None:
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

    def _cancel(self, call: _Inbound) -> None:
        call.cancelled = call.ctx.cancelled = True
        if call.credits is not None:
            call.credits.grant(1)
        if call.task is not None:
            call.task.cancel()
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


# A thread that waits for a seal looks this often whether its call was cancelled.
_REF_WAIT_SLICE_S = 0.5
