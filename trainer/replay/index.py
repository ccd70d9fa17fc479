"""The index of the replay buffer: what is in it, in which order it is taken, what expires next
(lifecycle L14, L15).

Every operation costs O(log n) in the groups of one task and status, or O(1); none looks at groups
that it does not return. Pure data, no arena, no locks: the replay buffer calls it under its own.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.errors import ConfigError
from trainer.rollout import Group, Status

__all__ = ["Entry", "Order", "ReplayIndex"]


class Order(enum.Enum):
    """Which group is taken first."""

    STALENESS = "staleness"  # oldest tokens first, first in first out among equals
    FIFO = "fifo"

    @classmethod
    def parse(cls, value: Order | str) -> Order:
        """From its name in a config."""
        try:
            return cls(value)
        except ValueError:
            allowed = ", ".join(repr(order.value) for order in cls)
            raise ConfigError(f"replay order {value!r} is unknown; allowed are {allowed}") from None


@dataclass(slots=True, eq=False)
class Entry:
    """A group in the buffer. `seq` keeps its place in the row also when it is offered again."""

    group: Group
    status: Status
    seq: int
    deadline: int | None
    alive: bool = True


#: (key, seq, serial, entry): the key is the oldest model step, or 0 for plain FIFO. An entry that
#: is filed again keeps its seq while its dead row may still be here; the serial tells the two
#: apart.
_Heap = list[tuple[int, int, int, Entry]]

#: Key of a group without any response: nothing in it ages.
_NO_TOKENS = 1 << 62


class ReplayIndex:
    """Groups by task and status, each in order; by uid; by the train step at which they expire."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.nbytes = 0
        self._serial = 0
        self.n_rollouts: dict[str, int] = {}
        self._by_uid: dict[str, Entry] = {}
        self._heaps: dict[tuple[str, Status], _Heap] = {}
        self._counts: dict[tuple[str, Status], int] = {}
        self._task_nbytes: dict[str, int] = {}
        self._deadlines: dict[int, set[Entry]] = {}
        self._deadline_heap: list[int] = []

    def __len__(self) -> int:
        return len(self._by_uid)

    def __contains__(self, uid: str) -> bool:
        return uid in self._by_uid

    def __iter__(self) -> Iterator[Entry]:
        """All entries in the order in which they came; O(n log n), for snapshots."""
        return iter(sorted(self._by_uid.values(), key=lambda entry: entry.seq))

    def add(self, group: Group, seq: int, deadline: int | None) -> Entry:
        """File a group; its uid must be new."""
        assert group.uid not in self._by_uid, group.uid
        entry = Entry(group, group.status, seq, deadline)
        self._by_uid[group.uid] = entry
        bucket = (group.task, entry.status)
        self._serial += 1
        row = (self._key(group), seq, self._serial, entry)
        heapq.heappush(self._heaps.setdefault(bucket, []), row)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._count_contents(group, 1)
        if deadline is not None:
            waiting = self._deadlines.get(deadline)
            if waiting is None:
                waiting = self._deadlines[deadline] = set()
                heapq.heappush(self._deadline_heap, deadline)
            waiting.add(entry)
        return entry

    def count(self, task: str, status: Status) -> int:
        """Groups of this task and status."""
        return self._counts.get((task, status), 0)

    def counts(self) -> dict[str, dict[str, int]]:
        """Task -> status -> groups, without zeros."""
        found: dict[str, dict[str, int]] = {}
        for (task, status), count in self._counts.items():
            if count:
                found.setdefault(task, {})[status.value] = count
        return found

    def task_nbytes(self, task: str) -> int:
        """Bytes in the arena that the groups of this task hold."""
        return self._task_nbytes.get(task, 0)

    def pop(self, task: str, status: Status) -> Entry | None:
        """Remove and return the next group in order; None when there is none."""
        heap = self._heaps.get((task, status))
        while heap:
            entry = heapq.heappop(heap)[3]
            if entry.alive:
                self._forget(entry)
                return entry
        return None

    def remove(self, uid: str) -> Entry | None:
        """Remove one group wherever it is; None when it is not here."""
        entry = self._by_uid.get(uid)
        if entry is None:
            return None
        self._forget(entry)
        bucket = (entry.group.task, entry.status)
        heap = self._heaps[bucket]
        # Its row in the heap stays until it is popped or the dead outnumber the living.
        if len(heap) > 64 and len(heap) > 2 * self._counts[bucket]:
            self._heaps[bucket] = [row for row in heap if row[3].alive]
            heapq.heapify(self._heaps[bucket])
        return entry

    def pop_expired(self, train_step: int) -> list[Entry]:
        """Remove and return all groups whose deadline has come; costs what it returns."""
        expired: list[Entry] = []
        while self._deadline_heap and self._deadline_heap[0] <= train_step:
            due = self._deadlines.pop(heapq.heappop(self._deadline_heap))
            for entry in sorted(due, key=lambda entry: entry.seq):
                removed = self.remove(entry.group.uid)
                assert removed is entry
                expired.append(entry)
        return expired

    def _forget(self, entry: Entry) -> None:
        entry.alive = False
        group = entry.group
        del self._by_uid[group.uid]
        self._counts[group.task, entry.status] -= 1
        self._count_contents(group, -1)
        if entry.deadline in self._deadlines:
            # An empty set stays until its step comes: removing it from the heap would cost O(n).
            self._deadlines[entry.deadline].discard(entry)

    def _count_contents(self, group: Group, sign: int) -> None:
        self.nbytes += sign * group.nbytes
        task = group.task
        self._task_nbytes[task] = self._task_nbytes.get(task, 0) + sign * group.nbytes
        self.n_rollouts[task] = self.n_rollouts.get(task, 0) + sign * len(group.rollouts)

    def _key(self, group: Group) -> int:
        if self.order is Order.FIFO:
            return 0
        oldest = group.model_step_min
        return _NO_TOKENS if oldest is None else oldest
