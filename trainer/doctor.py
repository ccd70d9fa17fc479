"""`shmrl doctor`: what dead runs left behind, and whether this machine can run the examples.

Owns the report only: arenas are found and removed by `shmstore`, socket folders by `actors`.
Promises: without `--clean` it changes nothing; with it, it removes only what belongs to no live
process. Exit status 1, as of `diff`: something was found and is still there. Called by
`trainer.cli`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from typing import Any

__all__ = ["machine_report", "run_doctor"]

_PACKAGES = ("torch", "transformers", "reasoning_gym", "math_verify", "tensorboard", "matplotlib")
_SHM = "/dev/shm"
_SHM_BYTES_WARN = 1 << 30


def run_doctor(*, clean: bool, as_json: bool) -> int:
    """Prints the report and returns the exit status of the arena check."""
    from actors.rundir import dead_runs, sweep
    from shmstore.cli import main as store_main

    arguments = ["doctor"] + (["--clean"] if clean else []) + (["--json"] if as_json else [])
    if not as_json:
        for name, value in machine_report().items():
            print(f"{name:<16} {value}")
    found = sweep() if clean else dead_runs()
    if as_json:
        return store_main(arguments)
    for name in found:
        text = f"socket folder of the dead run {name}"
        print(f"removed the {text}" if clean else f"{text}; the next run removes it")
    return store_main(arguments)


def machine_report() -> dict[str, Any]:
    """Facts that explain most failures to start, without importing torch."""
    report: dict[str, Any] = {
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        **_shared_memory(),
    }
    for package in _PACKAGES:
        report[package] = _version(package)
    return report


def _shared_memory() -> dict[str, str]:
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        return {
            "shared memory": f"none: {error}",
            "warning": f"no run can begin without {_SHM} (mount -t tmpfs tmpfs {_SHM})",
        }
    found = f"{usage.free >> 20} MiB free of {usage.total >> 20} MiB in {_SHM}"
    if not os.access(_SHM, os.W_OK | os.X_OK):
        return {"shared memory": found, "warning": f"{_SHM} cannot be written: no run can begin"}
    if usage.total < _SHM_BYTES_WARN:
        small = (
            f"{_SHM} is small; in a container raise it (docker run --shm-size=4g), or lower "
            "store.capacity"
        )
        return {"shared memory": found, "warning": small}
    return {"shared memory": found}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
