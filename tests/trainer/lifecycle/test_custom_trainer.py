"""examples/custom_trainer.py learns, balances and leaves nothing; and it needs only what it
says.
"""

from __future__ import annotations

import ast
import asyncio
import runpy
from pathlib import Path

from shmstore import Store

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "custom_trainer.py"


def test_the_trainer_of_ones_own_learns_and_leaves_an_empty_arena(store: Store) -> None:
    train = runpy.run_path(str(EXAMPLE))["train"]
    reward: float = asyncio.run(train(store))
    assert reward > 0.9
    assert store.stats().sessions == store.stats().objects == 0


def test_it_imports_the_store_and_the_lifecycle_and_nothing_else_of_ours() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"shmstore", "trainer"}
