"""The core reads no segment that is not what `trainer.segment` promises, and keeps few frames."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from shmstore import BadValue, ObjectRef, SessionReleased, Store, StoreFull
from shmstore.arrow import SegmentWriter, known_rows
from shmstore.testing import temporary_store
from tests.tree import ROOT
from trainer import segment_codec
from trainer.segment import Segment
from trainer.testing import make_segment
from trainer.trace import TraceStore

ROWS = np.zeros((3, 2, 2), np.uint8)


class Loose(msgspec.Struct):
    """The fields of a segment, unchecked."""

    token_ids: Any = np.zeros(3, np.int32)
    labels: Any = np.zeros(3, np.int32)
    logprobs: Any = np.zeros(3, np.float32)
    model_steps: Any = np.zeros(3, np.int32)
    text: Any = "abc"
    routed_experts: Any = ROWS
    n_routed: Any = 3
    routed_before: Any = None


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3]},
        {"token_ids": np.zeros(3, np.int64)},
        {"token_ids": np.zeros(3, ">i4")},
        {"token_ids": np.zeros(6, np.int32)[::2]},
        {"token_ids": np.zeros((3, 1), np.int32)},
        {"labels": np.zeros(2, np.int32)},
        {"logprobs": np.zeros(3, np.int32)},
        {"model_steps": None},
        {"text": b"abc"},
        {"text": "\ud800"},
        {"routed_experts": ROWS.astype(np.int8)},
        {"routed_experts": ROWS[:1], "n_routed": 1},
        {"routed_experts": np.zeros((4, 2, 2), np.uint8)},
        {"routed_experts": np.zeros((3, 2, 4), np.uint8)[:, :, ::2]},
        {"routed_experts": ROWS[0]},
        {"routed_experts": None},
        {"n_routed": 4},
        {"n_routed": 2**70},
        {"n_routed": "3"},
        {"routed_before": ROWS.astype(np.uint16)},
        {"routed_before": np.zeros((1, 2, 3), np.uint8)},
        {"routed_experts": None, "n_routed": 0, "routed_before": ROWS},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_is_not_as_a_segment_promises_is_never_written(
    store: Store, changes: dict[str, Any]
) -> None:
    store.sessions.open("s", owner="o")
    assert known_rows(Loose()) == 3
    before = store.stats().objects
    loose = Loose(**changes)
    assert known_rows(loose) is None
    for write in (
        lambda: segment_codec.writer.append(store, "s", loose),
        lambda: segment_codec.writer.put(store, loose),
        lambda: segment_codec.writer.bytes(loose),
    ):
        with pytest.raises(BadValue, match="no segment that was checked"):
            write()
    assert store.stats().objects == before
    store.sessions.release(["s"], owner="o")


@pytest.fixture
def frame() -> Any:
    found: list[Any] = []

    def note(segment: Segment) -> Any:
        found.append(_frame_of(segment))
        return found[-1]

    SegmentWriter(note, 1).bytes(make_segment(3, text="abc"))
    return found[0]


class Special(np.ndarray[Any, Any]):
    """As np.memmap is: an array of another class."""


def _unaligned(array: NDArray[Any]) -> NDArray[Any]:
    """A view of a message, at an odd address."""
    whole = np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:]
    return whole.view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("changed", [_unaligned, lambda array: array.view(Special)])
def test_arrays_at_any_address_and_of_any_class_are_stored(
    store: Store, changed: Callable[[NDArray[Any]], NDArray[Any]]
) -> None:
    plain = make_segment(3)
    wide = plain.evolve(routed_experts=np.full((3, 2, 2), 300, np.uint16))
    assert wide.routed_experts is not None
    given = Segment(
        changed(wide.token_ids),
        changed(wide.labels),
        changed(wide.logprobs),
        changed(wide.model_steps),
        routed_experts=changed(wide.routed_experts),
    )
    traces = TraceStore(store)
    traces.open("s", owner="o")
    traces.insert("s", given)
    assert segment_codec.stream(given) == segment_codec.stream(wide)
    trace = traces.export("s")
    np.testing.assert_array_equal(trace.token_ids, wide.token_ids)
    assert trace.routed_experts is not None
    np.testing.assert_array_equal(trace.routed_experts, wide.routed_experts)
    traces.release(["s"], owner="o")


def _frame_of(segment: Segment) -> Any:
    return segment_codec._frame_of(segment)


def _always(frame: Any, segment: Segment) -> Any:
    return frame


def test_a_frame_of_another_size_than_it_says_is_refused(frame: Any) -> None:
    segment = make_segment(3, text="abc")
    for wrong in (
        frame._replace(tail=frame.tail[:-1]),
        frame._replace(text_class=3),
        frame._replace(text_class=1 << 40),
        frame._replace(head=b""),
        tuple(frame)[:-1],
        b"",
        b"x" * 200,
        None,
    ):
        with pytest.raises(BadValue, match="frame"):
            SegmentWriter(functools.partial(_always, wrong), 8).bytes(segment)


def test_a_frame_is_made_once_for_all_segments_of_one_layout_and_few_are_kept() -> None:
    made: list[int] = []

    def frame_of(segment: Segment) -> Any:
        made.append(len(segment))
        return _frame_of(segment)

    writer = SegmentWriter(frame_of, 2)
    for n in (3, 3, 4, 3, 4):
        writer.bytes(make_segment(n, first_token=n))
    assert made == [3, 4]
    for n in (5, 3):  # the third empties what is full
        writer.bytes(make_segment(n))
    assert made == [3, 4, 5, 3]


def test_a_full_arena_refuses_a_segment_and_keeps_nothing_of_it() -> None:
    with temporary_store("1MiB") as store:
        traces = TraceStore(store)
        traces.open("s", owner="o")
        traces.insert("s", make_segment(20_000))
        with pytest.raises(StoreFull):
            traces.insert("s", make_segment(40_000), 0)
        assert (traces.length("s"), store.stats().objects) == (1, 1)
        traces.release(["s"], owner="o")


def test_all_sessions_before_one_that_is_gone_get_a_shared_segment(store: Store) -> None:
    traces = TraceStore(store)
    for session_id in ("a", "b", "c"):
        traces.open(session_id, owner="o")
    traces.release(["b"], owner="o")
    with pytest.raises(SessionReleased, match='"b"'):
        traces.insert_shared(["a", "b", "c"], make_segment(3))
    assert [traces.length(session_id) for session_id in ("a", "c")] == [1, 0]
    traces.release(["a", "c"], owner="o")
    assert store.stats().objects == 0


def test_a_segment_that_is_put_apart_ends_with_its_reference(store: Store) -> None:
    def apart() -> Iterator[ObjectRef]:
        yield TraceStore(store).put_apart(make_segment(3))

    assert [ref.alive and ref.nbytes > 0 for ref in apart()] == [True]
    assert store.stats().objects == 0


_WRITE = """
from shmstore import _core
from shmstore.testing import temporary_store
from trainer.testing import make_segment
from trainer.trace import TraceStore

_core.set_leak_warnings(True)
with temporary_store() as store:
    traces = TraceStore(store)
    traces.open("s", owner="o")
    traces.insert("s", make_segment(3))
    traces.export("s")
    traces.release(["s"], owner="o")
del store, traces
"""


def test_a_process_that_wrote_and_read_segments_leaves_nothing_of_the_core_behind() -> None:
    """The writer leads to Python's functions, and those to the writer."""
    ended = subprocess.run(
        [sys.executable, "-c", _WRITE], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
