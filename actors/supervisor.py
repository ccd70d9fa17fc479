"""Who lives, who dies, who comes back: the run's table of actors.

Owns every actor's record: its process, its place, its restarts, its owner. Lives in the driver;
used by `hub` and `runtime` on the driver's loop. Semantics are Erlang's: an actor may die `max`
times within a window; beyond that it stays dead, and its owner is told: an actor by being killed.

What it promises: a death is announced to every process once, with reason, exit code and the last
lines of stderr; an actor's children die with it; nothing is left of a process group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .codec import Blob, make_remote_error
from .errors import (
    ActorDied,
    ActorError,
    InitFailed,
    NameTaken,
    NoSuchActor,
    RemoteError,
    RuntimeClosed,
    SpawnDied,
    SpawnFailed,
    TemplateDied,
    UsageError,
)
from .handle import agent_method
from .logs import LogPump, make_pipe
from .node import Node
from .peers import Notice, State
from .placement import Book, Placement
from .records import Event, Record, RunConfig, Spec, reason_of
from .rundir import RunDir, check_name
from .spawn import Spawner

__all__ = ["ACTORS_MAX", "Supervisor"]

log = logging.getLogger("actors")

# Actors of a run, dead ones not counted.
ACTORS_MAX = 4096
# Dead ones that are remembered, so that a late caller hears why.
DEAD_REMEMBERED_MAX = 1024
# Templates that may die one after the other while one actor is forked.
TEMPLATES_MAX = 5
STOP_TIMEOUT_S = 5.0
# Between the agent's word that it is done and the end of its process.
EXIT_WAIT_S = 1.0
EVENTS_WAITING_MAX = 4096


class Supervisor:
    """See the module."""

    def __init__(
        self, node: Node, rundir: RunDir, book: Book, config: RunConfig, spawner: Spawner
    ) -> None:
        self.records: dict[int, Record] = {}  # in the order of their start
        self.names: dict[str, int] = {}
        self.book = book
        self.books: dict[str, Book] = {"": book}
        self.closing = False
        self.on_escalation: Callable[[Event], None] | None = None
        self._node = node
        self._rundir = rundir
        self._config = config
        self._spawner = spawner
        self._next_uid = 1
        self._watchers: set[tuple[int | None, asyncio.Queue[Event]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._named: dict[str, list[asyncio.Future[None]]] = {}
        self._dead: deque[int] = deque()

    # ---- the table ----------------------------------------------------------------------------

    def find(self, uid: int) -> Record:
        record = self.records.get(uid)
        if record is None:
            raise NoSuchActor(f"this run has no actor #{uid}")
        return record

    async def lookup(self, name: str, timeout_s: float | None) -> Notice:
        """The live actor of this name; waits up to `timeout_s` for one to be registered."""
        if name not in self.names and timeout_s:
            waiter: asyncio.Future[None] = self._node.loop.create_future()
            self._named.setdefault(name, []).append(waiter)
            try:
                await asyncio.wait_for(waiter, timeout_s)
            except TimeoutError:
                pass  # said below, with the names that there are
            finally:
                left = [w for w in self._named.pop(name, []) if w is not waiter]
                if left:
                    self._named[name] = left
        if name not in self.names:
            there = ", ".join(sorted(self.names)) or "none"
            raise NoSuchActor(f"this run has no actor named {name!r}; there are: {there}")
        return self.records[self.names[name]].notice()

    def _register(self, spec: Spec, owner_uid: int) -> Record:
        if self.closing:
            raise RuntimeClosed("the runtime is ending and starts no more actors")
        if sum(r.alive for r in self.records.values()) >= ACTORS_MAX:
            raise SpawnFailed(f"the run has {ACTORS_MAX} actors already, which is the limit")
        uid = self._next_uid
        if not spec.name:
            spec = replace(spec, name=f"{spec.class_name.lower()}-{uid}")
        check_name("the name of an actor", spec.name)
        if spec.name in self.names:
            raise NameTaken(f"an actor named {spec.name!r} is alive in this run already")
        self._next_uid += 1
        record = Record(uid, spec, owner_uid)
        self.records[uid] = record
        self.names[spec.name] = uid
        return record

    def host(
        self, name: str, class_name: str, methods: tuple[tuple[str, int], ...], node_uid: int
    ) -> Notice:
        """Register an object that lives in an existing process."""
        record = self._register(Spec(name, class_name, methods, Blob(b"")), node_uid)
        record.hosted = True
        record.node_uid = node_uid
        record.incarnation = 1
        host = self.records.get(node_uid)
        record.address = host.address if host is not None else "hub:"
        record.pid = host.pid if host is not None else os.getpid()
        self._set_state(record, State.UP)
        self._tell("started", record)
        return record.notice()

    def reserve(self, name: str, n_gpus: int, n_cpus: int) -> None:
        """Cut a sub-book for a group of actors."""
        if name in self.books:
            raise NameTaken(f"there is a reservation {name!r} already")
        self.books[name] = self.book.cut(f"reservation {name!r}", n_gpus, n_cpus)

    def unreserve(self, name: str) -> None:
        """Return a group's devices and cores to the run."""
        if not name or name not in self.books:
            raise UsageError(f"there is no reservation {name!r}")
        book = self.books[name]
        if len(book.free_gpus) != len(book.gpus) or len(book.free_cpus) != len(book.cpus):
            raise UsageError(f"actors within reservation {name!r} are alive; end them first")
        del self.books[name]
        self.book.give_back(Placement(book.gpus, book.cpus))

    def unhost(self, uid: int) -> None:
        """Forget a hosted object."""
        record = self.find(uid)
        record.reason = "it is no longer hosted"
        self._bury(record, "stopped")

    # ---- starting -----------------------------------------------------------------------------

    async def spawn(self, spec: Spec, owner_uid: int) -> Notice:
        """Start an actor; returns when `__init__` has. Raises SpawnFailed, PlacementError, ..."""
        book = self.books.get(spec.group)
        if book is None:
            raise UsageError(f"there is no reservation {spec.group!r}")
        record = self._register(spec, owner_uid)
        try:
            record.placement = book.take(f"actor {record.spec.name!r}", spec.gpus, spec.cpus)
            record.book = book
            await self._launch(record)
        except BaseException as error:
            record.final = True
            record.reason = record.reason or f"it never started: {error or type(error).__name__}"
            if record.alive:
                self._bury(record, None)
                self._kill_group(record)
            raise
        self._tell("started", record)
        return record.notice()

    async def _launch(self, record: Record) -> None:
        """One incarnation, begun again when the template dies under it. Raises SpawnFailed."""
        for _ in range(TEMPLATES_MAX - 1):
            try:
                return await self._launch_once(record)
            except TemplateDied as death:
                if self.closing or not record.alive:
                    raise
                log.warning("actor %s is forked by another template: %s", record.spec.name, death)
                record.incarnation -= 1  # of this one nothing lives
        return await self._launch_once(record)

    async def _launch_once(self, record: Record) -> None:
        """Fork, construct, announce."""
        spec, node = record.spec, self._node
        record.incarnation += 1
        record.doom = record.reason = record.stderr_tail = ""
        record.exit_code = None
        record.exit = node.loop.create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pumps, ends = self._make_pumps(record)
        try:
            record.pid = await self._spawner.fork(self._request(record), [theirs.fileno(), *ends])
            record.pumps = pumps
        except BaseException:
            ours.close()
            for pump in pumps:
                pump.close()
            raise
        finally:
            theirs.close()
            for end in ends:
                os.close(end)
        node.adopt_socket(ours, record.uid, record.incarnation)
        directory = tuple(r.notice() for r in self.records.values() if r.state == State.UP)
        then = {r.uid: r.version for r in self.records.values()}
        try:
            construct = agent_method(node, record.uid, "construct")
            record.address = await construct(spec.blob, directory)
        except ActorDied as died:
            raise SpawnDied(
                spec.name, f"while starting: {died.reason}", died.exit_code, died.stderr_tail
            ) from None
        except RemoteError as error:
            record.final = record.incarnation == 1
            record.doom = f"__init__ raised {error.remote_type}: {error}"
            self._kill_group(record)
            raise make_remote_error(
                error.cause, error.remote_type, str(error), error.remote_traceback, InitFailed
            ) from None
        if spec.restart is None:
            record.forget_arguments()
        others = (r for r in self.records.values() if r is not record)
        missed = tuple(r.notice() for r in others if r.version != then.get(r.uid, 0))
        if missed:
            agent_method(node, record.uid, "notices").tell(missed)
        self._set_state(record, State.UP)

    def _request(self, record: Record) -> dict[str, Any]:
        """What the template and the child are told before anything is unpickled."""
        spec, config = record.spec, self._config
        env = {"CUDA_VISIBLE_DEVICES": ",".join(record.placement.gpus), **dict(spec.env)}
        return {
            "uid": record.uid,
            "name": spec.name,
            "incarnation": record.incarnation,
            "token": config.token,
            "arena": config.arena,
            "in_flight_max": config.in_flight_max,
            "socket": config.listen
            or self._rundir.actor_socket(record.uid, detached=spec.detached),
            "keys": config.keys,
            "tracing": config.tracing,
            "methods": dict(spec.methods),
            "sys_path": spec.sys_path,
            "hints": dict(spec.hints),
            "env": env,
            "cwd": spec.cwd,
            "cpus": record.placement.cpus,
            "memory_bytes": spec.memory_bytes,
            "detached": spec.detached,
            "rank": spec.rank,
            "size": spec.size,
        }

    def _make_pumps(self, record: Record) -> tuple[list[LogPump], list[int]]:
        """Pipes for stdout and stderr: our readers, and the write ends for the child."""
        spec, config = record.spec, self._config
        file = Path(spec.log) if spec.log is not None else None
        if file is None and config.log_dir is not None:
            file = config.log_dir / f"{spec.name}.log"
        if spec.detached:  # it outlives the pipes: straight to the file
            target = os.open(file or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            return [], [target, os.dup(target)]
        pumps, ends = [], []
        for to_stderr in (False, True):
            read, write = make_pipe()
            ends.append(write)
            pumps.append(
                LogPump(
                    self._node.loop, read, spec.name, to_stderr=to_stderr,
                    forward=config.forward_logs, file=file,
                )
            )  # fmt: skip
        return pumps, ends

    # ---- death --------------------------------------------------------------------------------

    def on_exit(self, pid: int, exit_code: int | None) -> None:
        """A process ended (the template says so)."""
        record = next((r for r in self.records.values() if r.pid == pid and not r.hosted), None)
        if record is None or not record.alive:
            return
        self._kill_group(record)  # what it had started itself
        for pump in record.pumps:
            pump.drain()
        record.exit_code = exit_code
        record.stderr_tail = record.pumps[1].last_words() if record.pumps else ""
        record.reason = record.doom or reason_of(exit_code)
        if record.exit is not None and not record.exit.done():
            record.exit.set_result(None)
        self._end_dependents(record)
        if record.stopping:
            record.reason = record.doom or "it was stopped"
            self._bury(record, "stopped")
        elif record.final or record.spec.restart is None or self.closing or record.first_start:
            self._bury(record, None if record.first_start else "died")
        elif self._may_restart(record):
            self._set_state(record, State.RESTARTING)
            self._tell("died", record, more=True)
            record.pid = 0
            self._start_task(self._restart(record))
        else:
            self._give_up(record)

    def _may_restart(self, record: Record) -> bool:
        """Count this death in the window."""
        policy = record.spec.restart
        assert policy is not None
        now = time.monotonic()
        record.deaths.append(now)
        while record.deaths and now - record.deaths[0] > policy.within:
            record.deaths.popleft()
        return len(record.deaths) <= policy.max

    async def _restart(self, record: Record) -> None:
        try:
            await self._launch(record)
        except ActorError as error:
            # Where its process died, or is dying by our hand, on_exit counts it and decides. Else
            # there is none: the system refused the fork, or no template lives long enough.
            log.warning("restart of actor %s failed: %s", record.spec.name, error)
            if not isinstance(error, InitFailed | SpawnDied) and record.alive:
                record.reason = f"it could not be started again: {error}"
                self._bury(record, "died")
            return
        record.restarts += 1
        self._tell("restarted", record)

    def _give_up(self, record: Record) -> None:
        policy = record.spec.restart
        assert policy is not None
        self._tell("died", record, more=True)
        record.reason = (
            f"it died more than {policy.max} times within {policy.within:g} s, the last time:"
            f" {record.reason}"
        )
        self._bury(record, "gave_up")
        event = record.event("gave_up")
        owner = self.records.get(record.owner_uid)
        if owner is not None and owner.alive and not owner.hosted:
            owner.doom = f"escalated from actor {record.spec.name!r}: {record.reason}"
            self._kill_group(owner)
        elif self.on_escalation is not None:
            self.on_escalation(event)

    def _end_dependents(self, record: Record) -> None:
        """What a dead process owned or hosted ends with it, the last started first."""
        for child in reversed(list(self.records.values())):
            if not child.alive or child.uid == record.uid:
                continue
            if child.hosted and child.node_uid == record.uid:
                child.reason = f"its host {record.spec.name!r} died: {record.reason}"
                self._bury(child, "died")
            elif child.owner_uid == record.uid and not child.spec.detached and not child.hosted:
                child.final = True
                child.doom = f"its owner {record.spec.name!r} died: {record.reason}"
                self._kill_group(child)

    def _bury(self, record: Record, kind: str | None) -> None:
        """It will not come back: free its name and place, tell everybody."""
        if self.names.get(record.spec.name) == record.uid:
            del self.names[record.spec.name]
        if record.book is not None:
            record.book.give_back(record.placement)
            record.book = None
        for pump in record.pumps:
            pump.close()
        record.forget_arguments()
        self._set_state(record, State.DEAD)
        if kind is not None:
            self._tell(kind, record)
        self._dead.append(record.uid)
        if len(self._dead) > DEAD_REMEMBERED_MAX:
            self.records.pop(self._dead.popleft(), None)

    def _kill_group(self, record: Record) -> None:
        if not record.hosted and record.pid:
            self._spawner.kill_group(record.pid)

    # ---- ending on purpose --------------------------------------------------------------------

    async def kill(self, uid: int) -> None:
        """SIGKILL; returns when the process is gone. No restart."""
        record = self.find(uid)
        if not record.alive:
            return
        record.final = True
        if record.hosted:
            self._bury(record, "died")
            return
        record.doom = record.doom or "it was killed by kill()"
        self._kill_group(record)
        await self._gone(record)

    async def stop(self, uid: int, timeout_s: float | None) -> None:
        """In order: what it owns first, then its accepted calls, `on_stop`, exit; else SIGKILL."""
        record = self.find(uid)
        if not record.alive:
            return
        if record.hosted:
            self.unhost(uid)
            return
        timeout_s = STOP_TIMEOUT_S if timeout_s is None else timeout_s
        record.final = record.stopping = True
        for child in reversed(list(self.records.values())):
            if child.owner_uid == uid and child.alive and not child.spec.detached:
                await self.stop(child.uid, timeout_s)
        await self._settled(record, timeout_s)
        if record.state == State.UP:
            self._set_state(record, State.STOPPING)
            stop = agent_method(self._node, uid, "stop").using(timeout=timeout_s + EXIT_WAIT_S)
            try:
                if not await stop(timeout_s):
                    record.doom = f"it was stopped; calls were cut off after {timeout_s:g} s"
            except ActorDied:
                pass  # it was quicker than its answer
            except ActorError as error:
                record.doom = f"it did not stop when asked ({error}), and was killed"
                self._kill_group(record)
        else:
            self._kill_group(record)
        try:
            await asyncio.wait_for(self._gone(record), EXIT_WAIT_S)
        except TimeoutError:
            record.doom = "it was asked to stop, did not end, and was killed"
            self._kill_group(record)
            await self._gone(record)

    async def _settled(self, record: Record, timeout_s: float) -> None:
        """Wait out a start that is under way."""
        try:
            async with asyncio.timeout(timeout_s):
                while record.state in (State.STARTING, State.RESTARTING):
                    waiter: asyncio.Future[None] = self._node.loop.create_future()
                    record.waiters.append(waiter)
                    await waiter
        except TimeoutError:
            record.doom = "it was stopped while starting"

    async def _gone(self, record: Record) -> None:
        """Wait for the end of the present incarnation."""
        if record.alive and record.exit is not None:
            await asyncio.shield(record.exit)

    async def close(self, timeout_s: float) -> None:
        """Stop everything that is not detached, the last started first."""
        self.closing = True
        for record in reversed(list(self.records.values())):
            if record.alive and not record.spec.detached:
                await self.stop(record.uid, timeout_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ---- telling ------------------------------------------------------------------------------

    def _set_state(self, record: Record, state: str) -> None:
        """The one place where a state changes: every process hears of it."""
        record.state = state
        record.version += 1
        for waiter in record.waiters:
            if not waiter.done():
                waiter.set_result(None)
        record.waiters.clear()
        notice = record.notice()
        self._node.note(notice)
        for other in self.records.values():
            if other.state == State.UP and not other.hosted and other.uid != record.uid:
                agent_method(self._node, other.uid, "notice").tell(notice)
        if state == State.UP:
            for waiter in self._named.pop(record.spec.name, []):
                if not waiter.done():
                    waiter.set_result(None)

    def _tell(self, kind: str, record: Record, *, more: bool = False) -> None:
        event = record.event(kind, more=more)
        for uid, events in self._watchers:
            if uid in (None, record.uid):
                if events.full():
                    events.get_nowait()  # a watcher that does not look loses the oldest
                events.put_nowait(event)

    def watch(self, uid: int | None) -> asyncio.Queue[Event]:
        """A queue that gets every event of this actor (None: of all) from now on."""
        events: asyncio.Queue[Event] = asyncio.Queue(EVENTS_WAITING_MAX)
        self._watchers.add((uid, events))
        if uid is not None:
            record = self.find(uid)
            if record.state in (State.UP, State.STOPPING):
                events.put_nowait(record.event("started"))
            elif not record.alive:
                events.put_nowait(record.event("died"))
        return events

    def unwatch(self, uid: int | None, events: asyncio.Queue[Event]) -> None:
        self._watchers.discard((uid, events))

    def _start_task(self, coroutine: Any) -> None:
        task = self._node.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
