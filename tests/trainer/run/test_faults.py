"""Deaths in a live run: whoever is killed, it finishes, the books balance, nothing is left."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.trainer.run import runs

pytestmark = pytest.mark.timeout(600)  # against a hang: a loaded machine starts processes slowly

LONG = ("schedule.steps=40", "eval.prompts=0", "checkpoint.final=false", "metrics.plot=false")


@pytest.mark.parametrize("victim", ["learner", "producer"])
def test_L07_L12_a_killed_process_costs_a_restart_and_nothing_else(
    tmp_path: Path, victim: str
) -> None:
    run = runs.start(tmp_path, *LONG)
    run.wait_for_step(3)
    first = run.kill(victim)
    successor = run.wait_for_process(victim, not_pid=first)
    # It is forked with torch, which takes seconds to import, by a process without a thread.
    template = run.wait_for_process("shmrl-template")
    assert successor.ppid() == template.pid
    assert any("libtorch_cpu" in map_.path for map_ in template.memory_maps())
    assert template.num_threads() == 1
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["restarts"] == {victim: 1}
    assert result.summary["steps"] == 40
    assert [r["train_step"] for r in run.steps()] == list(range(1, 41))
    assert result.summary["ledger"]["trained"] == 40 * 16
    runs.check_clean(result, run.name)


def test_processes_that_are_killed_while_the_run_starts_are_started_again(tmp_path: Path) -> None:
    run = runs.start(tmp_path, *LONG, "engine.inline=false", "schedule.steps=5")
    for victim in ("learner", "engine-0", "producer"):
        first = run.kill(victim)
        run.wait_for_process(victim, not_pid=first)
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["ledger"]["trained"] == 5 * 16
    runs.check_clean(result, run.name)


def test_a_learner_without_a_state_in_the_arena_takes_the_run_back_to_its_checkpoint(
    tmp_path: Path,
) -> None:
    """First to the beginning, because there is no checkpoint yet; then to one."""
    back = ("checkpoint.recovery=checkpoint", "checkpoint.every=5")
    run = runs.start(tmp_path, *LONG, *back)
    run.wait_for_step(2)
    first = run.kill("learner")
    run.wait_for_process("learner", not_pid=first)
    run.wait_for_file("checkpoints/step-15")
    run.kill("learner")
    result = run.result()
    assert result.status == 0, result.stderr
    back_to = [int(step) for step in re.findall(r"the run goes back to step (\d+)", result.stderr)]
    assert back_to[0] == 0
    assert back_to[1] >= 15
    assert result.summary["restarts"] == {"learner": 2}
    assert result.summary["steps"] == 40
    assert [r["train_step"] for r in run.steps()] == list(range(1, 41))
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("staleness_max")] == list(range(1, 41))
    assert result.summary["ledger"]["trained"] == 40 * 16
    runs.check_clean(result, run.name)


def test_a_dead_engine_replica_costs_its_requests_a_new_start(tmp_path: Path) -> None:
    run = runs.start(tmp_path, *LONG, "engine.inline=false", "engine.replicas=2")
    run.wait_for_step(3)
    first = run.kill("engine-1")
    run.wait_for_process("engine-1", not_pid=first)
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["restarts"] == {"engine-1": 1}
    assert result.summary["ledger"]["trained"] == 40 * 16
    runs.check_clean(result, run.name)


def test_L27_processes_killed_one_after_the_other_at_random_do_not_stop_a_run(
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    choose = random.Random(seed)
    victims = choose.sample(["learner", "producer", "engine-0"], 3)
    run = runs.start(tmp_path, *LONG, "engine.inline=false", "schedule.steps=60")
    step = 0
    for victim in victims:
        step += choose.randrange(2, 6)
        run.wait_for_step(step)
        first = run.kill(victim)
        run.wait_for_process(victim, not_pid=first)
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["restarts"] == dict.fromkeys(victims, 1)
    assert result.summary["ledger"]["trained"] == 60 * 16
    runs.check_clean(result, run.name)


@pytest.mark.parametrize("victim", ["learner", "producer"])
def test_a_part_that_is_not_started_again_ends_the_run_with_the_cause(
    tmp_path: Path, victim: str
) -> None:
    run = runs.start(tmp_path, *LONG, "schedule.steps=5000", "faults.restarts_max=0")
    run.wait_for_step(2)
    run.kill(victim)
    result = run.result()
    assert result.status == 1, result.stderr
    assert victim in result.summary["error"]
    runs.check_clean(result, run.name)


def test_a_learner_that_stands_still_is_told_by_the_watchdog_and_not_waited_for(
    tmp_path: Path,
) -> None:
    run = runs.start(tmp_path, *LONG, "schedule.steps=5000", "faults.no_progress_s=5")
    run.wait_for_step(2)
    run.wait_for_process("learner").suspend()
    result = run.result()
    assert result.status == 1, result.stderr
    assert "nothing moved for" in result.summary["error"]
    assert "train step" in result.summary["error"]
    runs.check_clean(result, run.name)


JUDGE_THAT_WAITS = """
import os, time
def judge(prompt, text):
    open({called!r}, "w").close()
    while not os.path.exists({go!r}):
        time.sleep(0.02)
    return len(text) % 2
