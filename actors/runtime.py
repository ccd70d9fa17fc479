"""The run, as the driver sees it: `async with actors.Runtime(...) as rt`.

Owns the life of a run: its directory, its store if it made one, the node, the supervisor, the
template process; and takes all of it down again, in reverse, whatever happened in between.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .client import Client, check_env
from .context import ActorContext
from .errors import RuntimeClosed, UsageError
from .hub import Hub
from .mailbox import LocalActor
from .node import IN_FLIGHT_MAX, Node
from .peers import AGENT, State
from .placement import Book
from .records import Event, RunConfig
from .rundir import RunDir, check_name
from .spawn import Spawner
from .status import StatusServers
from .supervisor import STOP_TIMEOUT_S, Supervisor
from .tracing import Tracing

__all__ = ["Runtime", "run"]

T = TypeVar("T")
_TOKEN_BYTES = 32
_PORT_MAX = 65535
_WHEN_OPEN = ("_node", "hub", "store")
"""What a runtime has from the moment on at which it is entered."""


class Runtime(Client):
    """A run and all its actors; leaving the block ends them, the last started first.

    `store`: a capacity ("4GiB": an arena of the run's name is made, and removed at the end), or a
    `shmstore.Store` of your own. `gpus`: device numbers or a count (default: found in /proc).
    `cpus`: cores that may be handed out. `transport`: between actors, Unix sockets, or ZeroMQ with
    CURVE over tcp on the loopback. `preload`: modules that are imported once, in the template, so
    that each actor starts with them, also after a death; their import may start no thread and touch
    no device; one that raises is left to whoever imports it next. `env`: variables that all actors
    start with, set before those imports. `tracing`: OpenTelemetry spans around calls. `log_dir`:
    one file an actor. `metrics_port`: Prometheus text over HTTP on this machine's loopback.
    `on_escalation`: called when an actor of the driver has died too often. Times in seconds.
    """

    def __init__(
        self,
        store: int | str | Any | None = None,
        name: str | None = None,
        *,
        gpus: int | Sequence[int | str] | None = None,
        cpus: Sequence[int] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        forward_logs: bool = True,
        metrics_port: int | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        stop_timeout: float = STOP_TIMEOUT_S,
        transport: Literal["unix", "tcp"] = "unix",
        tracing: bool = False,
        preload: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        on_escalation: Callable[[Event], None] | None = None,
    ) -> None:
        if in_flight_max < 1:
            raise UsageError(f"in_flight_max must be at least 1, got {in_flight_max}")
        if metrics_port is not None and not (
            isinstance(metrics_port, int) and 0 <= metrics_port <= _PORT_MAX
        ):
            raise UsageError(f"metrics_port is a port of 0 to {_PORT_MAX}, got {metrics_port!r}")
        if not stop_timeout > 0:
            raise UsageError(f"stop_timeout must be a positive time in s, got {stop_timeout}")
        self.name = check_name(
            "the name of a run", name or f"run-{os.getpid()}-{os.urandom(3).hex()}"
        )
        self._store_option = store
        self._book = Book(gpus, cpus)
        self._log_dir = Path(log_dir).absolute() if log_dir is not None else None
        self._forward_logs = forward_logs
        self._metrics_port = metrics_port
        self._in_flight_max = in_flight_max
        if transport not in ("unix", "tcp"):
            raise UsageError(f'transport is "unix" or "tcp", got {transport!r}')
        self._transport = transport
        self._preload = (*(["shmstore"] if store is not None else []), *_check_preload(preload))
        self._env = check_env(env)
        self._tracing = Tracing() if tracing else None
        self._stop_timeout_s = stop_timeout
        self._on_escalation = on_escalation
        self._entered = False
        self._owns_store = False
        self._rundir: RunDir | None = None
        self._spawner: Spawner | None = None
        self._supervisor: Supervisor | None = None
        self._servers: StatusServers | None = None

    if not TYPE_CHECKING:  # mypy would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Asked for what is not there. Raises RuntimeClosed for what will be, once entered."""
            if name in _WHEN_OPEN:
                raise RuntimeClosed("this runtime was not entered: use it within `async with`")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def __aenter__(self) -> Runtime:
        if self._entered:
            raise RuntimeClosed("a Runtime is entered once; make another one")
        self._entered = True
        self._rundir = RunDir(self.name)
        try:
            self._open()
            self._servers = StatusServers(self.snapshot)
            await self._servers.start(self._rundir.socket_path("status"), self._metrics_port)
        except BaseException:
            await self._close()
            raise
        return self

    def _open(self) -> None:
        assert self._rundir is not None
        loop = asyncio.get_running_loop()
        spawner = self._make_spawner(loop)
        spawner.start()  # first: it warms up on another core while we go on
        self._spawner = spawner
        store = self.store = self._open_store()
        token = os.urandom(_TOKEN_BYTES)
        keys: tuple[str, str] | None = None
        if self._transport == "tcp":
            from .zmq_lane import new_keys

            keys = (new := new_keys()).public.decode(), new.secret.decode()
        node = Node(
            AGENT, token, store=store, in_flight_max=self._in_flight_max,
            keys=(keys[0].encode(), keys[1].encode()) if keys else None,
        )  # fmt: skip
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        config = RunConfig(
            token=token.hex(),
            arena=store.name if store is not None else None,
            in_flight_max=self._in_flight_max,
            log_dir=self._log_dir,
            forward_logs=self._forward_logs,
            listen="tcp://127.0.0.1" if self._transport == "tcp" else "",
            keys=keys,
            tracing=self._tracing is not None,
        )
        node.tracing = self._tracing
        self._supervisor = Supervisor(node, self._rundir, self._book, config, spawner)
        self._supervisor.on_escalation = self._on_escalation
        super().__init__(node, store)
        context = ActorContext(name="hub", uid=AGENT, incarnation=1, handle=self.hub, runtime=self)
        node.locals[AGENT] = LocalActor(
            node, Hub(node, self._supervisor, self.name, store), context, cycles=False
        )
        hub = node.peer(AGENT, "hub")
        hub.state, hub.link = State.UP, node.links[AGENT]

    def _make_spawner(self, loop: asyncio.AbstractEventLoop) -> Spawner:
        """What starts processes; `actors.testing` has another."""
        return Spawner(loop, self._on_exit, self._preload, self._env)

    def _open_store(self) -> Any:
        option = self._store_option
        if option is None:
            return None
        from shmstore import Store

        if isinstance(option, Store):
            return option
        self._owns_store = True
        return Store.create(self.name, capacity=option)

    def _on_exit(self, pid: int, exit_code: int | None) -> None:
        if self._supervisor is not None:
            self._supervisor.on_exit(pid, exit_code)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        """Take everything down, in reverse; each step runs whatever the others did."""
        detached = False
        if self._servers is not None:
            await self._servers.close()
        try:
            if self._supervisor is not None:
                detached = any(
                    r.alive and r.spec.detached for r in self._supervisor.records.values()
                )
                await self._supervisor.close(self._stop_timeout_s)
        finally:
            try:
                if self._spawner is not None:
                    await self._spawner.close()
            finally:
                self._close_rest(keep_sockets=detached)

    def _close_rest(self, *, keep_sockets: bool) -> None:
        opened = vars(self)
        node = opened.get("_node")
        if node is not None:
            for actor in node.locals.values():
                actor.close()
            node.close()
        if self._owns_store and (store := opened.get("store")) is not None:
            from shmstore import Store

            store.close()
            Store.unlink(self.name)
        if self._rundir is not None:
            self._rundir.remove(keep_sockets=keep_sockets)


def _check_preload(names: Sequence[str]) -> Sequence[str]:
    if not isinstance(names, (list, tuple)) or not all(n and isinstance(n, str) for n in names):
        hint = f"; did you mean [{names!r}]?" if isinstance(names, str) else ""
        raise UsageError(f"preload is a list of names of modules, got {names!r}{hint}")
    return names


def run(main: Coroutine[Any, Any, T], *, debug: bool = False) -> T:
    """`asyncio.run`, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main, debug=debug)
    with asyncio.Runner(debug=debug, loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
