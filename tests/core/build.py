"""Builds the C++ tests of the core and runs one of them. Owns the build folder `build/ctest`.

Called by tests/core and tests/crash. The build is incremental, so that only the first test of a
session waits for the compiler.
"""

from __future__ import annotations

import fcntl
import functools
import shutil
import subprocess
import sys
from pathlib import Path

from tests.tree import ROOT

BUILD = ROOT / "build" / "ctest"
BUILD_S_MAX = 900


def tool(name: str) -> str:
    """The path of cmake or ninja: beside this Python if pip put it there, else from the system."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is needed to build the C++ tests: pip install {name}"
    return found


def must(command: list[str], timeout_s: float) -> str:
    """Run it; its output, or a failed assertion that shows its end."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}:\n{output[-8000:]}"
    )
    return output


@functools.cache
def built() -> Path:
    """The folder with the executables, up to date. Another process of the suite may be building."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build()
    return BUILD


def _build() -> None:
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DSHMRL_TESTS=ON", "-DSHMRL_PYTHON=OFF"]
    ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    must([tool("cmake"), "-S", ".", "-B", str(BUILD), "-G", "Ninja", ninja, *flags], BUILD_S_MAX)
    must([tool("cmake"), "--build", str(BUILD), "--target", "shmrl_tests"], BUILD_S_MAX)


def run(name: str, *arguments: str, timeout_s: float = 100) -> str:
    """Run one executable, which must succeed; its output."""
    return must([str(built() / name), *arguments], timeout_s)
