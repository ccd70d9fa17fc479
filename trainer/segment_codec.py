"""A segment as one Arrow record batch: schema, fast writer, reader.

Columns, a row a token: `token_id`, `label`, `model_step` int32, `logprob` float32, and with routing
`routed_experts` as a fixed-shape tensor `[layers, top_k]` of uint8 or uint16. The schema's metadata
carries `text` (UTF-8, padded with zeros to a size class), `text_nbytes`, `n_routed`, and
`routed_before`: rows of routing for tokens just before this segment, which the engine could only
report with it (the last token of the turn before).

Writing through pyarrow costs more than copying the payload. So the two messages of the stream are
made once per shape by pyarrow, kept, and patched: only lengths in fixed places and the text change.
Every kept template was compared, byte for byte, with what pyarrow writes for the same batch, so a
pyarrow that lays out messages in another way is noticed at once and pyarrow's own bytes are used.

Behind the end of the stream, where no Arrow reader looks, lies a trailer with the places of all
parts, so that a trace is assembled without pyarrow as well: reading through it costs a hundred
times the copy.

No arena here; called by `trainer.trace` and `trainer.snapshot`, from any thread.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from trainer.errors import TraceError
from trainer.rollout import Segment

__all__ = ["Columns", "encode", "is_segment", "read", "to_batch", "view"]

Routing = NDArray[np.uint8] | NDArray[np.uint16]

#: Shapes (tokens, layers, text size class ...) of which the message templates are kept.
TEMPLATES_MAX = 4096
#: The smallest class of text sizes; classes double, so a template serves many texts.
_TEXT_CLASS_MIN = 64
#: Decimal digits in which counts stand in the metadata; patched in place.
_DIGITS = 10
#: End of stream mark; whole payload, n, body_at, n_routed; layers, top_k, itemsize, n_before;
#: text_at, text_nbytes, before_at; magic.
_TRAILER = struct.Struct("<8s QIII HHHH III 8s")
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MAGIC = b"segment1"
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)
_PADDING = b"\0" * 8


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Read-only views of one stored segment; they pin its bytes. `routed_before`: [r, layers,
    top_k].
    """

    token_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    model_steps: NDArray[np.int32]
    routed_experts: Routing | None
    n_routed: int
    routed_before: Routing | None
    text_bytes: bytes | memoryview

    @property
    def text(self) -> str:
        """The segment as text; decoded on demand, because export needs none."""
        return str(self.text_bytes, "utf-8")

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


@dataclass(frozen=True, slots=True)
class _Template:
    """Messages of one shape; places in the schema message where values are patched in."""

    schema_message: bytes
    batch_message: bytes
    text_at: int
    text_nbytes_at: int
    n_routed_at: int
    before_at: int
    body_nbytes: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """A template made ready for all segments of the same key: only text and `routed_before`
    vary.
    """

    head: bytes
    batch_message: bytes
    text_at: int
    text_nbytes_at: int
    before_at: int
    routing_tail: bytes
    trailer: bytes


#: Frames by (tokens, routing, rows before, known rows, text class); emptied when it is full.
_FRAMES: dict[tuple[Any, ...], _Frame] = {}
FRAMES_MAX = 8192


def encode(segment: Segment) -> Sequence[Any]:
    """The segment as buffers whose concatenation is one Arrow IPC stream."""
    text = segment.text.encode()
    n_text = len(text)
    routed, before = segment.routed_experts, segment.routed_before
    # Inserting is on the path of every turn: one lookup, then a copy of the head to patch.
    key = (
        segment.token_ids.size,
        None if routed is None else (routed.shape, routed.itemsize),
        0 if before is None else len(before),
        segment.n_routed,
        _text_class(n_text),
    )
    frame = _FRAMES.get(key)
    if frame is None:
        template = _template(_shape_of(segment, n_text))
        if template is None:
            return _encode_by_pyarrow(segment)
        frame = _keep(key, _frame_of(template, segment))
    head = bytearray(frame.head)
    head[frame.text_at : frame.text_at + n_text] = text
    head[frame.text_nbytes_at : frame.text_nbytes_at + _DIGITS] = b"%010d" % n_text
    if before is not None:
        rows = before.tobytes()
        head[frame.before_at : frame.before_at + len(rows)] = rows
    trailer = frame.trailer + n_text.to_bytes(4, "little") + _MAGIC
    columns = segment.token_ids, segment.labels, segment.logprobs, segment.model_steps
    if segment.token_ids.size & 1:
        a, b, c, d = columns
        pad = _PADDING[:4]
        parts: list[Any] = [head, frame.batch_message, a, pad, b, pad, c, pad, d, pad]
    else:
        parts = [head, frame.batch_message, *columns]
    if routed is not None:
        if len(routed):
            parts.append(routed if routed.flags.c_contiguous else np.ascontiguousarray(routed))
        if frame.routing_tail:
            parts.append(frame.routing_tail)
    parts.append(trailer)
    return parts


