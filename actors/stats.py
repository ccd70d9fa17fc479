"""Counts and durations of calls, cheap enough to be always on.

Owns a histogram with four buckets an octave (so a percentile is right within 19 %). Written on one
thread, read by snapshots on the same.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MethodStats"]

_OCTAVES = 44  # up to 2^44 ns, five hours


class MethodStats:
    """Of one method: how often, how long."""

    __slots__ = ("_buckets", "count", "errors", "max_ns", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.errors = 0
        self.total_ns = 0
        self.max_ns = 0
        self._buckets: list[int] | None = None

    def record(self, ns: int, failed: bool = False) -> None:
        """One call that took `ns` nanoseconds from its start to its answer."""
        if self._buckets is None:
            self._buckets = [0] * (_OCTAVES * 4)
        self.count += 1
        self.errors += failed
        self.total_ns += ns
        if ns > self.max_ns:
            self.max_ns = ns
        bits = ns.bit_length()
        index = bits * 4 + ((ns >> (bits - 3)) & 3) if bits > 2 else bits * 4
        self._buckets[min(index, _OCTAVES * 4 - 1)] += 1

    def percentile_ns(self, share: float) -> int:
        """Duration that this share of the calls did not exceed; 0 without calls."""
        if self._buckets is None or not self.count:
            return 0
        left = share * self.count
        for index, n in enumerate(self._buckets):
            left -= n
            if left <= 0:
                bits, quarter = divmod(index, 4)
                return min(self.max_ns, (5 + quarter) << max(bits - 3, 0))
        return self.max_ns

    def as_dict(self) -> dict[str, Any]:
        """For snapshots; durations in microseconds."""
        return {
            "count": self.count,
            "errors": self.errors,
            "mean_us": self.total_ns / self.count / 1e3 if self.count else 0.0,
            "p50_us": self.percentile_ns(0.5) / 1e3,
            "p99_us": self.percentile_ns(0.99) / 1e3,
            "max_us": self.max_ns / 1e3,
        }
