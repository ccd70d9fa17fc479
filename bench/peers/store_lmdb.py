"""LMDB with its map in /dev/shm: one writer at a time, every put a copy and a transaction."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence

import lmdb
import numpy as np

from bench.objects import MIB, SIZES_QUICK, Bytes, object_rows, small_put_rows
from bench.peers import emit


class Map:
    """Objects are values of one database; a get reads inside a read transaction."""

    name = "LMDB in memory"

    def __init__(self, folder: str) -> None:
        self._map = lmdb.open(
            folder, map_size=1024 * MIB, sync=False, metasync=False, writemap=True, lock=True
        )
        self._numbers = itertools.count()

    def put(self, value: Bytes) -> bytes:
        """One write transaction."""
        key = next(self._numbers).to_bytes(8, "big")
        with self._map.begin(write=True) as transaction:
            transaction.put(key, memoryview(value))
        return key

    def get(self, handle: bytes) -> Bytes:
        """The value as it lies in the map; valid while the transaction is (the array holds it)."""
        transaction = self._map.begin(buffers=True)
        return np.frombuffer(transaction.get(handle), dtype=np.uint8)

    def free(self, handle: bytes) -> None:
        """One write transaction."""
        with self._map.begin(write=True) as transaction:
            transaction.delete(handle)

    def free_many(self, handles: Sequence[bytes]) -> None:
        """All in one transaction."""
        with self._map.begin(write=True) as transaction:
            for handle in handles:
                transaction.delete(handle)


def main() -> int:
    """Rows of put, get, free and many small puts."""
    quick = "--quick" in sys.argv
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-lmdb-") as folder:
        store = Map(folder)
        rows = object_rows(store, SIZES_QUICK, quick)
        rows += small_put_rows(store, rounds=3 if quick else 10)
    return emit(rows)


if __name__ == "__main__":
    sys.exit(main())
