"""The hub: what every process of the run may ask the driver for.

Owns nothing; it is the agent (actor number 0) of the driver's node, reached by ordinary calls, and
passes them on to the supervisor. Methods run on the driver's loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from .errors import ActorError
from .handle import agent_method
from .node import Node
from .peers import Notice, State
from .records import Event, Spec
from .snapshot import process_memory
from .supervisor import Supervisor

__all__ = ["Hub"]

# An actor that does not answer within this is reported as unresponsive, with what is known.
STATS_TIMEOUT_S = 1.0


class Hub:
    """See the module."""

    def __init__(
        self, node: Node, supervisor: Supervisor, run: str = "", store: Any = None
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._run = run
        self._store = store
        self._started_s = time.time()

    async def spawn(self, spec: Spec, owner_uid: int) -> Notice:
        return await self._supervisor.spawn(spec, owner_uid)

    async def host(
        self, name: str, class_name: str, methods: tuple[tuple[str, int], ...], node_uid: int
    ) -> Notice:
        return self._supervisor.host(name, class_name, methods, node_uid)

    async def unhost(self, uid: int) -> None:
        self._supervisor.unhost(uid)

    async def lookup(self, name: str, timeout_s: float | None) -> Notice:
        return await self._supervisor.lookup(name, timeout_s)

    async def resolve(self, uid: int) -> Notice:
        """Where an actor is, for a process that got its handle before the news of it."""
        return self._supervisor.find(uid).notice()

    async def stop_actor(self, uid: int, timeout_s: float | None) -> None:
        await self._supervisor.stop(uid, timeout_s)

    async def kill_actor(self, uid: int) -> None:
        await self._supervisor.kill(uid)

    async def watch_actor(self, uid: int) -> AsyncIterator[Event]:
        """Events of one actor until its final one."""
        events = self._supervisor.watch(uid)
        try:
            while True:
                event = await events.get()
                yield event
                if event.final:
                    return
        finally:
            self._supervisor.unwatch(uid, events)

    async def watch_all(self) -> AsyncIterator[Event]:
        """Events of all actors, until the reader leaves."""
        events = self._supervisor.watch(None)
        try:
            while True:
                yield await events.get()
        finally:
            self._supervisor.unwatch(None, events)

    async def reserve(self, name: str, gpus: int, cpus: int) -> None:
        self._supervisor.reserve(name, gpus, cpus)

    async def unreserve(self, name: str) -> None:
        self._supervisor.unreserve(name)

    async def snapshot(self) -> dict[str, Any]:
        """State, memory and calls of every actor, use of the arena; asks all actors at once."""
        records = list(self._supervisor.records.values())
        rows = await asyncio.gather(*(self._row(r) for r in records))
        return {
            "run": self._run,
            "pid": os.getpid(),
            "time_s": time.time(),
            "uptime_s": time.time() - self._started_s,
            "memory": process_memory(os.getpid()),
            "pending_calls": len(self._node.pending),
            "late_replies": self._node.late_replies,
            "free_gpus": list(self._supervisor.book.free_gpus),
            "free_cpus": list(self._supervisor.book.free_cpus),
            "actors": list(rows),
            "store": asdict(self._store.stats()) if self._store is not None else None,
        }

    async def _row(self, record: Any) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": record.spec.name,
            "uid": record.uid,
            "class": record.spec.class_name,
            "state": record.state,
            "pid": record.pid,
            "incarnation": record.incarnation,
            "restarts": record.restarts,
            "owner": record.owner_uid,
            "hosted": record.hosted,
            "gpus": list(record.placement.gpus),
            "cpus": list(record.placement.cpus),
            "reason": record.reason,
            "exit_code": record.exit_code,
            "started_s": record.started_s,
        }
        local = self._node.locals.get(record.uid)
        if local is not None:
            row["waiting"], row["running"] = local.n_waiting, local.n_running
            row["methods"] = {n: s.as_dict() for n, s in local.stats.items() if s.count}
        elif record.state == State.UP and record.node_uid == record.uid:
            stats = agent_method(self._node, record.uid, "stats").using(timeout=STATS_TIMEOUT_S)
            try:
                row.update(await stats())
            except ActorError as error:
                row["unresponsive"] = str(error)
                row["memory"] = process_memory(record.pid)
        peer = self._node.peers.get(record.uid)
        row["in_flight_from_driver"] = peer.in_flight if peer is not None else 0
        return row
