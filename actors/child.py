"""The main program of an actor process, from the fork to the exit status.

Owns the process-wide set-up (streams, environment, paths, cores), the agent that the hub talks to,
and the end of the process. Called by `template` in the forked child, single-threaded until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .client import Client
from .codec import Blob
from .context import ActorContext, CallContext, set_process_actor
from .handle import Handle
from .mailbox import LocalActor
from .node import Node
from .peers import AGENT, Notice, State
from .snapshot import process_memory
from .tracing import Tracing

__all__ = ["Host", "main", "serve", "warm_up"]

log = logging.getLogger("actors")
# Exit status of an actor whose driver vanished (nobody is left to read it but the template).
_EXIT_ORPHANED = 70


def warm_up(preload: list[str], tell: Callable[[str], None]) -> None:
    """In the template: import what every actor needs, so that children share those pages. `tell`
    is told before each, and with nothing at the end: an import may take the process with it.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop")
    for name in preload:
        tell(name)
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            # Whoever needs it imports it again, and its owner hears why not.
            print(f"actors: could not be preloaded: {name}: {error!r}", file=sys.stderr)
    tell("")


def main(request: dict[str, Any], fds: list[int]) -> int:
    """Be the actor that `request` describes; returns the exit status."""
    link_fd, out_fd, err_fd = fds
    _set_up_streams(out_fd, err_fd)
    _set_up_process(request)
    sock = socket.socket(fileno=link_fd)
    store = None
    if request["arena"]:
        from shmstore import Store

        store = Store.attach(request["arena"])
    try:
        return _run(serve(request, sock, Host(store)))
    finally:
        if store is not None:
            store.close()


def _run(main: Any) -> int:
    try:
        import uvloop
    except ImportError:
        return int(asyncio.run(main))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return int(runner.run(main))


def _set_up_streams(out_fd: int, err_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out_fd, 1), (err_fd, 2)):
        os.dup2(source, target)
        if source > 2:
            os.close(source)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _set_up_process(request: dict[str, Any]) -> None:
    sys.path[:] = request["sys_path"]
    if request["hints"]:
        sys.meta_path.append(_HintFinder(request["hints"]))
    os.environ.update(request["env"])
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])
    if request["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
    if "numpy" in sys.modules:  # the template's state would be the same in every actor
        sys.modules["numpy"].random.seed()


class _HintFinder(importlib.abc.MetaPathFinder):
    """Finds modules that the driver loaded from files outside sys.path (test modules, scripts)."""

    def __init__(self, hints: dict[str, str | None]) -> None:
        self._hints = hints  # module → file; None for a package without one

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._hints:
            return None
        file = self._hints[name]
        if file is None:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        is_package = os.path.basename(file) == "__init__.py"
        return importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[os.path.dirname(file)] if is_package else None
        )


@dataclass(frozen=True)
class Host:
    """Where the actor lives: a process of its own, or (tests) the driver's."""

    store: Any = None
    own_process: bool = True


async def serve(request: dict[str, Any], sock: socket.socket, host: Host) -> int:
    """Be the actor until it is stopped, exits, or loses its driver; returns the exit status."""
    store = host.store
    node = Node(
        request["uid"],
        bytes.fromhex(request["token"]),
        store=store,
        in_flight_max=request["in_flight_max"],
        keys=_keys_of(request),
        incarnation=request["incarnation"],
    )
    done: asyncio.Future[int] = node.loop.create_future()

    def end(code: int) -> None:
        if not done.done():
            done.set_result(code)

    def lost(node_uid: int, why: str) -> None:
        if node_uid != AGENT or done.done():
            return
        if request["detached"] and agent.actor is not None:
            return  # it lives on; one that was never made has nobody who knows of it
        if host.own_process:
            os._exit(_EXIT_ORPHANED)
        end(_EXIT_ORPHANED)

    if request["tracing"]:
        node.tracing = Tracing()
    node.on_exit = end
    node.on_process_lost = lost
    client = Client(node, store)
    agent = Agent(node, client, request, host, end)
    context = ActorContext(
        name=request["name"], uid=AGENT, incarnation=request["incarnation"],
        handle=client.hub, runtime=client,
    )  # fmt: skip
    node.locals[AGENT] = LocalActor(node, agent, context, cycles=False)
    node.adopt_socket(sock, AGENT)
    hub = node.peer(AGENT, "hub")
    hub.state, hub.link = State.UP, node.links[AGENT]
    try:
        return await done
    finally:
        node.close()
        if agent.actor is not None:
            agent.actor.close()


