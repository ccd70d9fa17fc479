"""A run under fire: `python -m tests.trainer.run.soak --seconds 300` (`make soak-train S=300`).

Trains the tiny configuration with two engine processes, a warm-up, an evaluation every fourth step
and a checkpoint every other. At random moments, in the start and in a checkpoint as well as in a
step, it kills one process of the run (learner, producer, an engine, or the template that forks
them), or sends Ctrl-C, or kills the driver; after each end it resumes. It fails when a run ends by
itself with anything but success, when the books do not balance, when a step is missing from the
history, or when an arena is left. The seed is printed; the same seed makes the same choices, not
the same moments.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from shmstore import Store
from tests.trainer.run import runs

VICTIMS = ("learner", "producer", "engine-0", "engine-1", "shmrl-template")
PAUSE_S = (0.5, 5.5)
WARMUP = "warmup={steps_max: 40, target: 1.0, eval_every: 20, eval_prompts: 32, batch: 16}"
SETTINGS = (
    "engine.inline=false",
    "engine.replicas=2",
    "schedule.steps=1000000",
    "checkpoint.every=2",
    "eval.every=4",
    "faults.restarts_max=1000",
    WARMUP,
    "metrics.plot=false",
    "metrics.tensorboard=false",
    "metrics.trajectories_every=0",
)


def main() -> int:
    """Runs until the time is over; -> exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    choose = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        return _soak(Path(folder), choose, time.monotonic() + options.seconds)


def _soak(folder: Path, choose: random.Random, deadline: float) -> int:
    run = runs.start(folder, *SETTINGS, f"model.cache_dir={folder / 'cache'}")
    done: dict[str, int] = {}
    try:
        while time.monotonic() < deadline:
            if choose.random() < 0.5:
                run.wait_for_step(max([r["train_step"] for r in run.steps()], default=0) + 1)
            time.sleep(choose.uniform(*PAUSE_S))
            what = choose.choice((*VICTIMS * 3, "ctrl-c", "driver"))
            done[what] = done.get(what, 0) + 1
            if what in VICTIMS:
                run.kill(what)
                continue
            if what == "driver":
                run.end()
            else:
                run.interrupt()
                _check(run.result(), run.name, status=130)
            run = runs.resume(run.folder)
        run.wait_for_step(max([r["train_step"] for r in run.steps()], default=0) + 1)
        run.interrupt()
        _check(run.result(), run.name, status=130)
    finally:
        if run.process.poll() is None:
            run.end()
        if run.name in Store.list():
            Store.unlink(run.name)
    history = [r["train_step"] for r in run.steps()]
    steps = max(history)
    if history != list(range(steps + 1)):
        raise SystemExit(f"the history is not one of every step once: {history}")
    print(f"{steps} steps trained through " + ", ".join(f"{n} x {w}" for w, n in done.items()))
    return 0


def _check(result: runs.Result, name: str, status: int) -> None:
    if result.status != status:
        raise SystemExit(f"the run ended with {result.status}:\n{result.stderr}")
    runs.check_clean(result, name)


if __name__ == "__main__":
    sys.exit(main())
