"""A file per object in /dev/shm, mapped by hand: what one would write without any library."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.objects import SIZES_QUICK, Bytes, object_rows, small_put_rows
from bench.peers import emit


class RawFiles:
    """Objects are files of one folder."""

    name = "raw file in /dev/shm"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def put(self, value: Bytes) -> Path:
        """Creates, sizes, maps, copies, unmaps."""
        path = self._folder / str(next(self._numbers))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, value.nbytes)
            with mmap.mmap(descriptor, value.nbytes) as mapping:
                mapping[:] = memoryview(value)
        finally:
            os.close(descriptor)
        return path

    def get(self, handle: Path) -> Bytes:
        """Maps it for reading; unmapped when the array goes."""
        descriptor = os.open(handle, os.O_RDONLY)
        try:
            return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        finally:
            os.close(descriptor)

    def free(self, handle: Path) -> None:
        """Unlinks it."""
        os.unlink(handle)

    def free_many(self, handles: Sequence[Path]) -> None:
        """One by one: there is no other way."""
        for handle in handles:
            os.unlink(handle)


def main() -> int:
    """Rows of put, get, free and many small puts."""
    quick = "--quick" in sys.argv
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-raw-") as folder:
        store = RawFiles(Path(folder))
        rows = object_rows(store, SIZES_QUICK, quick=True)
        rows += small_put_rows(store, puts=2_000 if quick else 10_000, rounds=3)
    return emit(rows)


if __name__ == "__main__":
    sys.exit(main())
