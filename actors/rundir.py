"""The run's directory: sockets and a lock, readable by our user only.

Owns `/tmp/shmrl-UID/NAME`: mode 0700, one per live run, with the lock that tells a live run from
debris; each new run removes the debris. Called by `runtime` in the driver and by `top` from
outside.

Nobody waits for anybody here, and a process may be stopped or killed between any two steps:

- A directory is made under another name, its lock taken, and only then given its own, in one step.
  So one that is seen is locked for as long as its driver lives, and never lives again after that.
- The driver alone takes the lock exclusively; whoever looks takes it shared, and keeps that while
  it removes what is in there. So no looker is taken for a driver.
- Contents are removed from the directory that was looked at, whatever its name leads to by then.
  The directory itself goes by name, and only if it is empty, which that of a live run never is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import RunExists, RuntimeClosed, UsageError

__all__ = ["RunDir", "check_name", "dead_runs", "live_runs", "runs_root", "status_socket", "sweep"]

_STATUS_SOCKET = "status.sock"
_OF_DETACHED = "d"
"""With what the names of sockets of detached actors begin, which outlive the run."""
_LOCK = "lock"
_DRAFT = ".new-"
_TRIES_MAX = 100
"""Each needs somebody else who makes or removes a directory in that very moment."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_PEER = struct.Struct("iII")
"""Process, user and group: what the kernel says about the other end of a Unix socket."""
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_name(what: str, name: str) -> str:
    """A name fit for files, arenas and metrics. Raises UsageError."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise UsageError(
            f"{what} has 1 to 63 letters, digits, '.', '_' or '-', and starts with a letter or a"
            f" digit; got {name!r}"
        )
    return name


def runs_root() -> Path:
    """Where the directories of our user's runs are; made on demand. Raises UsageError if it cannot
    be made or is not ours.

    A fixed short path: a Unix socket's name has at most 107 bytes.
    """
    root = Path(f"/tmp/shmrl-{os.getuid()}")
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        info = root.lstat()
    except FileExistsError:  # a file, or a link that leads nowhere
        info = root.lstat()
    except OSError as error:
        raise UsageError(
            f"{root} cannot be made: {error.strerror}; the sockets of a run are in it, so /tmp has"
            " to be writable (TMPDIR does not move it)"
        ) from error
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
        self._folder, self._lock = _make(self.path)
        sweep()

    def actor_socket(self, uid: int, *, detached: bool) -> str:
        """Where an actor of the run listens."""
        return self.socket_path(f"{_OF_DETACHED if detached else 'a'}{uid}")

    def socket_path(self, name: str) -> str:
        """Where a process of the run listens; a directory that somebody removed is made again."""
        if not _is_at(self._folder, self.path):
            self._close()
            self._folder, self._lock = _make(self.path)
        return str(self.path / f"{name}.sock")

    def remove(self, *, keep_sockets: bool = False) -> None:
        """Take the directory away; with detached actors alive only the lock is given up."""
        try:
            if not keep_sockets:
                _clear(self._folder, self.path)
        finally:
            self._close()

    def _close(self) -> None:
        os.close(self._folder)
        os.close(self._lock)


def sweep() -> list[str]:
    """Remove the directories of runs that are dead; returns their names."""
    removed = []
    for found in _dead():
        with contextlib.suppress(OSError):  # what cannot go keeps nobody from anything
            found.clear()
            if not found.path.name.startswith(_DRAFT):
                removed.append(found.path.name)
    return removed


def dead_runs() -> list[str]:
    """Names of the runs whose directories `sweep` would remove."""
    names = [found.path.name for found in _dead()]
    return sorted(name for name in names if not name.startswith(_DRAFT))


def live_runs() -> list[str]:
    """Names of the runs whose driver lives; a killed driver leaves its socket file behind."""
    return sorted(
        p.parent.name for p in runs_root().glob(f"*/{_STATUS_SOCKET}") if _lives(p.parent)
    )


def status_socket(name: str) -> Path:
    """Where a live run answers `shmrl top`. Raises RuntimeClosed when there is no such run."""
    path = runs_root() / check_name("the name of a run", name) / _STATUS_SOCKET
    if not (path.exists() and _lives(path.parent)):
        live = live_runs()
        raise RuntimeClosed(
            f"no run named {name!r} is alive; alive: {', '.join(live) if live else 'none'}"
        )
    return path


# ---- making ------------------------------------------------------------------------------------


def _make(path: Path) -> tuple[int, int]:
    """Descriptors of a new directory of that name and of its lock. Raises RunExists."""
    draft, folder, lock = _draft()
    try:
        for _ in range(_TRIES_MAX):
            try:
                draft.rename(path)  # takes the place of an empty directory, and of no other
                return folder, lock
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with _looked_at(path) as found:
                if found is None:
                    continue
                if found.lives:
                    raise RunExists(
                        f"a run named {path.name!r} is alive (driver process {found.driver});"
                        " choose another name, or stop it"
                    )
                if (detached := found.listener(_OF_DETACHED)) is not None:
                    raise RunExists(
                        f"a detached actor of an earlier run named {path.name!r} lives (process"
                        f" {detached}); choose another name, or end it by a signal"
                    )
                found.clear()
        raise OSError(errno.ENOTEMPTY, "something is put there again and again")
    except OSError as error:
        _give_up(draft, folder, lock)
        raise UsageError(
            f"{path} cannot be made: {error.strerror or error}; remove it, or choose another name"
            " for the run"
        ) from error
    except BaseException:
        _give_up(draft, folder, lock)
        raise


def _draft() -> tuple[Path, int, int]:
    """A directory under a name of no run, with its lock taken."""
    for _ in range(_TRIES_MAX):
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=runs_root()))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # a sweep was faster
            folder = os.open(draft, _OPEN_FOLDER)
            lock = -1
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                lock = os.open(_LOCK, flags, 0o600, dir_fd=folder)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(lock, draft / _LOCK):  # and stays so: nobody else gets the lock now
                    os.pwrite(lock, str(os.getpid()).encode(), 0)
                    return draft, folder, lock
            except BaseException:
                os.close(folder)
                if lock >= 0:
                    os.close(lock)
                raise
            os.close(folder)
            os.close(lock)
    raise UsageError(f"{runs_root()}: what is made there is removed again and again")


def _give_up(draft: Path, folder: int, lock: int) -> None:
    _clear(folder, draft)
    os.close(folder)
    os.close(lock)


# ---- looking, and removing ---------------------------------------------------------------------


class _Found:
    """A directory as it was found. `lock`: held shared; None: somebody has it, or it has none."""

    def __init__(self, path: Path, folder: int, lock: int | None) -> None:
        self.path = path
        self._folder = folder
        self._lock = lock
        self.driver = "unknown"
        self.lives = False
        if lock is None:
            self.lives = not path.name.startswith(_DRAFT) and self.listener() is not None
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lives = True
            self.driver = os.pread(lock, 32, 0).decode() or self.driver

    def listener(self, kind: str = "") -> str | None:
        """Id of a process that accepts links there, at a socket whose name begins with `kind`."""
        for name in os.listdir(self._folder):
            if name.startswith(kind) and name.endswith(".sock"):
                pid = _listener(f"/proc/self/fd/{self._folder}/{name}")
                if pid is not None:
                    return pid
        return None

    def clear(self) -> None:
        """Remove it. A draft that has no lock yet is only removed while it is empty."""
        if self._lock is None and self.path.name.startswith(_DRAFT):
            with contextlib.suppress(OSError):
                self.path.rmdir()
        else:
            _clear(self._folder, self.path)


def _dead() -> Iterator[_Found]:
    """What no driver has any more, and no detached actor either."""
    for path in runs_root().iterdir():
        with _looked_at(path) as found:
            if found is None or found.lives or found.listener(_OF_DETACHED) is not None:
                continue
            yield found


@contextlib.contextmanager
def _looked_at(path: Path) -> Iterator[_Found | None]:
    """None when there is no such directory."""
    try:
        folder = os.open(path, _OPEN_FOLDER)
    except OSError:  # gone, a file, a link, somebody else's
        yield None
        return
    lock = None
    try:
        with contextlib.suppress(OSError):  # none, or a link or a pipe that somebody put there
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(_LOCK, flags, dir_fd=folder)
        yield _Found(path, folder, lock)
    finally:
        os.close(folder)
        if lock is not None:
            os.close(lock)


def _lives(path: Path) -> bool:
    with _looked_at(path) as found:
        return found is not None and found.lives


def _clear(folder: int, path: Path) -> None:
    """Everything in the directory, the lock last, and then the directory, if `path` still leads to
    it: that of another run is not empty. Others may be at it as well.
    """
    for name in os.listdir(folder):
        if name != _LOCK:
            _remove(name, folder)
    _remove(_LOCK, folder)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=folder)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` leads to what the descriptor is of."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _listener(path: str) -> str | None:
    """Id of the process that accepts links at this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            error = probe.connect_ex(path)
        except OSError:  # a name too long for a socket, so it is none
            return None
        if error == errno.EAGAIN:  # its queue is full
            return "unknown"
        if error:
            return None
        peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        return str(_PEER.unpack(peer)[0])
