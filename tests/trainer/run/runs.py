"""Runs of the command line as processes, for tests: start, watch, kill, read the result.

A run is the real thing (`python -m trainer.cli train`), on the smallest model. Its processes are
found by their names below the driver; its progress is read from metrics.jsonl as it grows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shmstore import Store
from shmstore.testing import unique_name

ROOT = Path(__file__).resolve().parents[3]
TINY = Path(__file__).parent / "tiny.yaml"
_DEADLINE_S = 300.0
"""Against a hang only; the suite's own time-out ends the test."""


_MAIN = "\nimport sys, trainer.cli\nsys.exit(trainer.cli.main())\n"


@dataclass
class Result:
    """How a run ended."""

    status: int
    summary: dict[str, Any]
    stderr: str


class Run:
    """A run under way."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        prelude: str = "",
        around: Sequence[str] = (),
    ) -> None:
        """`prelude`: Python that the driver runs first; `around`: the command that runs it."""
        self.folder = folder
        self.name = folder.name
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*around, sys.executable, "-c", prelude + _MAIN, *arguments, "--json"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def result(self, deadline_s: float = _DEADLINE_S) -> Result:
        """Waits for the end. Nothing of the run may be left then."""
        try:
            out, err = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        lines = out.strip().splitlines()
        summary = json.loads(lines[-1]) if lines else {}
        return Result(self.process.returncode, summary, err)

    def steps(self) -> list[dict[str, Any]]:
        """The metrics so far, a torn last line left out."""
        file = self.folder / "metrics.jsonl"
        found = []
        for line in file.read_text().splitlines() if file.is_file() else []:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found

    def wait_for_step(self, step: int) -> None:
        """Until metrics.jsonl has this train step."""
        self._wait(lambda: any(r["train_step"] >= step for r in self.steps()), f"step {step}")

    def wait_for_file(self, path: str) -> None:
        """Until the run folder has this file or folder."""
        self._wait((self.folder / path).exists, path)

    def wait_for_process(self, name: str, not_pid: int = 0) -> psutil.Process:
        """The process of this name; another one than `not_pid`."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found.clear()
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):  # it ended since it was listed
                    if process.name() == name and process.pid != not_pid:
                        found.append(process)
            return bool(found)

        self._wait(look, f"process {name}")
        return found[0]

    def processes(self) -> list[psutil.Process]:
        """Everything below the driver."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self, name: str) -> int:
        """kill -9 of the process of this name; -> its pid."""
        victim = self.wait_for_process(name)
        victim.send_signal(signal.SIGKILL)
        return victim.pid

    def interrupt(self) -> None:
        """Ctrl-C, once the driver listens to it: before, Python itself would end it."""
        self.wait_for_process("learner")
        self.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """kill -9 of the driver; everything below it is gone then."""
        below = self.processes()
        self.process.kill()
        self._is_dead(below)

    def dies(self) -> None:
        """Waits for a driver that kills itself; everything below it is gone then."""
        self.wait_for_step(1)
        self._is_dead(self.processes())

    def _is_dead(self, below: list[psutil.Process]) -> None:
        self.process.communicate(timeout=_DEADLINE_S)
        assert self.process.returncode == -signal.SIGKILL
        _, alive = psutil.wait_procs(below, timeout=20)
        assert alive == []

    def _wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            if self.process.poll() is not None:
                _, err = self.process.communicate()
                raise AssertionError(f"the run ended before {what}:\n{err}")
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"no {what} within {_DEADLINE_S} s")
            time.sleep(0.02)


def start(
    tmp_path: Path,
    *overrides: str,
    config: Path = TINY,
    prelude: str = "",
    around: Sequence[str] = (),
) -> Run:
    """`shmrl train` on the tiny configuration."""
    chosen = unique_name()
    settings = [f"run.folder={tmp_path}", f"run.name={chosen}", *overrides]
    sets = [part for text in settings for part in ("--set", text)]
    arguments = ["train", str(config), *sets]
    return Run(arguments, tmp_path / chosen, prelude=prelude, around=around)


def resume(folder: Path, *overrides: str) -> Run:
    """`shmrl resume` of a run folder."""
    sets = [part for text in overrides for part in ("--set", text)]
    return Run(["resume", str(folder), *sets], folder)


def own_environment(file: Path, source: str, name: str, params: str) -> str:
    """The setting by which the first task gets the class `name`; its source goes into `file`."""
    file.write_text(source)
    return f"tasks[0].environment={{kind: class, target: '{file}:{name}', params: {params}}}"


def check_clean(result: Result, name: str) -> None:
    """Books that balance, an empty arena that is gone from the machine."""
    ledger = result.summary["ledger"]
    ends = ("trained", "buffered", "failed", "filtered", "expired_dropped", "cancelled")
    assert ledger["produced"] == sum(ledger[end] for end in ends), ledger
    assert result.summary["arena"] == {"sessions": 0, "objects": 0, "bytes": 0}
    assert name not in {str(found) for found in Store.list()}
