"""The warm process: has imported the runtime, forks an actor on request, reaps it, reports its end.

Owns the actor processes as their parent. Started by `spawn.Spawner` in the driver as a process of
its own, single-threaded, without an event loop, without a ZeroMQ context: the only kind of process
from which a fork is safe, so what it is told to preload has to keep to that. Speaks JSON over one
SOCK_SEQPACKET socket, which is its lifeline too: when the driver is gone, it kills every process
group that is not detached, and ends. While it imports it looks at no socket, and the kernel ends it
with the driver.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

__all__ = ["REQUEST_BYTES_MAX", "kill_group", "main"]

REQUEST_BYTES_MAX = 200 * 1024
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main(fd: int, preload: list[str]) -> None:
    """Serve until the driver closes its end or dies."""
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    import ctypes  # here, because the driver imports this module for its constants

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, b"shmrl-template")
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _has_hung_up(sock):
        return
    from . import child

    child.warm_up(preload, lambda name: _send(sock, {"importing": name}))
    gc.collect()
    gc.freeze()  # what is here now stays shared with the children
    libc.prctl(_PR_SET_PDEATHSIG, 0)
    _Template(sock, libc).serve()


def _has_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock.fileno(), 0)  # only what is reported unasked
    return bool(poll.poll(0))


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    # A driver that is gone does not hear it: the next poll says so, and ends us.
    with contextlib.suppress(OSError):
        sock.send(json.dumps(message).encode())


class _Template:
    def __init__(self, sock: socket.socket, libc: Any) -> None:
        self._sock = sock
        self._libc = libc
        self._pid = os.getpid()
        self._children: dict[int, bool] = {}  # pid → detached
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver to handle
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._reap()
            if self._sock.fileno() in ready and not self._on_request():
                break
        self._kill_all()

    def _on_request(self) -> bool:
        """One request; False at the end of the lifeline."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, REQUEST_BYTES_MAX, 8)
        except OSError:
            return False
        if not data:
            return False
        request = json.loads(data)
        answer: dict[str, Any]
        try:
            pid = os.fork()
            answer = {"forked": request["ticket"], "pid": pid}
        except OSError as error:  # no more processes, or memory: the others live on
            pid = -1
            answer = {"refused": request["ticket"], "why": error.strerror}
        if pid == 0:
            self._become_actor(request, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._children[pid] = bool(request["detached"])
        _send(self._sock, answer)
        return True

    def _become_actor(self, request: dict[str, Any], fds: list[int]) -> None:
        """In the child; never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._sock.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            os.setsid()  # a process group of its own: it and what it starts end together
            if not request["detached"]:
                self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != self._pid:
                    os._exit(1)
            self._libc.prctl(_PR_SET_NAME, request["name"].encode()[:15])
            from . import child

            status = child.main(request, fds)
        except BaseException:  # the last frame of the process: say it as an interpreter would
            sys.excepthook(*sys.exc_info())
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)

    def _reap(self) -> None:
        """Report each child that has ended, with its status."""
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._children.pop(pid, None)
            # What it had started itself: here and not only in the driver, which may be dead.
            kill_group(pid)
            _send(self._sock, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _kill_all(self) -> None:
        """The driver is gone: take everything of the run with it."""
        for pid, detached in self._children.items():
            if not detached:
                kill_group(pid)
        for pid, detached in self._children.items():
            if not detached:
                os.waitpid(pid, 0)


def kill_group(pid: int) -> None:
    """SIGKILL to a process and its group; no error when they are gone."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
