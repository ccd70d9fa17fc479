"""What was damaged in the arena, or written by others, is read whole or refused by our errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shmstore import Store, StoreError
from trainer import segment_codec
from trainer.errors import TraceError, TrainerError
from trainer.rollout import Rollout
from trainer.segment import Segment
from trainer.trace import TraceStore

ROUNDS = 400


def _segment(dtype: str = "u1") -> Segment:
    ids = np.arange(5, dtype=np.int32)
    rows = np.full((5, 2, 3), 7, dtype)
    return Segment(ids, ids, np.ones(5, np.float32), ids, "häß€", rows, -1, rows[:1])


def _stored_bytes(store: Store, value: Any) -> bytes:
    return bytes(memoryview(store.pin(store.put(value))))


def _insert(store: Store, whole: bytes) -> None:
    draft = store.reserve(len(whole), session="s")
    memoryview(draft.view())[:] = whole
    draft.seal()


def _scribbled(rng: random.Random, whole: bytes) -> bytes:
    """A few bytes of one part overwritten: the store's header, the schema, the end."""
    low, high = rng.choice([(0, 64), (64, len(whole)), (max(64, len(whole) - 62), len(whole))])
    damaged = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        damaged[rng.randrange(low, high)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    return bytes(damaged)


@pytest.mark.parametrize("by", ["the writer", "pyarrow"])
def test_a_damaged_segment_is_read_whole_or_refused_by_an_error_of_ours(
    store: Store, traces: TraceStore, by: str
) -> None:
    segment = _segment()
    if by == "pyarrow":
        sound = _stored_bytes(store, segment_codec.to_batch(segment))
    else:
        sound = segment_codec.writer.bytes(segment)
    rng = random.Random(7)
    rollout = Rollout("r", "g", "s")
    calls: list[Callable[[], object]] = [
        lambda: traces.export("s", 0, with_routing=False),
        lambda: traces.segment("s", 0).n_trainable,
        lambda: traces.search("s", text="häß€"),
        lambda: traces.search("s", token_ids=[0, 1, 2, 3, 4]),
        lambda: traces.describe(rollout),
    ]
    read = refused = 0
    for _ in range(ROUNDS):
        traces.open("s", "o")
        _insert(store, _scribbled(rng, sound))
        for call in calls:
            try:
                call()
                read += 1
            except (StoreError, TrainerError):
                refused += 1
        traces.release(["s"], owner="o")
    assert read > ROUNDS
    assert refused > ROUNDS / 4
    assert store.stats().pinned == 0


def _changed(batch: pa.RecordBatch, name: bytes, value: bytes | None) -> pa.RecordBatch:
    metadata = {**batch.schema.metadata, name: value}
    return batch.replace_schema_metadata({k: v for k, v in metadata.items() if v is not None})


def _with_column(batch: pa.RecordBatch, at: int, column: pa.Array) -> pa.RecordBatch:
    return batch.set_column(at, batch.schema.names[at], column)


_TENSORS = pa.fixed_shape_tensor(pa.int32(), (2, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: _changed(batch, b"routed_before", None),
        lambda batch: _changed(batch, b"routed_before", b"12345"),
        lambda batch: _changed(batch, b"n_routed", b"many"),
        lambda batch: _changed(batch, b"n_routed", b"6"),
        lambda batch: _changed(batch, b"text_nbytes", b"-1"),
        lambda batch: _changed(batch, b"text_nbytes", b"65"),
        lambda batch: batch.select([0, 1, 2]),
        lambda batch: batch.select([1, 0, 2, 3]),
        lambda batch: _with_column(batch, 0, pa.array(range(5), pa.int64())),
        lambda batch: _with_column(batch, 1, pa.array([0, 1, None, 3, 4], pa.int32())),
        lambda batch: _with_column(batch, 4, pa.array([[[7]]] * 5)),
        lambda batch: _with_column(
            batch,
            4,
            pa.ExtensionArray.from_storage(
                _TENSORS, pa.array([[7] * 6] * 5, pa.list_(pa.int32(), 6))
            ),
        ),
    ],
)
def test_a_batch_that_is_almost_a_segment_is_refused(
    store: Store, traces: TraceStore, change: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    traces.open("s", "o")
    store.put(change(segment_codec.to_batch(_segment())), session="s")
    for call in (traces.export, lambda session_id: traces.segment(session_id, 0)):
        with pytest.raises(TraceError, match="not as a segment's"):
            call("s")
    traces.release(["s"], owner="o")
