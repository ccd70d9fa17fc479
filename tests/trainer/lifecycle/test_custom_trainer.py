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

import pytest

from shmstore import Store
from shmstore.testing import unique_name

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "custom_trainer.py"


def test_the_trainer_of_ones_own_learns_and_leaves_an_empty_arena(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(runpy.run_path(str(EXAMPLE))["train"](store))
    assert float(capsys.readouterr().out.split()[1]) > 0.9
    assert store.stats().sessions == store.stats().objects == 0


def test_it_imports_the_store_and_the_replay_buffer_and_loads_neither_torch_nor_actors() -> None:
    nodes = list(ast.walk(ast.parse(EXAMPLE.read_text())))
    froms = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    assert (froms, plain) == ({"shmstore", "trainer.replay"}, {"asyncio", "numpy"})
    program = f"import runpy, sys; runpy.run_path({str(EXAMPLE)!r}); print(sorted(sys.modules))"
    loaded = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True
    )
    assert not {"torch", "actors", "zmq"} & set(ast.literal_eval(loaded))


def test_it_has_sixty_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


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


async def test_an_error_of_its_producer_ends_its_learner_at_once(store: Store) -> None:
    trainer = runpy.run_path(str(EXAMPLE))

    async def produce(*_: object) -> None:
        raise ValueError("no engine")

    train = trainer["train"]
    train.__globals__["produce"] = produce
    with pytest.raises(ExceptionGroup) as raised:
        await train(store)
    assert raised.group_contains(ValueError, match="no engine")
