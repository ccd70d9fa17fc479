"""Snapshots of the replay buffer with its payloads: written without a pause, whole or absent
(lifecycle L24, L25).

`freeze` pins everything that belongs to one moment: it notes the groups and attaches their objects
to a session of the owner `snapshot`, so that they live on while the learner releases its own
sessions. `write` copies them to disk in a thread, straight from the arena; producer and learner go
on meanwhile. `read` brings them back into new sessions.

Files below the folder; JSON and Arrow IPC only, no pickle:

    snapshot.json            {"format": 1, "data": "data-3f2a"}; replaced last, so it names a whole
    snapshot or none data-3f2a/state.json     counters, window, whatever the caller added
    data-3f2a/groups.json    groups in buffer order
    data-3f2a/sessions.json  session -> [[payload file, batch, parent], ...]
    data-3f2a/payload-0.arrow    record batches of one schema; their own metadata beside each batch

A kill at any moment leaves the earlier snapshot in force; what it left behind is removed by the
next write.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from trainer import segment_codec
from trainer.errors import SnapshotError, SnapshotVersion
from trainer.rollout import Group, Status

if TYPE_CHECKING:
    from shmstore import ObjectRef, Store

__all__ = ["FORMAT", "Frozen", "freeze", "read", "read_state", "write"]

#: Version of the format that `write` writes and `read` reads.
FORMAT = 1
#: Under this name a snapshot in the making holds objects.
OWNER = "snapshot"

_MARKER = "snapshot.json"
_PARTIAL = ".partial-"
_DATA = "data-"
_NDARRAY = b"ndarray"
_BYTES = b"bytes"

#: Called before each step of writing with its name; tests kill the process there.
StepHook = Callable[[str], None]


#: What a damaged file leads to, whichever part of it is damaged.
_DAMAGE = (
    OSError,
    msgspec.DecodeError,
    pa.ArrowException,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)


def _no_hook(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """One moment of the buffer, pinned. `thaw` must be called once it is not needed; `write`
    does.
    """

    store: Store
    groups: Sequence[Group]
    state: Mapping[str, Any]
    #: Session id -> (object, parent) in order of position.
    sessions: Mapping[str, Sequence[tuple[ObjectRef, int | None]]]
    pin: str

    def thaw(self) -> None:
        """Let go of the pinned objects."""
        self.store.sessions.release([self.pin], owner=OWNER)


def freeze(store: Store, groups: Sequence[Group], state: Mapping[str, Any]) -> Frozen:
    """Pin the sessions of `groups`; nothing is copied. Call it where nothing else changes them."""
    pin = f"{OWNER}-{uuid.uuid4().hex[:16]}"
    sessions = store.sessions
    sessions.bind(OWNER, heir=None)
    sessions.open(pin, owner=OWNER)
    frozen: dict[str, list[tuple[ObjectRef, int | None]]] = {}
    seen: set[ObjectRef] = set()
    for group in groups:
        for rollout in group.rollouts:
            session_id = rollout.session_id
            entries = [(entry.ref, entry.parent) for entry in sessions.objects(session_id)]
            if not rollout.leaves and rollout.status is not Status.COMPLETED:
                # Cut back to its prompt, or under way with a producer: only that much is certain.
                entries = entries[: rollout.n_prompt_nodes]
            frozen[session_id] = entries
            for ref, _ in entries:
                if ref not in seen:
                    seen.add(ref)
                    sessions.attach(pin, ref)
    return Frozen(store, tuple(groups), dict(state), frozen, pin)


async def write(frozen: Frozen, folder: Path, hook: StepHook = _no_hook) -> None:
    """Write a frozen moment to `folder` in a thread, then thaw it. `SnapshotError` when the disk
    refuses.
    """
    try:
        await asyncio.to_thread(_write, frozen, folder, hook)
    except OSError as error:
        raise SnapshotError(
            f"the snapshot in {folder} could not be written: {error}; an earlier one there is "
            "still whole"
        ) from error
    finally:
        frozen.thaw()


async def read(folder: Path, store: Store, owner: str) -> tuple[list[Group], dict[str, Any]]:
    """Bring a snapshot into new sessions of `store` held by `owner`; -> (groups in order,
    state).
    """
    return await asyncio.to_thread(_read, folder, store, owner)


def read_state(folder: Path) -> dict[str, Any]:
    """Only the counters of a snapshot."""
    state: dict[str, Any] = msgspec.json.decode((_data_folder(folder) / "state.json").read_bytes())
    return state


def _write(frozen: Frozen, folder: Path, hook: StepHook) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:12]
    partial = folder / f"{_PARTIAL}{token}"
    final = folder / f"{_DATA}{token}"
    try:
        hook("make folder")
        partial.mkdir()
        places = _write_payloads(frozen, partial, hook)
        _write_json(partial / "sessions.json", _session_table(frozen, places), hook)
        _write_json(partial / "groups.json", frozen.groups, hook)
        _write_json(partial / "state.json", frozen.state, hook)
        hook("rename folder")
        partial.rename(final)
        _sync(folder)
        _write_json(
            folder / f"{_PARTIAL}{token}.json", {"format": FORMAT, "data": final.name}, hook
        )
        hook("replace marker")
        (folder / f"{_PARTIAL}{token}.json").replace(folder / _MARKER)
        _sync(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    hook("remove older")
    _remove_all_but(folder, final.name)


def _write_payloads(
    frozen: Frozen, partial: Path, hook: StepHook
) -> dict[ObjectRef, tuple[int, int]]:
    """Each object once, in a file per schema; -> where each object is: (file, batch)."""
    places: dict[ObjectRef, tuple[int, int]] = {}
    writers: dict[pa.Schema, tuple[int, pa.RecordBatchFileWriter]] = {}
    counts: list[int] = []
    sinks: list[Any] = []
    try:
        for session_id, entries in frozen.sessions.items():
            for ref, _ in entries:
                if ref in places:
                    continue
                batch = _as_batch(frozen.store.get(ref), session_id)
                bare = batch.schema.remove_metadata()
                if bare not in writers:
                    hook("open payload")
                    sink = (partial / f"payload-{len(writers)}.arrow").open("wb")
                    sinks.append(sink)
                    writers[bare] = (len(counts), pa.ipc.new_file(sink, bare))
                    counts.append(0)
                number, writer = writers[bare]
                hook("write payload")
                writer.write_batch(
                    batch.replace_schema_metadata(None), custom_metadata=batch.schema.metadata or {}
                )
                places[ref] = (number, counts[number])
                counts[number] += 1
        for _, writer in writers.values():
            hook("close payload")
            writer.close()
        for sink in sinks:
            sink.flush()
            os.fsync(sink.fileno())
    finally:
        for sink in sinks:
            sink.close()
    return places


def _session_table(
    frozen: Frozen, places: Mapping[ObjectRef, tuple[int, int]]
) -> dict[str, list[list[int | None]]]:
    return {
        session_id: [[*places[ref], parent] for ref, parent in entries]
        for session_id, entries in frozen.sessions.items()
    }


def _as_batch(value: Any, session_id: str) -> pa.RecordBatch:
    """A stored value as a record batch: segments are one already; arrays and bytes are wrapped."""
    if isinstance(value, pa.RecordBatch):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        flat = np.ascontiguousarray(value)
        metadata = {
            b"kind": _NDARRAY,
            b"dtype": flat.dtype.str.encode(),
            b"shape": msgspec.json.encode(value.shape),
        }
        return _bytes_batch(flat.reshape(-1).view(np.uint8), metadata)
    if isinstance(value, (bytes, memoryview, bytearray)):
        return _bytes_batch(np.frombuffer(value, np.uint8), {b"kind": _BYTES})
    raise SnapshotError(
        f"session {session_id!r} holds a {type(value).__name__}; a snapshot keeps segments, record "
        "batches, "
        "numeric arrays and bytes (no pickle)"
    )


def _bytes_batch(flat: Any, metadata: Mapping[bytes, bytes]) -> pa.RecordBatch:
    schema = pa.schema([pa.field("raw", pa.uint8(), nullable=False)], metadata=dict(metadata))
    return pa.RecordBatch.from_arrays([pa.array(flat)], schema=schema)


def _from_batch(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> Any:
    kind = metadata.get(b"kind") if batch.schema.names == ["raw"] else None
    if kind == _NDARRAY:
        dtype = np.dtype(metadata[b"dtype"].decode())
        shape = msgspec.json.decode(metadata[b"shape"])
        return batch.column(0).to_numpy(zero_copy_only=True).view(dtype).reshape(shape)
    if kind == _BYTES:
        return batch.column(0).to_numpy(zero_copy_only=True).tobytes()
    return batch.replace_schema_metadata(dict(metadata) or None)


def _read(folder: Path, store: Store, owner: str) -> tuple[list[Group], dict[str, Any]]:
    data = _data_folder(folder)
    try:
        groups = msgspec.json.decode((data / "groups.json").read_bytes(), type=list[Group])
        table = msgspec.json.decode(
            (data / "sessions.json").read_bytes(), type=dict[str, list[list[int | None]]]
        )
        missing = [s for group in groups for s in group.session_ids if s not in table]
        if missing:
            raise KeyError(f"sessions.json lacks {missing[:3]} of groups.json")
        state = msgspec.json.decode((data / "state.json").read_bytes())
        _restore_sessions(data, table, store, owner)
    except _DAMAGE as error:
        raise SnapshotError(
            f"the snapshot in {folder} cannot be read: {type(error).__name__}: {error}"
        ) from error
    return groups, state


def _restore_sessions(
    data: Path, table: Mapping[str, list[list[Any]]], store: Store, owner: str
) -> None:
    readers: dict[int, Any] = {}
    refs: dict[tuple[int, int], ObjectRef] = {}
    opened: list[str] = []
    try:
        for session_id, rows in table.items():
            store.sessions.open(session_id, owner=owner)
            opened.append(session_id)
            for number, index, parent in rows:
                ref = refs.get((number, index))
                if ref is None:
                    if number not in readers:
                        source = pa.memory_map(str(data / f"payload-{number}.arrow"))
                        readers[number] = pa.ipc.open_file(source)
                    loaded = readers[number].get_batch_with_custom_metadata(index)
                    value = _from_batch(loaded.batch, dict(loaded.custom_metadata or {}))
                    ref = refs[number, index] = _put(store, value)
                store.sessions.attach(session_id, ref, parent=parent)
    except BaseException:
        store.sessions.release(opened, owner=owner)
        raise


def _put(store: Store, value: Any) -> ObjectRef:
    """Segments are written as `trainer.trace` writes them, to the byte; the rest as the store
    does.
    """
    if not segment_codec.is_segment(value):
        return store.put(value)
    segment = segment_codec.read(value).as_segment()
    return store.put_stream(segment_codec.encode(segment))


def _data_folder(folder: Path) -> Path:
    marker = folder / _MARKER
    if not marker.exists():
        raise SnapshotError(f"{folder} holds no snapshot ({_MARKER} is missing)")
    try:
        found = msgspec.json.decode(marker.read_bytes())
    except msgspec.DecodeError as error:
        raise SnapshotError(f"{marker} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else found
        raise SnapshotVersion(
            f"the snapshot in {folder} has format {version!r}; this version reads format {FORMAT}"
        )
    return folder / str(found["data"])


def _write_json(path: Path, value: Any, hook: StepHook) -> None:
    hook(f"write {path.name.rpartition('-')[0] or path.name}")
    with path.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=1))
        file.flush()
        hook(f"sync {path.name.rpartition('-')[0] or path.name}")
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
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
