"""What the replay buffer books: the ledger of L26 and the window of L29, fed from the same few
events.

Each event is booked once, where it happens; nothing here decides anything. Owned by the replay
buffer, on its loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.ledger import Ledger
from trainer.rollout import Group, Rollout, Status
from trainer.window import Window

__all__ = ["Accounts"]

#: The end that a group comes to when it is not filed.
_ENDS = {
    Status.FAILED: "failed",
    Status.FILTERED: "filtered",
    Status.EXPIRED: "expired_dropped",
}


class Accounts:
    """Ledger and open window."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.window = Window()

    def put(self, group: Group, *, first: bool, before: Group | None = None) -> None:
        """A producer handed a group in. `first`: never before; `before`: what it was when it was
        lent.
        """
        rollouts, status = group.rollouts, group.status
        window = self.window.task(group.task)
        if first:
            self.ledger.book_produced(group.task, len(rollouts))
            window.produced_samples += len(rollouts)
        window.produced_tokens += sum([r.n_sampled for r in rollouts])
        if before is not None:
            window.produced_tokens -= sum([r.n_sampled for r in before.rollouts])
        window.add_time(max([r.generation_time_s for r in rollouts]))
        if status is Status.COMPLETED:
            window.completed_samples += len(rollouts)
        if status in (Status.ABORTED, Status.EXPIRED):
            return  # it comes again: its rewards would count twice
        # Raw: before filtering, so the mean does not depend on what is filtered (L09).
        rewards = [r.reward for r in rollouts if r.reward is not None]
        window.raw_reward_sum += sum(rewards)
        window.raw_reward_count += len(rewards)

    def ended(self, group: Group, status: Status) -> None:
        """A group ended as FAILED, FILTERED, or EXPIRED and dropped."""
        n = len(group.rollouts)
        self.ledger.book_end(group.task, _ENDS[status], n)
        window = self.window.task(group.task)
        if status is Status.FAILED:
            window.failed_samples += n
        elif status is Status.FILTERED:
            window.filtered_samples += n
        else:
            window.expired_samples += n

    def cut(self, task: str, stale: tuple[Rollout, ...]) -> None:
        """Rollouts were cut back to their prompt for another attempt."""
        self.window.task(task).expired_samples += len(stale)

    def trained(self, groups: Iterable[Group]) -> int:
        """The learner has trained and released them; -> their rollouts."""
        trained: Counter[str] = Counter()
        for group in groups:
            trained[group.task] += len(group.rollouts)
        for task, count in trained.items():
            self.ledger.book_end(task, "trained", count)
        return trained.total()

    def cancelled(self, group: Group, *, first: bool = False) -> None:
        """A group was given up. `first`: it had never been handed in."""
        if first:
            self.ledger.book_produced(group.task, len(group.rollouts))
        self.ledger.book_end(group.task, "cancelled", len(group.rollouts))
        self.window.task(group.task).cancelled_samples += len(group.rollouts)

    def to_json(self) -> dict[str, Any]:
        """For a snapshot."""
        return {"ledger": self.ledger.to_json(), "window": self.window.to_json()}

    def load_json(self, value: Mapping[str, Any]) -> None:
        """The reverse of `to_json`."""
        self.ledger = Ledger.from_json(value["ledger"])
        self.window = Window.from_json(value["window"])
