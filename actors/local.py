"""Actors without processes: the same runtime, every actor on this loop in this process.

Owns the stand-in for the template process. For unit tests of user code: calls, errors, order,
supervision, restarts and refs are the real code; a process, a signal, a device or a memory limit is
not there. Public as `actors.testing.LocalRuntime`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from .child import Host, serve
from .runtime import Runtime

__all__ = ["LocalRuntime"]

_FIRST_PID = 1 << 30  # beyond any real one, so that nothing real can be signalled


class _LocalSpawner:
    """Runs the main program of an actor process as a task."""

    def __init__(
        self, on_exit: Callable[[int, int | None], None], store: Callable[[], Any]
    ) -> None:
        self._on_exit = on_exit
        self._store = store
        self._pids = itertools.count(_FIRST_PID)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.pid = 0

    def start(self) -> None:
        """Nothing to warm up."""

    async def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Start the task; the descriptors of the output are not used."""
        pid = next(self._pids)
        sock = socket.socket(fileno=os.dup(fds[0]))
        self._tasks[pid] = asyncio.get_running_loop().create_task(self._main(pid, request, sock))
        return pid

    async def _main(self, pid: int, request: dict[str, Any], sock: socket.socket) -> None:
        code: int | None = -signal.SIGKILL
        try:
            code = await serve(request, sock, Host(self._store(), own_process=False))
        finally:
            self._tasks.pop(pid, None)
            self._on_exit(pid, code)

    def kill_group(self, pid: int) -> None:
        """Cancel the task: its calls end as if the process had been killed."""
        task = self._tasks.get(pid)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """End what is left."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LocalRuntime(Runtime):
    """A `Runtime` whose actors live on this loop. `kill` and `Restart` work; signals do not."""

    def _make_spawner(self, loop: asyncio.AbstractEventLoop) -> Any:
        return _LocalSpawner(self._on_exit, lambda: self.store)
