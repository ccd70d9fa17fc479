"""Links: ordered, lossless streams of frames between two processes.

Owns the sockets. `Link` is the interface that every lane implements; here are the same-host lane
(a Unix-domain stream socket, docs/decisions/0301 has the figures) and the loopback of a process
to itself; `zmq_lane` has the other. Used by `node` only, on the node's loop thread only.

What it promises: frames arrive whole and in order, or the link closes and says so once; a send
never blocks and never drops: what the kernel does not take waits in memory, up to
`LINK_QUEUE_BYTES_MAX`, beyond which QueueFull is raised and nothing of the frame is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from . import faults
from .errors import ProtocolError, QueueFull
from .messages import FRAME_BYTES_MAX, HEADER_BYTES

__all__ = ["LINK_QUEUE_BYTES_MAX", "Link", "LinkOwner", "LoopbackLink", "UnixLink", "UnixListener"]

LINK_QUEUE_BYTES_MAX = 1 << 30
_RECEIVE_BYTES = 1 << 16
# Join small frames up to this many bytes into one system call.
_JOIN_BYTES = 1 << 18
_BACKLOG = 512
_SIZE = struct.Struct("<I")
_UCRED = struct.Struct("iII")


class LinkOwner(Protocol):
    """Who hears of a link's frames and of its end: the node."""

    def on_frame(self, link: Link, frame: memoryview) -> None:
        """`frame` is valid during the call only."""

    def on_link_closed(self, link: Link, why: str) -> None: ...


class Link(Protocol):
    """One ordered stream of frames to one process. Hashable by identity."""

    peer_uid: int  # actor number of the process at the other end; -1 until HELLO
    peer_incarnation: int  # of that process
    trusted: bool  # nothing is unpickled before this is true
    closed: bool
    kept: dict[tuple[int, int, int], Any]  # what is alive until an ACK: (call, item, is reply)

    def send(self, frame: bytes) -> None:
        """Queue a frame. Raises QueueFull; a closed link swallows it (the owner was told)."""

    def close(self) -> None: ...


