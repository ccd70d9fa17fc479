"""What a run came to: the line that `--json` prints and `summary.json` keeps.

Owns the shape of that record and the exit statuses of the command. Filled by the
driver as it goes; read by people, `bench train` and tests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_LEFTOVERS",
    "EXIT_OK",
    "EXIT_USAGE",
    "ArenaLeft",
    "Summary",
]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LEFTOVERS = 3
"""Something of the run was left in the arena."""
EXIT_INTERRUPTED = 130


@dataclass
class ArenaLeft:
    """What was in the arena after everything that should have ended had ended."""

    sessions: int = 0
    objects: int = 0
    bytes: int = 0

    @property
    def empty(self) -> bool:
        return not (self.sessions or self.objects)


_TOTALS = (
    "steps",
    "rewards",
    "evals",
    "tokens_generated",
    "tokens_trained",
    "wall_s",
    "wait_s",
    "step_s",
)
_ON_THE_WAY = ("rewards", "evals", "began", "wait_s", "step_s")


@dataclass
class Summary:
    """Rewards are means: of the first and last tenth of the steps, and of held-out prompts.

    Steps, tokens, `wall_s` and the share of it that the learner waited count the whole run, with
    what came before the checkpoint from which it was resumed.
    """

    run: str
    steps: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    eval_first: float | None = None
    eval_last: float | None = None
    ledger: Mapping[str, Any] = field(default_factory=dict)
    arena: ArenaLeft = field(default_factory=ArenaLeft)
    left_by_owner: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    tokens_generated: int = 0
    tokens_trained: int = 0
    learner_wait_share: float = 0.0
    restarts: Mapping[str, int] = field(default_factory=dict)
    interrupted: bool = False
    error: str | None = None
    warnings: list[str] = field(default_factory=list)
    exit: int = EXIT_OK
    rewards: list[float] = field(default_factory=list, repr=False)
    evals: list[float] = field(default_factory=list, repr=False)
    wait_s: float = field(default=0.0, repr=False)
    step_s: float = field(default=0.0, repr=False)
    began: float = field(default_factory=time.perf_counter, repr=False)
    """When `wall_s` was last right, on the clock of this process."""

    def add_step(self, reward: float, tokens_generated: float, tokens_trained: float) -> None:
        """Books one more trained step."""
        self.steps += 1
        self.tokens_generated += int(tokens_generated)
        self.tokens_trained += int(tokens_trained)
        if math.isfinite(reward):
            self.rewards.append(reward)

    def add_time(self, wait_s: float, step_s: float) -> None:
        """Books how long a step took, and how long the learner waited in it."""
        self.wait_s += wait_s
        self.step_s += step_s

    def settle(self, *, count_time: bool = True) -> None:
        """Computes first and last from the series, a tenth of the steps at each end, and shares.

        Without `count_time` what went by since `restore` is left out.
        """
        if count_time:
            self._count_time()
        self.learner_wait_share = self.wait_s / self.step_s if self.step_s else 0.0
        if self.rewards:
            tenth = max(1, len(self.rewards) // 10)
            self.reward_first = sum(self.rewards[:tenth]) / tenth
            self.reward_last = sum(self.rewards[-tenth:]) / tenth
        if self.evals:
            self.eval_first, self.eval_last = self.evals[0], self.evals[-1]

    def totals(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run adds up like an uninterrupted one."""
        self._count_time()
        return {name: getattr(self, name) for name in _TOTALS}

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.wall_s, self.began = self.wall_s + now - self.began, now

    def begin_again(self) -> None:
        """Forgets what was trained; `restore` says what of it is in a checkpoint."""
        self.restore(Summary(self.run).totals())

    def restore(self, totals: Mapping[str, Any]) -> None:
        """Goes on from the totals of a checkpoint; the time since `began` still counts. KeyError
        when one is missing.
        """
        for name in _TOTALS:
            value = totals[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without what is only needed on the way."""
        record = asdict(self)
        for inner in _ON_THE_WAY:
            del record[inner]
        return {key: _rounded(value) for key, value in record.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
