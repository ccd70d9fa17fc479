"""A value on its way into the arena: how many bytes it needs, and who writes them.

Owns one record, so that codecs know nothing of arenas and the store nothing of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Encoded(NamedTuple):
    """`write` gets exactly `payload_bytes` writable bytes, 64-byte aligned, right after
    `header`."""

    header: bytes
    payload_bytes: int
    write: Callable[[memoryview], None]
