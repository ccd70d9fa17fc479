"""A snapshot as files: whole or absent, each with its checksum (lifecycle L24, L25).

    snapshot.json         {"format": 2, "data": "data-3f2a", "files": {name: {"nbytes", "sha256"}}}
    data-3f2a/...         the files; never changed once the marker names them

`SnapshotWriter` writes a new data folder beside the old one and replaces the marker last, so a kill
at any moment leaves the earlier snapshot in force; what it left behind is removed by the next
writer. `SnapshotReader` compares every file that it hands out with the marker: a file that is
missing, cut or changed is a `SnapshotError` that names it.

Knows nothing of what the files mean; called by `trainer.snapshot`, from any thread. `to_the_end`
is for whoever writes files in a thread of their loop, as `trainer.run.folder` does too.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import msgspec

from trainer.errors import SnapshotError, SnapshotVersion

__all__ = ["FORMAT", "SnapshotReader", "SnapshotWriter", "StepHook", "to_the_end"]

#: Version of the format that is written and read.
FORMAT = 2

_MARKER = "snapshot.json"
_PARTIAL = ".partial-"
_DATA = "data-"

#: Called before each step of writing with its name; tests kill the process there.
StepHook = Callable[[str], None]

T = TypeVar("T")


async def to_the_end(work: Callable[..., None], *arguments: Any) -> None:
    """Runs `work` in a thread and waits for it, also when cancelled: files must not be left half
    written by one who cleans up, or goes on writing after that.
    """
    job = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait((job,))
        raise


class _Written(msgspec.Struct, frozen=True):
    """What the marker says about one file."""

    nbytes: int
    sha256: str


class _Marker(msgspec.Struct, frozen=True):
    format: int
    data: str
    files: dict[str, _Written]


class HashedFile:
    """A file that is written once, front to back, and knows the checksum of what went in."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._digest = hashlib.sha256()
        self._nbytes = 0

    @property
    def closed(self) -> bool:
        """pyarrow asks for it."""
        return self._file.closed

    def write(self, data: Any) -> int:
        """Append bytes; -> how many."""
        self._digest.update(data)
        count = self._file.write(data)
        self._nbytes += count
        return count

    def tell(self) -> int:
        """Bytes so far."""
        return self._nbytes

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def sync(self) -> None:
        """Return when the disk has it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def written(self) -> _Written:
        """Size and checksum of all that was written."""
        return _Written(self._nbytes, self._digest.hexdigest())


class SnapshotWriter:
    """A context manager: on leaving it the new snapshot is published, or removed if the block
    raised.
    """

    def __init__(self, folder: Path, hook: StepHook) -> None:
        token = uuid.uuid4().hex[:12]
        self._folder = folder
        self._partial = folder / f"{_PARTIAL}{token}"
        self._marker = folder / f"{_PARTIAL}{token}.json"
        self._final = folder / f"{_DATA}{token}"
        self._hook = hook
        self._files: dict[str, HashedFile] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._hook("make folder")
        self._partial.mkdir()
        return self

    def file(self, name: str) -> HashedFile:
        """A new file of the snapshot; it is synced and closed when the snapshot is published."""
        self._hook(f"open {name}")
        found = self._files[name] = HashedFile(self._partial / name)
        return found

    def json(self, name: str, value: Any) -> None:
        """A whole file of JSON; `SnapshotError` when the value is none."""
        try:
            raw = _pretty(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise SnapshotError(f"{name} cannot be written as JSON: {error}") from error
        self.file(name).write(raw)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        except BaseException:
            kind = BaseException
            raise
        finally:
            for file in self._files.values():
                file.close()
            if kind is not None:
                shutil.rmtree(self._partial, ignore_errors=True)

    def _publish(self) -> None:
        for name, file in self._files.items():
            self._hook(f"sync {name}")
            file.sync()
        self._hook("rename folder")
        self._partial.rename(self._final)
        _sync_folder(self._folder)
        self._hook("write marker")
        files = {name: file.written() for name, file in self._files.items()}
        marker = HashedFile(self._marker)
        try:
            marker.write(_pretty(_Marker(FORMAT, self._final.name, files)))
            self._hook("sync marker")
            marker.sync()
        finally:
            marker.close()
        self._hook("replace marker")
        self._marker.replace(self._folder / _MARKER)
        _sync_folder(self._folder)
        self._hook("remove older")
        _remove_all_but(self._folder, self._final.name)


class SnapshotReader:
    """The snapshot in `folder`. `SnapshotError` when there is none, `SnapshotVersion` when its
    format is another.
    """

    def __init__(self, folder: Path) -> None:
        self._marker = _read_marker(folder)
        self._data = folder / self._marker.data

    def path(self, name: str) -> Path:
        """A file whose bytes are those that were written."""
        path = self._data / name
        wanted = self._marker.files.get(name)
        if wanted is None:
            raise SnapshotError(f"the snapshot in {self._data.parent} has no file {name}")
        try:
            with path.open("rb") as file:
                nbytes = os.fstat(file.fileno()).st_size
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error}; use another snapshot") from error
        if (nbytes, found) != (wanted.nbytes, wanted.sha256):
            raise SnapshotError(
                f"{path} is not what was written: {nbytes} bytes with checksum {found[:12]}, and "
                f"{wanted.nbytes} with {wanted.sha256[:12]} were; use another snapshot"
            )
        return path

    def json(self, name: str, kind: type[T]) -> T:
        """A whole file of JSON as `kind`."""
        path = self.path(name)
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.DecodeError as error:
            raise SnapshotError(f"{path} does not say what it should: {error}") from error


def _read_marker(folder: Path) -> _Marker:
    path = folder / _MARKER
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise SnapshotError(f"{folder} holds no snapshot ({_MARKER} is missing)") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error
    try:
        found = msgspec.json.decode(raw)
        version = found.get("format") if isinstance(found, dict) else found
        if version != FORMAT:
            raise SnapshotVersion(
                f"the snapshot in {folder} has format {version!r}; this version reads format "
                f"{FORMAT}"
            )
        return msgspec.convert(found, _Marker)
    except msgspec.DecodeError as error:
        raise SnapshotError(f"{path} is not the JSON of a snapshot: {error}") from error


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_all_but(folder: Path, keep: str) -> None:
    """Older snapshots and what killed writers left; only names of ours are touched."""
    for path in folder.iterdir():
        if path.name == keep or not path.name.startswith((_PARTIAL, _DATA)):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
