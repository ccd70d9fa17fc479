"""What users' code, prompts and disks do to a run, and what it answers: a clear end or no harm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tests.trainer.run import runs

pytestmark = pytest.mark.timeout(600)  # against a hang: a loaded machine starts processes slowly

QUICK = (
    "eval.prompts=0",
    "checkpoint.final=false",
    "metrics.plot=false",
    "metrics.tensorboard=false",
)

JUDGES = """
import time
def sometimes(prompt, text):
    kind = sum(map(ord, prompt["text"])) % 8
    if kind == 0:
        raise ValueError("the judge broke")
    if kind == 1:
        return "nonsense"
    if kind == 2 and not text.startswith("x"):
        time.sleep(3600)
    return float(len(text)) / 8
"""


def test_L13_a_judge_that_hangs_raises_and_talks_nonsense_costs_rollouts_and_not_the_run(
    tmp_path: Path,
) -> None:
    judges = tmp_path / "judges.py"
    judges.write_text(JUDGES)
    judge = f"{{kind: callable, target: '{judges}:sometimes', timeout_s: 0.3, processes: 2}}"
    run = runs.start(tmp_path, *QUICK, f"tasks[0].judge={judge}", "schedule.steps=6")
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["ledger"]["failed"] > 0
    assert result.summary["ledger"]["trained"] == 6 * 16
    runs.check_clean(result, run.name)


TOOLS = """
import dataclasses, json, time
from trainer.environments import ToolLoop

def lookup(n):
    if n % 4 == 0:
        time.sleep(3600)
    if n % 4 == 1:
        raise ValueError("no such page")
    return n

class Asks:
    '''Lets a model that knows no tools call one in every first turn.'''
    def __init__(self, target):
        self.loop = ToolLoop([target], max_turns=2, timeout_s=0.3)
    async def run(self, session, prompt):
        call = {"name": "lookup", "arguments": {"n": sum(map(ord, prompt.text))}}
        await self.loop.run(Says(session, f"<tool_call>{json.dumps(call)}</tool_call>"), prompt)
    async def aclose(self):
        await self.loop.aclose()

class Says:
    def __init__(self, session, text):
        self.session, self.text = session, text
    async def generate(self, content):
        return dataclasses.replace(await self.session.generate(content), text=self.text)
"""


def test_L13_a_tool_that_sleeps_or_raises_costs_rollouts_and_not_the_run(tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    run = runs.start(
        tmp_path,
        *QUICK,
        runs.own_environment(tools, TOOLS, "Asks", f"{{target: '{tools}:lookup'}}"),
        'model.alphabet="0123456789<>=_/\\ntolrespn"',
        "model.config.max_position_embeddings=128",
        "faults.useless_groups_max=20",
        "schedule.steps=3",
    )
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["ledger"]["failed"] > 0
    assert " of task sort; the last: " in result.stderr, "a failing rollout is told while it runs"
    assert result.summary["ledger"]["trained"] == 3 * 16
    runs.check_clean(result, run.name)


def write_a_model_that_says_nothing(folder: Path) -> None:
    """Its layers add nothing to the embedding, whose first number is large and asks for the end."""
    from trainer.config import load
    from trainer.model.models import build_model, export_hf

    config = load(runs.TINY, ["model.config.tie_word_embeddings=false"]).model
    model, tokenizer = build_model(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                value.zero_()
        model.model.embed_tokens.weight[:, 0] = 10
        model.lm_head.weight[tokenizer.eos_token_id, 0] = 100
    export_hf(model, tokenizer, folder)


def test_empty_responses_are_scored_and_trained_like_others(tmp_path: Path) -> None:
    write_a_model_that_says_nothing(tmp_path / "silent")
    judges = tmp_path / "empty.py"
    judges.write_text("def judge(p, t):\n    assert t == ''\n    return len(p['text']) % 2\n")
    judge = f"tasks[0].judge={{kind: callable, target: '{judges}:judge'}}"
    run = runs.start(
        tmp_path, *QUICK, f"model={tmp_path / 'silent'}", judge, "faults.useless_groups_max=20"
    )
    result = run.result()
    assert result.status == 0, result.stderr
    assert (result.summary["ledger"]["failed"], result.summary["ledger"]["trained"]) == (0, 4 * 16)
    rows = pq.read_table(run.folder / "trajectories/step-2.parquet").to_pylist()
    assert {row["response"] for row in rows} == {""}
    runs.check_clean(result, run.name)


def test_rewards_that_are_all_equal_for_ever_end_the_run_with_the_reason(tmp_path: Path) -> None:
    run = runs.start(
        tmp_path, *QUICK, "replay.filter_equal_rewards=true", "faults.useless_groups_max=30",
        "tasks[0].judge={kind: callable, target: 'operator:is_not'}",
    )  # fmt: skip
    result = run.result()
    assert result.status == 1
    assert "30 groups in a row were failed or filtered" in result.summary["error"]
    assert "all rewards of the group were equal" in result.summary["error"]
    runs.check_clean(result, run.name)


def test_prompts_longer_than_the_context_fail_with_their_length(tmp_path: Path) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text('{"prompt": "' + "1" * 40 + '", "answer": "1"}\n')
    source = f"{{kind: jsonl, path: '{prompts}', holdout: 0.0}}"
    run = runs.start(tmp_path, *QUICK, f"tasks[0].source={source}", "faults.useless_groups_max=8")
    result = run.result()
    assert result.status == 1
    assert "8 groups in a row" in result.summary["error"]
    assert "40" in result.summary["error"]
    assert result.summary["ledger"]["failed"] >= 8 * 4
    runs.check_clean(result, run.name)


def test_prompts_that_run_out_end_the_run_with_the_reason(tmp_path: Path) -> None:
    prompts = tmp_path / "few.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}<", "answer": "{i}"}}\n' for i in range(10)))
    source = f"{{kind: jsonl, path: '{prompts}', holdout: 0.0, repeat: false}}"
    run = runs.start(tmp_path, *QUICK, f"tasks[0].source={source}", "schedule.steps=9")
    result = run.result()
    assert result.status == 1
    assert "its prompts ran out" in result.summary["error"]
    assert result.summary["steps"] == 2
    runs.check_clean(result, run.name)


SMALL_DISK = """mount -t tmpfs -o size=480k tmpfs "$0" || exit 77
"$@"; status=$?; cp -r "$0" "$0-after"; exit $status"""
"""Room for one checkpoint of the tiny model (300 KB) and not for two; exists as long as the run."""


def test_a_disk_that_fills_up_at_a_checkpoint_is_told_and_the_one_before_is_whole(
    tmp_path: Path,
) -> None:
    """A real full disk: a small tmpfs in a mount namespace of the run's own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.call([*unshare, "true"]):
        pytest.skip("this machine grants no mount namespace")
    around = [*unshare, "sh", "-c", SMALL_DISK, str(disk)]
    settings = (*QUICK, "schedule.steps=6", "checkpoint.every=2", "metrics.trajectories_every=0")
    result = runs.start(disk, *settings, around=around).result()
    assert result.status == 0, result.stderr
    assert result.summary["steps"] == 6
    warnings = result.summary["warnings"]
    assert [w[:24] for w in warnings] == ["the checkpoint of step 4", "the checkpoint of step 6"]
    assert all("No space left on device" in warning for warning in warnings)
    runs.check_clean(result, result.summary["run"])
    (folder,) = Path(f"{disk}-after").iterdir()
    there = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert there == ["latest", "step-2"]
    resumed = runs.resume(folder, "schedule.steps=3").result()
    assert resumed.status == 0, resumed.stderr
    assert (resumed.summary["steps"], resumed.summary["ledger"]["trained"]) == (3, 3 * 16)


