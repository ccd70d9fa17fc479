"""Segments: what an engine or a user gives is converted once, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmstore.arrow import METADATA_BYTES_MAX, ROWS_BEFORE_MAX
from trainer import Segment
from trainer.errors import BadSegment
from trainer.segment import narrowest_unsigned
from trainer.trace import TraceStore


def test_a_copy_with_changes_is_checked_as_a_new_segment() -> None:
    segment = Segment([1, 2], [1, 2], [0, 0], [0, 0])
    assert segment.evolve(labels=[1, 3]).labels.tolist() == [1, 3]
    with pytest.raises(BadSegment, match="labels has shape"):
        segment.evolve(labels=[1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": [1]}, r"labels has shape \(1,\)"),
        ({"routed_experts": np.zeros((2, 2), np.uint8)}, "tokens, layers, top_k"),
        ({"routed_experts": np.zeros((2, 2, 2))}, "float64; need .* of whole numbers"),
        ({"routed_experts": np.full((2, 2, 2), -1)}, "go from -1 to -1; experts are numbered 0"),
        ({"routed_experts": np.full((2, 2, 2), 65536)}, "go from 65536 to 65536"),
        ({"routed_experts": np.zeros((5, 2, 2), np.uint8)}, "5 rows for 2 tokens"),
        ({"n_routed": 1}, "routed_experts is None"),
        ({"token_ids": ["a", "b"]}, "token_ids cannot be taken as int32"),
        ({"token_ids": [2**40, 1]}, "they go from 1 to 1099511627776"),
        ({"token_ids": [1.7, 2.0]}, "they are float64"),
        ({"token_ids": 5}, "it has 0 dimensions"),
        ({"text": 5}, "text is 5; a str is needed"),
        ({"text": "half a pair: \ud800"}, "text cannot be stored as UTF-8"),
        ({"routed_experts": [[[1]], [[1, 2]]]}, "routed_experts is no array"),
        ({"routed_experts": "x"}, "routed_experts has shape"),
        (
            {
                "routed_experts": np.zeros((2, 2, 2), np.uint8),
                "routed_before": np.zeros((1, 2, 3), np.uint8),
            },
            "must be the same",
        ),
        ({"token_ids": [[1], [1, 2]]}, "token_ids cannot be taken as int32"),
        ({"logprobs": [1j, 2]}, "they are complex128"),
        ({"logprobs": ["0.5", "1"]}, "they are <U3"),
        ({"n_routed": None}, "n_routed is None; a whole number is needed"),
        ({"routed_experts": np.zeros((2, 2, 2), np.uint8), "n_routed": 1.0}, "n_routed is 1.0"),
        ({"routed_experts": np.zeros((2, 0, 2), np.uint8)}, "0 experts a token"),
        ({"routed_experts": np.zeros((2, 2, 0), np.uint8)}, "0 experts a token"),
        ({"routed_experts": np.zeros((2, 2, 32768), np.uint8)}, "65536 experts a token"),
        (
            {
                "routed_experts": np.zeros((2, 1, 1), np.uint8),
                "routed_before": np.zeros((ROWS_BEFORE_MAX + 1, 1, 1), np.uint8),
            },
            "routed_before has 65536 rows",
        ),
        ({"text": "x" * (METADATA_BYTES_MAX + 1)}, "text has 67108865 bytes"),
    ],
)
def test_a_segment_whose_arrays_do_not_fit_is_refused_by_name(
    changes: dict[str, object], said: str
) -> None:
    good = {"token_ids": [1, 2], "labels": [1, 2], "logprobs": [0, 0], "model_steps": [0, 0]}
    with pytest.raises(BadSegment, match=said):
        Segment(**{**good, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("n_routed", [np.int64(2), np.uint8(2), 2, -1])
def test_the_widest_routing_that_is_allowed_is_stored(traces: TraceStore, n_routed: Any) -> None:
    """What the check lets through, the core takes."""
    routed = np.full((2, 1, 65535), 7, np.uint8)
    before = routed[:1].repeat(16, axis=0)
    traces.open("s", "o")
    given = Segment([1, 2], [1, 2], [0, 0], [0, 0], "x", routed, n_routed, before)
    stored = traces.segment("s", traces.insert("s", given))
    assert (stored.n_routed, type(given.n_routed)) == (2, int)
    np.testing.assert_array_equal(stored.routed_before, before)
    del stored
    traces.release(["s"], owner="o")


def test_arrays_with_gaps_are_stored_without_them(traces: TraceStore) -> None:
    wide = np.arange(8, dtype=np.int32)
    routed = np.arange(32, dtype=np.uint8).reshape(8, 2, 2)
    segment = Segment(
        wide[::2], wide[::2], wide[::2] / 2, wide[::2], "x", routed[::2], -1, routed[1:3, ::-1]
    )
    traces.open("s", "o")
    stored = traces.segment("s", traces.insert("s", segment))
    np.testing.assert_array_equal(stored.token_ids, [0, 2, 4, 6])
    np.testing.assert_array_equal(stored.logprobs, [0, 1, 2, 3])
    np.testing.assert_array_equal(stored.routed_experts, routed[::2])
    np.testing.assert_array_equal(stored.routed_before, routed[1:3, ::-1])
    del stored
    traces.release(["s"], owner="o")


@pytest.mark.parametrize(("largest", "dtype"), [(255, "u1"), (256, "u2"), (65535, "u2")])
@pytest.mark.parametrize("given", ["i4", "i8", "u8", list])
def test_routing_in_wider_types_is_narrowed(largest: int, dtype: str, given: Any) -> None:
    wide = np.array([[[0, largest]], [[1, 2]]])
    routed: Any = wide.tolist() if given is list else wide.astype(given)
    before = np.zeros((1, 1, 2), "i8")
    segment = Segment([1, 2], [1, 2], [0, 0], [0, 0], "", routed, -1, before)
    assert segment.routed_experts is not None
    assert segment.routed_before is not None
    assert segment.routed_experts.dtype == segment.routed_before.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(segment.routed_experts, wide)


@pytest.mark.parametrize(("n", "dtype"), [(1, "u1"), (256, "u1"), (257, "u2"), (65536, "u2")])
def test_expert_indices_travel_in_the_narrowest_type(n: int, dtype: str) -> None:
    assert narrowest_unsigned(n) == np.dtype(dtype)
    assert np.array([n - 1]).astype(narrowest_unsigned(n))[0] == n - 1


def test_more_experts_than_a_record_can_name_are_refused() -> None:
    with pytest.raises(BadSegment, match="65537 experts"):
        narrowest_unsigned(65537)
