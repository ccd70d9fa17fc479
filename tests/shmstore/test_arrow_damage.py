"""An Arrow stream that was damaged in the arena is ArenaDamaged, and never read beyond its end."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from shmstore import ArenaDamaged, Store, StoreError


@pytest.mark.parametrize("sort", [pa.RecordBatch, pa.Table, pa.Array, pa.ChunkedArray])
def test_an_arrow_message_that_states_more_rows_than_it_holds_is_damaged(
    store: Store, sort: type
) -> None:
    """Arrow itself takes the number as it stands, and reads beyond its buffers."""
    n_rows, n_stated = 1000, 100_000
    batch = pa.record_batch({"a": np.arange(n_rows, dtype=np.int32)})
    values = {
        pa.RecordBatch: batch,
        pa.Table: pa.table(batch),
        pa.Array: batch.column(0),
        pa.ChunkedArray: pa.chunked_array([batch.column(0)]),
    }
    whole = bytes(memoryview(store.pin(store.put(values[sort]))))
    damaged = whole.replace(n_rows.to_bytes(8, "little"), n_stated.to_bytes(8, "little"))
    assert damaged != whole
    draft = store.reserve(len(damaged), head=0)
    memoryview(draft.view())[:] = damaged
    with pytest.raises(ArenaDamaged, match="no Arrow"):
        store.get(draft.seal())


def test_every_byte_of_a_small_arrow_object_may_be_damaged(store: Store) -> None:
    whole = bytes(memoryview(store.pin(store.put(pa.record_batch({"a": [1, 2, 3]})))))
    read = refused = 0
    for at in range(64, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        draft = store.reserve(len(damaged))
        memoryview(draft.view())[:] = damaged
        try:
            store.get(draft.seal())
            read += 1
        except StoreError:
            refused += 1
    assert read > 0
    assert refused > 0
