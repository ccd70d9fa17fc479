"""The commands beside `train`: what they refuse before anything starts, and what `doctor` tells."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

import trainer.cli
import trainer.run.eval_run
import trainer.run.folder
from actors.errors import UsageError
from tests.trainer.run import runs
from trainer.run.folder import RunFolder, default_run_name


def test_a_field_without_set_in_front_of_it_is_told_how(capsys: pytest.CaptureFixture[str]) -> None:
    for given, hinted in ((["schedule.steps=5"], True), (["again.yaml"], False)):
        with pytest.raises(SystemExit):
            trainer.cli.main(["train", str(runs.TINY), *given])
        told = capsys.readouterr().err
        assert f"unrecognized arguments: {given[0]}" in told
        assert ("--set section.field=value" in told) == hinted


def test_the_command_alone_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert trainer.cli.main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "train from a configuration file" in told.err
    assert "Exit status: 0 done; 1 failed" in told.err


def test_doctor_names_the_socket_folders_of_dead_runs_and_removes_none_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("actors.rundir.runs_root", lambda: tmp_path)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/lock").touch()
    trainer.cli.main(["doctor"])
    assert "socket folder of the dead run killed; the next run removes" in capsys.readouterr().out
    assert (tmp_path / "killed/lock").exists()


@pytest.mark.parametrize("missing", [True, False])
def test_doctor_says_what_keeps_every_run_from_beginning(
    missing: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "none" if missing else tmp_path
    monkeypatch.setattr("trainer.doctor._SHM", str(place))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    trainer.cli.main(["doctor"])
    told = capsys.readouterr().out
    assert ("shared memory    none: [Errno 2]" in told) == missing
    assert (f"no run can begin without {place}" in told) == missing
    assert (f"{place} cannot be written: no run can begin" in told) != missing


def test_doctor_tells_of_the_machine_where_no_folder_of_sockets_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Path:
        raise UsageError("/tmp/shmrl-0 cannot be made: Read-only file system")

    monkeypatch.setattr("actors.rundir.runs_root", refuse)
    assert trainer.cli.main(["doctor"]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("python ")
    assert "cannot be made" in told.err


def test_doctor_says_what_its_exit_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trainer.cli.main(["doctor", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "0 nothing is left behind and every arena is sound; 1 something was found" in told


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("prompts", "0"),
        ("prompts", "-1"),
        ("prompts", "9" * 14),
        ("prompts", "few"),
        ("temperature", "nan"),
        ("temperature", "-1"),
    ],
)
def test_an_evaluation_that_cannot_be_meant_is_refused_before_anything_starts(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        trainer.cli.main(["eval", str(folder.path), f"--{option}={value}"])
    assert f"argument --{option}: '{value}' is no " in capsys.readouterr().err


def test_a_run_whose_disk_is_full_or_read_only_is_not_resumed_and_says_so(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.metrics_file.write_text("{}\n")

    def full(path: Path, _: str) -> None:
        if path.name == refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(trainer.run.folder, "write_atomically", full)
    for refused, status in (("config.yaml", 2), ("metrics.jsonl", 1)):
        assert trainer.cli.main(["resume", str(folder.path), "--quiet"]) == status
        said = capsys.readouterr().err
        assert f"[Errno 28] No space left on device: '{folder.path / refused}'" in said
        assert "make room there" in said


def test_a_run_trained_again_is_named_after_the_first() -> None:
    assert default_run_name(Path("runs/mine/config.yaml")).startswith("mine-")
    again = default_run_name(Path("runs/quick-1129-231502/config.yaml"))
    assert re.fullmatch(r"quick-\d{4}-\d{6}", again)


def test_an_evaluation_in_which_every_rollout_failed_ends_with_1(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"run": "r", "reward": None, "rollouts": 10, "failed": 10}
    monkeypatch.setattr(trainer.run.eval_run, "evaluate_run", lambda *_, **__: found)
    assert trainer.cli.main(["eval", str(folder.path), "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) == found
    assert "10 of 10 rollouts failed" in told.err
