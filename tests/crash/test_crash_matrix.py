"""A sample of the crash matrix (`make crash` runs all of it), and the canary that it must catch."""

from __future__ import annotations

import subprocess

import pytest

from tests.core import build

SAMPLE_S_MAX = 300
JOURNALED = "transfer_many,release_many,free_many"


@pytest.fixture(scope="module", autouse=True)
def executables() -> None:
    build.built()


@pytest.mark.timeout(build.BUILD_S_MAX)
def test_a_kill_at_any_store_leaves_the_state_before_or_after() -> None:
    output = build.run("shmrl_crash_matrix", "--sample", "8", timeout_s=SAMPLE_S_MAX)
    assert "all sound" in output
    # Both sides of the commit were seen, where an operation outlives the process that made it.
    for operation in JOURNALED.split(","):
        line = next(line for line in output.splitlines() if line.startswith(operation))
        assert "before 0," not in line
        assert "after 0," not in line


@pytest.mark.timeout(build.BUILD_S_MAX)
def test_the_canary_with_a_store_left_out_is_caught() -> None:
    command = [str(build.built() / "shmrl_crash_canary"), "--sample", "12", "--only", JOURNALED]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SAMPLE_S_MAX
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "neither before nor after" in done.stderr
