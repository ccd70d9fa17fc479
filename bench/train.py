"""`python -m bench train`: what asynchrony gives, and what the runtime takes.

Owns the comparison of two runs of the command line that do the same work, one with the synchronous
schedule (produce, then train, then sync), one with the asynchronous: each learner and producer a
process of its own on one pinned thread. Three mixes: *balanced* (bench/balanced.yaml, up to 24 new
tokens a rollout), in which generation and training cost about the same, so that two cores can at
best halve the time of a step; *quickstart* (examples/quickstart.yaml without warm-up and
evaluation, 7 tokens), in which they do not; and *longer*, the first with up to 96 tokens. What the
runtime takes goes with the number of rollouts, arithmetic with their tokens, so the three show from
which size on the one is small beside the other. The runs alternate; figures are of the steps after
the first few, from the runs' own metrics.jsonl (docs/metrics.md says what each is).

Overhead, as wall time: the share of all steps together that is not the longest chain of arithmetic.
Arithmetic is the CPU time of two calls, an engine's pass (admission, forward, sampling, cache, and
taking the results out, the Python of these included) and the learner's update (packing, forward,
backward, optimizer), each on its one thread. One after the other (sync) the chain is their sum;
side by side (async) it is the busier of the two, by their sums over ten steps. So everything else
counts against the runtime, also waiting for each other, and the reading, storing, judging and
booking that a thread does between two passes. A core that another process took is the machine's:
the *floor*, measured before each run, is the share of their time that two pinned threads lose
which only compute. Overhead is stated with it and without.
Overhead, as CPU time, says the same without the clock: what all processes computed besides
arithmetic, and which of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.floors import lost_share
from bench.peers import ROOT, run_workers
from bench.report import BenchArgs, Goal, Report, Row, Samples, Unit, at_most

SKIPPED_STEPS = 5  # of each run: imports, first allocations, the buffer's first filling
TIMEOUT_S = 900.0
FLOOR_S = 5.0  # before each run
ASYNC_GOAL = at_most(0.6, "ratio")
OVERHEAD_GOAL = at_most(0.03)
Goals = tuple[Goal, ...]


@dataclass(frozen=True)
class Mix:
    """A configuration, and what the benchmark changes in it."""

    name: str
    config: Path
    changes: tuple[str, ...] = ()
    steps: int = 60
    halves: bool = False
    """Generation and training cost about the same."""
    overhead_goals: Goals = ()


MIXES = (
    Mix(
        "balanced",
        ROOT / "bench" / "balanced.yaml",
        halves=True,
        overhead_goals=(OVERHEAD_GOAL,),
    ),
    Mix(
        "quickstart",
        ROOT / "examples" / "quickstart.yaml",
        (
            *("eval.prompts=0", "eval.every=0", "checkpoint.every=0", "checkpoint.final=false"),
            *("warmup=null", "replay.filter_equal_rewards=false"),
            *("metrics.plot=false", "metrics.tensorboard=false"),
        ),
    ),
    Mix(
        "longer",
        ROOT / "bench" / "balanced.yaml",
        ("rollout.max_new_tokens=96", "model.config.max_position_embeddings=128"),
        steps=20,
        overhead_goals=(OVERHEAD_GOAL,),
    ),
)


def main(args: BenchArgs) -> int:
    """Measures, prints, writes; returns the exit status, 1 when a run failed."""
    report = Report("train", args)
    if len(os.sched_getaffinity(0)) < 2:
        report.remark("one core only: asynchrony cannot gain anything here")
    for mix in MIXES:
        if not args.wants(mix.name):
            continue
        steps, repeats = (min(20, mix.steps), 1) if args.quick else (mix.steps, 2)
        try:
            report.add(*compare(mix, steps, repeats))
        except RunFailed as failed:
            report.remark(str(failed))
            report.finish()
            return 1
    if args.peers:
        run_workers(report, "train", ["trl"])
    return report.finish()


class RunFailed(Exception):
    """A run of the command line ended with an error."""


def run(mix: Mix, schedule: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    """One run to its end; the metrics of its steps after the first few."""
    name = f"bench-{mix.name}-{schedule}-{os.getpid()}"
    settings = (
        *mix.changes,
        *(f"run.folder={folder}", f"run.name={name}"),
        *(f"schedule.name={schedule}", f"schedule.steps={steps}"),
    )
    command = [sys.executable, "-m", "trainer.cli", "train", str(mix.config), "--json"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise RunFailed(f"{mix.name}, {schedule}: exit {done.returncode}: {tail}")
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["train_step"] > SKIPPED_STEPS and "step_s" in row]


def compare(mix: Mix, steps: int, repeats: int) -> list[Row]:
    """Rows of one mix: the schedules in turn, `repeats` times."""
    taken: dict[str, list[dict[str, Any]]] = {"sync": [], "async": []}
    floors: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        for repeat in range(repeats):
            for schedule in ("sync", "async") if repeat % 2 == 0 else ("async", "sync"):
                floors.append(lost_share(FLOOR_S))
                taken[schedule] += run(mix, schedule, steps, Path(folder) / str(repeat))
    step = {
        schedule: Samples(tuple(row["step_s"] * 1e9 for row in rows))
        for schedule, rows in taken.items()
    }
    ratio = step["async"].median_s / step["sync"].median_s
    goals = (ASYNC_GOAL,) if mix.halves else ()
    work = f"train step, {mix.name}"
    found = [
        step["sync"].row(work, "sync", note=_halves(taken["sync"])),
        Row(
            work,
            "async",
            step["async"].median_s,
            p99=step["async"].p99_s,
            n=step["async"].n,
            reference="sync",
            ratio=ratio,
            goals=goals,
        ),
    ]
    floor = statistics.mean(floors)
    found.append(
        Row(
            f"lost to the machine, {mix.name}",
            "floor",
            floor,
            unit="x",
            n=len(floors),
            note="share of the time of two pinned threads that only compute",
        )
    )
    for schedule, rows in taken.items():
        found += _shares(mix, schedule, rows, floor)
    return found


def _median(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(float(row.get(name, 0.0)) for row in rows)


def _halves(rows: Sequence[dict[str, Any]]) -> str:
    """How the work divides."""
    engine, learner = _median(rows, "cpu/engine_arithmetic"), _median(rows, _LEARNER)
    return f"engine {engine * 1e3:.0f} ms, learner {learner * 1e3:.0f} ms of arithmetic"


_CHAIN_STEPS = 10
_ENGINE, _LEARNER = "cpu/engine_arithmetic", "cpu/learner_arithmetic"
_BESIDES = {
    "cpu/driver": "prompts, buffer, books, metrics, messages",
    "cpu/producer": "conversations, segments, judges, hand-in, taking weights",
    "cpu/learner": "reading traces, publishing weights, messages",
}


def overhead_share(rows: Sequence[dict[str, Any]], schedule: str) -> float:
    """Share of all steps together outside their longest chain of arithmetic.

    Side by side the engine works for a later step than the learner, so what both did within one
    step are not two halves of the same work: the busier of the two is that of some steps' sums. Of
    a whole run's it would not be either: the speed of a shared machine changes within seconds, not
    alike on both cores, and then the one is the busier and then the other.
    """
    chain = 0.0
    for first in range(0, len(rows), _CHAIN_STEPS):
        part = rows[first : first + _CHAIN_STEPS]
        engine, learner = (sum(float(r[k]) for r in part) for k in (_ENGINE, _LEARNER))
        chain += max(engine, learner) if schedule == "async" else engine + learner
    return 1.0 - chain / sum(float(r["step_s"]) for r in rows)


def cpu_share(row: dict[str, Any]) -> float:
    """Share of the CPU time of all processes of the run that is not arithmetic."""
    besides = sum(row[name] for name in _BESIDES)
    return float(besides / (besides + row[_ENGINE] + row[_LEARNER]))


def _shares(mix: Mix, schedule: str, rows: Sequence[dict[str, Any]], floor: float) -> list[Row]:
    def row(work: str, value: float, unit: Unit, note: str = "", goals: Goals = ()) -> Row:
        work = f"{work}, {mix.name}"
        return Row(work, schedule, value, unit=unit, n=len(rows), goals=goals, note=note)

    wall = overhead_share(rows, schedule)
    cpu = statistics.median(cpu_share(r) for r in rows)
    found = [
        row(
            "overhead of the runtime",
            wall,
            "x",
            "share of all steps outside the longest chain of arithmetic",
        ),
        row(
            "overhead of the runtime, without the floor",
            1.0 - (1.0 - wall) / (1.0 - floor),
            "x",
            "the same, had the machine left both cores alone",
            mix.overhead_goals,
        ),
        row("overhead of the runtime, CPU", cpu, "x", "share of all CPU time of the run"),
    ]
    for name, what in _BESIDES.items():
        place = name.removeprefix("cpu/")
        found.append(row(f"CPU a step besides arithmetic: {place}", _median(rows, name), "s", what))
    found += [
        row("learner waits", _median(rows, "learner_wait_share"), "x", "share of a step"),
        row("tokens generated", _median(rows, "tokens_per_s"), "1/s"),
        row("tokens trained", _median(rows, "trained_tokens_per_s"), "1/s"),
    ]
    return found