"""


def test_deaths_that_no_call_noticed_are_counted(tmp_path: Path) -> None:
    """The learner waits for its first batch, which its judge holds back, and dies twice."""
    called, go, judges = tmp_path / "called", tmp_path / "go", tmp_path / "waits.py"
    judges.write_text(JUDGE_THAT_WAITS.format(called=str(called), go=str(go)))
    judge = f"tasks[0].judge={{kind: callable, target: '{judges}:judge', timeout_s: 600}}"
    run = runs.start(tmp_path, *LONG, judge, "schedule.steps=2", "schedule=sync")
    run.wait_for_file(str(called))
    first = run.kill("learner")
    second = run.wait_for_process("learner", not_pid=first)
    second.kill()
    run.wait_for_process("learner", not_pid=second.pid)
    go.touch()
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["restarts"] == {"learner": 2}
    runs.check_clean(result, run.name)


def test_processes_that_die_while_nobody_calls_them_are_found_out_by_the_next_call(
    tmp_path: Path,
) -> None:
    """The learner waits for a batch that a slow judge delays; the producer waits for weights."""
    judges = tmp_path / "slow.py"
    judges.write_text("import time\ndef slow(p, t):\n    time.sleep(0.04)\n    return len(t) % 2\n")
    judge = f"tasks[0].judge={{kind: callable, target: '{judges}:slow', processes: 2}}"
    run = runs.start(tmp_path, *LONG, judge, "schedule.steps=6", "schedule=sync")
    for step in (1, 2):
        run.wait_for_step(step)
        first = run.kill("learner")
        run.wait_for_process("learner", not_pid=first)
    result = run.result()
    assert result.status == 0, result.stderr
    assert result.summary["restarts"] == {"learner": 2}
    assert result.summary["ledger"]["trained"] == 6 * 16
    runs.check_clean(result, run.name)


BUG = """
import trainer.dispatch
async def put_all(*_, **__):
    raise ZeroDivisionError("a bug of ours")
trainer.dispatch.Dispatcher.put_all = put_all
"""


def test_a_bug_where_groups_are_handed_in_ends_the_run_and_leaves_its_trace(
    tmp_path: Path,
) -> None:
    run = runs.start(tmp_path, *LONG, prelude=BUG)
    result = run.result()
    assert result.status == 1
    cause = "PartFailed: producer-0 failed: ZeroDivisionError: a bug of ours"
    assert result.summary["error"] == cause
    log = (run.folder / "logs/producer.log").read_text()
    assert "production ends\nTraceback" in log
    assert ", in put_all\n" in log
    runs.check_clean(result, run.name)