def _keep(key: tuple[Any, ...], frame: _Frame) -> _Frame:
    if len(_FRAMES) >= FRAMES_MAX:
        _FRAMES.clear()
    _FRAMES[key] = frame
    return frame


def _frame_of(template: _Template, segment: Segment) -> _Frame:
    """The template with everything patched that is the same for all segments of one key."""
    shape = _shape_of(segment, 0)
    head = bytearray(template.schema_message)
    at = template.n_routed_at
    head[at : at + _DIGITS] = b"%010d" % segment.n_routed
    body_at = len(head) + len(template.batch_message)
    tail = b""
    if segment.routed_experts is not None:
        tail = bytes(_routing_tail(segment.routed_experts, shape.n))
    trailer = _TRAILER.pack(
        _END_OF_STREAM,
        body_at + template.body_nbytes + _TRAILER.size,
        shape.n,
        body_at,
        segment.n_routed,
        shape.layers,
        shape.top_k,
        shape.itemsize,
        shape.before,
        template.text_at,
        template.before_at,
        0,
        _MAGIC,
    )
    return _Frame(
        head=bytes(head),
        batch_message=template.batch_message,
        text_at=template.text_at,
        text_nbytes_at=template.text_nbytes_at,
        before_at=template.before_at,
        routing_tail=tail,
        trailer=trailer[: -len(_MAGIC) - 4],
    )


def view(whole: memoryview) -> Columns | None:
    """A stored segment from the bytes of its object, without pyarrow; None when it has no trailer.

    `whole` may begin with a header of the store's own. Costs a few microseconds; the views pin
    `whole`.
    """
    if len(whole) < _TRAILER.size:
        return None
    (
        _,
        nbytes,
        n,
        body_at,
        n_routed,
        layers,
        top_k,
        itemsize,
        n_before,
        text_at,
        before_at,
        text_nbytes,
        magic,
    ) = _TRAILER.unpack_from(whole, len(whole) - _TRAILER.size)
    if magic != _MAGIC or nbytes > len(whole):
        return None
    start = len(whole) - nbytes
    at = start + body_at
    column = n * 4 + (n & 1) * 4
    ends = (
        at + 4 * column + n * layers * top_k * itemsize,
        start + before_at + n_before * layers * top_k * itemsize,
        start + text_at + text_nbytes,
    )
    if itemsize > 2 or max(ends) > len(whole) - _TRAILER.size:
        raise TraceError(
            f"a segment of {n} tokens and {text_nbytes} bytes of text does not fit its "
            f"{len(whole)} bytes: its trailer was overwritten"
        )
    routed: Any = None
    before: Any = None
    if itemsize:
        dtype = _UINT8 if itemsize == 1 else _UINT16
        row = layers * top_k
        routed = np.frombuffer(whole, dtype, n * row, at + 4 * column).reshape(n, layers, top_k)
        if n_before:
            before = np.frombuffer(whole, dtype, n_before * row, start + before_at)
            before = before.reshape(n_before, layers, top_k)
    return Columns(
        token_ids=np.frombuffer(whole, _INT32, n, at),
        labels=np.frombuffer(whole, _INT32, n, at + column),
        logprobs=np.frombuffer(whole, _FLOAT32, n, at + 2 * column),
        model_steps=np.frombuffer(whole, _INT32, n, at + 3 * column),
        routed_experts=routed,
        n_routed=n_routed,
        routed_before=before,
        text_bytes=whole[start + text_at : start + text_at + text_nbytes],
    )


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
    """Views of a stored segment; `TraceError` when the batch is none."""
    if not is_segment(batch):
        found = batch.schema.names if isinstance(batch, pa.RecordBatch) else type(batch).__name__
        raise TraceError(f"this object of the arena is not a segment, but {found}")
    metadata = batch.schema.metadata
    columns = batch.columns
    routed = before = None
    if len(columns) > 4:
        layers, top_k = columns[4].type.shape
        n = batch.num_rows
        values = columns[4].storage.flatten().to_numpy(zero_copy_only=True)
        routed = values.reshape(n, layers, top_k)
        raw = metadata[b"routed_before"]
        if raw:
            before = np.frombuffer(raw, routed.dtype).reshape(-1, layers, top_k)
    return Columns(
        token_ids=columns[0].to_numpy(zero_copy_only=True),
        labels=columns[1].to_numpy(zero_copy_only=True),
        logprobs=columns[2].to_numpy(zero_copy_only=True),
        model_steps=columns[3].to_numpy(zero_copy_only=True),
        routed_experts=routed,
        n_routed=int(metadata[b"n_routed"]),
        routed_before=before,
        text_bytes=metadata[b"text"][: int(metadata[b"text_nbytes"])],
    )


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
    fields = [
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("logprob", pa.float32(), nullable=False),
        pa.field("model_step", pa.int32(), nullable=False),
    ]
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


