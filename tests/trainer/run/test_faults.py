"""Deaths in a live run: whoever is killed, the run finishes, the books balance, the arena is empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.run import runs

LONG = ("schedule.steps=40", "eval.prompts=0", "checkpoint.final=false", "metrics.plot=false")


@pytest.mark.parametrize("victim", ["learner", "producer"])
def test_L07_L12_a_killed_process_costs_a_restart_and_nothing_else(
    tmp_path: Path, victim: str
) -> None:
    run = runs.start(tmp_path, *LONG)
    run.wait_for_step(3)
    first = run.kill(victim)
    run.wait_for_process(victim, not_pid=first)
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["restarts"] == {victim: 1}
    assert result.summary["steps"] == 40
    assert [r["train_step"] for r in run.steps()] == list(range(1, 41))
    assert result.summary["ledger"]["trained"] == 40 * 16
    runs.check_clean(result, run.name)
