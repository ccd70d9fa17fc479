"""A segment as one Arrow record batch: schema, fast writer, reader.

Columns, a row a token: `token_id`, `label`, `model_step` int32, `logprob` float32, and with routing
`routed_experts` as a fixed-shape tensor `[layers, top_k]` of uint8 or uint16. The schema's metadata
carries `text` (UTF-8, padded with zeros to a size class), `text_nbytes`, `n_routed`, and
`routed_before`: rows of routing for tokens just before this segment, which the engine could only
report with it (the last token of the turn before).

Writing through pyarrow costs more than copying the payload. So the two messages of the stream are
made once per shape by pyarrow, kept, and cut where text, counts and rows stand: a segment is those
cuts with its own arrays between them, which the core writes straight into the arena. What is kept
was first compared with a message of pyarrow's own, so a pyarrow that lays them out in another way
is noticed at once, and its own bytes are used.

Behind the end of the stream, where no Arrow reader looks, lies a trailer with the places of all
parts, so that a trace is assembled without pyarrow as well: reading through it costs a hundred
times the copy. `csrc/segment_format.h` reads it.

No arena here; called by `trainer.trace` and `trainer.snapshot`, from any thread.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shmstore import ArenaDamaged, headers
from shmstore.arrow import SegmentWriter, Sort, segment_places
from trainer.errors import TraceError
from trainer.segment import Segment

__all__ = ["Columns", "is_segment", "read", "stream", "to_batch", "view", "writer"]

Routing = NDArray[np.uint8] | NDArray[np.uint16]

#: Shapes (tokens, layers, text size class ...) of which pyarrow's messages are kept.
SHAPES_MAX = 4096
#: The smallest class of text sizes; classes double, so a template serves many texts.
_TEXT_CLASS_MIN = 64
#: Decimal digits in which counts stand in the metadata.
_DIGITS = 10
#: End of stream mark; whole payload, n, body_at, n_routed; layers, top_k, itemsize, n_before;
#: text_at, before_at; magic; text size in digits.
_TRAILER = struct.Struct("<8s QIII HHHH II 8s 10s")
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MAGIC = b"segment2"
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)

#: Names and types of the columns; routing follows.
_FIELDS = [
    ("token_id", pa.int32()),
    ("label", pa.int32()),
    ("logprob", pa.float32()),
    ("model_step", pa.int32()),
]

#: Rows of `Columns.numbers`.
_TOKEN_IDS, _LABELS, _LOGPROBS, _MODEL_STEPS = range(4)


class Columns(msgspec.Struct, frozen=True, eq=False):
    """Read-only views of one stored segment; they pin its bytes.

    `numbers` int32 [4, n]: the columns side by side, the log-probs by their bits; `routed_before`:
    [r, layers, top_k].
    """

    n: int
    numbers: NDArray[np.int32]
    routed_experts: Routing | None
    n_routed: int
    routed_before: Routing | None
    text_bytes: bytes | memoryview

    @property
    def token_ids(self) -> NDArray[np.int32]:
        row: NDArray[np.int32] = self.numbers[_TOKEN_IDS]
        return row

    @property
    def labels(self) -> NDArray[np.int32]:
        row: NDArray[np.int32] = self.numbers[_LABELS]
        return row

    @property
    def logprobs(self) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self.numbers[_LOGPROBS].view(_FLOAT32)
        return row

    @property
    def model_steps(self) -> NDArray[np.int32]:
        row: NDArray[np.int32] = self.numbers[_MODEL_STEPS]
        return row

    @property
    def text(self) -> str:
        """The segment as text; decoded on demand, because export needs none."""
        try:
            return str(self.text_bytes, "utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(f"the text of a stored segment is damaged: {error}") from error

    def as_segment(self) -> Segment:
        """What was stored, over the same bytes."""
        return Segment(
            token_ids=self.token_ids,
            labels=self.labels,
            logprobs=self.logprobs,
            model_steps=self.model_steps,
            text=self.text,
            routed_experts=self.routed_experts,
            n_routed=self.n_routed,
            routed_before=self.routed_before,
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the bytes of the two messages depend on, besides the patched values."""

    n: int
    dtype: str | None
    layers: int
    top_k: int
    before: int
    text_class: int

    @property
    def itemsize(self) -> int:
        """Bytes of one expert index; 0 without routing."""
        return 0 if self.dtype is None else 2 if self.dtype == "uint16" else 1

    @property
    def row_nbytes(self) -> int:
        """Bytes of the routing of one token."""
        return self.layers * self.top_k * self.itemsize


