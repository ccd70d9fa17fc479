"""What taking a batch reports for its window (lifecycle L29), each count handed out once.

The buffer adds to a `Window` as groups are put and dropped; `take` closes the window and starts the
next. A snapshot carries the open window, so resume reports what was not yet handed out. Pure; no
arena, no clock.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["TaskWindow", "Window", "WindowReport"]

#: Group generation times kept per task and window for the quantiles; beyond it every second one is
#: thinned out.
TIMES_MAX = 4096


@dataclass(slots=True)
class TaskWindow:
    """Counts of one task in one window; rollouts unless the name says otherwise. Adds up over
    tasks.
    """

    produced_samples: int = 0
    produced_tokens: int = 0
    completed_samples: int = 0
    failed_samples: int = 0
    filtered_samples: int = 0
    expired_samples: int = 0
    cancelled_samples: int = 0
    raw_reward_sum: float = 0.0
    raw_reward_count: int = 0
    group_time_count: int = 0
    group_time_sum_s: float = 0.0
    group_times_s: list[float] = field(default_factory=list)
    leftover: dict[str, int] = field(default_factory=dict)

    def add_time(self, seconds: float) -> None:
        """One group took this long to generate."""
        self.group_time_count += 1
        self.group_time_sum_s += seconds
        bisect.insort(self.group_times_s, seconds)
        if len(self.group_times_s) > TIMES_MAX:
            # Sorted, so every second one keeps the shape of the distribution.
            self.group_times_s = self.group_times_s[::2]

    def add(self, other: TaskWindow) -> None:
        """Add every count of `other`."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.group_times_s = sorted(self.group_times_s + other.group_times_s)
        for status, count in other.leftover.items():
            self.leftover[status] = self.leftover.get(status, 0) + count

    @property
    def raw_reward_mean(self) -> float:
        """Mean reward before filtering; NaN when nothing was scored."""
        return self.raw_reward_sum / self.raw_reward_count if self.raw_reward_count else math.nan

    @property
    def group_time_mean_s(self) -> float:
        """Mean seconds to generate a group; NaN when none was."""
        return self.group_time_sum_s / self.group_time_count if self.group_time_count else math.nan

    def group_time_quantile_s(self, quantile: float) -> float:
        """Nearest-rank quantile of the group generation times; NaN when there are none."""
        if not self.group_times_s:
            return math.nan
        rank = math.ceil(quantile * len(self.group_times_s))
        return self.group_times_s[max(rank, 1) - 1]


_SUMS = tuple(f.name for f in fields(TaskWindow) if f.name not in ("group_times_s", "leftover"))


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One window, per task and in total; `total` is the sum of `tasks`.

    `pause_s` and `production_s`: how long the producers stood still and worked, all tasks alike.
    """

    tasks: Mapping[str, TaskWindow]
    total: TaskWindow
    pause_s: float = 0.0
    production_s: float = 0.0

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Flat numbers for a metrics file; quantities without a value are left out."""
        total = self.total
        flat: dict[str, float] = {
            "produced_samples": total.produced_samples,
            "produced_tokens": total.produced_tokens,
            "failed_samples": total.failed_samples,
            "filtered_samples": total.filtered_samples,
            "expired_samples": total.expired_samples,
            "cancelled_samples": total.cancelled_samples,
            "raw_reward_mean": total.raw_reward_mean,
            "group_time_mean_s": total.group_time_mean_s,
            "group_time_p50_s": total.group_time_quantile_s(0.5),
            "group_time_p99_s": total.group_time_quantile_s(0.99),
            "pause_s": self.pause_s,
            "production_s": self.production_s,
        }
        flat.update({f"leftover_{status}": n for status, n in total.leftover.items()})
        return {prefix + name: value for name, value in flat.items() if not math.isnan(value)}


class Window:
    """The open window: one `TaskWindow` per task, and the producers' times."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self.production_s = 0.0
        self._tasks: dict[str, TaskWindow] = {}

    def task(self, name: str) -> TaskWindow:
        """The open counts of a task."""
        return self._tasks.setdefault(name, TaskWindow())

    def close(self, leftover: Mapping[str, Mapping[str, int]]) -> WindowReport:
        """Hand out the counts and start over.

        `leftover`: task -> status -> groups that are still in the buffer.
        """
        tasks, self._tasks = self._tasks, {}
        for name, counts in leftover.items():
            tasks.setdefault(name, TaskWindow()).leftover = dict(counts)
        total = TaskWindow()
        for window in tasks.values():
            total.add(window)
        report = WindowReport(tasks, total, self.pause_s, self.production_s)
        self.pause_s = self.production_s = 0.0
        return report

    def to_json(self) -> dict[str, Any]:
        """For a snapshot."""
        return {
            "pause_s": self.pause_s,
            "production_s": self.production_s,
            "tasks": {name: asdict(window) for name, window in self._tasks.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Window:
        """The reverse of `to_json`."""
        window = cls()
        window.pause_s = value["pause_s"]
        window.production_s = value["production_s"]
        window._tasks = {name: TaskWindow(**counts) for name, counts in value["tasks"].items()}
        return window
