"""What any process of a run can do with it: spawn, host, look up.

Owns the translation of `spawn(cls, ...)` into a `Spec`. `Runtime` (driver) and
`actors.current().runtime` (inside an actor) are both clients; they differ in where the hub is.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from .calls import Stream
from .context import ActorContext
from .errors import ActorError, CallTimeout, RemoteError, UsageError, WouldBlockLoop
from .handle import Handle, RemoteMethod, Team, hub_handle
from .method import method_table, methods_of
from .node import Node
from .peers import AGENT, Notice
from .records import Restart, Spec
from .rundir import check_name
from .spawn import import_hints

__all__ = ["Client"]

T = TypeVar("T")

_SUFFIXES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
TEAM_SIZE_MAX = 1024


class Client:
    """Spawns, hosts and finds actors. All methods are for the node's event loop."""

    def __init__(self, node: Node, store: Any = None) -> None:
        self._node = node
        self.store = store  # the shmstore.Store of the run, or None
        self.hub = hub_handle(node)
        node.resolve = functools.partial(self._ask, "resolve")

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            return await RemoteMethod(self.hub, method, 0)(*args)
        except RemoteError as error:
            # The hub's refusals are ours, not a user's method's: no traceback of the driver.
            if isinstance(error.cause, ActorError):
                raise error.cause from None
            raise

    async def spawn(
        self,
        cls: type,
        *args: Any,
        name: str | None = None,
        restart: Restart | None = None,
        gpus: int = 0,
        cpus: int = 0,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log: str | os.PathLike[str] | None = None,
        memory: int | str | None = None,
        detached: bool = False,
        within: str | None = None,
        **kwargs: Any,
    ) -> Handle:
        """Start `cls(*args, **kwargs)` in a process of its own; returns when `__init__` has.

        `restart`: start again after a death (default: never). `gpus`, `cpus`: devices and cores for
        it alone. `env` is added to the environment; `cwd`, `log` (file for its output); `memory`:
        limit of its address space ("2GiB"); `detached`: outlives this run; `within`: name of a
        reservation. Arguments of `__init__` that have one of these names are passed by position.
        Raises SpawnFailed, PlacementError, NameTaken, NotSerializable.
        """
        spec = self._spec(
            cls, args, kwargs, name=name, restart=restart, gpus=gpus, cpus=cpus, env=env, cwd=cwd,
            log=log, memory=memory, detached=detached, within=within,
        )  # fmt: skip
        return self._bind(await self._ask("spawn", spec, self._node.uid))

    async def spawn_many(
        self, cls: type, n: int, *args: Any, name: str | None = None, **options: Any
    ) -> Team:
        """`n` actors of one class, started one after the other; all or none.

        Their names end in -0, -1, ...; each finds its place in `actors.current().rank` and `.size`.
        """
        if not isinstance(n, int) or not 1 <= n <= TEAM_SIZE_MAX:
            raise UsageError(f"a team has 1 to {TEAM_SIZE_MAX} members, got {n!r}")
        members: list[Handle] = []
        try:
            for rank in range(n):
                chosen = f"{name}-{rank}" if name is not None else None
                spec = self._spec(cls, args, None, name=chosen, rank=rank, size=n, **options)
                members.append(self._bind(await self._ask("spawn", spec, self._node.uid)))
        except BaseException:
            for member in reversed(members):
                await member.kill()
            raise
        return Team(members)

    def _spec(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        name: str | None = None,
        restart: Restart | None = None,
        gpus: int = 0,
        cpus: int = 0,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log: str | os.PathLike[str] | None = None,
        memory: int | str | None = None,
        detached: bool = False,
        within: str | None = None,
        rank: int = 0,
        size: int = 1,
        **rest: Any,
    ) -> Spec:
        if not isinstance(cls, type):
            raise UsageError(f"an actor is made of a class, got {cls!r}; host() takes objects")
        _check_words(cls, kwargs if kwargs is not None else rest)
        if restart is not None and not isinstance(restart, Restart):
            raise UsageError(f"restart is an actors.Restart(max=, within=), got {restart!r}")
        if name is not None:
            check_name("the name of an actor", name)
        if cwd is not None and not Path(cwd).is_dir():
            raise UsageError(f"cwd must be a directory that exists, got {os.fspath(cwd)!r}")
        return Spec(
            name=name or "",
            class_name=cls.__qualname__.rpartition(".")[2],
            methods=tuple(method_table(cls).items()),
            blob=self._node.codec.seal_blob((cls, args, kwargs if kwargs is not None else rest)),
            restart=restart,
            gpus=gpus,
            cpus=cpus,
            env=tuple(check_env(env).items()),
            cwd=os.fspath(cwd) if cwd is not None else None,
            log=os.path.abspath(log) if log is not None else None,
            memory_bytes=_bytes_of(memory) if memory is not None else 0,
            detached=detached,
            rank=rank,
            size=size,
            sys_path=tuple(sys.path),
            hints=tuple(import_hints(cls).items()),
            group=within or "",
        )

    def _bind(self, notice: Notice) -> Handle:
        """A handle of this process for the actor of a notice."""
        self._node.note(notice)
        return Handle(self._node, notice.uid, notice.name, notice.class_name, dict(notice.methods))

    async def host(self, obj: Any, *, name: str) -> Handle:
        """Make an object of this process reachable as an actor, on this loop.

        Its `async` methods run on this event loop, its `def` methods in a thread, like those of any
        actor. It ends with this process, or by `handle.stop()`. Raises NameTaken.
        """
        from .mailbox import LocalActor

        cls = type(obj)
        if not methods_of(cls):
            raise UsageError(f"{cls.__qualname__} has no public methods that could be called")
        check_name("the name of an actor", name)
        table = tuple(method_table(cls).items())
        notice = await self._ask("host", name, cls.__qualname__, table, self._node.uid)
        handle = self._bind(notice)
        context = ActorContext(
            name=name, uid=notice.uid, incarnation=1, handle=handle, runtime=self
        )
        self._node.locals[notice.uid] = LocalActor(self._node, obj, context)
        self._node.note(notice)
        return handle

    async def lookup(self, name: str, *, timeout: float | None = None) -> Handle:
        """The live actor of this name; with `timeout`, waits so many seconds for it to appear.

        Raises NoSuchActor, with the names that there are.
        """
        return self._bind(await self._ask("lookup", name, timeout))

    def watch(self) -> Stream:
        """`async for event in runtime.watch()`: what happens to all actors of the run."""
        return RemoteMethod(self.hub, "watch_all", 0).stream()

    async def reserve(self, name: str, *, gpus: int = 0, cpus: int = 0) -> str:
        """Set devices and cores aside for a group of actors (`spawn(within=name)`).

        All of them or PlacementError. `unreserve(name)` gives them back.
        """
        check_name("the name of a reservation", name)
        await self._ask("reserve", name, gpus, cpus)
        return name

    async def unreserve(self, name: str) -> None:
        """Give a reservation back. Raises UsageError while actors live within."""
        await self._ask("unreserve", name)

    async def snapshot(self) -> dict[str, Any]:
        """The run as plain data: "actors" (state, pid, restarts, queues, memory, calls with p50 and
        p99), "store" (use of the arena by owner), driver, free devices."""
        return cast(dict[str, Any], await self._ask("snapshot"))

    def wait(self, action: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """For threads (a `def` method, a notebook): do `action` on the runtime's loop, and wait.

        `runtime.wait(runtime.lookup("learner"))`, `runtime.wait(handle.stop())`. Raises CallTimeout
        after `timeout` seconds, and WouldBlockLoop on the loop's own thread.
        """
        if self._node.on_loop_thread():
            action.close()
            raise WouldBlockLoop("wait() is for threads; on the event loop, await the same thing")
        future = asyncio.run_coroutine_threadsafe(action, self._node.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise  # the action's own
            future.cancel()
            raise CallTimeout(f"it took longer than {timeout} s") from None
        except BaseException:  # Ctrl-C: what nobody waits for any more is given up
            future.cancel()
            raise

    @property
    def uid(self) -> int:
        """Number of this process: 0 is the driver."""
        return self._node.uid

    @property
    def in_driver(self) -> bool:
        return self._node.uid == AGENT


def _bytes_of(size: int | str) -> int:
    """Bytes of "512MiB", "4GiB" or a number. Raises UsageError."""
    if isinstance(size, int) and size > 0:
        return size
    if isinstance(size, str):
        for suffix, factor in sorted(_SUFFIXES.items(), key=lambda item: -len(item[0])):
            number = size.removesuffix(suffix).strip() if suffix else size.strip()
            if size.endswith(suffix) and number.isdigit() and int(number) > 0:
                return int(number) * factor
    raise UsageError(f'a size is a positive number of bytes or "512MiB", "4GiB"; got {size!r}')


_OTHER_WORDS = {"num_gpus": "gpus=", "num_cpus": "cpus=", "max_restarts": "restart="}


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Variables that a process can have. Raises UsageError for others."""
    if env is not None and not isinstance(env, Mapping):
        raise UsageError(f"env maps text to text, got {env!r}")
    for key, value in (env or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"env maps text to text, got {key!r}: {value!r}")
        try:
            fits = key and "=" not in key and b"\0" not in os.fsencode(key) + os.fsencode(value)
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise UsageError(
                f"env has a name or value that no process can have: {key!r}: {value!r}"
            )
    return dict(env or {})


def _check_words(cls: type, kwargs: Mapping[str, Any]) -> None:
    """Options as Ray calls them, which would end up as arguments of `__init__`."""
    for word in _OTHER_WORDS.keys() & kwargs.keys():
        try:
            inspect.signature(cls).bind_partial(**{word: kwargs[word]})
        except TypeError:
            raise UsageError(
                f"spawn has no option {word!r} and {cls.__name__} takes no such argument; here it"
                f" is `{_OTHER_WORDS[word]}` (docs/from_ray.md)"
            ) from None