def _encode_by_pyarrow(segment: Segment) -> list[Any]:
    batch = to_batch(segment)
    return [batch.schema.serialize(), batch.serialize()]


@functools.lru_cache(maxsize=TEMPLATES_MAX)
def _template(shape: _Shape) -> _Template | None:
    """The messages of this shape, or None when pyarrow's layout is not the one that we patch."""
    if shape.n == 0:
        return None
    text_mark = b"\x01T" * (shape.text_class // 2)
    row_nbytes = shape.layers * shape.top_k * (np.dtype(shape.dtype).itemsize if shape.dtype else 1)
    before_mark = b"\x02" * (shape.before * row_nbytes)
    metadata = _metadata(shape, text_mark, 1111111111, before_mark)
    metadata["text_nbytes"] = b"2222222222"
    schema_message = bytes(_schema(shape, metadata).serialize())
    marks = (text_mark, b"2222222222", b"1111111111")
    if any(schema_message.count(mark) != 1 for mark in marks):
        return None
    batch_message = bytes(_zero_batch(shape).serialize())
    column = shape.n * 4 + -(shape.n * 4) % 8
    body = 4 * column
    if shape.dtype is not None:
        body += shape.n * row_nbytes + -(shape.n * row_nbytes) % 8
    head = 8 + int.from_bytes(batch_message[4:8], "little")
    if len(batch_message) != head + body:
        return None
    template = _Template(
        schema_message=schema_message.replace(text_mark, bytes(shape.text_class)),
        batch_message=batch_message[:head],
        text_at=schema_message.index(text_mark),
        text_nbytes_at=schema_message.index(b"2222222222"),
        n_routed_at=schema_message.index(b"1111111111"),
        before_at=schema_message.index(before_mark) if before_mark else 0,
        body_nbytes=body,
    )
    return template if _same_as_pyarrow(shape, template) else None


def _zero_batch(shape: _Shape) -> pa.RecordBatch:
    return to_batch(_sample(shape, 0))


def _sample(shape: _Shape, value: int) -> Segment:
    ints = np.full(shape.n, value, np.int32)
    routed = before = None
    if shape.dtype is not None:
        routed = np.full((shape.n, shape.layers, shape.top_k), value, shape.dtype)
        if shape.before:
            before = routed[:1].repeat(shape.before, axis=0)
    return Segment(
        token_ids=ints,
        labels=ints + value,
        logprobs=np.full(shape.n, value + 0.5, np.float32),
        model_steps=ints + 2 * value,
        text="x" * (shape.text_class // 2 + 1),
        routed_experts=routed,
        routed_before=before,
    )


def _same_as_pyarrow(shape: _Shape, template: _Template) -> bool:
    """Whether pyarrow reads from the template's layout just what was put in, column by column."""
    sample = _sample(shape, 3)
    body = b"".join(
        column.tobytes() + b"\0" * (-column.nbytes % 8)
        for column in (sample.token_ids, sample.labels, sample.logprobs, sample.model_steps)
    )
    if sample.routed_experts is not None:
        body += _routing_bytes(sample.routed_experts, shape.n)
    stream = template.schema_message + template.batch_message + body
    batch = pa.ipc.open_stream(pa.py_buffer(stream)).read_next_batch()
    columns = [column.to_pylist() for column in batch.columns[:4]]
    wanted = [column.to_pylist() for column in to_batch(sample).columns[:4]]
    same_routing = sample.routed_experts is None or bool(
        (batch.column(4).storage.flatten().to_numpy() == 3).all()
    )
    return columns == wanted and same_routing
