"""The record of a rollout's earlier attempt, as its next one goes through it again (lifecycle L11).

A rollout that was aborted goes on by running its environment again. What its session holds from
before is taken from here segment by segment, in the order in which it was stored, as long as the
environment says the same at the same place. Reads the arena once, when it is made; belongs to one
conversation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.segment import NO_MODEL_STEP
from trainer.trace import TraceStore

__all__ = ["Record", "Recorded"]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One segment; `parent` is the node that it follows."""

    node: int
    parent: int | None
    token_ids: NDArray[np.int32]
    n_routed: int
    sampled: bool
    model_steps: NDArray[np.int32]


class Record:
    """What is left of it; false when that is nothing. `turns`: nodes at which turns ended."""

    def __init__(self, segments: list[Recorded], turns: Collection[int]) -> None:
        self._left = segments[::-1]
        self._turns = frozenset(turns)

    @classmethod
    def of_session(cls, traces: TraceStore, session_id: str, turns: Collection[int]) -> Record:
        """Everything that the session holds now."""
        segments = []
        for node, parent in enumerate(traces.parents(session_id)):
            segment = traces.segment(session_id, node)
            sampled = bool(len(segment)) and int(segment.model_steps[0]) != NO_MODEL_STEP
            segments.append(
                Recorded(
                    node,
                    parent,
                    segment.token_ids.copy(),
                    segment.n_routed,
                    sampled,
                    segment.model_steps.copy(),
                )
            )
        return cls(segments, turns)

    def __bool__(self) -> bool:
        return bool(self._left)

    def samples_after(self, node: int | None) -> bool:
        """Whether the model goes on at `node` next."""
        return bool(self._left) and self._left[-1].sampled and self._left[-1].parent == node

    def take_said(self, node: int | None, tokens: NDArray[np.int32]) -> Recorded | None:
        """The next segment, when it was said at `node` and is `tokens`."""
        following = self._left[-1] if self._left else None
        if following is None or following.sampled or following.parent != node:
            return None
        return self._left.pop() if np.array_equal(following.token_ids, tokens) else None

    def take_turn(self, node: int | None) -> list[Recorded]:
        """The segments of the next turn, when the model began it at `node` and came to its end."""
        for n, recorded in enumerate(reversed(self._left), start=1):
            if not recorded.sampled or recorded.parent != node:
                break
            node = recorded.node
            if node in self._turns:
                return self._take(n)
        return []

    def take_sampled(self, node: int | None) -> list[Recorded]:
        """The segments of a turn that was aborted, when the model had begun it at `node`."""
        taken: list[Recorded] = []
        while self.samples_after(node):
            taken += self._take(1)
            node = taken[-1].node
        return taken

    def leave(self) -> int | None:
        """Give up what is left; -> the first node of that, None when there is none."""
        first = self._left[-1].node if self._left else None
        self._left.clear()
        return first

    def _take(self, n: int) -> list[Recorded]:
        return [self._left.pop() for _ in range(n)]
