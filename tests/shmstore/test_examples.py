"""The examples of the store run to their end and leave the machine as they found it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shmstore import Store

ROOT = Path(__file__).parents[2]


def test_the_hand_over_runs_and_empties_its_arena() -> None:
    before = set(Store.list())
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "handover.py"), "--groups", "9"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "72 sessions of 512 tokens x 48 layers x top-8" in result.stdout
    assert result.stdout.rstrip().endswith("audit: sound")
    assert not [name for name in set(Store.list()) - before if name.startswith("handover-")]
