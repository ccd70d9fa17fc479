"""Arrow arrays, chunked arrays, record batches, tables and tensors, as an IPC stream written into
the arena.

Owns the sorts of Arrow value and their way back: buffers of what `get` returns point into the
arena, with the pin as their base. Nested, dictionary, null and extension columns (fixed-shape
tensors) are Arrow's own business. Called by `codec` only; pyarrow is imported when a value needs
it, not before.
"""

from __future__ import annotations

import enum
import importlib
import sys
from types import ModuleType
from typing import Any

from . import _core, headers
from .encoded import Encoded
from .errors import ArenaDamaged, NotStorable
from .headers import Header, Kind

_COLUMN = "value"  # the one column of an array that travels alone


class Sort(enum.StrEnum):
    """Which Arrow class the stream was made from."""

    ARRAY = "array"
    CHUNKED = "chunked"
    BATCH = "batch"
    TABLE = "table"
    TENSOR = "tensor"


# Headers of streams that come in parts; the core fills in the length.
STREAM_HEADS = {
    sort.value: headers.pack(Kind.ARROW, 0, text=sort.value)
    for sort in (Sort.BATCH, Sort.TABLE, Sort.ARRAY, Sort.CHUNKED)
}

# Of streams that a trailer ends; see `_core.pyi`.
segment_places, known_rows = _core.segment_places, _core.known_rows
SegmentWriter = _core.SegmentWriter
EXPERTS_PER_TOKEN_MAX = _core.EXPERTS_PER_TOKEN_MAX
ROWS_BEFORE_MAX = _core.ROWS_BEFORE_MAX
METADATA_BYTES_MAX = _core.METADATA_BYTES_MAX


def _pyarrow() -> ModuleType:
    try:
        return importlib.import_module("pyarrow.ipc") and sys.modules["pyarrow"]
    except ImportError as error:
        raise NotStorable(
            "the object is an Arrow value, and pyarrow is not installed here"
        ) from error


def sort_of(value: object) -> Sort | None:
    """The sort of an Arrow value, None for everything else. Imports nothing."""
    pa: Any = sys.modules.get("pyarrow")
    if pa is None:
        return None
    if isinstance(value, pa.RecordBatch):
        return Sort.BATCH
    if isinstance(value, pa.Table):
        return Sort.TABLE
    if isinstance(value, pa.Array):
        return Sort.ARRAY
    if isinstance(value, pa.ChunkedArray):
        return Sort.CHUNKED
    if isinstance(value, pa.Tensor):
        return Sort.TENSOR
    return None


def encode(value: Any, sort: Sort) -> Encoded:
    """Plan the stream: one dry pass counts the bytes, the real pass writes them in place."""
    pa = _pyarrow()
    container = _container(pa, value, sort)
    counter = pa.MockOutputStream()
    try:
        _write_stream(pa, counter, container)
    except pa.ArrowException as error:
        raise NotStorable(f"Arrow cannot write this {type(value).__name__}: {error}") from error
    n_bytes = counter.size()

    def write(payload: memoryview) -> None:
        with pa.FixedSizeBufferWriter(pa.py_buffer(payload)) as sink:
            _write_stream(pa, sink, container)

    return Encoded(headers.pack(Kind.ARROW, n_bytes, text=sort.value), n_bytes, write)


def decode(header: Header, whole: memoryview) -> Any:
    """The Arrow value over the object's bytes, without a copy."""
    pa = _pyarrow()
    start = header.payload_offset
    payload = pa.py_buffer(whole[start : start + header.payload_bytes])
    try:
        sort = Sort(header.text)
        if sort is Sort.TENSOR:
            return pa.ipc.read_tensor(pa.BufferReader(payload))
        with pa.ipc.open_stream(payload) as reader:
            if sort in (Sort.BATCH, Sort.ARRAY):
                batch = reader.read_next_batch()
                batch.validate()  # Arrow trusts a message's lengths, and would read beyond buffers
                return batch if sort is Sort.BATCH else _column(batch)
            table = reader.read_all()
            table.validate()
            return table if sort is Sort.TABLE else _column(table)
    except (pa.ArrowException, OSError, ValueError, StopIteration) as error:
        raise ArenaDamaged(f"the object is no Arrow {header.text!r} stream: {error}") from error


def _column(container: Any) -> Any:
    """The array that travelled alone. Of an extension type that this process does not know, Arrow
    would give the storage without a word; in a batch or table its field still names the type."""
    name = (container.schema.field(0).metadata or {}).get(b"ARROW:extension:name")
    if name is not None:
        raise NotStorable(
            f"the object is an Arrow array of the extension type {name.decode()!r}, which this "
            "process does not know; call pyarrow.register_extension_type first"
        )
    return container.column(0)


def _container(pa: ModuleType, value: Any, sort: Sort) -> Any:
    if sort is Sort.ARRAY:
        return pa.RecordBatch.from_arrays([value], names=[_COLUMN])
    if sort is Sort.CHUNKED:
        return pa.Table.from_arrays([value], names=[_COLUMN])
    return value


def _write_stream(pa: ModuleType, sink: Any, container: Any) -> None:
    if isinstance(container, pa.Tensor):
        pa.ipc.write_tensor(container, sink)
        return
    with pa.ipc.new_stream(sink, container.schema) as writer:
        writer.write(container)
