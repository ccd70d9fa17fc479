"""Snapshots of the replay buffer with its payloads: written without a pause, whole or absent
(lifecycle L24, L25).

`freeze` pins everything that belongs to one moment: it notes the groups and attaches their objects
to a session of the owner `snapshot`, so that they live on while the learner releases its own
sessions. `write` copies them to disk in a thread, straight from the arena; producer and learner go
on meanwhile. `read` brings them back into new sessions, byte for byte.

The files (`trainer.snapshot_folder` has them whole or absent, with checksums); JSON and Arrow IPC
only, no pickle:

    state.json          counters, window, whatever the caller added
    groups.json         groups in buffer order
    sessions.json       session -> [[payload file, batch, parent], ...]
    payload-0.arrow     record batches of one schema; each one's metadata beside it

Segments are stored as what they are. Any other value that a session holds (arrays, torch tensors,
bytes, Arrow data) is a batch of its bytes, with the header that stands before them in the arena. A
pickled value is refused before anything is written.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from shmstore import ArenaDamaged, headers
from shmstore.headers import Kind
from trainer import segment_codec
from trainer.errors import SnapshotError, TraceError
from trainer.rollout import Group, Status
from trainer.snapshot_folder import (
    FORMAT,
    SnapshotReader,
    SnapshotWriter,
    StepHook,
    to_the_end,
)

if TYPE_CHECKING:
    from shmstore import ObjectRef, Store

__all__ = ["FORMAT", "Frozen", "freeze", "read", "read_state", "without_unfinished", "write"]

#: Under this name a snapshot in the making holds objects.
OWNER = "snapshot"

#: Key of a batch's metadata under which a value that is no record batch keeps its header.
_HEADER = b"value_header"
_BYTES = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])

#: What files that are whole but do not fit together lead to.
_MISFITS = (pa.ArrowException, ArenaDamaged, TraceError, LookupError, TypeError, ValueError)


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


def without_unfinished(group: Group) -> Group:
    """Members that are not COMPLETED, cut back to their prompt."""
    return group.with_rollouts(
        [r if r.status is Status.COMPLETED else r.cut_to_prompt(r.status) for r in group.rollouts]
    )


def freeze(store: Store, groups: Sequence[Group], state: Mapping[str, Any]) -> Frozen:
    """Pin the sessions of `groups`; nothing is copied. Call it where nothing else changes them.
    Nothing stays pinned when it raises.
    """
    pin = f"{OWNER}-{uuid.uuid4().hex[:16]}"
    sessions = store.sessions
    sessions.bind(OWNER, heir=None)
    sessions.open(pin, owner=OWNER)
    try:
        frozen = _pinned(store, groups, pin)
    except BaseException:
        sessions.release([pin], owner=OWNER)
        raise
    return Frozen(store, tuple(groups), dict(state), frozen, pin)


def _pinned(
    store: Store, groups: Sequence[Group], pin: str
) -> dict[str, list[tuple[ObjectRef, int | None]]]:
    """What each session of `groups` holds; the session `pin` holds it as well afterwards."""
    sessions = store.sessions
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
    return frozen


async def write(frozen: Frozen, folder: Path, hook: StepHook = _no_hook) -> None:
    """Write a frozen moment to `folder` in a thread, then thaw it; cancelled, it still waits for
    that thread. `SnapshotError` for a value that cannot be kept without pickle, or when the disk
    refuses.
    """
    try:
        await to_the_end(_write, frozen, folder, hook)
    except OSError as error:
        raise SnapshotError(
            f"the snapshot in {folder} could not be written: {error}; an earlier one there is "
            "still whole"
        ) from error
    finally:
        frozen.thaw()


async def read(folder: Path, store: Store, owner: str) -> tuple[list[Group], dict[str, Any]]:
    """Bring a snapshot into new sessions of `store` held by `owner`; -> (groups in order,
    state). Cancelled, it leaves none.
    """
    job = asyncio.ensure_future(asyncio.to_thread(_read, folder, store, owner))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait((job,))  # the thread goes on all the same
        if job.exception() is None:
            opened = [sid for group in job.result()[0] for sid in group.session_ids]
            store.sessions.release(opened, owner=owner)
        raise


def read_state(folder: Path) -> dict[str, Any]:
    """Only the counters of a snapshot."""
    return SnapshotReader(folder).json("state.json", dict[str, Any])


# -- writing -------------------------------------------------------------------------------------


def _write(frozen: Frozen, folder: Path, hook: StepHook) -> None:
    _refuse_pickles(frozen)
    with SnapshotWriter(folder, hook) as writer:
        writer.json("state.json", frozen.state)
        writer.json("groups.json", frozen.groups)
        places = _write_payloads(frozen, writer, hook)
        table = {
            session_id: [[*places[ref], parent] for ref, parent in entries]
            for session_id, entries in frozen.sessions.items()
        }
        writer.json("sessions.json", table)


def _refuse_pickles(frozen: Frozen) -> None:
    for session_id, entries in frozen.sessions.items():
        for position, (ref, _) in enumerate(entries):
            if headers.unpack(memoryview(frozen.store.pin(ref))).kind is Kind.PICKLE:
                raise SnapshotError(
                    f"session {session_id!r} holds a pickled value at position {position}; a "
                    "snapshot keeps segments, arrays, tensors, bytes and Arrow data, and no pickle"
                )


def _write_payloads(
    frozen: Frozen, writer: SnapshotWriter, hook: StepHook
) -> dict[ObjectRef, tuple[int, int]]:
    """Each object once, in a file per schema; -> where each object is: (file, batch)."""
    places: dict[ObjectRef, tuple[int, int]] = {}
    numbers: dict[pa.Schema, int] = {}
    payloads: list[pa.RecordBatchFileWriter] = []
    counts: list[int] = []
    with ExitStack() as closing:
        for ref, _ in itertools.chain.from_iterable(frozen.sessions.values()):
            if ref in places:
                continue
            batch = _as_batch(frozen.store, ref)
            bare = batch.schema.remove_metadata()
            number = numbers.setdefault(bare, len(numbers))
            if number == len(payloads):
                sink = writer.file(f"payload-{number}.arrow")
                payloads.append(closing.enter_context(pa.ipc.new_file(sink, bare)))
                counts.append(0)
            hook("write payload")
            payloads[number].write_batch(
                batch.replace_schema_metadata(None), custom_metadata=batch.schema.metadata or {}
            )
            places[ref] = number, counts[number]
            counts[number] += 1
        hook("end payloads")
    return places


def _as_batch(store: Store, ref: ObjectRef) -> pa.RecordBatch:
    """A segment as the record batch that it is, any other value as a batch of its bytes."""
    whole = memoryview(store.pin(ref))
    header = headers.unpack(whole)
    if header.kind is Kind.ARROW:
        value = store.get(ref)
        if segment_codec.is_segment(value):
            return value
    start, end = header.payload_offset, header.payload_offset + header.payload_bytes
    schema = _BYTES.with_metadata({_HEADER: headers.left_open(bytes(whole[:start]))})
    payload = pa.array(np.frombuffer(whole[start:end], np.uint8))
    return pa.RecordBatch.from_arrays([payload], schema=schema)


# -- reading -------------------------------------------------------------------------------------


def _read(folder: Path, store: Store, owner: str) -> tuple[list[Group], dict[str, Any]]:
    files = SnapshotReader(folder)
    groups = files.json("groups.json", list[Group])
    table = files.json("sessions.json", dict[str, list[tuple[int, int, int | None]]])
    state = files.json("state.json", dict[str, Any])
    missing = [s for group in groups for s in group.session_ids if s not in table]
    if missing:
        raise SnapshotError(f"the snapshot in {folder} has groups without sessions: {missing[:3]}")
    try:
        _restore_sessions(files, table, store, owner)
    except _MISFITS as error:
        raise SnapshotError(
            f"the files of the snapshot in {folder} do not fit together: {type(error).__name__}: "
            f"{error}"
        ) from error
    return groups, state


def _restore_sessions(
    files: SnapshotReader,
    table: Mapping[str, list[tuple[int, int, int | None]]],
    store: Store,
    owner: str,
) -> None:
    payloads: dict[int, Any] = {}
    refs: dict[tuple[int, int], ObjectRef] = {}
    opened: list[str] = []
    try:
        for session_id, rows in table.items():
            store.sessions.open(session_id, owner=owner)
            opened.append(session_id)
            for number, index, parent in rows:
                ref = refs.get((number, index))
                if ref is not None:
                    store.sessions.attach(session_id, ref, parent=parent)
                    continue
                if number not in payloads:
                    source = pa.memory_map(str(files.path(f"payload-{number}.arrow")))
                    payloads[number] = pa.ipc.open_file(source)
                loaded = payloads[number].get_batch_with_custom_metadata(index)
                metadata = dict(loaded.custom_metadata or {})
                refs[number, index] = _put(store, loaded.batch, metadata, session_id, parent)
    except BaseException:
        store.sessions.release(opened, owner=owner)
        raise


def _put(
    store: Store,
    batch: pa.RecordBatch,
    metadata: dict[bytes, bytes],
    session_id: str,
    parent: int | None,
) -> ObjectRef:
    """Segments are written as `trainer.trace` writes them, and all else as it was, to the byte."""
    head = metadata.get(_HEADER)
    if head is None:
        segment = segment_codec.read(batch.replace_schema_metadata(metadata)).as_segment()
        return segment_codec.writer.put(store, segment, session_id, None, parent)
    ref = store.put_parts(head, [batch.column(0).to_numpy()], session_id, None, parent)
    if headers.unpack(memoryview(store.pin(ref))).kind is Kind.PICKLE:
        raise ValueError("one of them holds a pickle, and those are never read from disk")
    return ref
