"""Ends that are not the end: kill -9 of the driver, Ctrl-C, and going on from the checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shmstore import Store
from tests.trainer.run import runs
from trainer.checkpoint import read_checkpoint
from trainer.cli import main
from trainer.snapshot_folder import SnapshotReader

pytestmark = [
    pytest.mark.timeout(600),  # against a hang: a loaded machine starts processes slowly
    pytest.mark.xdist_group("the uninterrupted run"),  # trained once for all tests of this file
]

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
    assert done.returncode == 1  # as of `diff`: something was found, and is still there


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
    check_same_history(expected, whole, runs.resume(broken.folder).result(), broken)


def check_same_history(
    expected: runs.Result, whole: runs.Run, resumed: runs.Result, broken: runs.Run
) -> None:
    """Bit for bit, and in all counters."""
    assert (expected.status, resumed.status) == (0, 0), resumed.stderr
    for one, other in zip(whole.steps(), broken.steps(), strict=True):
        assert {k: one.get(k) for k in COUNTERS} == {k: other.get(k) for k in COUNTERS}
    files = [r.folder / "checkpoints/step-6/learner/learner.safetensors" for r in (whole, broken)]
    assert files[0].read_bytes() == files[1].read_bytes()
    same = ("steps", "ledger", "reward_first", "reward_last", "eval_first", "tokens_trained")
    assert {k: expected.summary[k] for k in same} == {k: resumed.summary[k] for k in same}
    runs.check_clean(resumed, broken.name)


CTRL_C_IN_PRODUCTION = """
import asyncio, os, signal, trainer.run.driver as d, trainer.run.desk as k
from trainer.checkpoint import write_checkpoint
put_all, left, checkpoint = k.RemoteDesk.put_all, {groups}, asyncio.Event()
async def some_and_then_the_signal(self, groups, *, owner):
    global left
    now, later = groups[:left], groups[left:]
    outcomes = await put_all(self, now, owner=owner) if now else []
    left, before = left - len(now), left
    if before and not left:
        os.kill(os.getpid(), signal.SIGINT)
    if later:  # the others of the batch are still made when the checkpoint is written
        await checkpoint.wait()
        outcomes += await put_all(self, later, owner=owner)
    return outcomes
async def noted(*arguments):
    if not left:
        checkpoint.set()
    return await write_checkpoint(*arguments)
