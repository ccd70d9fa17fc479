"""The run folder: whole checkpoints or none, metrics that survive a kill, pictures and lines."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainer.cli
import trainer.run.eval_run
import trainer.run.folder
from actors.codec import make_remote_error
from actors.errors import UsageError
from actors.rundir import check_name
from shmstore import OutOfMemory, Store, StoreExists, StoreFull, TableFull
from shmstore.testing import unique_name
from tests.trainer.run import runs
from trainer.config import load
from trainer.errors import ConfigError
from trainer.ledger import ENDS
from trainer.metrics import MetricsWriter, describe, read_metrics
from trainer.run.display import LiveDisplay, PlainDisplay, make_display
from trainer.run.ending import failed
from trainer.run.ending import last_words as said_last
from trainer.run.folder import BadRunFolder, RunFolder, default_run_name, write_atomically
from trainer.run.learner_actor import LearnerReady
from trainer.run.opening import check_capacity
from trainer.run.plot import plot_rewards, smoothed
from trainer.run.summary import Summary

CONFIG = """\
model: {config: {architecture: Qwen3MoeForCausalLM}, tokenizer: char}
tasks: [{name: sort, source: {dataset: number_sorting, render: compact_sorting}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG)
    return RunFolder.create(load(file, [f"run.folder={tmp_path / 'runs'}"]), "r")


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


def test_a_display_that_nobody_can_see_any_more_is_silent() -> None:
    class Broken(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    display = make_display(table_rows=3, stream=Broken())
    display.note("hello")
    display.step({"train_step": 1.0})
    display.close()


def test_a_run_that_a_full_disk_ended_says_where_and_what_to_do(folder: RunFolder) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(folder.metrics_file))
    first, second = failed(folder, error).splitlines()
    assert first.endswith(f"No space left on device: '{folder.metrics_file}'")
    assert second == (
        "  what to do: make room there; there is no checkpoint, so "
        f"`shmrl resume {folder.path}` begins again"
    )
    assert failed(folder, ValueError("x")) == "ValueError: x"


def test_a_run_that_a_full_arena_ended_says_what_to_raise(folder: RunFolder) -> None:
    """Also out of a process of the run, where it is a RemoteError, too."""
    full = StoreFull("no room for 9 bytes", needed=9)
    remote = make_remote_error(full, "shmstore.errors.StoreFull", str(full), "trace")
    for error in (full, remote):
        first, second = failed(folder, error).splitlines()
        assert first == "StoreFull: no room for 9 bytes"
        assert second.startswith("  what to do: raise store.capacity, or")
    assert "capacity" not in failed(folder, TableFull("no row"))


def test_a_run_whose_arena_the_machine_cannot_hold_says_what_to_lower(folder: RunFolder) -> None:
    with pytest.raises(OutOfMemory) as caught:
        Store.create(unique_name(), capacity="8TiB")
    first, second = failed(folder, caught.value).splitlines()
    assert first.startswith("OutOfMemory: /dev/shm has")
    assert "lower store.capacity" in second
    assert second.endswith("begins again")


def test_a_run_whose_name_is_taken_says_so_in_the_words_of_the_command(folder: RunFolder) -> None:
    error = StoreExists('arena "r" is in use by 3 process(es); attach to it, or choose another')
    assert "choose another name (--set run.name=" in failed(folder, error).splitlines()[1]


def test_a_run_that_may_use_no_more_memory_says_so(folder: RunFolder) -> None:
    first, second = failed(folder, MemoryError()).splitlines()
    assert first == "MemoryError"
    assert second.startswith("  what to do: allow the processes of the run more memory")


@pytest.mark.parametrize(
    ("settings", "left", "least"),
    [
        ((), 4, 28_000_000),  # two states and the weights
        ((), 1, 20_000_000),  # one state and the weights twice
        (("model.dtype=bfloat16",), 4, 26_000_000),
        (("checkpoint.recovery=checkpoint",), 4, 8_000_000),
    ],
)
def test_an_arena_that_can_never_hold_the_model_is_refused_before_the_first_rollout(
    settings: tuple[str, ...], left: int, least: int
) -> None:
    ready = LearnerReady(train_step=6, parameters=1_000_000, warmup={}, source="start")

    def check(capacity: int) -> None:
        sizes = (f"store.capacity={capacity}", f"schedule.steps={6 + left}", "replay.max_bytes=1e6")
        check_capacity(load(runs.TINY, (*settings, *sizes)), ready)

    check(least + 1)
    with pytest.raises(ConfigError, match="1,000,000 parameters needs more than") as refused:
        check(least)
    proposed = "checkpoint.recovery: checkpoint" in str(refused.value)
    assert proposed == ("checkpoint.recovery=checkpoint" not in settings)


def test_a_resumed_run_with_no_step_to_train_needs_no_room_for_a_state() -> None:
    ready = LearnerReady(train_step=4, parameters=1 << 30, warmup={}, source="checkpoint")
    check_capacity(load(runs.TINY, ("schedule.steps=4",)), ready)


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


def test_the_plot_is_a_picture(folder: RunFolder) -> None:
    writer = MetricsWriter(folder.metrics_file, None)
    for step in range(1, 30):
        writer.write(
            step, {"reward": step / 30, **({"eval/reward": 0.5} if step % 10 == 0 else {})}
        )
    writer.close()
    plot_rewards(folder.metrics_file, folder.plot_file, "r")
    assert folder.plot_file.read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_a_running_mean_over_a_twentieth() -> None:
    assert smoothed([float(i) for i in range(40)])[-1] == 38.5
    assert smoothed([1.0, 3.0]) == [1.0, 3.0]


def test_plain_lines_say_step_and_reward() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.step({"train_step": 7, "reward": 0.25, "arena_bytes": 3 << 20})
    display.step({"train_step": 8, "reward": 0.5})  # within the same second: left out
    display.note("engine restarted")
    assert stream.getvalue() == "step 7  reward 0.250  arena 3.0 MiB\nengine restarted\n"


def test_plain_lines_say_who_owns_what_and_leave_out_no_last_step() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.step({"train_step": 7, "owner/replay": 32.0, "owner/learner": 16.0})
    display.step({"train_step": 8, "owner/weights": 1.0})
    display.close()
    display.close()
    assert stream.getvalue().splitlines() == [
        "step 7  sessions: learner 16, replay 32",
        "step 8  sessions: weights 1",
    ]


def test_a_note_is_shown_as_it_is_whatever_it_says() -> None:
    stream = io.StringIO()
    display = LiveDisplay(3, stream, 80)
    for text in ("what [bold]the judge[/] said: [/tmp/x] :x:", "[red]", "`shmrl resume x`" * 9):
        display.note(text)
        assert f"{text}\n" in stream.getvalue()
    display.close()


LATEST = {
    "train_step": 1200.0,
    "reward": 0.907,
    "eval/reward": 0.918,
    "staleness_mean": 0.62,
    "kl_engine": 0.00191,
    "tokens_per_s": 16_029.0,
    "learner_wait_share": 0.51,
    "step_s": 0.82,
    "window/failed_samples": 8.0,
    "window/filtered_samples": 1576.0,
    "buffer_groups": 18.0,
    "arena_bytes": 16.0 * (1 << 20),
    "owner/producer-0": 232.0,
    "owner/replay": 144.0,
}


@pytest.mark.parametrize(
    ("width", "last"), [(120, "18"), (80, "1,576"), (60, "0.82"), (40, "0.00191")]
)
def test_a_narrow_live_table_leaves_columns_out_and_wraps_or_cuts_none(
    width: int, last: str
) -> None:
    stream = io.StringIO()
    display = LiveDisplay(3, stream, width)
    display.step(LATEST)
    display.close()
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:3] == ["step", "reward", "held-out"]
    assert lines[1].split()[:3] == ["1200", "0.907", "0.918"]
    assert lines[1].split()[-1] == last
    assert "…" not in stream.getvalue()
    assert "arena 16.0 MiB; sessions: producer-0" in stream.getvalue()


