"""`make gpu-check`: whether everything that touches a device is right here, and how fast.

On the CPU first, then on each kind of use of the GPUs that are there: copies between arena and
device, equal log-probs of engine and learner, tokens a second, weights on their way, learner and
engine on one device with a split of its memory, in turns, and on two devices. Each part is a
process of its own with a limit of its own, so that neither an error nor a hang nor a broken device
loses the others. One table with ratios to plain copies from pinned memory; less than ten minutes.
The exit status is 0 when every part ran and met its goals; without CUDA those are the CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import BenchArgs, Goal, Report, Row, at_least, at_most

LIMIT_S = 590.0
"""Of all parts together; a part that would begin later has failed."""
ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
STEPS = 60
REWARD_GAIN_MIN = 0.05
"""From the first tenth of the steps to the last; the whole quickstart gains about 0.4."""
_LAST_WORDS = 2000


@dataclass(frozen=True)
class Part:
    """One process: its rows, and how long it may take."""

    name: str
    rows: Callable[[], Iterator[Row]]
    limit_s: float = 120.0


def parts(gpus: int) -> list[Part]:
    """What is checked on a machine with so many CUDA devices."""
    found = _device_parts("cpu", large=False)
    found.append(_train_part("train on cpu", ()))
    if gpus:
        gpu = "cuda:0"
        shared = ("learner.device=cuda:0", "engine.device=cuda:0")
        split = ("learner.memory_fraction=0.4", "engine.memory_fraction=0.4")
        found += _device_parts(gpu, large=True)
        found.append(Part("memory split", lambda: _copies().memory_split(gpu)))
        found.append(_train_part("train on one device, split", (*shared, *split)))
        half = ("model.dtype=bfloat16", "learner.autocast=true")
        turns = (*shared, *half, "schedule.name=colocated", "schedule.steps=20")
        found.append(_train_part("train on one device, in turns", turns, learns=False))
    if gpus > 1:
        found.append(Part("weights to cuda:1", lambda: _weights("cuda:0", "cuda:1", large=True)))
        apart = ("learner.device=cuda:0", "engine.device=cuda:1", "engine.inline=false")
        found.append(_train_part("train on two devices", apart))
    return found


def _device_parts(device: str, *, large: bool) -> list[Part]:
    model, n_bytes = _model(), 256 << 20 if large else 32 << 20
    size = model.LARGE if large else model.SMALL
    return [
        Part(f"copies, {device}", partial(_copies().copies, device, n_bytes)),
        Part(f"log-probs, {device}", partial(model.equal_logprobs, device, model.SMALL)),
        Part(f"bfloat16, {device}", partial(model.half_precision_logprobs, device, model.SMALL)),
        Part(f"speed, {device}", partial(model.speed, device, size, half=large)),
        Part(f"weights, cpu → {device}", lambda: _weights("cpu", device, large=False)),
        *([Part(f"weights, {device}", lambda: _weights(device, device, large=True))] * large),
    ]


def _weights(source: str, target: str, *, large: bool) -> Iterator[Row]:
    size = _model().LARGE if large else _model().SMALL
    found: Iterator[Row] = _copies().weights(source, target, size)
    return found


def _model() -> Any:
    from bench import gpu_model

    return gpu_model


def _copies() -> Any:
    from bench import gpu_copies

    return gpu_copies


def _train_part(name: str, overrides: Sequence[str], *, learns: bool = True) -> Part:
    return Part(name, lambda: train(name, overrides, learns=learns), limit_s=240.0)


def train(name: str, overrides: Sequence[str], *, learns: bool = True) -> Iterator[Row]:
    """The quickstart from the command line, shortened: it learns, its books balance, its arena is
    empty."""
    changes = (f"schedule.steps={STEPS}", f"eval.every={STEPS}", "checkpoint.every=0", *overrides)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "trainer.cli", "train", str(QUICKSTART), "--json", "--quiet"]
            + [word for change in changes for word in ("--set", change)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"the run ended with {done.returncode}: {done.stderr[-_LAST_WORDS:]}"
            )
    summary = json.loads(done.stdout.splitlines()[-1])
    gain = summary["reward_last"] - summary["reward_first"]
    goals = (at_least(REWARD_GAIN_MIN),) if learns else ()
    note = f"{summary['reward_first']:.2f} → {summary['reward_last']:.2f}"
    yield Row(name, "reward gained", gain, "count", n=summary["steps"], goals=goals, note=note)
    yield Row(name, "wall time", summary["wall_s"])
    for which in ("generated", "trained"):
        rate = summary[f"tokens_{which}"] / summary["wall_s"]
        yield Row(name, f"tokens {which} a second", rate, "1/s")
    books = summary["ledger"]
    ends = ("trained", "buffered", "failed", "filtered", "expired_dropped", "cancelled")
    lost = books["produced"] - sum(books[end] for end in ends)
    yield Row(name, "rollouts not in the books", abs(lost), "count", goals=(at_most(0),))
    left = summary["arena"]["sessions"] + summary["arena"]["objects"]
    yield Row(name, "left in the arena", left, "count", goals=(at_most(0),))


def run_parts(report: Report, chosen: Sequence[Part], command: Sequence[str]) -> list[str]:
    """Each part in a process of its own (`command` and its name); → the parts that failed."""
    failed = []
    ends = time.monotonic() + LIMIT_S
    for part in chosen:
        limit_s = min(part.limit_s, ends - time.monotonic())
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as rows:
            problem = _run_part(part.name, [*command, part.name, "--rows", rows.name], limit_s)
            report.add(*(_row(json.loads(line)) for line in rows))
        if problem is not None:
            failed.append(part.name)
            report.remark(f"{part.name}: {problem}")
    return failed


def _run_part(name: str, command: Sequence[str], limit_s: float) -> str | None:
    """→ what went wrong."""
    if limit_s <= 0:
        return f"there was no time left of {LIMIT_S:.0f} s"
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {limit_s:.0f} s"
    if done.returncode == 0:
        return None
    return f"exit status {done.returncode}\n{done.stderr[-_LAST_WORDS:]}"


def _row(fields: dict[str, Any]) -> Row:
    return Row(**{**fields, "goals": tuple(Goal(**goal) for goal in fields["goals"])})


def _be_part(part: Part, rows: Path) -> int:
    """In the part's own process: writes each row as it comes."""
    with rows.open("a", encoding="utf-8") as file:
        for row in part.rows():
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything and prints the table; → 0 when nothing failed."""
    import torch

    parser = argparse.ArgumentParser(prog="gpu-check", description="Check and time the devices.")
    parser.add_argument("--only", metavar="WORD", help="parts whose name contains WORD")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--part", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = parts(gpus)
    if given.part is not None:
        return _be_part(next(part for part in found if part.name == given.part), given.rows)
    args = BenchArgs(json=given.json, quick=gpus == 0, only=given.only)
    report = Report("gpu", args)
    chosen = [part for part in found if args.wants(part.name)]
    failed = run_parts(report, chosen, [sys.executable, "-m", "bench.gpu_check", "--part"])
    if gpus:
        names = {torch.cuda.get_device_name(index) for index in range(gpus)}
        report.remark(f"{gpus} CUDA devices: {', '.join(sorted(names))}")
    else:
        report.remark("there is no CUDA device here: only the CPU's part was run")
    report.finish()
    missed = [row for row in report.rows if any(met is False for _, met in row.verdicts())]
    for row in missed:
        print(f"missed: {row.work}: {row.subject}", file=sys.stderr)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
