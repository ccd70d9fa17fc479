"""What tests of the store share: functions for puppets, and looks at processes from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from shmstore import ObjectRef, Store

ROOT = Path(__file__).parents[2]
FUTEX = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]


def attach(state: Any, name: str) -> None:
    state["store"] = Store.attach(name)


def fill(state: Any, n: int, size: int) -> ObjectRef:
    state["refs"] = [state["store"].put(bytes(size)) for _ in range(n)]
    first: ObjectRef = state["refs"][0]
    return first


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, to its natural end."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def mapped(store_path: str) -> int:
    """How many mappings of this process lie over the arena's file."""
    return Path("/proc/self/maps").read_text().count(store_path)


def wait_until_asleep(pid: int) -> None:
    """Until its main thread waits on a futex, that is inside a wait of the store."""
    for _ in range(10_000):
        if Path(f"/proc/{pid}/syscall").read_text().split()[0] == FUTEX:
            return
        threading.Event().wait(0.002)
    raise AssertionError(f"process {pid} never waited on a futex")


def interrupt_when_waiting(pid: int) -> None:
    """SIGINT once the main thread sleeps inside a wait of the store."""
    wait_until_asleep(pid)
    os.kill(pid, signal.SIGINT)