class _Frame(NamedTuple):
    """What surrounds the varying parts of all segments of one layout, as `SegmentWriter` takes it.

    In their order: `head`, the text filled up with zeros to `text_class`, `before_rows`, the rows
    for tokens before, `before_digits`, the size of the text in digits, `to_body`, the columns, each
    padded to 8 bytes, the routing, `tail`, the size of the text once more. `head` begins with the
    store's header.
    """

    text_class: int
    head: bytes
    before_rows: bytes
    before_digits: bytes
    to_body: bytes
    tail: bytes


#: Frames that are kept; beyond that all are made anew.
FRAMES_MAX = 8192


def stream(segment: Segment) -> bytes:
    """The Arrow IPC stream of a segment, with the trailer behind its end."""
    return writer.bytes(segment)[len(_header(0)) :]


def view(whole: memoryview) -> Columns | None:
    """A stored segment from the bytes of its object, without pyarrow; None when it has no trailer.

    `whole` may begin with a header of the store's own; the views pin it.
    """
    try:
        places = segment_places(whole)
    except ArenaDamaged as error:
        raise TraceError(str(error)) from error
    if places is None:
        return None
    n, at, stride, layers, top_k, itemsize = places[:6]
    routed_at, n_routed, before_at, n_before, text_at, text_end = places[6:]
    routed: Any = None
    before: Any = None
    if itemsize:
        dtype = _UINT8 if itemsize == 1 else _UINT16
        routed = np.ndarray((n, layers, top_k), dtype, whole, routed_at)
        if n_before:
            before = np.ndarray((n_before, layers, top_k), dtype, whole, before_at)
    numbers: NDArray[np.int32] = np.ndarray((4, n), _INT32, whole, at, (stride, 4))
    return Columns(n, numbers, routed, n_routed, before, whole[text_at:text_end])


def to_batch(segment: Segment) -> pa.RecordBatch:
    """The same record batch by way of pyarrow."""
    text = segment.text.encode()
    shape = _shape_of(segment, len(text))
    before = segment.routed_before.tobytes() if segment.routed_before is not None else b""
    metadata = _metadata(shape, text, segment.n_routed, before)
    arrays = [
        pa.array(column)
        for column in (segment.token_ids, segment.labels, segment.logprobs, segment.model_steps)
    ]
    if segment.routed_experts is not None:
        flat = _routing_bytes(segment.routed_experts, shape.n)
        unpadded = shape.n * shape.layers * shape.top_k * segment.routed_experts.itemsize
        values = pa.Array.from_buffers(
            pa.from_numpy_dtype(segment.routed_experts.dtype),
            shape.n * shape.layers * shape.top_k,
            [None, pa.py_buffer(flat[:unpadded])],
        )
        storage = pa.FixedSizeListArray.from_arrays(values, shape.layers * shape.top_k)
        arrays.append(pa.ExtensionArray.from_storage(_tensor_type(shape), storage))
    return pa.RecordBatch.from_arrays(arrays, schema=_schema(shape, metadata))


def is_segment(value: object) -> bool:
    """Whether a stored value is a segment, and not something else that a session holds."""
    if not isinstance(value, pa.RecordBatch):
        return False
    metadata = value.schema.metadata
    return metadata is not None and b"text_nbytes" in metadata


def read(batch: pa.RecordBatch) -> Columns:
    """The columns of a stored segment, the numbers copied; `TraceError` when the batch is none."""
    if not is_segment(batch):
        found = batch.schema.names if isinstance(batch, pa.RecordBatch) else type(batch).__name__
        raise TraceError(f"this object of the arena is not a segment, but {found}")
    try:
        batch.validate()
        return _read(batch, batch.schema.metadata)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise TraceError(f"this record batch is not as a segment's: {error!r}") from error


def _read(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes]) -> Columns:
    columns = batch.columns
    if [(field.name, field.type) for field in batch.schema][:4] != _FIELDS:
        raise ValueError(f"its columns are {batch.schema.names}")
    routed: Routing | None = None
    before: Any = None
    n = batch.num_rows
    if len(columns) > 4:
        routed = _read_routing(columns[4], n)
        raw = metadata[b"routed_before"]
        if raw:
            before = np.frombuffer(raw, routed.dtype).reshape(-1, *routed.shape[1:])
    n_routed, text_nbytes = int(metadata[b"n_routed"]), int(metadata[b"text_nbytes"])
    text = metadata[b"text"]
    n_routed_max = 0 if routed is None else n
    if not (0 <= n_routed <= n_routed_max and 0 <= text_nbytes <= len(text)):
        raise ValueError(f"n_routed is {n_routed}, text_nbytes {text_nbytes}")
    rows = [column.to_numpy(zero_copy_only=True).view(_INT32) for column in columns[:4]]
    return Columns(n, np.stack(rows), routed, n_routed, before, text[:text_nbytes])


