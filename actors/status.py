"""What a run tells the outside: a status socket for `shmrl top`, Prometheus text over HTTP.

Owns the two servers of a driver. The socket lies in the run's 0700 directory and answers each
connection with one snapshot as JSON; the port is on the loopback only, and only when asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from .errors import RuntimeClosed, UsageError
from .rundir import status_socket

__all__ = ["StatusServers", "prometheus_text", "read_status"]

log = logging.getLogger("actors")

Snapshot = dict[str, Any]
# A reader that does not read, or asks for too much, is cut off.
_REQUEST_BYTES_MAX = 8192
_TIMEOUT_S = 5.0


class StatusServers:
    """Serve snapshots until closed."""

    def __init__(self, snapshot: Callable[[], Awaitable[Snapshot]]) -> None:
        self._snapshot = snapshot
        self._servers: list[asyncio.Server] = []

    async def start(self, path: str, port: int | None) -> None:
        """The socket at `path`; with `port` HTTP too. Raises UsageError if that is taken."""
        self._servers.append(await asyncio.start_unix_server(self._on_status, path))
        if port is None:
            return
        try:
            server = await asyncio.start_server(
                self._on_http, "127.0.0.1", port, limit=_REQUEST_BYTES_MAX
            )
        except OSError as error:
            raise UsageError(f"metrics_port {port} cannot be used: {error.strerror}") from error
        self._servers.append(server)

    async def close(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.close()
            await server.wait_closed()

    async def _on_status(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._answer(writer, lambda snapshot: json.dumps(snapshot).encode())

    async def _on_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.close()
            return
        method, _, path = request.split(b"\r\n", 1)[0].partition(b" ")
        if method != b"GET" or path.split(b" ")[0] not in (b"/metrics", b"/"):
            writer.write(
                b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            writer.close()
            return
        await self._answer(writer, lambda snapshot: _http(prometheus_text(snapshot).encode()))

    async def _answer(
        self, writer: asyncio.StreamWriter, render: Callable[[Snapshot], bytes]
    ) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                writer.write(render(await self._snapshot()))
                await writer.drain()
        except (TimeoutError, ConnectionError) as error:
            log.debug("a reader of the status went away: %r", error)
        finally:
            writer.close()


def read_status(name: str) -> Snapshot:
    """The snapshot of a live run of our user, from any process. Raises RuntimeClosed."""
    path = status_socket(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_TIMEOUT_S)
        try:
            sock.connect(str(path))
            chunks = list(iter(lambda: sock.recv(1 << 16), b""))
        except (ConnectionError, FileNotFoundError) as error:
            raise RuntimeClosed(f"the run {name!r} is ending, or has ended: {error}") from error
        except OSError as error:
            raise RuntimeClosed(f"the run {name!r} does not answer: {error}") from error
    if not chunks:
        raise RuntimeClosed(f"the run {name!r} is ending")
    snapshot: Snapshot = json.loads(b"".join(chunks))
    return snapshot


def _http(body: bytes) -> bytes:
    head = (
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def prometheus_text(snapshot: Snapshot) -> str:
    """The snapshot in the text format of Prometheus (0.0.4)."""
    actors = snapshot["actors"]
    families = [
        ("actor_up", "gauge", "1 while the actor takes calls", _per_actor(
            actors, lambda a: int(a["state"] == "up"))),
        ("actor_restarts_total", "counter", "restarts after a death", _per_actor(
            actors, lambda a: a["restarts"])),
        ("actor_calls_waiting", "gauge", "calls that wait inside the actor", _per_actor(
            actors, lambda a: a.get("waiting"))),
        ("actor_calls_running", "gauge", "calls that run", _per_actor(
            actors, lambda a: a.get("running"))),
        ("actor_memory_pss_bytes", "gauge", "proportional memory of the process", _per_actor(
            actors, lambda a: (a.get("memory") or {}).get("pss_bytes"))),
        ("actor_method_calls_total", "counter", "calls that ended", _per_method(
            actors, "count", 1)),
        ("actor_method_errors_total", "counter", "calls that raised", _per_method(
            actors, "errors", 1)),
        ("actor_method_seconds_p50", "gauge", "median duration", _per_method(
            actors, "p50_us", 1e-6)),
        ("actor_method_seconds_p99", "gauge", "99th percentile of the duration", _per_method(
            actors, "p99_us", 1e-6)),
        ("arena_owner_bytes", "gauge", "bytes of an owner's sessions", _per_owner(snapshot, 2)),
        ("arena_owner_sessions", "gauge", "sessions of an owner", _per_owner(snapshot, 0)),
        ("arena_used_bytes", "gauge", "bytes in use", _of_store(snapshot, "used")),
        ("arena_capacity_bytes", "gauge", "bytes there are", _of_store(snapshot, "capacity")),
    ]  # fmt: skip
    lines = []
    for name, kind, text, samples in families:
        full = f"shmrl_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        for labels, value in samples:
            pairs = {"run": snapshot["run"], **labels}
            inside = ",".join(f'{k}="{_escape(v)}"' for k, v in pairs.items())
            lines.append(f"{full}{{{inside}}} {value}")
    return "\n".join(lines) + "\n"


Samples = Iterable[tuple[dict[str, str], Any]]


def _per_actor(actors: list[Snapshot], value: Callable[[Snapshot], Any]) -> Samples:
    return [({"actor": a["name"]}, v) for a in actors if (v := value(a)) is not None]


def _per_method(actors: list[Snapshot], field: str, factor: float) -> Samples:
    return [
        ({"actor": a["name"], "method": name}, stats[field] * factor)
        for a in actors
        for name, stats in a.get("methods", {}).items()
    ]


def _per_owner(snapshot: Snapshot, index: int) -> Samples:
    owners = (snapshot.get("store") or {}).get("by_owner", {})
    return [({"owner": owner}, usage[index]) for owner, usage in owners.items()]


def _of_store(snapshot: Snapshot, field: str) -> Samples:
    store = snapshot.get("store")
    return [({}, store[field])] if store else []


def _escape(text: str) -> str:
    return str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
