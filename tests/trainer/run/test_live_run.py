"""The main job as a person runs it: one command, real processes, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.trainer.run import runs
from trainer.metrics import describe

pytestmark = [
    pytest.mark.timeout(600),  # against a hang: a loaded machine starts processes slowly
    pytest.mark.xdist_group("the live run"),  # trained once for all tests of this file
]

STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[runs.Result, runs.Run]:
    """One whole run, looked at by the tests below."""
    run = runs.start(tmp_path_factory.mktemp("runs"), f"schedule.steps={STEPS}", "eval.every=2")
    return run.result(), run


def test_a_run_ends_with_its_result_and_balanced_books(
    finished: tuple[runs.Result, runs.Run],
) -> None:
    result, run = finished
    assert result.status == 0, result.stderr
    assert (result.summary["exit"], result.summary["steps"]) == (0, STEPS)
    assert result.summary["tokens_generated"] >= result.summary["tokens_trained"] > 0
    if result.summary["ledger"]["produced"] > result.summary["ledger"]["trained"]:
        assert result.summary["tokens_generated"] > result.summary["tokens_trained"]
    assert 0.0 <= result.summary["learner_wait_share"] <= 1.0
    assert json.loads((run.folder / "summary.json").read_text()) == result.summary
    runs.check_clean(result, run.name)


def test_every_step_is_in_the_metrics_under_documented_names(
    finished: tuple[runs.Result, runs.Run],
) -> None:
    _, run = finished
    records = run.steps()
    assert [r["train_step"] for r in records] == list(range(STEPS + 1))
    assert [r["train_step"] for r in records if "eval/reward" in r] == [0, 2, 4]
    names = {name for record in records for name in record}
    assert {name for name in names if describe(name) is None} == set()
    for record in records[1:]:
        assert record["rollouts"] == 16
        assert record["staleness_max"] <= 1
        ends = ("trained", "buffered", "failed", "filtered", "expired_dropped", "cancelled")
        assert record["ledger/produced"] == sum(record[f"ledger/{end}"] for end in ends)


def test_counts_are_written_as_whole_numbers_and_nothing_else_is(
    finished: tuple[runs.Result, runs.Run],
) -> None:
    counts = {"count", "rollout", "token", "B"}
    for record in finished[1].steps():
        for name, value in record.items():
            described = describe(name)
            assert described is not None
            counted = described.unit in counts and not name.endswith("_mean")
            if counted or name.endswith(("_samples", "/tokens", "/traces", "_step")):
                assert type(value) is int, name
            elif name.endswith(("_s", "_mean", "_share", "loss")):
                assert type(value) is float, name


def test_with_replay_the_learner_agrees_with_the_engine_on_fresh_rollouts(
    finished: tuple[runs.Result, runs.Run],
) -> None:
    _, run = finished
    first = run.steps()[1]
    assert first["staleness_max"] == 0
    assert first["learner/logprob_diff_max"] < 1e-4


def test_the_run_folder_holds_what_its_page_says(finished: tuple[runs.Result, runs.Run]) -> None:
    _, run = finished
    assert (run.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert any((run.folder / "tensorboard").iterdir())
    assert (run.folder / "checkpoints/latest").read_text() == f"step-{STEPS}\n"
    for part in ("learner", "buffer", "driver.json"):
        assert (run.folder / f"checkpoints/step-{STEPS}" / part).exists()
    assert not list(run.folder.rglob("*.pkl"))
    rows = pq.read_table(run.folder / "trajectories/step-2.parquet").to_pylist()
    assert len(rows) == 16
    assert all(row["prompt"][-1] in "<>" and row["reward"] in (0.0, 1.0) for row in rows)
    assert all(0 < row["sampled_tokens"] <= row["response_tokens"] for row in rows)
    assert run.steps()[1]["tokens_trained"] == sum(row["sampled_tokens"] for row in rows)
    assert all((row["response"] == row["answer"]) == (row["reward"] == 1.0) for row in rows)


def test_the_export_loads_with_from_pretrained(finished: tuple[runs.Result, runs.Run]) -> None:
    from transformers import AutoModelForCausalLM

    _, run = finished
    model = AutoModelForCausalLM.from_pretrained(run.folder / f"hf/step-{STEPS}")
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.config.num_experts == 4


def test_the_checkpoint_can_be_evaluated(
    finished: tuple[runs.Result, runs.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.cli import main

    _, run = finished
    assert main(["eval", str(run.folder), "--prompts", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["prompts"], found["rollouts"]) == (STEPS, 4, 4)
    assert json.loads((run.folder / "evals.jsonl").read_text().splitlines()[-1]) == found
    assert main(["eval", str(run.folder), "--step", "3"]) == 2
    assert "there are: step-4" in capsys.readouterr().err


def test_a_bad_configuration_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.cli import main

    config = tmp_path / "bad.yaml"
    config.write_text("model: {tokenizer: char}\nscheduel: async\n")
    assert main(["train", str(config), "--set", f"run.folder={tmp_path / 'runs'}"]) == 2
    assert "did you mean `schedule`?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


TWO_TURNS = """
class TwoTurns:
    def __init__(self, between): self.between = between
    async def run(self, session, prompt):
        await session.generate(prompt.text)
        await session.generate(self.between)
"""


def test_an_exported_folder_and_a_users_multi_turn_environment_train(
    finished: tuple[runs.Result, runs.Run], tmp_path: Path
) -> None:
    _, before = finished
    run = runs.start(
        tmp_path,
        f"model={before.folder / f'hf/step-{STEPS}'}",
        runs.own_environment(tmp_path / "turns.py", TWO_TURNS, "TwoTurns", "{between: '='}"),
        "rollout.max_new_tokens=4",
        "schedule.steps=2",
        "eval.prompts=0",
        "checkpoint.final=false",
    )
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["ledger"]["failed"] == 0
    assert run.steps()[0]["learner/logprob_diff_max"] < 1e-4
    rows = pq.read_table(run.folder / "trajectories/step-2.parquet").to_pylist()
    assert all("=" in row["response"] for row in rows)
    runs.check_clean(result, run.name)
