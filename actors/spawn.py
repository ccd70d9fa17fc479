"""Starting processes: the driver's end of the warm template, and how a class travels.

Owns the template process and the socket to it. Used by `supervisor` on the driver's loop. A fork
happens only in the template, never here, so no lock, thread or ZeroMQ context is ever inherited.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.machinery
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import SpawnFailed, TemplateDied, UsageError
from .template import REQUEST_BYTES_MAX, kill_group

__all__ = ["Spawner", "import_hints"]

_MESSAGE_BYTES = 4096
_EXIT_WAIT_S = 5.0
# From the last word of a process that is ending to its end; what only hung up is killed after it.
_HANGUP_WAIT_S = 1.0
#: What a process does to itself; any other signal that ended it was sent.
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class Spawner:
    """Forks actors through a template process; started on first use, and again if it dies.

    `preload`: modules that the template imports; `env`: variables that it, and so each actor,
    starts with besides the driver's.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_exit: Callable[[int, int | None], None],
        preload: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._preload = list(preload)
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._tickets = itertools.count(1)
        self._forking: dict[int, asyncio.Future[int]] = {}
        self._pids: set[int] = set()
        self._sending = asyncio.Lock()  # one request at a time waits for room in the socket
        self._room: asyncio.Future[None] | None = None  # what it waits for
        self._importing = ""  # what the template imports, in advance
        self._template_status: int | None = None  # of the last one that died: as Popen says it

    def start(self) -> None:
        """Start the template; it warms up while the driver goes on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = (
                f"import os, sys; os.environ.update({self._env!r}); sys.path[:] = {sys.path!r};"
                f" from actors.template import main; main({theirs.fileno()}, {self._preload!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, *_interpreter_flags(), "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the driver alone
            )
        ours.setblocking(False)
        self._sock, self._importing = ours, ""
        self._loop.add_reader(ours.fileno(), self._on_readable)

    async def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """A new actor process with these descriptors; its pid. The caller closes its own copies.

        Raises TemplateDied, and SpawnFailed when the system refuses another process.
        """
        if self._sock is None:
            self.start()
        assert self._sock is not None
        ticket = next(self._tickets)
        data = json.dumps({**request, "ticket": ticket}).encode()
        if len(data) > REQUEST_BYTES_MAX:
            raise UsageError(
                f"sys.path, env and names of an actor take {len(data)} bytes, at most"
                f" {REQUEST_BYTES_MAX}; pass large values as arguments"
            )
        await self._send(self._sock, data, fds)
        # Known from here on; the answer cannot have been read since, as nothing was awaited.
        forked: asyncio.Future[int] = self._loop.create_future()
        self._forking[ticket] = forked
        try:
            return await forked
        finally:
            self._forking.pop(ticket, None)

    async def _send(self, sock: socket.socket, data: bytes, fds: list[int]) -> None:
        async with self._sending:
            while sock is self._sock:
                try:
                    socket.send_fds(sock, [data], fds)
                    return
                except BlockingIOError:
                    await self._wait_for_room(sock)
                except OSError as error:
                    if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                        raise SpawnFailed(
                            f"the template process could not be asked: {error.strerror}"
                        ) from error
                    self._on_readable()  # what it said before; at its end we know that it died
        raise self._template_died()

    async def _wait_for_room(self, sock: socket.socket) -> None:
        """Until the socket may take more, or is ours no longer."""
        self._room = self._loop.create_future()
        self._loop.add_writer(sock.fileno(), _set, self._room)
        try:
            await self._room
        finally:
            self._room = None
            if sock is self._sock:
                self._loop.remove_writer(sock.fileno())

    def _give_up_socket(self, sock: socket.socket) -> None:
        """Watch it no longer, and close it; who waits for room in it goes on."""
        self._sock = None
        self._loop.remove_reader(sock.fileno())
        self._loop.remove_writer(sock.fileno())
        sock.close()
        if self._room is not None:
            _set(self._room)

    def _on_readable(self) -> None:
        while self._sock is not None:
            try:
                data = self._sock.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it left requests unread; what it said before is still to be read
            except OSError:
                data = b""
            if not data:
                self._on_gone()
                return
            message = json.loads(data)
            if "importing" in message:
                self._importing = message["importing"]
            elif "forked" in message:
                self._pids.add(message["pid"])
                forked = self._forking.pop(message["forked"], None)
                if forked is not None and not forked.done():
                    forked.set_result(message["pid"])
            elif "refused" in message:
                forked = self._forking.pop(message["refused"], None)
                if forked is not None and not forked.done():
                    forked.set_exception(
                        SpawnFailed(f"the system refused another process: {message['why']}")
                    )
            else:
                self._pids.discard(message["exited"])
                # Soon, not now: whoever waits for the fork hears of it before its end.
                self._loop.call_soon(self._on_exit, message["exited"], message["code"])

    def _on_gone(self) -> None:
        """The template died: its children died with it (parent-death signal), without a status."""
        if self._sock is None:
            return
        self._give_up_socket(self._sock)
        if self._process is not None:
            self._template_status = _end(self._process)
            self._process = None
        for forked in self._forking.values():
            if not forked.done():
                forked.set_exception(self._template_died())
        for pid in list(self._pids):
            self._pids.discard(pid)
            self._loop.call_soon(self._on_exit, pid, None)

    def _template_died(self) -> TemplateDied:
        status = self._template_status
        sent = status is not None and status < 0 and -status not in _OWN_SIGNALS
        text = f"the template process {_how_it_ended(status)}"
        if self._importing:
            text += f" while it imported {self._importing!r}"
        if sent:
            return TemplateDied(
                f"{text}; look for who sent it (the out-of-memory killer?), then spawn again"
            )
        if not self._importing:
            return TemplateDied(f"{text}; spawn again")
        return TemplateDied(f"{text}, which preload names; leave that to the actors that need it")

    def kill_group(self, pid: int) -> None:
        """SIGKILL to an actor and everything that it started."""
        kill_group(pid)

    async def close(self) -> None:
        """End the template; what it forked and is not detached ends with it."""
        if self._sock is None or self._process is None:
            return
        process, sock = self._process, self._sock
        self._process = None
        if not self._pids:  # nothing to take along; it may be in the middle of a long import
            process.kill()
        pidfd = os.pidfd_open(process.pid)
        ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(pidfd, _set, ended)
        self._give_up_socket(sock)
        try:
            await asyncio.wait_for(ended, _EXIT_WAIT_S)
        except TimeoutError:
            process.kill()
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            process.wait()

    @property
    def pid(self) -> int:
        """Process id of the template; 0 when it is not running."""
        return self._process.pid if self._process is not None else 0


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Reap a process that has hung up; its own status, or None when it went on and is killed."""
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(_HANGUP_WAIT_S * 1000):
            return process.wait()
        process.kill()
        process.wait()
        return None
    finally:
        os.close(pidfd)


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "hung up"
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"
    return f"was killed by signal {-status} ({name})"


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _interpreter_flags() -> list[str]:
    """The flags of this interpreter that change what code means (-O, -W, -X), for the template."""
    flags = ["-O"] * sys.flags.optimize
    flags += ["-B"] * sys.flags.dont_write_bytecode
    flags += [f"-W{option}" for option in sys.warnoptions if option != "error"]
    return flags


