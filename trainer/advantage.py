"""How much better than expected each rollout of a group was.

Pure functions of rewards. Sources: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783), RLOO
(2402.14740), DAPO (2503.14476). Formulas: docs/losses.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.errors import ConfigError

__all__ = [
    "Estimator",
    "batch_advantages",
    "compute_advantages",
    "is_degenerate",
    "overlong_penalty",
]

Estimator = Literal["grpo", "dr_grpo", "rloo", "mean"]
_DEVIATION_EPSILON = 1e-4
"""Added to the deviation, so that a group that nearly agrees does not explode (TRL's value)."""


def compute_advantages(
    rewards: ArrayLike, estimator: Estimator = "grpo", *, baseline: float | None = None
) -> NDArray[np.float32]:
    """Advantages float32 `[K]` of the K rewards of one group.

    grpo: (reward - mean) / (deviation + 1e-4), deviation with K - 1; dr_grpo: reward - mean; rloo:
    reward - mean of the others; mean: reward - `baseline`, the mean over the batch (given by the
    caller). A group whose rewards are all equal has advantages of exactly zero, but for `mean`.

    Raises ConfigError for an unknown estimator, a reward that is not finite, a group of one with
    rloo, or `mean` without a baseline.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ConfigError(f"rewards must be one finite number a rollout; given {rewards!r}")
    return np.array(_advantages(values.tolist(), estimator, baseline), dtype=np.float32)


def batch_advantages(
    groups: Sequence[Sequence[float]], estimator: Estimator = "grpo"
) -> list[list[float]]:
    """`compute_advantages` of each group of a batch; gives `mean` its baseline."""
    baseline = sum(map(sum, groups)) / max(1, sum(map(len, groups)))
    return [_advantages(group, estimator, baseline) for group in groups]


def _advantages(
    values: Sequence[float], estimator: Estimator, baseline: float | None
) -> list[float]:
    """In plain Python: for a handful of numbers a step, a call of numpy takes longer than all of
    them.
    """
    size = len(values)
    if not size or not all(map(math.isfinite, values)):
        raise ConfigError(f"rewards must be one finite number a rollout; given {values!r}")
    if estimator == "mean":
        if baseline is None:
            raise ConfigError("estimator `mean` needs baseline=, the mean reward of the batch")
        return [value - baseline for value in values]
    if estimator not in ("grpo", "dr_grpo", "rloo"):
        raise ConfigError(f"estimator is {estimator!r}; allowed are grpo, dr_grpo, rloo, mean")
    if estimator == "rloo" and size < 2:
        raise ConfigError("rloo compares a rollout with the others of its group; it has none")
    if values.count(values[0]) == size:
        return [0.0] * size
    mean = _sum(values) / size
    centred = [value - mean for value in values]
    if estimator == "dr_grpo":
        return centred
    factor = size / (size - 1)
    if estimator == "grpo":
        deviation = math.sqrt(_sum([part * part for part in centred]) / (size - 1))
        factor = 1.0 / (deviation + _DEVIATION_EPSILON)
    return [part * factor for part in centred]


def _sum(values: Sequence[float]) -> float:
    """Exact; infinite where it is too large, so that the learner leaves the update out."""
    try:
        return math.fsum(values)
    except OverflowError:
        return sum(values)


def is_degenerate(rewards: ArrayLike) -> bool:
    """Whether all rewards are equal: nothing to learn from, what DAPO's dynamic sampling drops."""
    values = np.asarray(rewards, dtype=np.float64)
    return bool((values == values[0]).all())


def overlong_penalty(tokens: int, tokens_max: int, buffer: int) -> float:
    """DAPO's soft penalty, to be added to the reward: 0 up to `tokens_max - buffer` response
    tokens, then falling linearly to -1 at `tokens_max` and beyond. `buffer` 0: none at all.
    """
    if buffer <= 0:
        return 0.0
    return float(np.clip((tokens_max - buffer - tokens) / buffer, -1.0, 0.0))
