"""How much better than expected each rollout of a group was.

Pure functions of rewards; numpy only. Sources: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783), RLOO
(2402.14740), DAPO (2503.14476). Formulas: docs/losses.md.
"""

from __future__ import annotations

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
    if values.ndim != 1 or not len(values):
        raise ConfigError(f"rewards must be one finite number a rollout; given {rewards!r}")
    if estimator == "mean" and baseline is None:
        raise ConfigError("estimator `mean` needs baseline=, the mean reward of the batch")
    advantages: NDArray[np.float32] = _of_groups(values[None], estimator, baseline or 0.0)[0]
    return advantages


def batch_advantages(
    groups: Sequence[ArrayLike], estimator: Estimator = "grpo"
) -> list[NDArray[np.float32]]:
    """`compute_advantages` of each group of a batch; gives `mean` its baseline."""
    values = [np.asarray(group, dtype=np.float64) for group in groups]
    baseline = float(np.concatenate(values).mean()) if values else 0.0
    if len({group.shape for group in values}) == 1 and values[0].ndim == 1 and len(values[0]):
        return list(_of_groups(np.stack(values), estimator, baseline))
    return [compute_advantages(group, estimator, baseline=baseline) for group in values]


def _of_groups(
    values: NDArray[np.float64], estimator: Estimator, baseline: float
) -> NDArray[np.float32]:
    """Of groups of one size, a row each."""
    if not np.isfinite(values).all():
        raise ConfigError(f"rewards must be one finite number a rollout; given {values.tolist()}")
    if estimator == "mean":
        return np.asarray(values - baseline, dtype=np.float32)
    if estimator not in ("grpo", "dr_grpo", "rloo"):
        raise ConfigError(f"estimator is {estimator!r}; allowed are grpo, dr_grpo, rloo, mean")
    size = values.shape[1]
    if estimator == "rloo" and size < 2:
        raise ConfigError("rloo compares a rollout with the others of its group; it has none")
    centred = values - values.mean(axis=1, keepdims=True)
    if estimator == "grpo" and size > 1:
        centred /= values.std(axis=1, ddof=1, keepdims=True) + _DEVIATION_EPSILON
    if estimator == "rloo":
        centred *= size / (size - 1)
    centred[(values == values[:, :1]).all(axis=1)] = 0.0
    return np.asarray(centred, dtype=np.float32)


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
