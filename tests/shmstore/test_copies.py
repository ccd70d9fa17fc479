"""Every way of copying into the arena moves every byte: plain, streamed, pooled, again, at once.

The sizes stand on both sides of the limits in csrc/copy.cc.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shmstore import Store

KIB, MIB = 1 << 10, 1 << 20
EDGES = (4 * KIB, 128 * KIB, 8 * MIB, 16 * MIB)


def some_bytes(n: int, offset: int) -> np.ndarray:
    """n bytes that repeat nowhere near, starting `offset` bytes off any alignment."""
    whole = np.random.default_rng(n).integers(0, 256, n + 64, dtype=np.uint8)
    return whole[offset : offset + n]


@pytest.mark.parametrize("size", [edge + d for edge in EDGES for d in (-1, 0, 1)])
def test_every_byte_arrives(store: Store, size: int) -> None:
    for offset in (0, 1, 63):
        value = some_bytes(size, offset)
        for _ in range(3):  # the same place again: a destination that is in the cache
            ref = store.put(value)
            assert np.array_equal(store.get(ref), value)
            store.free(ref)


def test_threads_that_copy_at_once_do_not_mix(store: Store) -> None:
    values = [some_bytes(9 * MIB, k) for k in range(3)]
    wrong: list[int] = []

    def copy(k: int) -> None:
        for _ in range(4):
            ref = store.put(values[k], timeout=60)
            if not np.array_equal(store.get(ref), values[k]):
                wrong.append(k)
            del ref

    threads = [threading.Thread(target=copy, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
