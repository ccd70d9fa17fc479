"""What can be stored comes back equal, in place and read-only."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shmstore import ObjectFreed, ObjectNotSealed, Store, StoreError

RECORD = np.dtype([("a", "<i4"), ("b", "<f8", (2,))])
ARRAYS = {
    "int64": np.arange(12).reshape(3, 4),
    "zero-d": np.array(3.5),
    "empty": np.empty((0, 5), dtype=np.float32),
    "structured": np.zeros(3, dtype=RECORD),
    "datetime": np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
    "big-endian": np.arange(4, dtype=">i4"),
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "strided": np.arange(20)[::3],
    "reversed": np.arange(6)[::-1],
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "float16": np.arange(3, dtype=np.float16),
    "text": np.array(["a", "bc"]),
    "objects": np.array([{"a": 1}, None], dtype=object),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_comes_back_equal_with_its_dtype(store: Store, kind: str) -> None:
    given = ARRAYS[kind]
    got = store.get(store.put(given))
    assert got.dtype == given.dtype
    assert got.shape == given.shape
    assert np.array_equal(got, given, equal_nan=given.dtype.kind in "fcM")


OTHERS: dict[str, Any] = {
    "bytes": b"abc\0def",
    "no bytes": b"",
    "bytearray": bytearray(b"xyz"),
    "text": "grüße",
    "none": None,
    "nested": {"a": [1, 2.5, ("x", None)], "b": {"c": {1, 2}}},
    "with arrays": {"x": np.arange(1000), "y": [np.ones(3)]},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_picklable_value_comes_back_equal(store: Store, kind: str) -> None:
    given = OTHERS[kind]
    got = store.get(store.put(given))
    if kind == "with arrays":
        assert np.array_equal(got["x"], given["x"])
        assert np.array_equal(got["y"][0], given["y"][0])
    else:
        assert got == given


def test_a_memoryview_comes_back_equal(store: Store) -> None:
    assert store.get(store.put(memoryview(b"0123456789")[2:5])) == b"234"


ARROW = {
    "array": pa.array([1, None, 3]),
    "nested": pa.array([[1, 2], None, []], type=pa.list_(pa.int32())),
    "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
    "null": pa.nulls(4),
    "text": pa.array(["x", None, "yz"]),
    "batch": pa.record_batch({"t": [1, 2], "s": ["a", "b"]}),
    "table": pa.table({"t": [1, 2, 3]}),
    "chunked": pa.chunked_array([[1, 2], [3]]),
    "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    ),
}


@pytest.mark.parametrize("kind", ARROW)
def test_an_arrow_value_comes_back_equal(store: Store, kind: str) -> None:
    given = ARROW[kind]
    got = store.get(store.put(given))
    assert got.equals(given)
    assert (got.schema if kind in ("batch", "table") else got.type) == (
        given.schema if kind in ("batch", "table") else given.type
    )


def test_an_arrow_column_is_read_in_place(store: Store) -> None:
    ref = store.put(pa.record_batch({"t": np.arange(100_000)}))
    first, second = store.get(ref), store.get(ref)
    address = first.column(0).buffers()[1].address
    assert address == second.column(0).buffers()[1].address


def test_a_value_that_cannot_be_stored_says_so(store: Store) -> None:
    with pytest.raises(StoreError):
        store.put(threading.Lock())
    assert store.stats().objects == 0
    assert store.check() == []


def test_views_are_zero_copy_and_read_only(store: Store) -> None:
    ref = store.put(np.arange(1000))
    one, two = store.get(ref), store.get(ref)
    assert one.ctypes.data == two.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        one.flags.writeable = True


def test_payloads_are_aligned_to_64_bytes(store: Store) -> None:
    for n in (1, 17, 1000, 100_000):
        assert store.get(store.put(np.zeros(n, dtype=np.uint8))).ctypes.data % 64 == 0


def test_a_build_is_sealed_on_leaving_the_block(store: Store) -> None:
    with store.build((2, 3), "f4") as draft:
        draft.array[...] = 7
        with pytest.raises(ObjectNotSealed):
            store.get(draft.ref)
    assert store.get(draft.ref).tolist() == [[7, 7, 7], [7, 7, 7]]


def test_a_build_that_raises_is_discarded(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.build(8) as draft:
        raise ZeroDivisionError
    with pytest.raises(ObjectFreed):
        store.get(draft.ref)
    assert store.stats().objects == 0


def test_a_get_waits_for_the_seal(store: Store) -> None:
    draft = store.build(4)
    timer = threading.Timer(0.05, lambda: (draft.array.fill(9), draft.seal()))
    timer.start()
    assert store.get(draft.ref, timeout=10).tolist() == [9, 9, 9, 9]
    timer.join()


def test_a_get_that_waits_in_vain_says_not_sealed(store: Store) -> None:
    with store.build(4) as draft:
        with pytest.raises(ObjectNotSealed):
            store.get(draft.ref, timeout=0.01)
        draft.array[:] = 0


@pytest.mark.parametrize("timeout", [-1, math.nan, "soon"])
def test_an_absurd_time_out_is_refused(store: Store, timeout: Any) -> None:
    with pytest.raises(StoreError):
        store.put(b"x", timeout=timeout)