def last_words(first_step: int = 1, **known: object) -> list[str]:
    summary = Summary("r")
    for name, value in known.items():
        setattr(summary, name, value)
    summary.settle()
    summary.wall_s = 3.0
    return list(said_last(summary, RunFolder(Path("runs/r")), first_step))


def test_the_last_words_compare_only_what_was_measured_twice_and_end_with_the_books() -> None:
    ledger = {**dict.fromkeys((*ENDS, "buffered"), 0), "produced": 12, "trained": 8, "filtered": 4}
    words = last_words(steps=2, rewards=[0.1, 0.3], evals=[0.165], ledger=ledger)
    assert words[:2] == [
        "reward of all rollouts: 0.100 -> 0.300",
        "reward on held-out prompts: 0.165, measured once",
    ]
    assert words[-1].startswith("books balance: produced 12 = trained 8 + filtered 4 rollouts (")
    assert last_words()[0].startswith("0 steps in 3.0 s")
    words = last_words(ledger={**ledger, "trained": 7})
    assert words[-1].startswith("books do NOT balance: produced 12, but trained 7")


def test_the_last_words_of_a_resumed_run_say_which_steps_are_new() -> None:
    assert "40 steps in 3.0 s, of which steps 12-40 since" in last_words(12, steps=40)[0]


def test_the_time_of_a_resumed_run_goes_on_from_its_checkpoint() -> None:
    first = Summary("r")
    first.began -= 100.0
    again = Summary("r")
    again.began -= 50.0  # it started before it read the checkpoint
    again.restore(first.totals())
    again.settle()
    assert 150.0 <= again.to_json()["wall_s"] < 200.0


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
