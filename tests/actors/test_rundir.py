"""Directories of runs: whoever is stopped or killed while it makes or removes one, at whatever
line, holds up nobody, takes nothing of a live run and leaves nothing for good.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import actors
from actors import rundir
from actors.rundir import RunDir, live_runs, sweep

_LINES_MAX = 1000
_runs_root = rundir.runs_root
_EXISTS = 3  # exit status of a child that was told so


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rundir, "runs_root", lambda: tmp_path)
    return tmp_path


def _dead(folder: Path) -> None:
    """What a killed run leaves, with something that is none of its."""
    (folder / "somebodys/deep").mkdir(parents=True)
    (folder / "somebodys/deep/file").touch()
    (folder / "lock").touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "status.sock"))


def _stopped_at(line: int, work: Callable[[], object]) -> int:
    """A child that does `work` up to its n-th line of `rundir` and stops there; its pid. 0: it has
    ended before.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            sys.settrace(_stopper(line))
            work()
            status = 0
        except actors.RunExists:
            status = _EXISTS
        finally:
            os._exit(status)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        return pid
    assert os.waitstatus_to_exitcode(status) == 0
    return 0


def _stopper(line: int) -> Callable[[FrameType, str, Any], Any]:
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != rundir.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
        return trace

    return trace


