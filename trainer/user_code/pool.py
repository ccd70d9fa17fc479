"""Runs a user's functions in worker processes with a time limit that also ends what hangs.

Owns the worker processes (`trainer.user_code.worker`) and their pipes. Promises: `call` returns
within its time limit plus the time to kill a process; a worker that hung, died or wrote nonsense is
replaced before the next call; at most `processes` run; `aclose` leaves no child. Calls beyond the
number of workers wait, and their waiting does not count against their limit.

Called from the event loop of the producer process, by judges and by the tool environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from trainer.errors import TrainerError
from trainer.user_code.worker import FRAME_BYTES_MAX

__all__ = ["CallFailed", "CallPool", "CallTimedOut"]

_LENGTH = struct.Struct("<I")
_START_TIMEOUT_S = 60.0
"""For the start of Python and the import of the user's module."""
_EXIT_TIMEOUT_S = 2.0
"""For a worker to end after it closed its pipe; then it is killed."""


class CallFailed(TrainerError):
    """The user's function raised, died, or answered something that cannot be sent."""


class CallTimedOut(CallFailed, TimeoutError):
    """The user's function did not answer in time and its process was killed."""


class CallPool:
    """At most `processes` workers. Not thread-safe: one event loop."""

    def __init__(self, processes: int, timeout_s: float) -> None:
        self._free = asyncio.Semaphore(processes)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._timeout_s = timeout_s
        self._closed = False

    async def __aenter__(self) -> CallPool:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """The value of `target(*args, **kwargs)`; arguments and value are plain data (msgpack).

        Raises CallTimedOut after `timeout_s`, CallFailed with the remote traceback otherwise.
        """
        if self._closed:
            raise CallFailed(f"{target}: the pool is closed")
        try:
            request = msgspec.msgpack.encode({"target": target, "args": args, "kwargs": kwargs})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CallFailed(f"{target}: arguments cannot be sent: {error}") from error
        async with self._free:
            worker = self._idle.pop() if self._idle else await _Worker.start()
            self._busy.add(worker)
            healthy = False
            try:
                answer = await worker.load(target)
                if "error" not in answer:
                    answer = await worker.ask(target, request, self._timeout_s)
                healthy = True
            finally:  # a cancelled caller leaves a half-read answer: it must not serve the next
                self._busy.discard(worker)
                if healthy and not self._closed:
                    self._idle.append(worker)
                else:
                    await worker.end()
        if "error" in answer:
            raise CallFailed(f"{target}: {answer['error']}\n{answer['traceback']}".rstrip())
        return answer["value"]

    async def aclose(self) -> None:
        """Ends all workers, also those with a call in progress. Idempotent."""
        self._closed = True
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        for worker in workers:
            await worker.end()


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._loaded: set[str] = set()

    @classmethod
    async def start(cls) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trainer.user_code.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=FRAME_BYTES_MAX,
        )
        return cls(process)

    async def load(self, target: str) -> dict[str, Any]:
        """Imports the target, which may be slow and does not count against the call's limit."""
        if target in self._loaded:
            return {}
        answer = await self.ask(
            target, msgspec.msgpack.encode({"target": target}), _START_TIMEOUT_S
        )
        if "error" not in answer:
            self._loaded.add(target)
        return answer

    async def ask(self, target: str, request: bytes, limit_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._exchange(request)
        except TimeoutError as error:
            raise CallTimedOut(f"{target}: no answer within {limit_s:g} s; it was ended") from error
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            code = await self._exit_status()
            raise CallFailed(f"{target}: its process died (exit status {code})") from error
        return answer

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(_LENGTH.pack(len(request)) + request)
        await stdin.drain()
        (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
        if length > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {length} bytes")
        answer = msgspec.msgpack.decode(await stdout.readexactly(length))
        if not isinstance(answer, dict):
            raise ValueError("no map")
        return answer

    async def _exit_status(self) -> int:
        """Of a worker that closed its pipe. Killing it at once would race with its own exit, and
        asyncio then reports 255 for whatever its status was.
        """
        with contextlib.suppress(TimeoutError):  # the pipe is closed, but it lives on
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await self._process.wait()
        return await self.end()

    async def end(self) -> int:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                self._process.send_signal(signal.SIGSTOP)  # it starts no more of them
                _kill_descendants(self._process.pid)
                self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):  # asyncio waits for the pipe as well, which an
            async with asyncio.timeout(_EXIT_TIMEOUT_S):  # orphan of user code may still hold
                await self._process.wait()
        code = self._process.returncode
        return -signal.SIGKILL if code is None else code


def _kill_descendants(pid: int) -> None:
    """What user code has started and not ended: it would burn a core, and hold the pipe."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, listed.read_text().split()):
                _kill_descendants(child)
                os.kill(child, signal.SIGKILL)