def import_hints(cls: type) -> dict[str, str | None]:
    """Files of the modules of `cls` and its bases that a fresh process would not find by name."""
    hints: dict[str, str | None] = {}
    for base in cls.__mro__:
        name = base.__module__
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or name == "__main__" or _importable(name, file):
            continue
        hints[name] = os.path.abspath(file)
        parent = name.rpartition(".")[0]
        while parent:
            found = getattr(sys.modules.get(parent), "__file__", None)
            if parent not in hints and not _importable(parent, found):
                hints[parent] = os.path.abspath(found) if found else None
            parent = parent.rpartition(".")[0]
    return hints


def _importable(name: str, file: str | None) -> bool:
    """True when the path finder, asked afresh, finds this module in this file."""
    path: Any = None
    spec = None
    parts = name.split(".")
    for i in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            # Built in, frozen, or found by a finder of an editable install: not ours to judge.
            return i == 0 and (parts[0] in sys.builtin_module_names or _has_other_finder(parts[0]))
        path = spec.submodule_search_locations
    assert spec is not None
    if file is None:
        return True
    return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def _has_other_finder(name: str) -> bool:
    """True when a finder other than the path's claims the top-level name (editable installs)."""
    for finder in sys.meta_path:
        if finder is importlib.machinery.PathFinder or not hasattr(finder, "find_spec"):
            continue
        if type(finder).__module__.startswith("_pytest"):
            continue
        if finder.find_spec(name, None) is not None:
            return True
    return False
