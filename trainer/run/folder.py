"""The folder that a run leaves behind, and the names in it.

    runs/NAME/
      config.yaml            complete, resolved, paths absolute; training it again repeats the run
      metrics.jsonl          one JSON object a train step; docs/metrics.md explains the names
      summary.json           the line that `--json` prints
      evals.jsonl            what `shmrl eval` found, one JSON object a call
      tensorboard/           event files
      checkpoints/step-N/    what resume needs; `checkpoints/latest` names the newest whole one
      hf/step-N/             for transformers' from_pretrained
      trajectories/          Parquet files of prompts, answers and rewards
      logs/                  one file a process
      reward.png

Owns these paths and the atomic ways to write them (temporary name, flush, rename). Promises: a
reader never sees half a file or half a checkpoint. Used by the driver only; other processes get
paths from it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.config import Config, load, resolved
from trainer.config.checks import run_name_problem
from trainer.config.paths import with_absolute_paths
from trainer.errors import ConfigError
from trainer.snapshot_folder import to_the_end

__all__ = ["BadRunFolder", "RunFolder", "default_run_name", "write_atomically"]

_LATEST = "latest"
_STEP = "step-"
_NAMED_MAX = 5
"""Runs that a message names."""


class BadRunFolder(ConfigError):
    """A folder that is no run, or a run without what was asked for."""


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config: Config | None = None
        self._claimed = False

    @classmethod
    def create(cls, config: Config, name: str) -> RunFolder:
        """Makes a fresh folder `config.run.folder`/name and writes config.yaml into it."""
        path = Path(config.run.folder) / name
        if path.exists():
            raise BadRunFolder(
                f"{path} exists: resume it (shmrl resume {path}), remove it, or choose another "
                "name (--set run.name=...)"
            )
        folder = cls(path)
        try:
            for part in (path, folder.checkpoints, folder.logs):
                part.mkdir(parents=True, exist_ok=True)
            folder.write_config(config)
        except BaseException as error:  # nobody can go on with a folder without config.yaml
            shutil.rmtree(path, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise BadRunFolder(
                f"{path} cannot be written: {error}; choose another place (--set run.folder=...)"
            ) from error
        return folder

    def remove_unbegun(self) -> bool:
        """Removes what `create` made if there is nothing else, so that a run of this name can be
        created again; -> whether it did. Not for a folder in which something is to go on.
        """
        made = (self.checkpoints, self.logs, self.config_file)
        if set(self.path.glob("*")) != set(made) or any((*made[0].glob("*"), *made[1].glob("*"))):
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        return not self.path.exists()

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run. A bare name is looked for in ./runs as well. Raises BadRunFolder."""
        for candidate in (Path(path), Path("runs") / path):
            if (candidate / "config.yaml").is_file():
                named = candidate.name not in ("", "..")
                folder = cls(candidate if named else Path(os.path.abspath(candidate)))
                if problem := run_name_problem(folder.name):  # it was moved or copied
                    raise BadRunFolder(
                        f"{folder.path}: a run is named as its folder, and {problem}; rename it"
                    )
                return folder
        newest = sorted(Path("runs").glob("*/config.yaml"), key=_changed_s)[-_NAMED_MAX:]
        there = ", ".join(file.parent.name for file in newest) or "none"
        raise BadRunFolder(
            f"{path} is no run folder: it has no config.yaml, nor has runs/{path} (looked from "
            f"{Path.cwd()}); the newest in runs/: {there}"
        )

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """For whoever trains the run: nobody else does meanwhile (BadRunFolder), who would cut the
        metrics under its hands. The system lets go of the lock with the process, however it ends.
        Within the block again, it is no error.
        """
        if self._claimed:
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks goes without
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise BadRunFolder(
                        f"{self.path} is being trained by another process; wait for it, or copy "
                        f"the folder (`shmrl top {self.name}` shows its processes)"
                    ) from error
            self._claimed = True
            yield
        finally:
            self._claimed = False
            os.close(handle)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def evals_file(self) -> Path:
        return self.path / "evals.jsonl"

    @property
    def plot_file(self) -> Path:
        return self.path / "reward.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    def hf(self, step: int) -> Path:
        return self.path / "hf" / f"{_STEP}{step}"

    def config(self, overrides: tuple[str, ...] = ()) -> Config:
        """The run's own configuration, read and checked once. Raises ConfigMistakes."""
        if self._config is None or overrides:
            self._config = load(self.config_file, overrides)
        return self._config

    def write_config(self, config: Config) -> None:
        """Writes the resolved configuration, which is the run's from now on, paths absolute."""
        import yaml

        self._config = config = with_absolute_paths(config)
        text = yaml.safe_dump(resolved(config), sort_keys=False, allow_unicode=True, width=100)
        write_atomically(self.config_file, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes the final result."""
        write_atomically(self.summary_file, json.dumps(summary, indent=1) + "\n")

    def add_eval(self, result: Mapping[str, Any]) -> None:
        """Keeps what one evaluation of a checkpoint found."""
        line = (json.dumps(result) + "\n").encode()
        with self.evals_file.open("ab", buffering=0) as file:
            written = file.write(line)
            if written != len(line):  # the disk is full: half a line would spoil the next one
                file.truncate(file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # ------------------------------------------------------------------------------- checkpoints

    @asynccontextmanager
    async def new_checkpoint(self, step: int) -> AsyncIterator[Path]:
        """A folder to fill; on leaving the block it becomes `step-N` and then `latest`.

        When the block raises (disk full, say) the partial folder is removed and `latest` is
        untouched. The disk is waited for in a thread: the loop has producers to serve.
        """
        draft = self.checkpoints / f".{_STEP}{step}.{os.getpid()}.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        # In a run folder that is there: nobody needs half of one.
        self.checkpoints.mkdir(exist_ok=True)
        draft.mkdir()
        try:
            yield draft
            await to_the_end(self._keep, draft, self.checkpoints / f"{_STEP}{step}")
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _keep(self, draft: Path, final: Path) -> None:
        """Makes a whole draft the newest checkpoint."""
        _sync_tree(draft)
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        _sync_folder(self.checkpoints)
        write_atomically(self.checkpoints / _LATEST, final.name + "\n")

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """(step, folder) of the newest whole checkpoint. Raises BadRunFolder when it is gone."""
        marker = self.checkpoints / _LATEST
        if not marker.is_file():
            return None
        name = marker.read_text(encoding="utf-8", errors="backslashreplace").strip()
        found = [each for each in self._all_checkpoints() if each[1].name == name]
        if not found:
            there = ", ".join(path.name for _, path in self._all_checkpoints()) or "none"
            raise BadRunFolder(
                f"{marker} names {name!r}, which is no checkpoint there; there are: {there}; write "
                "the name of one into it, or remove it to begin again"
            )
        return found[0]

    def prune_checkpoints(self, keep: int) -> None:
        """Removes all but the newest `keep`, never the one that `latest` names, and stale
        drafts.
        """
        latest = self.latest_checkpoint()
        kept = {path for _, path in self._all_checkpoints()[-keep:]}
        if latest is not None:
            kept.add(latest[1])
        for _, path in self._all_checkpoints():
            if path not in kept:
                shutil.rmtree(path)
        for draft in self.checkpoints.glob(f".{_STEP}*.tmp"):
            if draft.name.split(".")[-2] != str(os.getpid()):
                shutil.rmtree(draft)
        for marker in self.checkpoints.glob(f".{_LATEST}.*.tmp"):
            if marker.name.split(".")[-2] != str(os.getpid()):
                marker.unlink(missing_ok=True)

    def _all_checkpoints(self) -> list[tuple[int, Path]]:
        found = [
            (int(path.name.removeprefix(_STEP)), path)
            for path in self.checkpoints.glob(f"{_STEP}*")
            if path.name.removeprefix(_STEP).isdigit()
        ]
        return sorted(found)

    def keep_metrics_through(self, step: int) -> None:
        """Drops metrics of steps after `step`: a resumed run writes them again."""
        if not self.metrics_file.is_file():
            return
        kept = []
        for line in self.metrics_file.read_bytes().split(b"\n"):
            try:
                at = json.loads(line.decode())["train_step"]
            except (ValueError, LookupError, TypeError):
                continue  # the last line of a killed run may be torn
            if isinstance(at, int | float) and at <= step:
                kept.append(line)
        write_atomically(self.metrics_file, b"".join(line + b"\n" for line in kept).decode())


def _changed_s(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0  # it went meanwhile


def default_run_name(config_path: Path) -> str:
    """`quickstart-1129-231502`: sortable, unique enough for one machine and checked on creation.

    The `config.yaml` of a run gives the run's name, less the time in it.
    """
    stem = config_path.stem
    if config_path.name == "config.yaml":
        stem = re.sub(r"-\d{4}-\d{6}$", "", config_path.absolute().parent.name)
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in stem)
    return f"{plain.strip('-')[:20] or 'run'}-{time.strftime('%m%d-%H%M%S')}"


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path`; a reader sees the old text or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