def _read_routing(column: pa.Array, n: int) -> Routing:
    form = column.type
    if not isinstance(form, pa.FixedShapeTensorType) or form.permutation is not None:
        raise ValueError(f"its routing is {form}")
    layers, top_k = form.shape
    values: Routing = column.storage.flatten().to_numpy(zero_copy_only=True)
    if values.dtype not in (_UINT8, _UINT16):
        raise ValueError(f"its experts are {values.dtype}")
    return values.reshape(n, layers, top_k)


def _text_class(text_nbytes: int) -> int:
    """The power of two, at least the smallest class, that holds the text."""
    return (
        max(_TEXT_CLASS_MIN, 1 << (text_nbytes - 1).bit_length())
        if text_nbytes
        else _TEXT_CLASS_MIN
    )


def _shape_of(segment: Segment, text_nbytes: int) -> _Shape:
    text_class = _text_class(text_nbytes)
    routed = segment.routed_experts
    if routed is None:
        return _Shape(len(segment), None, 0, 0, 0, text_class)
    before = 0 if segment.routed_before is None else len(segment.routed_before)
    _, layers, top_k = routed.shape
    name = "uint8" if routed.itemsize == 1 else "uint16"
    return _Shape(len(segment), name, layers, top_k, before, text_class)


def _routing_tail(routed: Routing, n: int) -> int:
    """Bytes behind the known rows: a missing last row as zeros, and padding to 8 as Arrow wants."""
    row_nbytes = int(routed.shape[1] * routed.shape[2] * routed.itemsize)
    return (n - len(routed)) * row_nbytes + -(n * row_nbytes) % 8


def _routing_bytes(routed: Routing, n: int) -> bytes:
    return routed.tobytes() + bytes(_routing_tail(routed, n))


def _tensor_type(shape: _Shape) -> pa.FixedShapeTensorType:
    assert shape.dtype is not None
    return pa.fixed_shape_tensor(
        pa.from_numpy_dtype(np.dtype(shape.dtype)), (shape.layers, shape.top_k)
    )


def _schema(shape: _Shape, metadata: dict[str, bytes]) -> pa.Schema:
    fields = [pa.field(name, form, nullable=False) for name, form in _FIELDS]
    if shape.dtype is not None:
        fields.append(pa.field("routed_experts", _tensor_type(shape), nullable=False))
    return pa.schema(fields, metadata=metadata)


def _metadata(shape: _Shape, text: bytes, n_routed: int, before: bytes) -> dict[str, bytes]:
    return {
        "text_nbytes": b"%010d" % len(text),
        "n_routed": b"%010d" % n_routed,
        "routed_before": before,
        "text": text.ljust(shape.text_class, b"\0"),
    }


def _written_by_pyarrow(segment: Segment) -> bytes:
    """pyarrow's own messages. Where the parts stand in them is not known, so they stand once more
    behind the end of the stream, for the trailer to name.
    """
    batch, text = to_batch(segment), segment.text.encode()
    shape = _shape_of(segment, len(text))
    before = segment.routed_before
    messages = bytes(batch.schema.serialize()) + bytes(batch.serialize()) + _END_OF_STREAM
    rows_before = b"" if before is None else before.tobytes()
    body = _body(segment)
    text_at = len(messages)
    before_at = text_at + len(text)
    body_at = before_at + len(rows_before)
    nbytes = body_at + len(body) + _TRAILER.size
    trailer = _trailer(shape, segment.n_routed, nbytes, body_at, text_at, before_at)
    digits = b"%010d" % len(text)
    return b"".join((_header(nbytes), messages, text, rows_before, body, trailer, digits))


def _trailer(
    shape: _Shape, n_routed: int, nbytes: int, body_at: int, text_at: int, before_at: int
) -> bytes:
    """All of it but the digits of the text's size, which follow."""
    whole = _TRAILER.pack(
        _END_OF_STREAM,
        nbytes,
        shape.n,
        body_at,
        n_routed,
        shape.layers,
        shape.top_k,
        shape.itemsize,
        shape.before,
        text_at,
        before_at,
        _MAGIC,
        b"",
    )
    return whole[:-_DIGITS]