def _go_on(pid: int) -> int:
    """Its exit status."""
    os.kill(pid, signal.SIGCONT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _every_line(work: Callable[[], object], prepare: Callable[[], object]) -> Iterator[int]:
    """The pid of a child that is stopped at the first line of `work`, at the second, and so on."""
    for line in range(1, _LINES_MAX):
        prepare()
        pid = _stopped_at(line, work)
        if pid == 0:
            assert line > 20, "it stops at hardly any line"
            return
        yield pid
    raise AssertionError("it never ends")


def test_a_sweep_that_is_stopped_holds_up_nobody_and_takes_nothing_of_a_live_run(
    root: Path,
) -> None:
    def prepare() -> None:
        _dead(root / "run")
        _dead(root / ".new-dead")

    for pid in _every_line(sweep, prepare):
        ours, other = RunDir("run"), RunDir("other")
        Path(ours.socket_path("a1")).touch()
        with pytest.raises(actors.RunExists, match=f"driver process {os.getpid()}"):
            RunDir("run")
        assert _go_on(pid) == 0
        assert sorted(os.listdir(ours.path)) == ["a1.sock", "lock"]
        assert sorted(p.name for p in root.iterdir()) == ["other", "run"]
        ours.remove()
        other.remove()
        assert list(root.iterdir()) == []


def test_a_sweep_that_is_killed_leaves_nothing_that_the_next_one_does_not_remove(
    root: Path,
) -> None:
    def prepare() -> None:
        _dead(root / "run")
        _dead(root / ".new-dead")

    for pid in _every_line(sweep, prepare):
        _kill(pid)
        assert set(sweep()) <= {"run"}
        assert list(root.iterdir()) == []


@pytest.mark.parametrize("after_a_dead_one", [False, True])
def test_of_two_that_start_under_one_name_exactly_one_has_it(
    root: Path, after_a_dead_one: bool
) -> None:
    def prepare() -> None:
        if after_a_dead_one:
            _dead(root / "run")

    outcomes = set()
    for pid in _every_line(lambda: RunDir("run"), prepare):
        sweep()
        RunDir("other").remove()
        try:
            ours = RunDir("run")
        except actors.RunExists:
            assert _go_on(pid) == 0
            outcomes.add("theirs")
        else:
            assert _go_on(pid) == _EXISTS
            assert os.listdir(ours.path) == ["lock"]
            ours.remove()
            outcomes.add("ours")
        sweep()
        assert list(root.iterdir()) == []
    assert outcomes == {"ours", "theirs"}


def test_a_start_that_is_killed_leaves_nothing_that_the_next_one_does_not_remove(
    root: Path,
) -> None:
    for pid in _every_line(lambda: RunDir("run"), lambda: _dead(root / "run")):
        _kill(pid)
        made = RunDir("run")
        assert [p.name for p in root.iterdir()] == ["run"]
        made.remove()
        assert list(root.iterdir()) == []


def test_an_end_that_is_killed_or_stopped_makes_no_trouble(root: Path) -> None:
    def live_and_end() -> None:
        RunDir("run").remove()

    for pid in _every_line(live_and_end, lambda: None):
        sweep()
        try:
            ours: RunDir | None = RunDir("run")
        except actors.RunExists:
            ours = None
        _kill(pid) if ours is None else _go_on(pid)
        if ours is not None:
            assert os.listdir(ours.path) == ["lock"]
            ours.remove()
        sweep()
        assert list(root.iterdir()) == []


def test_dead_runs_are_named_before_they_are_removed_and_live_ones_are_not(root: Path) -> None:
    alive = RunDir("alive")
    _dead(root / "run")
    assert rundir.dead_runs() == ["run"]
    assert sweep() == ["run"]
    assert rundir.dead_runs() == []
    alive.remove()


def test_a_live_run_that_lost_its_lock_is_left_alone(root: Path) -> None:
    """To somebody who removes old files in /tmp."""
    made = RunDir("run")
    with socket.socket(socket.AF_UNIX) as status:
        status.bind(made.socket_path("status"))
        status.listen()
        (made.path / "lock").unlink()
        assert (sweep(), live_runs()) == ([], ["run"])
        with pytest.raises(actors.RunExists):
            RunDir("run")
        assert (made.path / "status.sock").exists()
    made.remove()
    assert list(root.iterdir()) == []


@contextmanager
def left_listening(name: str) -> Iterator[RunDir]:
    """A run whose driver has gone while an actor of it still listens."""
    gone = RunDir("run")
    with socket.socket(socket.AF_UNIX) as actor:
        actor.bind(gone.socket_path(name))
        actor.listen()
        gone.remove(keep_sockets=True)
        yield gone


def test_a_run_whose_detached_actor_lives_keeps_its_name_and_its_sockets(root: Path) -> None:
    with left_listening("d1") as gone:
        text = f"detached actor of an earlier run named 'run' lives .process {os.getpid()}."
        with pytest.raises(actors.RunExists, match=text):
            RunDir("run")
        assert sweep() == []
        assert (gone.path / "d1.sock").exists()
    RunDir("run").remove()
    assert list(root.iterdir()) == []


def test_an_actor_that_dies_with_its_killed_driver_keeps_no_run_from_its_name(root: Path) -> None:
    with left_listening("a1"):
        RunDir("run").remove()
    assert list(root.iterdir()) == []


def test_what_cannot_be_removed_is_told_to_who_wants_its_name_and_stops_nobody_else(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    _dead(root / "run")
    monkeypatch.setattr("shutil.rmtree", refuse)
    RunDir("other").remove()
    with pytest.raises(actors.UsageError, match="run cannot be made: Operation not permitted; rem"):
        RunDir("run")
    assert [p.name for p in root.iterdir()] == ["run"]
    assert (root / "run/lock").exists(), "so that it is swept when it can be"


def test_a_file_of_that_name_is_an_error_of_ours(root: Path) -> None:
    (root / "run").touch()
    with pytest.raises(actors.UsageError, match="run cannot be made: Not a directory; remove it"):
        RunDir("run")
    assert [p.name for p in root.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "cannot be made: Read-only .* /tmp has to"),
        (FileExistsError(errno.EEXIST, "File exists"), "must be a directory of user"),
    ],
)
def test_where_no_folder_of_sockets_can_be_it_is_an_error_of_ours(
    error: OSError, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "lstat", lambda _: os.lstat(__file__))
    with pytest.raises(actors.UsageError, match=told):
        _runs_root()


@pytest.mark.parametrize(
    "put",
    [
        lambda folder: (folder / "lock").symlink_to("/nowhere"),
        lambda folder: os.mkfifo(folder / "lock"),
        lambda folder: (folder / ("b" * 100 + ".sock")).touch(),
    ],
    ids=["a lock that is a link", "a lock that is a pipe", "a socket's name that is too long"],
)
def test_what_no_run_leaves_keeps_no_run_from_starting(
    root: Path, put: Callable[[Path], object]
) -> None:
    (root / "strange").mkdir()
    put(root / "strange")
    RunDir("mine").remove()
    assert not list(root.iterdir())
    (root / "strange").mkdir()
    put(root / "strange")
    RunDir("strange").remove()
    assert not list(root.iterdir())