class UnixLink:
    """The same-host lane: one Unix-domain stream socket, read and written by the loop itself."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        owner: LinkOwner,
        *,
        peer_uid: int = -1,
        trusted: bool = False,
    ) -> None:
        sock.setblocking(False)
        self.peer_uid = peer_uid
        self.peer_incarnation = 0
        self.trusted = trusted
        self.closed = False
        self.kept: dict[tuple[int, int, int], Any] = {}
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._owner = owner
        self._out: list[bytes | memoryview] = []
        self._out_bytes = 0
        self._flush_scheduled = False
        self._writer_added = False
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        loop.add_reader(self._fd, self._on_readable)

    # ---- out ----------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        if self.closed or (faults.outgoing is not None and held_back(self, self._loop, frame)):
            return
        self._out_bytes += len(frame)
        if self._out_bytes > LINK_QUEUE_BYTES_MAX:
            self._out_bytes -= len(frame)
            raise QueueFull(
                f"{self._out_bytes} bytes wait for a process that does not read them (at most"
                f" {LINK_QUEUE_BYTES_MAX}); is it stopped?"
            )
        self._out.append(frame)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """One system call for everything that was sent since the last turn of the loop."""
        self._flush_scheduled = False
        while self._out and not self.closed:
            out = self._out
            if len(out) == 1:
                data = out[0]
            elif self._out_bytes <= _JOIN_BYTES:
                data = b"".join(out)
                self._out = [data]
            else:
                data = self._join_some()
            try:
                n = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._fail(f"write failed: {error.strerror}")
                return
            self._out_bytes -= n
            if n == len(data):
                del self._out[0]
            else:
                self._out[0] = memoryview(data)[n:]
                break
        self._watch_writable(bool(self._out))

    def _join_some(self) -> bytes | memoryview:
        """Join small frames at the head; a large one goes alone, uncopied."""
        total = 0
        n = 0
        for chunk in self._out:
            total += len(chunk)
            if n and total > _JOIN_BYTES:
                break
            n += 1
        if n > 1:
            self._out[:n] = [b"".join(self._out[:n])]
        return self._out[0]

    def _watch_writable(self, wanted: bool) -> None:
        if self.closed or wanted == self._writer_added:
            return
        self._writer_added = wanted
        if wanted:
            self._flush_scheduled = True
            self._loop.add_writer(self._fd, self._flush_ready)
        else:
            self._loop.remove_writer(self._fd)

    def _flush_ready(self) -> None:
        self._flush()
        if self._writer_added:
            self._flush_scheduled = True

    # ---- in -----------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            n = self._sock.recv_into(self._view[self._filled :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(f"read failed: {error.strerror}")
            return
        if n == 0:
            self._fail("the process at the other end is gone")
            return
        self._filled += n
        self._cut_frames()

    def _cut_frames(self) -> None:
        view, end, at = self._view, self._filled, 0
        on_frame = self._owner.on_frame
        while end - at >= HEADER_BYTES:
            size = _SIZE.unpack_from(view, at)[0]
            if not HEADER_BYTES <= size <= FRAME_BYTES_MAX:
                self._fail(f"a frame that claims {size} bytes")
                return
            if size > end - at:
                break
            try:
                on_frame(self, view[at : at + size])
            except ProtocolError as error:
                self._fail(str(error))
            if self.closed:
                return
            at += size
        self._keep_rest(at)

    def _keep_rest(self, at: int) -> None:
        """Move an incomplete frame to the front of a buffer that can hold it."""
        rest = self._filled - at
        need = _RECEIVE_BYTES
        if rest >= HEADER_BYTES:
            need = max(need, _SIZE.unpack_from(self._view, at)[0])
        if need != len(self._buffer):
            buffer = bytearray(need)
            buffer[:rest] = self._view[at : self._filled]
            self._buffer, self._view = buffer, memoryview(buffer)
        elif at and rest:
            self._buffer[:rest] = bytes(self._view[at : self._filled])
        self._filled = rest

    # ---- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close from our side; what is queued is tried once more, without waiting."""
        if not self.closed:
            self._flush()
        self._fail("closed here")

    def _fail(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        if self._writer_added:
            self._loop.remove_writer(self._fd)
        self._sock.close()
        self._out.clear()
        self._out_bytes = 0
        self._owner.on_link_closed(self, why)
        self.kept.clear()


def held_back(link: Link, loop: asyncio.AbstractEventLoop, frame: bytes) -> bool:
    """True when a test loses this frame, or sends it later."""
    assert faults.outgoing is not None
    fate = faults.outgoing(frame)
    if not fate:
        return False
    if fate != faults.DROP:
        loop.call_later(fate, link.send, frame)
    return True


class LoopbackLink:
    """From a process to itself: the same frames, no socket, still one turn of the loop apart."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: LinkOwner, uid: int) -> None:
        self.peer_uid = uid
        self.peer_incarnation = 0
        self.trusted = True
        self.closed = False
        self.kept: dict[tuple[int, int, int], Any] = {}
        self._loop = loop
        self._owner = owner

    def send(self, frame: bytes) -> None:
        if self.closed or (faults.outgoing is not None and held_back(self, self._loop, frame)):
            return
        self._loop.call_soon(self._deliver, frame)

    def _deliver(self, frame: bytes) -> None:
        if not self.closed:
            self._owner.on_frame(self, memoryview(frame))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._owner.on_link_closed(self, "closed here")
        self.kept.clear()


class UnixListener:
    """Accepts links at a path inside the run's 0700 directory, from processes of our user only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: str,
        on_link: Callable[[socket.socket], None],
    ) -> None:
        self.address = "unix://" + path
        self._loop = loop
        self._path = path
        self._on_link = on_link
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sock.setblocking(False)
        if os.path.exists(path):  # of an earlier incarnation, which is dead
            os.unlink(path)
        self._sock.bind(path)
        os.chmod(path, 0o600)
        self._sock.listen(_BACKLOG)
        loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        cred = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        if _UCRED.unpack(cred)[1] != os.getuid():
            sock.close()
            return
        self._on_link(sock)

    def close(self) -> None:
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        if os.path.exists(self._path):
            os.unlink(self._path)
