"""docs/lifecycle.md lists every rule, and every proof that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "lifecycle.md").read_text()


def test_every_rule_from_L01_to_L31_is_listed_with_a_proof() -> None:
    rows = [row for row in TEXT.splitlines() if row.startswith("| L")]
    listed = {rule for row in rows for rule in re.findall(r"\bL\d\d\b", row.split("|")[1])}
    assert listed == {f"L{number:02}" for number in range(1, 32)}
    assert [row for row in rows if "`test_" not in row] == []


def test_every_proof_that_is_named_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_[A-Za-z0-9_]+)`", TEXT))
    assert len(named) > 60
    assert {name for name in named if f"def {name}(" not in tests} == set()
