"""The books of L26: every rollout that was produced came to exactly one end, or is still held.

    produced = trained + buffered + failed + filtered + expired_dropped + cancelled

in rollouts, per task and in total. `buffered` is never booked here: it is measured (in the buffer,
lent to a producer for another attempt, or taken by a learner that has not finished), so a lost or
doubled rollout shows as a difference. Owned by the replay buffer, on its loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from trainer.errors import LedgerError

__all__ = ["ENDS", "Ledger", "TaskBooks"]


@dataclass(slots=True)
class TaskBooks:
    """Counters of one task, in rollouts; they only grow."""

    produced: int = 0
    trained: int = 0
    failed: int = 0
    filtered: int = 0
    expired_dropped: int = 0
    cancelled: int = 0

    @property
    def ended(self) -> int:
        """Rollouts that came to an end."""
        return self.trained + self.failed + self.filtered + self.expired_dropped + self.cancelled


_COUNTERS = tuple(f.name for f in fields(TaskBooks))

#: The ways in which a rollout ends.
ENDS = tuple(name for name in _COUNTERS if name != "produced")


class Ledger:
    """Counters per task, and the check that they balance."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskBooks] = {}

    def book_produced(self, task: str, count: int) -> None:
        """`count` rollouts left the producer for the first time."""
        self._books(task).produced += count

    def book_end(self, task: str, end: str, count: int) -> None:
        """`count` rollouts came to `end`, one of `ENDS`."""
        assert end in ENDS, end
        books = self._books(task)
        setattr(books, end, getattr(books, end) + count)

    def task(self, name: str) -> TaskBooks:
        """A copy of the counters of one task."""
        return TaskBooks(**_counts(self._books(name)))

    @property
    def total(self) -> TaskBooks:
        """Counters of all tasks together."""
        total = TaskBooks()
        for books in self._tasks.values():
            for name, count in _counts(books).items():
                setattr(total, name, getattr(total, name) + count)
        return total

    def balance(self, buffered: Mapping[str, int]) -> None:
        """Check the books against what is really held now, per task; `LedgerError` states every
        counter.
        """
        wrong = [
            task
            for task in sorted({*self._tasks, *buffered})
            if self._books(task).produced != self._books(task).ended + buffered.get(task, 0)
        ]
        if wrong:
            raise LedgerError("the books do not balance:\n" + self._table(buffered, wrong))

    def report(self, buffered: Mapping[str, int]) -> dict[str, object]:
        """All counters, in total and per task, with what is held now."""
        return {
            **_counts(self.total),
            "buffered": sum(buffered.values()),
            "tasks": {
                task: {**_counts(books), "buffered": buffered.get(task, 0)}
                for task, books in sorted(self._tasks.items())
            },
        }

    def to_json(self) -> dict[str, dict[str, int]]:
        """For a snapshot."""
        return {task: _counts(books) for task, books in self._tasks.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Mapping[str, int]]) -> Ledger:
        """The reverse of `to_json`."""
        ledger = cls()
        for task, counts in value.items():
            ledger._tasks[task] = TaskBooks(**counts)
        return ledger

    def _books(self, task: str) -> TaskBooks:
        return self._tasks.setdefault(task, TaskBooks())

    def _table(self, buffered: Mapping[str, int], wrong: list[str]) -> str:
        lines = []
        for task in sorted({*self._tasks, *buffered}):
            books = self._books(task)
            held = buffered.get(task, 0)
            ends = " + ".join(f"{end} {getattr(books, end)}" for end in ENDS)
            off = books.produced - books.ended - held
            mark = f"  <-- off by {off:+d}" if task in wrong else ""
            lines.append(f"  {task}: produced {books.produced} = buffered {held} + {ends}{mark}")
        return "\n".join(lines)


def _counts(books: TaskBooks) -> dict[str, int]:
    """By name."""
    return {name: getattr(books, name) for name in _COUNTERS}
