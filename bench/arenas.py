"""Arenas of the benchmarks: a name of its own each, removed whatever happens."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from shmstore import Store


@contextlib.contextmanager
def arena(capacity: int, **options: Any) -> Iterator[Store]:
    """A new arena, `store.name` its name; unlinked at the end of the block."""
    name = f"bench-{uuid.uuid4().hex[:12]}"
    with Store.create(name, capacity, **options) as store:
        try:
            yield store
        finally:
            Store.unlink(name)
