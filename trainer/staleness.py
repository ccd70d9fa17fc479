"""How old a token, a rollout and a model may be (lifecycle, "Staleness"; L18, L23).

A token that step `model_step` sampled and train step `train_step` trains has staleness
`train_step - model_step - 1`; a rollout has that of its oldest token. Pure functions of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.errors import ConfigError
from trainer.segment import IGNORE_LABEL

__all__ = ["StalenessBudget", "mask_stale_labels", "token_staleness"]


def token_staleness(train_step: int, model_step: int) -> int:
    """0 for a token that is trained by the very step after the one whose weights sampled it."""
    return train_step - model_step - 1


def mask_stale_labels(
    labels: NDArray[np.int32],
    model_steps: NDArray[np.int32],
    train_step: int,
    max_token_staleness: int | None,
) -> NDArray[np.int32]:
    """Labels without the tokens that are older than `max_token_staleness` (L18).

    labels, model_steps: int32 [n]. The given array comes back when nothing is too old, else a copy.
    """
    if max_token_staleness is None:
        return labels
    stale = (model_steps < train_step - 1 - max_token_staleness) & (labels != IGNORE_LABEL)
    if not stale.any():
        return labels
    return np.where(stale, np.int32(IGNORE_LABEL), labels)


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """How far the producer may run ahead of the learner.

    `max_staleness` m counts sync periods of `sync_interval` s train steps: a rollout expires at
    staleness `>= (m + 1) * s`. None: rollouts never expire and the producer is bounded by
    `batches_ahead_max` alone.
    """

    max_staleness: int | None = 0
    sync_interval: int = 1
    #: A rollout all of whose tokens are older than this cannot be trained (L18).
    max_token_staleness: int | None = None
    #: Batches that may be ready or in production however fresh they are; bounds the buffer.
    batches_ahead_max: int = 8

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(f"max_staleness is {self.max_staleness}; it must be at least 0")
        if self.sync_interval < 1:
            raise ConfigError(f"sync_interval is {self.sync_interval}; it must be at least 1")
        if self.batches_ahead_max < 1:
            raise ConfigError(f"batches_ahead_max is {self.batches_ahead_max}; at least 1")

    @property
    def limit(self) -> int | None:
        """The staleness at which a fresh rollout is of no use any more, in train steps."""
        limits = []
        if self.max_staleness is not None:
            limits.append((self.max_staleness + 1) * self.sync_interval)
        if self.max_token_staleness is not None:
            limits.append(self.max_token_staleness + 1)
        return min(limits, default=None)

    def batches_usable(self, model_step: int, next_train_step: int) -> int:
        """How many coming batches can still use what `model_step` samples now; 0: too old, stop.

        Step t can train it while `t - model_step - 1 < limit`, so the last one is
        `model_step + limit`.
        """
        if self.limit is None:
            return self.batches_ahead_max
        usable = model_step + self.limit - next_train_step + 1
        return max(0, min(usable, self.batches_ahead_max))
