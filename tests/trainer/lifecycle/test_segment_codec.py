"""A segment is one Arrow record batch, whichever way it was written."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmstore.arrow import SegmentWriter
from trainer import segment_codec
from trainer.errors import TraceError
from trainer.segment import Segment


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    n = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    routed = before = None
    if draw(st.booleans()):
        layers, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        dtype = draw(st.sampled_from([np.uint8, np.uint16]))
        rows = max(0, n - draw(st.integers(0, 1)))
        routed = rng.integers(0, 200, (rows, layers, top_k)).astype(dtype)
        if draw(st.booleans()):
            before = rng.integers(0, 200, (draw(st.integers(1, 2)), layers, top_k)).astype(dtype)
    return Segment(
        token_ids=rng.integers(0, 1 << 20, n),
        labels=rng.integers(-100, 1 << 20, n),
        logprobs=rng.normal(size=n),
        model_steps=rng.integers(-1, 9, n),
        text=draw(st.text(max_size=200)),
        routed_experts=routed,
        routed_before=before,
    )


def _decode(segment: Segment) -> pa.RecordBatch:
    return pa.ipc.open_stream(pa.py_buffer(segment_codec.stream(segment))).read_next_batch()


@settings(deadline=None)  # pyarrow takes a while at its first call
@given(segments(), st.binary(max_size=70))
def test_what_is_written_is_read_back_to_the_bit(segment: Segment, header: bytes) -> None:
    whole = header + segment_codec.stream(segment)
    viewed = segment_codec.view(memoryview(whole))
    assert viewed is not None
    for columns in (segment_codec.read(_decode(segment)), viewed):
        _check(segment, columns)


def _check(segment: Segment, columns: segment_codec.Columns) -> None:
    for name in ("token_ids", "labels", "logprobs", "model_steps"):
        np.testing.assert_array_equal(getattr(columns, name), getattr(segment, name))
    assert columns.text == segment.text
    assert columns.n_routed == segment.n_routed
    if segment.routed_experts is None:
        assert columns.routed_experts is None
    else:
        known = len(segment.routed_experts)
        assert columns.routed_experts is not None
        np.testing.assert_array_equal(columns.routed_experts[:known], segment.routed_experts)
        assert not columns.routed_experts[known:].any()
        assert columns.routed_experts.dtype == segment.routed_experts.dtype
    if segment.routed_before is not None:
        np.testing.assert_array_equal(columns.routed_before, segment.routed_before)


@settings(deadline=None)
@given(segments())
def test_the_fast_writer_and_pyarrow_write_the_same_batch(segment: Segment) -> None:
    fast, slow = _decode(segment), segment_codec.to_batch(segment)
    assert fast.schema.equals(slow.schema, check_metadata=True)
    assert fast.equals(slow)
    fast.validate(full=True)


@settings(deadline=None)
@given(segments())
def test_all_segments_with_tokens_are_written_between_frames(segment: Segment) -> None:
    """And not by pyarrow, which is slow: this one lays its messages out as we do."""
    assert isinstance(segment_codec._frame_of(segment), tuple) == bool(len(segment))


def test_where_pyarrow_lays_messages_out_in_another_way_its_own_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment = Segment([1], [1], [0.0], [0], "other", np.full((1, 3, 2), 7, np.uint8))
    wanted, body = segment_codec.to_batch(segment), segment_codec._body(segment)
    segment_codec._layout.cache_clear()
    monkeypatch.setattr(segment_codec, "_body", lambda given: body[::-1])
    writer = SegmentWriter(segment_codec._frame_of, 8)
    whole = segment_codec._frame_of(segment)
    segment_codec._layout.cache_clear()
    assert isinstance(whole, bytes)
    assert writer.bytes(segment) == whole
    stream = whole[segment_codec.headers.unpack(memoryview(whole)).payload_offset :]
    assert pa.ipc.open_stream(pa.py_buffer(stream)).read_next_batch().equals(wanted)


def test_the_schema_is_the_one_of_the_contract() -> None:
    segment = Segment([1], [1], [0.0], [0], "x", np.zeros((1, 3, 2), np.uint8))
    schema = _decode(segment).schema
    assert schema.names == ["token_id", "label", "logprob", "model_step", "routed_experts"]
    assert schema.field("routed_experts").type == pa.fixed_shape_tensor(pa.uint8(), (3, 2))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_bytes_that_are_no_segment_are_not_taken_for_one(raw: bytes) -> None:
    assert segment_codec.view(memoryview(raw)) is None


@settings(deadline=None)
@given(segments(), st.data())
def test_an_overwritten_trailer_is_an_error_of_ours_or_changes_no_length(
    segment: Segment, data: st.DataObject
) -> None:
    whole = bytearray(segment_codec.stream(segment))
    at = data.draw(st.integers(max(0, len(whole) - 56), len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        columns = segment_codec.view(memoryview(bytes(whole)))
    except TraceError:
        return
    if columns is not None:
        assert len(columns.labels) == len(columns.model_steps) == len(columns.token_ids)


def test_a_batch_that_is_no_segment_is_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1])], names=["a"])
    assert not segment_codec.is_segment(batch)
    with pytest.raises(TraceError, match=r"not a segment, but \['a'\]"):
        segment_codec.read(batch)
