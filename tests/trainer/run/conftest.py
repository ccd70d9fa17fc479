"""What tests of a run's parts start from: the folder of a run that has not begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import load
from trainer.run.folder import RunFolder

CONFIG = """\
model: {config: {architecture: Qwen3MoeForCausalLM}, tokenizer: char}
tasks: [{name: sort, source: {dataset: number_sorting, render: compact_sorting}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG)
    return RunFolder.create(load(file, [f"run.folder={tmp_path / 'runs'}"]), "r")
