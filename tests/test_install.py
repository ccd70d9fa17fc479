"""`make install` looks for what it needs before it downloads gigabytes or leaves half a .venv."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tree


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("PYTHON=false", "install: false does not run, or is older than Python 3.11"),
        ("CXX=no-compiler", "install: there is no C++ compiler no-compiler"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_installed(
    setting: str, told: str, tmp_path: Path
) -> None:
    made = tmp_path / "venv"
    result = subprocess.run(
        ["make", "install", f"VENV={made}", f"PYTHON={sys.executable}", setting],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert told in result.stdout
    assert not made.exists()
