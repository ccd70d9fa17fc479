"""The run's directory: sockets and a lock, readable by our user only.

Owns `/tmp/shmrl-UID/NAME`: mode 0700, one per live run, with the lock that tells a live run from
debris; each new run removes the debris. Who makes or removes one holds the lock of them all for
that moment. Called by `runtime` in the driver and by `top` from outside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import RunExists, RuntimeClosed, UsageError

__all__ = ["RunDir", "check_name", "live_runs", "runs_root", "status_socket", "sweep"]

_STATUS_SOCKET = "status.sock"
_LOCK_OF_ALL = ".lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


def check_name(what: str, name: str) -> str:
    """A name fit for files, arenas and metrics. Raises UsageError."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise UsageError(
            f"{what} has 1 to 63 letters, digits, '.', '_' or '-', and starts with a letter or a"
            f" digit; got {name!r}"
        )
    return name


def runs_root() -> Path:
    """Where the directories of our user's runs are; made on demand, and refused if not ours.

    A fixed short path: a Unix socket's name has at most 107 bytes.
    """
    root = Path(f"/tmp/shmrl-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    info = root.lstat()
    if (
        not stat.S_ISDIR(info.st_mode)
        or info.st_uid != os.getuid()
        or stat.S_IMODE(info.st_mode) & 0o077
    ):
        raise UsageError(f"{root} must be a directory of user {os.getuid()} with mode 0700")
    return root


class RunDir:
    """The directory of one live run; its lock dies with this process."""

    def __init__(self, name: str) -> None:
        self.path = runs_root() / check_name("the name of a run", name)
        with _alone():
            self._make(name)
            with contextlib.suppress(OSError):  # what of the dead cannot go stops no new run
                _sweep()

    def _make(self, name: str) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode().strip()
            os.close(self._lock)
            raise RunExists(
                f"a run named {name!r} is alive (driver process {owner or 'unknown'}); choose"
                " another name, or stop it"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        for leftover in self.path.glob("*.sock"):  # of a run that was killed
            leftover.unlink(missing_ok=True)

    def socket_path(self, name: str) -> str:
        """Where a process of the run listens; a directory that somebody removed is made again."""
        runs_root()
        self.path.mkdir(mode=0o700, exist_ok=True)
        return str(self.path / f"{name}.sock")

    def remove(self, *, keep_sockets: bool = False) -> None:
        """Take the directory away; with detached actors alive only the lock is given up."""
        if not keep_sockets:
            _remove(self.path)
        os.close(self._lock)


def sweep() -> list[str]:
    """Remove the directories of runs that are dead; returns their names."""
    with _alone():
        return _sweep()


def _sweep() -> list[str]:
    removed = []
    for path in runs_root().iterdir():
        with _lock_of_the_dead(path) as dead:
            # A detached actor may live there still.
            if dead and not any(map(_listens, path.glob("a*.sock"))):
                _remove(path)
                removed.append(path.name)
    return removed


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time makes or removes directories: nobody removes one that is being made."""
    lock = os.open(runs_root() / _LOCK_OF_ALL, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _lock_of_the_dead(folder: Path) -> Iterator[bool]:
    """True, and the run's lock is ours meanwhile, when its driver is gone."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield False  # not ours to judge, or the lock of all
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Sockets, the lock and the folder; there is nothing else in it. It may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()


def _listens(path: Path) -> bool:
    """True when a process accepts links at this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)


def live_runs() -> list[str]:
    """Names of the runs whose driver lives; a killed driver leaves its socket file behind."""
    return sorted(
        p.parent.name for p in runs_root().glob(f"*/{_STATUS_SOCKET}") if _lives(p.parent)
    )


def _lives(folder: Path) -> bool:
    with _lock_of_the_dead(folder) as dead:
        return not dead


def status_socket(name: str) -> Path:
    """Where a live run answers `shmrl top`. Raises RuntimeClosed when there is no such run."""
    path = runs_root() / check_name("the name of a run", name) / _STATUS_SOCKET
    if not (path.exists() and _lives(path.parent)):
        live = live_runs()
        raise RuntimeClosed(
            f"no run named {name!r} is alive; alive: {', '.join(live) if live else 'none'}"
        )
    return path
