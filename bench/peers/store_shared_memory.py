"""multiprocessing.shared_memory: the standard library's own segments, one per object."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from multiprocessing import resource_tracker, shared_memory

import numpy as np

from bench.objects import SIZES_QUICK, Bytes, object_rows, small_put_rows
from bench.peers import emit


class Segments:
    """Objects are SharedMemory blocks; a get attaches by name, as another process would."""

    name = "multiprocessing.shared_memory"

    def put(self, value: Bytes) -> str:
        """Creates a block and copies; the creator's mapping is closed again."""
        block = shared_memory.SharedMemory(create=True, size=value.nbytes)
        np.ndarray(value.nbytes, np.uint8, block.buf)[:] = value
        block.close()
        return block.name

    def get(self, handle: str) -> Bytes:
        """Attaches; the array keeps the block."""
        block = shared_memory.SharedMemory(name=handle)
        return _Attached(block).view()

    def free(self, handle: str) -> None:
        """Unlinks through a fresh attachment, since the name is all that others have."""
        block = shared_memory.SharedMemory(name=handle)
        block.unlink()
        block.close()

    def free_many(self, handles: Sequence[str]) -> None:
        """One by one: there is no other way."""
        for handle in handles:
            self.free(handle)


class _Attached:
    """Closes a block when the last array over it is gone."""

    def __init__(self, block: shared_memory.SharedMemory) -> None:
        self._block = block

    def view(self) -> Bytes:
        array = np.frombuffer(self._block.buf, dtype=np.uint8)
        self._block._mmap = None  # type: ignore[attr-defined]  # the array owns the mapping now
        self._block._buf = None  # type: ignore[attr-defined]
        self._block.close()
        return array


def main() -> int:
    """Rows of put, get, free and many small puts."""
    quick = "--quick" in sys.argv
    resource_tracker.ensure_running()
    store = Segments()
    rows = object_rows(store, SIZES_QUICK, quick=True)
    rows += small_put_rows(store, puts=1_000 if quick else 5_000, rounds=3)
    return emit(rows)


if __name__ == "__main__":
    sys.exit(main())
