"""The run folder: whole checkpoints or none, and metrics that survive a kill."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainer.cli
import trainer.run.eval_run
import trainer.run.folder
from actors.rundir import check_name
from tests.trainer.run.conftest import CONFIG
from trainer.config import load
from trainer.metrics import MetricsWriter, describe, read_metrics
from trainer.run.ending import failed
from trainer.run.folder import BadRunFolder, RunFolder, default_run_name, write_atomically


def test_the_resolved_config_of_a_run_loads_to_the_same_config(folder: RunFolder) -> None:
    again = RunFolder.open(folder.path)
    assert again.config() == folder.config()
    assert again.config(("schedule.steps=3",)).schedule.steps == 3


def test_a_run_is_never_written_over_and_a_folder_without_a_run_is_refused(
    folder: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(BadRunFolder, match="exists"):
        RunFolder.create(folder.config(), "r")
    with pytest.raises(BadRunFolder, match="no run folder"):
        RunFolder.open(tmp_path / "nothing")


def test_a_run_that_is_not_there_is_refused_with_the_newest_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRunFolder, match="the newest in runs/: none"):
        RunFolder.open("b")
    for number, name in enumerate("fedcba"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
        os.utime(tmp_path / "runs" / name / "config.yaml", (number, number))
    with pytest.raises(BadRunFolder, match=r"the newest in runs/: e, d, c, b, a$"):
        RunFolder.open("runs/g")


def test_a_folder_is_found_from_inside_of_it_and_a_name_that_no_run_can_have_is_refused(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.logs)
    assert RunFolder.open("..").name == "r"
    monkeypatch.chdir(folder.path)
    assert RunFolder.open(".").name == "r"
    for name in ("r (copy)", "r" * 41, "é"):
        shutil.copytree(folder.path, folder.path.with_name(name))
        with pytest.raises(BadRunFolder, match=r"a run is named as its folder, .*; rename it"):
            RunFolder.open(folder.path.with_name(name))


def test_a_run_that_is_being_trained_is_not_resumed_beside_and_not_touched(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.metrics_file.write_text('{"train_step": 9}\n')
    with folder.claimed(), folder.claimed():
        assert trainer.cli.main(["resume", str(folder.path), "--quiet"]) == 2
    assert "is being trained by another process; wait" in capsys.readouterr().err
    assert folder.metrics_file.read_text() == '{"train_step": 9}\n'
    with RunFolder.open(folder.path).claimed():
        pass


def test_a_folder_that_cannot_be_made_is_refused_with_what_to_do(
    folder: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    config = dataclasses.replace(
        folder.config(), run=dataclasses.replace(folder.config().run, folder=str(tmp_path / "file"))
    )
    with pytest.raises(BadRunFolder, match="choose another place"):
        RunFolder.create(config, "r")


def test_a_folder_that_could_only_be_made_in_part_does_not_stay(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(trainer.run.folder, "write_atomically", full)
        with pytest.raises(BadRunFolder, match="No space left on device"):
            RunFolder.create(folder.config(), "other")
    RunFolder.create(folder.config(), "other")


def test_only_a_folder_with_nothing_of_a_run_in_it_is_removed(folder: RunFolder) -> None:
    for part in (folder.metrics_file, folder.logs / "learner.log", folder.checkpoints / ".draft"):
        part.write_text("")
        assert not folder.remove_unbegun()
        part.unlink()
    assert folder.config_file.exists()
    assert folder.remove_unbegun()
    assert not folder.path.exists()
    assert not folder.remove_unbegun()


async def write_until_the_disk_is_full(folder: RunFolder, step: int) -> None:
    async with folder.new_checkpoint(step) as draft:
        (draft / "half").write_text("x")
        raise OSError("no space left on device")


async def checkpoint(folder: RunFolder, step: int) -> None:
    async with folder.new_checkpoint(step) as draft:
        (draft / "data").write_text(str(step))


async def test_L24_a_checkpoint_that_fails_leaves_the_one_before_and_no_draft(
    folder: RunFolder,
) -> None:
    await checkpoint(folder, 10)
    with pytest.raises(OSError, match="no space"):
        await write_until_the_disk_is_full(folder, 20)
    assert folder.latest_checkpoint() == (10, folder.checkpoints / "step-10")
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["latest", "step-10"]


async def test_L24_a_kill_between_rename_and_marker_leaves_the_marked_one(
    folder: RunFolder,
) -> None:
    await checkpoint(folder, 10)
    (folder.checkpoints / "step-20").mkdir()  # renamed, but the marker was never written
    assert folder.latest_checkpoint() == (10, folder.checkpoints / "step-10")
    await checkpoint(folder, 20)
    assert folder.latest_checkpoint() == (20, folder.checkpoints / "step-20")


@pytest.mark.parametrize("marker", [b"step-12\n", b"", b"\xff\xfe", b"step-x", b"../step-10"])
async def test_a_marker_of_a_checkpoint_that_is_gone_is_told_and_nothing_begins_again_unasked(
    folder: RunFolder, marker: bytes
) -> None:
    await checkpoint(folder, 10)
    (folder.checkpoints / "step-x").mkdir()
    (folder.checkpoints / "latest").write_bytes(marker)
    with pytest.raises(BadRunFolder, match="no checkpoint there; there are: step-10; write"):
        folder.latest_checkpoint()
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "there are: step-10" in failed(folder, full), "nothing hides how a run ended"


async def test_a_run_whose_checkpoints_were_removed_begins_again_and_keeps_new_ones(
    folder: RunFolder,
) -> None:
    shutil.rmtree(folder.checkpoints)
    assert folder.latest_checkpoint() is None
    await checkpoint(folder, 10)
    assert folder.latest_checkpoint() == (10, folder.checkpoints / "step-10")


async def test_pruning_keeps_the_newest_and_the_marked_checkpoint(folder: RunFolder) -> None:
    for step in (9, 10, 11, 100):
        await checkpoint(folder, step)
    write_atomically(folder.checkpoints / "latest", "step-9\n")
    stale = folder.checkpoints / ".step-12.1.tmp"
    stale.mkdir()
    folder.prune_checkpoints(2)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == [
        "latest",
        "step-100",
        "step-11",
        "step-9",
    ]


def test_a_failed_write_leaves_the_old_text(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \udc80")
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_metrics_skip_what_is_no_number_and_survive_a_torn_last_line(folder: RunFolder) -> None:
    writer = MetricsWriter(folder.metrics_file, folder.tensorboard)
    for step in range(1, 6):
        writer.write(step, {"reward": step / 10, "loss": math.nan if step == 2 else 1.0})
    writer.close()
    with folder.metrics_file.open("a") as file:
        file.write('{"train_step": 6, "rew')
    records = list(read_metrics(folder.metrics_file))
    assert [r["reward"] for r in records] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert records[1]["nonfinite"] == 1
    assert any(folder.tensorboard.iterdir())
    folder.keep_metrics_through(3)
    kept = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    assert [r["train_step"] for r in kept] == [1, 2, 3]
    whole = folder.metrics_file.read_bytes()
    folder.metrics_file.write_bytes(b'\xff\n[1]\n{"train_step": null}\n' + whole[:-1])
    folder.keep_metrics_through(3)
    assert folder.metrics_file.read_bytes() == whole, "its last line ends, for the next to follow"


def test_tensorboard_shows_each_step_once_after_a_run_went_back(folder: RunFolder) -> None:
    for first, rewards in ((0, (0.1, 0.2, 0.3)), (2, (0.7, 0.8, 0.9))):
        writer = MetricsWriter(folder.metrics_file, folder.tensorboard, first)
        for step, reward in enumerate(rewards, start=first or 1):
            writer.write(step, {"reward": reward})
        writer.close()
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("reward")]
    assert found == [(1, 0.1), (2, 0.7), (3, 0.8), (4, 0.9)]


def test_events_that_cannot_be_written_are_told_once_and_the_metrics_go_on(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    writer = MetricsWriter(folder.metrics_file, folder.tensorboard, warn=told.append)
    assert writer._events is not None
    monkeypatch.setattr(type(writer._events), "scalar", _disk_is_full)
    for step in (1, 2):
        writer.write(step, {"reward": 0.5})
    writer.close()
    assert [r["train_step"] for r in read_metrics(folder.metrics_file)] == [1, 2]
    assert len(told) == 1
    assert "no more TensorBoard events" in told[0]


def _disk_is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_metrics_of_a_folder_that_was_removed_are_an_error(folder: RunFolder) -> None:
    writer = MetricsWriter(folder.metrics_file, None)
    writer.write(1, {"reward": 0.5})
    shutil.rmtree(folder.path)
    with pytest.raises(FileNotFoundError, match="removed while it ran"):
        writer.write(2, {"reward": 0.5})
    writer.close()


def test_the_config_of_a_run_is_read_the_same_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 2)
    (tmp_path / "mine.py").write_text("def score(prompt, text):\n    return 1.0\n")
    file = tmp_path / "c.yaml"
    file.write_text(
        CONFIG.splitlines()[0]
        + """
eval: {prompts: 0}
tasks:
- name: t
  source: {kind: jsonl, path: p.jsonl, holdout: 0}
  environment: {kind: tools, tools: ["mine.py:score", "json:dumps"]}
  judge: {kind: callable, target: "mine.py:score"}
"""
    )
    monkeypatch.chdir(tmp_path)
    made = RunFolder.create(load(file), "r")
    monkeypatch.chdir("/")
    again = RunFolder.open(tmp_path / "runs" / "r").config()
    assert again == made.config()
    assert again.tasks[0].environment.tools == (f"{tmp_path}/mine.py:score", "json:dumps")
    assert again.run.folder == str(tmp_path / "runs")


def test_families_of_metrics_are_described_and_unknown_names_are_not() -> None:
    assert describe("owner/producer-0") is not None
    assert describe("eval/reward") is not None
    assert describe("surprise") is None


@pytest.mark.parametrize(
    "file",
    ["_x.yaml", "-a.yaml", "ü ü.yaml", ".yaml", "a.b_c.yaml", "x" * 80, "config.yaml"],
)
def test_the_default_name_of_a_run_is_one_that_the_runtime_takes(file: str) -> None:
    check_name("the name of a run", default_run_name(Path(file)))
