"""Ends that are not the end: kill -9 of the driver, Ctrl-C, and going on from the checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shmstore import Store
from tests.trainer.run import runs
from trainer.cli import main

pytestmark = pytest.mark.timeout(600)  # against a hang: a loaded machine starts processes slowly

EXACT = (
    "run.deterministic=true",
    "schedule=sync",
    "schedule.steps=6",
    "checkpoint.every=2",
    "eval.every=2",
    "metrics.plot=false",
    "metrics.tensorboard=false",
)
COUNTERS = ("reward", "loss", "tokens_trained", "ledger/produced", "ledger/trained", "eval/reward")


def check_doctor_finds(name: str) -> None:
    """L28: what a killed run left is found. It is not cleaned here: that would sweep others' too;
    the resumed run takes the arena's place.
    """
    done = subprocess.run(
        [sys.executable, "-m", "trainer.cli", "doctor", "--json"],
        cwd=runs.ROOT,
        env={**os.environ, "PYTHONPATH": str(runs.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert name in done.stdout


KILLED_AT = {
    "anywhere": "",
    "before the checkpoint of step 4 is named": """
import os, signal, trainer.run.folder as r
real = r.write_atomically
def dying(path, text):
    if path.name == "latest" and text == "step-4\\n":
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, text)
r.write_atomically = dying
""",
    "right after the checkpoint of step 4": """
import os, signal, trainer.run.driver as d
real = d.write_checkpoint
async def dying(folder, step, *rest):
    await real(folder, step, *rest)
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
d.write_checkpoint = dying
""",
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[runs.Result, runs.Run]:
    """The run that the broken ones are compared with."""
    whole = runs.start(tmp_path_factory.mktemp("runs"), *EXACT)
    return whole.result(), whole


@pytest.mark.parametrize("moment", KILLED_AT)
def test_L25_resumed_after_a_kill_the_history_is_bit_for_bit_that_of_an_uninterrupted_run(
    tmp_path: Path,
    uninterrupted: tuple[runs.Result, runs.Run],
    moment: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected, whole = uninterrupted
    broken = runs.start(tmp_path, *EXACT, prelude=KILLED_AT[moment])
    if moment == "anywhere":
        broken.wait_for_step(3)
        broken.end()
    else:
        broken.dies()
    check_doctor_finds(broken.name)
    if moment == "anywhere":
        assert main(["eval", str(broken.folder), "--prompts", "4", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] in (2, 4)
    resumed = runs.resume(broken.folder).result()
    assert (expected.status, resumed.status) == (0, 0), resumed.stderr
    for one, other in zip(whole.steps(), broken.steps(), strict=True):
        assert {k: one.get(k) for k in COUNTERS} == {k: other.get(k) for k in COUNTERS}
    files = [r.folder / "checkpoints/step-6/learner/learner.safetensors" for r in (whole, broken)]
    assert files[0].read_bytes() == files[1].read_bytes()
    same = ("steps", "ledger", "reward_first", "reward_last", "eval_first", "tokens_trained")
    assert {k: expected.summary[k] for k in same} == {k: resumed.summary[k] for k in same}
    runs.check_clean(resumed, broken.name)


def test_ctrl_c_once_ends_after_the_step_with_a_checkpoint_and_resume_finishes(
    tmp_path: Path,
) -> None:
    run = runs.start(tmp_path, "schedule.steps=500", "eval.prompts=0")
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    first = run.result()
    assert first.status == 130, first.stderr
    assert first.summary["interrupted"]
    steps = first.summary["steps"]
    assert (run.folder / "checkpoints/latest").read_text() == f"step-{steps}\n"
    runs.check_clean(first, run.name)
    second = runs.resume(run.folder, f"schedule.steps={steps + 3}").result()
    assert second.status == 0, second.stderr
    assert second.summary["steps"] == steps + 3
    assert second.summary["ledger"]["trained"] == (steps + 3) * 16
    assert [r["train_step"] for r in run.steps()] == list(range(1, steps + 4))
    runs.check_clean(second, run.name)


def test_ctrl_c_twice_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    run = runs.start(tmp_path, "schedule.steps=500", "eval.prompts=0")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    result = run.result()
    assert result.status == 130, result.stderr
    assert run.name not in Store.list()
    assert run.processes() == []
