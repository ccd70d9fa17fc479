"""Value headers: what is packed is unpacked, and damaged ones are ArenaDamaged and nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmstore import ArenaDamaged, Store, StoreError, codec, headers
from shmstore.headers import Kind

VALUES: list[Any] = [
    np.arange(12, dtype="i2").reshape(3, 4),
    np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    np.asfortranarray(np.ones((2, 3))),
    np.zeros((1, 2, 1, 2, 1, 2, 1)),
    torch.ones(3, 2, dtype=torch.bfloat16),
    b"some bytes",
    bytearray(b"more bytes"),
    memoryview(np.arange(6, dtype="f8").reshape(2, 3)),
]


@given(
    kind=st.sampled_from(Kind),
    payload_bytes=st.integers(0, 1 << 40),
    shape=st.lists(st.integers(0, 1 << 40), max_size=headers.NDIM_MAX).map(tuple),
    text=st.text(st.characters(codec="utf-8"), max_size=200),
    fortran=st.booleans(),
)
def test_a_header_comes_back_as_it_was_packed(
    kind: Kind, payload_bytes: int, shape: tuple[int, ...], text: str, fortran: bool
) -> None:
    packed = headers.pack(kind, payload_bytes, shape=shape, text=text, fortran=fortran)
    assert len(packed) % headers.ALIGNMENT_BYTES == 0
    if payload_bytes > 1 << 16:  # the payload is not there
        with pytest.raises(ArenaDamaged):
            headers.unpack(memoryview(packed))
        return
    parsed = headers.unpack(memoryview(packed + bytes(payload_bytes)))
    assert parsed == headers.Header(kind, len(packed), payload_bytes, shape, text, 0, fortran)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_scribbled_headers_are_refused_or_read_within_the_object(store: Store, value: Any) -> None:
    """Both readers, the core's and Python's: an error of ours or a value, never a crash."""
    whole = bytearray(memoryview(store.pin(store.put(value))))
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    header_bytes = headers.unpack(memoryview(whole)).payload_offset
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(header_bytes)] = rng.choice((0, 1, 2, 255, rng.randrange(256)))
        handle = store.reserve(len(damaged))
        memoryview(handle.view())[:] = damaged
        ref = handle.seal()
        for read in (store.get, lambda r: store.get(r, copy=True), store.buffer):
            try:
                touched = read(ref)
                if isinstance(touched, np.ndarray) and touched.size:
                    bytes(touched.tobytes())
            except StoreError:
                refused += 1
        _ = ref.nbytes
    assert refused > 0


def test_objects_too_short_for_a_header_are_damaged(store: Store) -> None:
    for size in (0, 1, 63):
        ref = store.reserve(size).seal()
        with pytest.raises(ArenaDamaged):
            store.get(ref)
        with pytest.raises(ArenaDamaged):
            store.buffer(ref)
        assert ref.nbytes == size


def test_decode_checks_what_the_core_leaves_to_it() -> None:
    for packed in (
        headers.pack(Kind.ARRAY, 8, shape=(2,), text="'<f8'"),
        headers.pack(Kind.ARRAY, 0, shape=(0, 1 << 40, 1 << 40), text="'<f8'"),
        headers.pack(Kind.ARRAY, 8, shape=(1,), text="no literal("),
        headers.pack(Kind.ARRAY, 8, shape=(1,), text="'not a dtype'"),
        headers.pack(Kind.ARRAY, 8, shape=(1,), text="'|O'"),
        headers.pack(Kind.TENSOR, 8, shape=(3,), text="float32"),
        headers.pack(Kind.TENSOR, 8, shape=(2,), text="load"),
        headers.pack(Kind.MEMORYVIEW, 8, shape=(1,), text="Z"),
        headers.pack(Kind.MEMORYVIEW, 8, shape=(3,), text="f"),
        headers.pack(Kind.ARROW, 8, text="batch"),
        headers.pack(Kind.ARROW, 8, text="no sort"),
        headers.pack(Kind.PICKLE, 8),
    ):
        with pytest.raises(ArenaDamaged):
            codec.decode(memoryview(packed + bytes(8)), allow_pickle=True)
