"""The tests of the C++ core, each claim of csrc/tests/rules_*.cc as a test of its own."""

from __future__ import annotations

import re

import pytest

from tests.core import build
from tests.tree import ROOT

RULES = sorted(
    rule
    for path in (ROOT / "csrc/tests").glob("rules_*.cc")
    for rule in re.findall(r"^RULE\((\w+)\)", path.read_text(), re.MULTILINE)
)


@pytest.fixture(scope="module", autouse=True)
def executables() -> None:
    build.built()


@pytest.mark.timeout(build.BUILD_S_MAX)
def test_every_rule_in_the_source_is_run() -> None:
    assert sorted(build.run("shmrl_rules", "--list").split()) == RULES
    assert len(RULES) > 50


@pytest.mark.timeout(build.BUILD_S_MAX)
@pytest.mark.parametrize("rule", RULES)
def test_core(rule: str) -> None:
    assert "1 tests passed" in build.run("shmrl_rules", rule)


@pytest.mark.timeout(build.BUILD_S_MAX)
def test_threads_of_one_process_share_a_store() -> None:
    assert "all sound" in build.run("shmrl_threads", "--rounds", "1000")


@pytest.mark.timeout(build.BUILD_S_MAX)
def test_scribbled_bytes_are_an_error_and_never_a_signal_or_a_hang() -> None:
    output = build.run("shmrl_fuzz_bytes", "--rounds", "1000")
    refused, reported, _ = map(int, re.findall(r"(\d+)(?:,|$)", output.strip().splitlines()[-1]))
    assert refused > 0
    assert reported > 0


@pytest.mark.timeout(build.BUILD_S_MAX)
def test_random_kills_leave_a_sound_arena() -> None:
    assert ": sound" in build.run("shmrl_soak", "--seconds", "3")
