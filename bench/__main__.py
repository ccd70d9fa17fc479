"""`python -m bench NAME`: parses the command line and hands over to `bench.NAME.main(args)`.

Each benchmark is imported only when it is asked for, so that `bench store` needs no torch. The
exit status is the benchmark's own: 0 when it ran, whatever the figures; 2 for a wrong command
line; 1 when it could not run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import BenchArgs

BENCHMARKS = {
    "store": "the arena: put, get, free, hand-over, sessions, reclaim",
    "actors": "the runtime: calls, arguments, spawn, death notice",
    "replay": "the life of a rollout: buffer, traces, export",
    "train": "a run: synchronous against asynchronous, overhead",
}


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m bench` and of `shmrl bench`."""
    about = "Measure shmrl beside its floors."
    top = argparse.ArgumentParser(prog="shmrl bench", description=about)
    top.add_argument("name", choices=sorted(BENCHMARKS), help="what to measure")
    top.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="results go there, the plot beside it (default: bench/results/DATE-NAME.json)",
    )
    top.add_argument(
        "--peers",
        action="store_true",
        help="measure other systems in the same run, where `make bench-peers` installed them",
    )
    top.add_argument(
        "--quick",
        action="store_true",
        help="fewer repetitions and no huge objects; nothing is written unless --json is given",
    )
    top.add_argument("--only", metavar="WORD", help="run only the parts whose name contains WORD")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns its exit status."""
    given = parser().parse_args(argv)
    args = BenchArgs(json=given.json, peers=given.peers, quick=given.quick, only=given.only)
    module_name = f"bench.{given.name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        print(f"bench {given.name} cannot run: {missing}", file=sys.stderr)
        return 1
    status: int = module.main(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
