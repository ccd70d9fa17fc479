"""Runs other systems beside ours, each as a subprocess, and brings their rows back.

A worker is a module `bench.peers.<bench>_<peer>` with `main() -> int`, run as
`PYTHON -m bench.peers.<bench>_<peer> [--quick]` from the repository's root. It imports only the
peer, numpy and `bench.report`, never shmrl, and prints one JSON document
`{"rows": [...], "remarks": [...]}` (see `emit`) as its last line of output. A worker that is not
installed, fails or hangs becomes a remark in the report, never a failed benchmark.

`make bench-peers` installs the peers into `.venv-peers`; a module that imports here already
(multiprocessing, a raw file) runs in the present interpreter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import Goal, Report, Row

ROOT = Path(__file__).parent.parent.parent
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
TIMEOUT_S = 600.0

__all__ = ["PEER_PYTHON", "emit", "peer_python", "run_worker", "run_workers"]


def peer_python() -> Path | None:
    """The interpreter that `make bench-peers` made, or None."""
    return PEER_PYTHON if PEER_PYTHON.exists() else None


def emit(rows: Sequence[Row], remarks: Sequence[str] = ()) -> int:
    """Called last by a worker: its rows as one line of JSON on stdout."""
    document = {"rows": [dataclasses.asdict(row) for row in rows], "remarks": list(remarks)}
    print(json.dumps(document), flush=True)
    return 0


def run_worker(
    module: str,
    *,
    python: Path | str = sys.executable,
    quick: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> tuple[list[Row], list[str]]:
    """Runs one worker to its end; (rows, remarks). Failure is a remark with the last lines."""
    command = [str(python), "-m", f"bench.peers.{module}", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], [f"{module}: gave up after {timeout_s:.0f} s"]
    if done.returncode != 0:
        tail = " | ".join(done.stderr.strip().splitlines()[-2:])
        return [], [f"{module}: exit {done.returncode}: {tail}"]
    document = json.loads(done.stdout.strip().splitlines()[-1])
    rows = []
    for fields in document["rows"]:
        goals = tuple(Goal(**goal) for goal in fields.pop("goals"))
        rows.append(Row(**fields, goals=goals))
    return rows, list(document["remarks"])


def run_workers(report: Report, bench: str, peers: Sequence[str]) -> None:
    """Runs `bench.peers.<bench>_<peer>` of each peer with its interpreter, into `report`."""
    python = peer_python()
    if python is None:
        report.remark("no peers: .venv-peers is missing; `make bench-peers` installs them")
        return
    for peer in peers:
        rows, remarks = run_worker(f"{bench}_{peer}", python=python, quick=report.args.quick)
        report.add(*rows)
        for remark in remarks:
            report.remark(remark)
