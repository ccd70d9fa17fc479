"""`shmrl eval`, interrupted, with its processes killed, or without room for its result."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from shmstore import Store
from tests.trainer.run import runs
from trainer.run.folder import RunFolder

pytestmark = [
    pytest.mark.timeout(600),  # against a hang: a loaded machine starts processes slowly
    pytest.mark.xdist_group("the run that is evaluated"),  # trained once for all tests of this file
]

JUDGE = """
import os, time
def judge(prompt, text):
    open({called!r}, "w").close()
    while not os.path.exists({go!r}):
        time.sleep(0.02)
    return len(text) % 2
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step. Its judge waits for the file `go` beside it, and says that it does."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "go").touch()
    judges = folder / "waits.py"
    judges.write_text(JUDGE.format(called=str(folder / "called"), go=str(folder / "go")))
    judge = f"tasks[0].judge={{kind: callable, target: '{judges}:judge', timeout_s: 600}}"
    run = runs.start(folder, judge, "schedule.steps=1", "eval.prompts=0", "metrics.plot=false")
    result = run.result()
    assert result.status == 0, result.stderr
    return run.folder


class Evaluation(runs.Run):
    """`shmrl eval` of a run whose judge waits until `let_go`."""

    def __init__(self, trained: Path, folder: Path, *overrides: str, prelude: str = "") -> None:
        shutil.copytree(trained, folder)
        opened = RunFolder.open(folder)
        opened.write_config(opened.config(overrides))
        self._called, self._go = trained.parent / "called", trained.parent / "go"
        self._called.unlink(missing_ok=True)
        self._go.unlink(missing_ok=True)
        super().__init__(["eval", str(folder), "--prompts", "4"], folder, prelude=prelude)

    def wait_for_the_judge(self) -> None:
        """Until the first rollout has ended."""
        self.wait_for_file(str(self._called))

    def let_go(self) -> None:
        self._go.touch()

    def evals(self) -> Sequence[str]:
        """What the run keeps of its evaluations."""
        file = self.folder / "evals.jsonl"
        return file.read_text().splitlines() if file.is_file() else []


def check_nothing_is_left(evaluation: Evaluation, below: Sequence[psutil.Process]) -> None:
    name = f"{evaluation.name[:30]}-eval-{evaluation.process.pid}"
    assert name not in {str(found) for found in Store.list()}
    _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2)])
def test_an_evaluation_that_is_interrupted_leaves_nothing(
    trained: Path, tmp_path: Path, number: signal.Signals, times: int
) -> None:
    evaluation = Evaluation(trained, tmp_path / trained.name)
    evaluation.wait_for_the_judge()
    below = evaluation.processes()
    for _ in range(times):
        evaluation.process.send_signal(number)
    result = evaluation.result()
    assert result.status == 130, result.stderr
    assert "the evaluation was interrupted; nothing is kept of it" in result.stderr
    assert "Traceback" not in result.stderr
    assert (result.summary, evaluation.evals()) == ({}, [])
    check_nothing_is_left(evaluation, below)


def test_an_evaluation_that_is_interrupted_while_its_models_are_built_leaves_nothing(
    trained: Path, tmp_path: Path
) -> None:
    evaluation = Evaluation(trained, tmp_path / trained.name)
    evaluation.interrupt()
    result = evaluation.result()
    assert result.status == 130, result.stderr
    assert "Traceback" not in result.stderr
    check_nothing_is_left(evaluation, [])


@pytest.mark.parametrize(
    ("victim", "overrides"),
    [
        ("producer", ()),
        ("engine-0", ("engine.inline=false",)),
    ],
)
def test_L12_a_process_that_is_killed_while_it_evaluates_is_started_again(
    trained: Path, tmp_path: Path, victim: str, overrides: Sequence[str]
) -> None:
    evaluation = Evaluation(trained, tmp_path / trained.name, *overrides)
    evaluation.wait_for_the_judge()
    below = evaluation.processes()
    first = evaluation.kill(victim)
    evaluation.wait_for_process(victim, not_pid=first)
    evaluation.let_go()
    result = evaluation.result()
    assert result.status == 0, result.stderr
    assert result.summary["rollouts"] == 4
    assert result.summary["failed"] == 0
    assert [json.loads(line) for line in evaluation.evals()] == [result.summary]
    assert f"{victim} died" in result.stderr
    check_nothing_is_left(evaluation, below)


def test_a_producer_that_is_not_started_again_ends_the_evaluation_with_the_cause(
    trained: Path, tmp_path: Path
) -> None:
    evaluation = Evaluation(trained, tmp_path / trained.name, "faults.restarts_max=0")
    evaluation.wait_for_the_judge()
    below = evaluation.processes()
    evaluation.kill("producer")
    result = evaluation.result()
    assert result.status == 1, result.stderr
    assert "producer failed: " in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert evaluation.evals() == []
    check_nothing_is_left(evaluation, below)


FULL_FOR_LOGS = """
import errno, os, pathlib
_mkdir = pathlib.Path.mkdir
def mkdir(self, *args, **options):
    if self.name == "eval":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
    _mkdir(self, *args, **options)
pathlib.Path.mkdir = mkdir
"""
STDOUT_IS_FULL = """
import os
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
"""


def test_a_full_disk_is_told_when_not_even_the_logs_have_room(
    trained: Path, tmp_path: Path
) -> None:
    evaluation = Evaluation(trained, tmp_path / trained.name, prelude=FULL_FOR_LOGS)
    result = evaluation.result()
    assert result.status == 1, result.stderr
    assert "could not be evaluated: [Errno 28] No space left" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    check_nothing_is_left(evaluation, [])


def test_a_result_that_no_disk_has_room_for_is_told_on_stderr(
    trained: Path, tmp_path: Path
) -> None:
    evaluation = Evaluation(trained, tmp_path / trained.name, prelude=STDOUT_IS_FULL)
    (evaluation.folder / "evals.jsonl").symlink_to("/dev/full")
    evaluation.let_go()
    result = evaluation.result()
    assert result.status == 1, result.stderr
    assert "evals.jsonl could not be written: [Errno 28] No space left" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert "stdout cannot be written ([Errno 28] No space left on device)" in last
    assert json.loads(last.partition("this was to go there: ")[2])["rollouts"] == 4
    check_nothing_is_left(evaluation, [])


def test_half_a_line_of_a_full_disk_does_not_spoil_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system writes what it has room for."""
    import io

    folder = RunFolder(tmp_path)
    folder.add_eval({"step": 1})
    write = io.FileIO.write

    class Short(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            return write(self, data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *_, **__: Short(self, "ab"))
        with pytest.raises(OSError, match="No space left"):
            folder.add_eval({"step": 2})
    folder.add_eval({"step": 3})
    assert [json.loads(line)["step"] for line in folder.evals_file.read_text().splitlines()] == [
        1,
        3,
    ]