def test_a_run_that_cannot_keep_what_it_trained_says_at_the_end_what_where_and_what_to_do(
    tmp_path: Path,
) -> None:
    settings = ("checkpoint.final=true", "checkpoint.every=30", "schedule.steps=30")
    run = runs.start(tmp_path, *QUICK, *settings)
    run.wait_for_step(2)
    for name in ("checkpoints", "hf"):
        shutil.rmtree(run.folder / name, ignore_errors=True)
        (run.folder / name).write_text("not a folder any more")
    result = run.result()
    assert result.status == 1
    assert result.summary["steps"] == 30
    lines = result.summary["error"].splitlines()
    assert lines[0] == "trained up to step 30, but not kept:"
    assert lines[1].startswith("  the checkpoint of step 30 could not be written to ")
    assert lines[2].startswith("  the export to ")
    assert lines[3].startswith(
        "  what to do: make room there; there is no checkpoint, so `shmrl re"
    )
    assert len(lines) == 4
    assert result.stderr.endswith(f"shmrl: {result.summary['error']}\n")
    # Due and last at once: it was tried once.
    assert result.stderr.count("the checkpoint of step 30") == 2
    assert [w.strip() for w in result.summary["warnings"]] == [line.strip() for line in lines[1:3]]
    runs.check_clean(result, run.name)


def test_L30_the_colocated_schedule_and_several_tasks_with_weights(tmp_path: Path) -> None:
    two = (
        "tasks=[{name: up, weight: 3, source: {dataset: number_sorting, render: compact_sorting}},"
        " {name: down, source: {dataset: number_sorting, render: compact_sorting}}]"
    )
    run = runs.start(tmp_path, *QUICK, two, "schedule=colocated", "schedule.weight_sync=pause")
    result = run.result()
    assert result.status == 0, result.stderr
    by_task = result.summary["ledger"]["tasks"]
    assert {name: books["trained"] for name, books in by_task.items()} == {"up": 48, "down": 16}
    assert all(r["staleness_max"] == 0 for r in run.steps())
    runs.check_clean(result, run.name)


NO_WEIGHTS = """
from trainer.errors import EngineError
from trainer.run.driver import Driver
sync = Driver._sync
async def refused(self, model_step, mode):
    if model_step == {step}:
        raise EngineError('no weights today')
    await sync(self, model_step, mode)
Driver._sync = refused
"""


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_the_last_step_is_in_the_metrics_although_its_weights_reached_no_engine(
    tmp_path: Path, schedule: str
) -> None:
    settings = (f"schedule.name={schedule}", "schedule.steps=2", "metrics.plot=false")
    run = runs.start(tmp_path, *settings, prelude=NO_WEIGHTS.format(step=2))
    result = run.result()
    assert (result.status, result.summary["steps"]) == (1, 2), result.stderr
    assert result.summary["error"].startswith("EngineError: no weights today")
    told = run.steps()
    assert [r["train_step"] for r in told] == [0, 1, 2]
    assert (told[-1]["ledger/trained"], told[-1]["model_step"]) == (32, 1)
    assert "eval/reward" not in told[-1]
    runs.check_clean(result, run.name)
