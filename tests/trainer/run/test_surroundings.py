"""What is around a run and goes away: standard streams, the terminal, its folders."""

from __future__ import annotations

import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from shmstore import Store
from shmstore.testing import unique_name
from tests.trainer.run import runs

pytestmark = pytest.mark.timeout(600)  # against a hang: a loaded machine starts processes slowly

TOO_SMALL = """
from shmstore import Store
create = Store.create
Store.create = lambda name, **limits: create(name, **{**limits, "capacity": "8TiB"})
"""

QUICK = ("eval.prompts=0", "checkpoint.final=false", "metrics.plot=false")


def test_a_run_whose_standard_input_was_closed_before_it_began(tmp_path: Path) -> None:
    closed = ("bash", "-c", 'exec "$0" "$@" <&-')
    result = runs.start(tmp_path, *QUICK, "schedule.steps=2", around=closed).result()
    assert (result.status, result.summary["steps"]) == (0, 2), result.stderr


def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    run = runs.start(tmp_path, *QUICK, "schedule.steps=20", around=("nohup",))
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGHUP)
    result = run.result()
    assert (result.status, result.summary["steps"]) == (0, 20), result.stderr


def test_a_run_goes_on_when_the_reader_of_its_lines_has_gone(tmp_path: Path) -> None:
    run = runs.start(tmp_path, *QUICK, "schedule.steps=20")
    run.wait_for_step(1)
    assert run.process.stderr is not None
    run.process.stderr.close()
    result = run.result()
    assert (result.status, result.summary["steps"], result.summary["error"]) == (0, 20, None)
    runs.check_clean(result, run.name)


@pytest.mark.parametrize("cause", ["the name is taken", "the machine is too small"])
def test_a_run_without_an_arena_leaves_nothing_and_the_same_command_works_afterwards(
    tmp_path: Path, cause: str
) -> None:
    name = unique_name()
    folder = tmp_path / name
    settings = ("run.folder=" + str(tmp_path), "run.name=" + name, *QUICK, "schedule.steps=1")
    sets = [part for text in settings for part in ("--set", text)]
    train = ["train", str(runs.TINY), *sets]
    if cause == "the name is taken":
        with Store.create(name):
            refused = runs.Run(train, folder).result()
        Store.unlink(name)
    else:
        refused = runs.Run(train, folder, prelude=TOO_SMALL).result()
    assert refused.status == 1
    assert refused.stderr.endswith(
        "the run had not begun and left no folder: the same command begins it when that is mended\n"
    )
    assert list(tmp_path.iterdir()) == []
    result = runs.Run(train, folder).result()
    assert (result.status, result.summary["steps"]) == (0, 1), result.stderr


ON_A_TERMINAL = """
import fcntl, os, sys, termios
terminal = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)  # its end is ours to be told
os.dup2(terminal, 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_terminal_that_is_closed_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The live table is shown on it until then."""
    ours, theirs = pty.openpty()
    around = (sys.executable, "-c", ON_A_TERMINAL, os.ttyname(theirs))
    run = runs.start(tmp_path, "eval.prompts=0", "schedule.steps=5000", around=around)
    seen = b""
    while b"train" not in seen or not run.steps():
        seen += os.read(ours, 1 << 16)
    os.close(ours)
    os.close(theirs)
    result = run.result()
    assert result.status == 130
    steps = result.summary["steps"]
    assert (run.folder / "checkpoints/latest").read_text() == f"step-{steps}\n"
    runs.check_clean(result, run.name)


def test_a_run_whose_folder_is_removed_ends_and_says_so(tmp_path: Path) -> None:
    run = runs.start(tmp_path, *QUICK, "schedule.steps=5000", "metrics.trajectories_every=0")
    run.wait_for_step(2)
    run.folder.rename(tmp_path / "elsewhere")
    for path in sorted((tmp_path / "elsewhere").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    result = run.result()
    assert result.status == 1
    assert "removed while it ran" in result.summary["error"]
    runs.check_clean(result, run.name)