def _frame_of(segment: Segment) -> _Frame | bytes:
    """The frame of this segment and all like it; all bytes where pyarrow's layout is another."""
    shape = _shape_of(segment, len(segment.text.encode()))
    layout = _layout(shape)
    if layout is None:
        return _written_by_pyarrow(segment)
    message, text_at, rows_at, digits_at, n_routed_at = layout.schema
    schema = bytearray(message)
    schema[n_routed_at : n_routed_at + _DIGITS] = b"%010d" % segment.n_routed
    rows_end = rows_at + shape.before * shape.row_nbytes
    body_at = len(schema) + len(layout.batch_head)
    tail_nbytes = 0
    if segment.routed_experts is not None:
        tail_nbytes = _routing_tail(segment.routed_experts, shape.n)
    nbytes = body_at + layout.body_nbytes + _TRAILER.size
    trailer = _trailer(shape, segment.n_routed, nbytes, body_at, text_at, rows_at)
    return _Frame(
        text_class=shape.text_class,
        head=_header(nbytes) + bytes(schema[:text_at]),
        before_rows=bytes(schema[text_at + shape.text_class : rows_at]),
        before_digits=bytes(schema[rows_end:digits_at]),
        to_body=bytes(schema[digits_at + _DIGITS :]) + layout.batch_head,
        tail=bytes(tail_nbytes) + trailer,
    )


def _header(nbytes: int) -> bytes:
    """Stands before the stream of a record batch in the arena."""
    return headers.pack(headers.Kind.ARROW, nbytes, text=Sort.BATCH.value)


#: Writes segments into the arena: `append`, `put`.
writer = SegmentWriter(_frame_of, FRAMES_MAX)


class _SchemaLayout(NamedTuple):
    """pyarrow's schema message, and where in it the varying parts stand."""

    message: bytes
    text_at: int
    rows_at: int
    digits_at: int
    n_routed_at: int


class _Layout(NamedTuple):
    """pyarrow's messages of one shape; of the batch's, what stands before the columns."""

    schema: _SchemaLayout
    batch_head: bytes
    body_nbytes: int


@functools.lru_cache(maxsize=SHAPES_MAX)
def _schema_layout(shape: _Shape) -> _SchemaLayout | None:
    """The same for all numbers of tokens: ask with 0. None as `_layout`."""
    message = _schema_message(shape, {})
    text_at = _place(shape, "text", shape.text_class)
    digits_at = _place(shape, "text_nbytes", _DIGITS)
    n_routed_at = _place(shape, "n_routed", _DIGITS)
    rows_at = digits_at
    if shape.before:
        rows_at = _place(shape, "routed_before", shape.before * shape.row_nbytes)
    if not 0 <= text_at < rows_at <= digits_at or n_routed_at < 0:
        return None
    return _SchemaLayout(message, text_at, rows_at, digits_at, n_routed_at)


@functools.lru_cache(maxsize=SHAPES_MAX)
def _layout(shape: _Shape) -> _Layout | None:
    """None when pyarrow lays the messages out in another way than we fill them in."""
    schema = _schema_layout(dataclasses.replace(shape, n=0)) if shape.n else None
    if schema is None:
        return None
    sample = _sample(shape)
    message, body = bytes(to_batch(sample).serialize()), _body(sample)
    body_at = 8 + int.from_bytes(message[4:8], "little")
    if message[body_at:] != body:
        return None
    return _Layout(schema, message[:body_at], len(body))


def _schema_message(shape: _Shape, changes: Mapping[str, bytes]) -> bytes:
    metadata = _metadata(shape, b"", 0, bytes(shape.before * shape.row_nbytes))
    return bytes(_schema(shape, {**metadata, **changes}).serialize())


def _place(shape: _Shape, name: str, nbytes: int) -> int:
    """Where the value of `name` stands in the schema message; -1 unless in one piece."""
    low, high = (
        np.frombuffer(_schema_message(shape, {name: fill * nbytes}), np.uint8)
        for fill in (b"1", b"2")
    )
    if len(low) != len(high):
        return -1
    differs = np.flatnonzero(low != high)
    at = int(differs[0]) if len(differs) else -1
    return at if len(differs) == nbytes == int(differs[-1]) + 1 - at else -1


def _sample(shape: _Shape) -> Segment:
    """A segment of this shape; each column holds another number."""
    routed = before = None
    if shape.dtype is not None:
        routed = np.full((shape.n, shape.layers, shape.top_k), 5, shape.dtype)
        if shape.before:
            before = routed[:1].repeat(shape.before, axis=0)
    return Segment(
        token_ids=np.full(shape.n, 1, np.int32),
        labels=np.full(shape.n, 2, np.int32),
        logprobs=np.full(shape.n, 3.5, np.float32),
        model_steps=np.full(shape.n, 4, np.int32),
        text="x" * (shape.text_class // 2 + 1),
        routed_experts=routed,
        routed_before=before,
    )


def _body(segment: Segment) -> bytes:
    """The columns behind each other, each filled up to 8 bytes."""
    body = b""
    for column in (segment.token_ids, segment.labels, segment.logprobs, segment.model_steps):
        body += column.tobytes() + bytes(-column.nbytes % 8)
    routed = segment.routed_experts
    return body if routed is None else body + _routing_bytes(routed, len(segment))