k.RemoteDesk.put_all, d.write_checkpoint = some_and_then_the_signal, noted
"""


@pytest.mark.parametrize("trained", [0, 3])
def test_L25_resumed_after_ctrl_c_in_production_the_history_is_that_of_an_uninterrupted_run(
    tmp_path: Path, uninterrupted: tuple[runs.Result, runs.Run], trained: int
) -> None:
    """What had been made of the step under way is kept; the rest is sampled as without it."""
    expected, whole = uninterrupted
    prelude = CTRL_C_IN_PRODUCTION.format(groups=4 * trained + 1)
    broken = runs.start(tmp_path, *EXACT, prelude=prelude)
    first = broken.result()
    assert (first.status, first.summary["steps"]) == (130, trained), first.stderr
    assert (broken.folder / "checkpoints/latest").read_text() == f"step-{trained}\n"
    kept = SnapshotReader(broken.folder / f"checkpoints/step-{trained}/buffer")
    assert len(kept.json("groups.json", list[Any])) == 1
    runs.check_clean(first, broken.name)
    check_same_history(expected, whole, runs.resume(broken.folder).result(), broken)


def test_ctrl_c_once_ends_after_the_step_with_a_checkpoint_and_resume_finishes(
    tmp_path: Path,
) -> None:
    warmup = "warmup={steps_max: 2, target: 1.0, batch: 4, eval_every: 2, eval_prompts: 4}"
    run = runs.start(
        tmp_path, "schedule.steps=500", "eval.prompts=0", warmup, "model.cache_dir=null"
    )
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    first = run.result()
    assert first.status == 130, first.stderr
    assert first.summary["interrupted"]
    assert f"`shmrl resume {run.folder}` goes on" in first.stderr
    assert "warm-up: 2/2" in first.stderr
    steps = first.summary["steps"]
    assert (run.folder / "checkpoints/latest").read_text() == f"step-{steps}\n"
    runs.check_clean(first, run.name)
    second = runs.resume(run.folder, f"schedule.steps={steps + 3}").result()
    assert second.status == 0, second.stderr
    assert second.summary["steps"] == steps + 3
    assert f"building the model of step {steps}\n" in second.stderr
    assert "warm" not in second.stderr
    assert second.summary["ledger"]["trained"] == (steps + 3) * 16
    assert [r["train_step"] for r in run.steps()] == list(range(1, steps + 4))
    runs.check_clean(second, run.name)
    third = runs.resume(run.folder).result()
    assert (third.status, third.summary["steps"]) == (0, steps + 3), third.stderr
    assert "no step was left to train, so the totals are those of the last ch" in third.stderr
    same = ("reward_first", "reward_last", "tokens_trained", "learner_wait_share")
    assert [third.summary[key] for key in same] == [second.summary[key] for key in same]
    kept = read_checkpoint(run.folder / f"checkpoints/step-{steps + 3}").totals
    assert third.summary["wall_s"] == pytest.approx(kept["wall_s"], abs=1e-5)


def test_ctrl_c_twice_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    run = runs.start(tmp_path, "schedule.steps=500", "eval.prompts=0")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    result = run.result()
    assert result.status == 130, result.stderr
    assert run.name not in Store.list()
    assert run.processes() == []


def test_ctrl_c_while_the_first_process_is_still_being_started(tmp_path: Path) -> None:
    run = runs.start(tmp_path, "schedule.steps=500")
    run.wait_for_process("shmrl-template")
    run.process.send_signal(signal.SIGINT)
    result = run.result()
    assert (result.status, result.summary["steps"]) == (130, 0), result.stderr
    runs.check_clean(result, run.name)


def test_ctrl_c_while_the_model_is_built_and_warmed_up_kills_and_counts_no_death(
    tmp_path: Path,
) -> None:
    warmup = "warmup={steps_max: 1000000, target: 1.0, batch: 16, eval_every: 1000000}"
    run = runs.start(tmp_path, "schedule.steps=500", warmup)
    run.interrupt()
    result = run.result()
    assert (result.status, result.summary["steps"]) == (130, 0), result.stderr
    assert (result.summary["error"], result.summary["restarts"]) == (None, {})
    runs.check_clean(result, run.name)


SLOW_CHECKPOINT = """
import asyncio, pathlib, trainer.snapshot as s
real = s.write
async def slow(frozen, folder, *rest):
    there = pathlib.Path({there!r})
    if not there.exists():
        return await real(frozen, folder, *rest)
    (there / "writes").touch()
    try:
        await asyncio.Event().wait()
    finally:
        frozen.thaw()
s.write = slow
"""


def test_many_ctrl_c_in_a_checkpoint_leave_the_one_before(tmp_path: Path) -> None:
    there = tmp_path / "there"
    settings = ("schedule.steps=500", "eval.prompts=0", "checkpoint.every=2")
    run = runs.start(tmp_path, *settings, prelude=SLOW_CHECKPOINT.format(there=str(there)))
    run.wait_for_file("checkpoints/step-2")
    there.mkdir()
    run.wait_for_file(str(there / "writes"))  # of a checkpoint that never ends
    while run.process.poll() is None:  # by somebody who loses patience
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    result = run.result()
    assert result.status == 130, result.stderr
    latest = (run.folder / "checkpoints/latest").read_text().strip()
    step = int(latest.removeprefix("step-"))
    assert f"the checkpoint of step {step} is whole" in result.summary["error"]
    runs.check_clean(result, run.name)
    resumed = runs.resume(run.folder, f"schedule.steps={step + 2}").result()
    assert (resumed.status, resumed.summary["steps"]) == (0, step + 2), resumed.stderr
    left = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert left <= {"latest", *(f"step-{n}" for n in range(step + 3))}