def _keys_of(request: dict[str, Any]) -> tuple[bytes, bytes] | None:
    """The run's CURVE key pair; runs on Unix sockets have none."""
    keys = request["keys"]
    return (keys[0].encode(), keys[1].encode()) if keys is not None else None


class Agent:
    """What the hub asks of an actor process. Methods here are the process's control plane."""

    def __init__(
        self, node: Node, client: Client, request: dict[str, Any], host: Host, end: Any
    ) -> None:
        self._host = host
        self._node = node
        self._client = client
        self._request = request
        self._end = end
        self.actor: LocalActor | None = None

    async def construct(self, blob: Blob, directory: tuple[Notice, ...]) -> str:
        """Make the actor; returns the address at which other processes reach it."""
        for notice in directory:
            self._node.note(notice)
        request, node = self._request, self._node
        actor_class, args, kwargs = node.codec.open_blob(blob)
        me = node.peer(request["uid"], request["name"])
        me.state, me.link, me.incarnation = State.UP, node.links[node.uid], request["incarnation"]
        handle = Handle(
            node, request["uid"], request["name"], actor_class.__qualname__, request["methods"]
        )
        context = ActorContext(
            name=request["name"], uid=request["uid"], incarnation=request["incarnation"],
            handle=handle, runtime=self._client, rank=request["rank"], size=request["size"],
        )  # fmt: skip
        if self._host.own_process:
            set_process_actor(context)
        args, kwargs = await _values_of_refs(node, args, kwargs)
        self.actor = await LocalActor.create(node, actor_class, args, kwargs, context)
        node.locals[request["uid"]] = self.actor
        return node.listen(request["socket"])

    async def notice(self, notice: Notice) -> None:
        """News of another actor (or of this one)."""
        if notice.uid != self._request["uid"]:
            self._node.note(notice)

    async def notices(self, notices: tuple[Notice, ...]) -> None:
        """What happened to others while this one was constructed."""
        for notice in notices:
            await self.notice(notice)

    async def stop(self, timeout_s: float) -> bool:
        """Finish accepted calls, run `on_stop`, end the process. False if calls were cut off."""
        clean = True
        if self.actor is not None:
            clean = await self.actor.drain(timeout_s)
            hook = getattr(self.actor.obj, "on_stop", None)
            if hook is not None:
                await self._run_hook(hook)
        self._node.loop.call_later(0, self._end, 0)
        return clean

    async def _run_hook(self, hook: Any) -> None:
        assert self.actor is not None
        try:
            if inspect.iscoroutinefunction(hook):
                await hook()
            else:
                await self.actor.run_in_thread(CallContext(self.actor.context), hook)
        except Exception:  # the process ends all the same; the log says what the hook did not do
            log.exception("on_stop of actor %s raised", self._request["name"])

    async def ping(self) -> int:
        """This process's id, as a sign of life."""
        return os.getpid()

    async def stats(self) -> dict[str, Any]:
        """Counts for `rt.snapshot()`."""
        node, actor = self._node, self.actor
        return {
            "pid": os.getpid(),
            "memory": process_memory(os.getpid()),
            "waiting": actor.n_waiting if actor else 0,
            "running": actor.n_running if actor else 0,
            "pending_calls": len(node.pending),
            "late_replies": node.late_replies,
            "methods": {n: s.as_dict() for n, s in actor.stats.items() if s.count} if actor else {},
        }


async def _values_of_refs(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Top-level refs among the arguments of `__init__` arrive as values, like those of calls."""
    codec = node.codec
    if not any(codec.is_ref(a) for a in (*args, *kwargs.values())):
        return args, kwargs

    def fetch() -> tuple[tuple[Any, ...], dict[str, Any]]:
        def value_of(arg: Any) -> Any:
            return codec.get(arg, float("inf")) if codec.is_ref(arg) else arg

        return tuple(map(value_of, args)), {k: value_of(v) for k, v in kwargs.items()}

    return await node.loop.run_in_executor(None, fetch)
