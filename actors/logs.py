"""What actors print: forwarded line by line with the actor's name, kept in files, tail remembered.

Owns the read ends of the pipes that are an actor's stdout and stderr. Used by `supervisor` on the
driver's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
from collections import deque
from pathlib import Path
from typing import IO

__all__ = ["CRASH_LINES_MAX", "LINE_BYTES_MAX", "TAIL_LINES_MAX", "LogPump", "make_pipe"]

TAIL_LINES_MAX = 20
CRASH_LINES_MAX = 8
"""Of what the interpreter writes when it crashes: the cause and the frames that led to it."""
LINE_BYTES_MAX = 8192
_CRASH = "Fatal Python error: "
_READ_BYTES = 1 << 16
# So that a driver that is busy for a while does not stop actors that print.
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


def make_pipe() -> tuple[int, int]:
    """(read end, not blocking; write end), both close-on-exec."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    # With the user's pipe quota used up the default size works as well.
    with contextlib.suppress(PermissionError):
        fcntl.fcntl(write, _F_SETPIPE_SZ, _PIPE_BYTES)
    return read, write


class LogPump:
    """Reads one stream of one actor until its end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        name: str,
        *,
        to_stderr: bool,
        forward: bool,
        file: Path | None,
    ) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES_MAX)
        self._crash: list[str] = []
        self._loop = loop
        self._fd = fd
        self._prefix = f"[{name}] "
        self._to_stderr = to_stderr
        self._forward = forward
        self._file: IO[str] | None = None
        if file is not None:
            self._file = file.open("a", encoding="utf-8", errors="replace")
        self._rest = b""
        self._open = True
        loop.add_reader(fd, self.drain)

    def last_words(self) -> str:
        """The last lines; of a crash, whose dump ends in a list of modules, its beginning too."""
        if not self._crash or self._crash[0] in self.tail:
            return "\n".join(self.tail)
        return "\n".join([*self._crash, "...", *self.tail])

    def drain(self) -> None:
        """Take what is there; at the end of the stream close it."""
        while self._open:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            self._take(data)
            if len(data) < _READ_BYTES:
                return

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._emit(line)
        self._flush()

    def _emit(self, line: bytes) -> None:
        text = line[:LINE_BYTES_MAX].decode("utf-8", "replace")
        self.tail.append(text)
        if text.startswith(_CRASH):
            self._crash = [text]
        elif self._crash and len(self._crash) < CRASH_LINES_MAX:
            self._crash.append(text)
        if self._file is not None:
            self._file.write(text + "\n")
        if self._forward:
            stream = sys.stderr if self._to_stderr else sys.stdout
            stream.write(self._prefix + text + "\n")

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
        if self._forward:
            (sys.stderr if self._to_stderr else sys.stdout).flush()

    def close(self) -> None:
        """Stop reading. What a grandchild still writes is lost."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._rest:
            self._emit(self._rest)
            self._flush()
            self._rest = b""
        if self._file is not None:
            self._file.close()
