"""examples/custom_trainer.py learns, balances and leaves nothing; and it needs only what it
says.
"""

from __future__ import annotations

import ast
import asyncio
import os
import runpy
import subprocess
import sys
from pathlib import Path

from shmstore import Store
from shmstore.testing import unique_name

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "custom_trainer.py"


def test_the_trainer_of_ones_own_learns_and_leaves_an_empty_arena(store: Store) -> None:
    train = runpy.run_path(str(EXAMPLE))["train"]
    reward: float = asyncio.run(train(store))
    assert reward > 0.9
    assert store.stats().sessions == store.stats().objects == 0


def test_it_imports_the_store_and_the_lifecycle_and_nothing_else_of_ours() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"shmstore", "trainer"}


def test_the_loop_in_the_page_on_training_runs_as_it_stands() -> None:
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    program = page.rsplit("```python\n", 1)[1].split("```")[0]
    program = program.replace('"mine"', repr(unique_name()))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(".0") == 2 * 4
