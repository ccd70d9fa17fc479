"""The examples run as a reader would run them, and print what they claim."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EXPECTED = {
    "counter": ["one call: 11", "12 to 1011", "customers: 1021", "still answering: 1021",
                "slow one: 40000000000", "an error arrives as itself"],
    "pipeline": ["sum: 62914560.0", "objects alive: 4", "objects alive: 0"],
    "supervised_crash": ["crash 1: killed by SIGKILL, exit code -9", "after the restart: 42",
                         "incarnation: 2", "event: restarted", "event: gave_up"],
    "stream": ["read: HELLO HELLO ", "than the window: True", "counted: 49995000"],
}  # fmt: skip


def test_every_example_is_run() -> None:
    assert {p.stem for p in (ROOT / "examples" / "actors").glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_claims(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "actors" / f"{name}.py")],
        capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    at = 0
    for text in EXPECTED[name]:
        at = done.stdout.find(text, at)
        assert at >= 0, f"{text!r} is missing, or out of order, in:\n{done.stdout}"
    assert not done.stderr
