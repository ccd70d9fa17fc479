"""Policy losses as pure functions of log-probabilities.

All tensors are flat, one element a trained token: `[M]`, of R rollouts, `rollout` `[M]` saying
which. Every function returns a loss for each token (to be minimised) and leaves the averaging to
`token_weights`, so that the passes of a batch add up to the whole whatever their sizes. Formulas
and sources: docs/losses.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.model.config import LearnerConfig

__all__ = [
    "TokenLoss",
    "correction_weights",
    "kl_k3",
    "policy_loss",
    "rollout_means",
    "token_weights",
]

_LOG_RATIO_MAX = 20.0
"""exp() of more than this is noise; the ratio is held there so that it stays finite."""


@dataclass(frozen=True)
class TokenLoss:
    """loss `[M]`; clipped bool `[M]`: tokens whose gradient the clipping has removed or bounded."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def policy_loss(
    config: LearnerConfig,
    logp: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    rollout: torch.Tensor,
    rollouts: int,
) -> TokenLoss:
    """The loss that `config.loss` names, before importance weights.

    logp float32 `[M]` with gradient; old float32 `[M]`: the log-probs that the ratio is taken
    against; advantage float32 `[M]`; rollout int64 `[M]` below `rollouts`.
    """
    log_ratio = (logp - old).clamp(-_LOG_RATIO_MAX, _LOG_RATIO_MAX)
    if config.loss == "gspo":
        log_ratio = rollout_means(log_ratio, rollout, rollouts)[rollout]
    ratio = log_ratio.exp()
    if config.loss == "reinforce":
        return TokenLoss(-advantage * logp, ratio, torch.zeros_like(ratio, dtype=torch.bool))
    if config.loss == "cispo":
        weight = ratio.detach().clamp(max=1.0 + config.clip_high)
        return TokenLoss(-weight * advantage * logp, ratio, ratio > 1.0 + config.clip_high)
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    above = (ratio > 1.0 + config.clip_high) & (advantage > 0)
    below = (ratio < 1.0 - config.clip_low) & (advantage < 0)
    clipped = above | below
    if config.clip_dual is not None:
        floor = config.clip_dual * advantage
        held = (advantage < 0) & (gain < floor)
        gain = torch.where(held, floor, gain)
        clipped = clipped | held
    return TokenLoss(-gain, ratio, clipped)


def correction_weights(
    config: LearnerConfig, proximal: torch.Tensor, rollout_logp: torch.Tensor
) -> torch.Tensor:
    """Importance weight of each token, learner / engine, without gradient `[M]`.

    proximal: the learner's log-probs before the update; rollout_logp: the engine's.
    """
    mode: Literal["none", "truncate", "mask"] = config.correction
    if config.loss == "decoupled_ppo" and mode == "none":
        mode = "truncate"
    if mode == "none":
        return torch.ones_like(rollout_logp)
    log_ratio = (proximal.detach() - rollout_logp).clamp(-_LOG_RATIO_MAX, _LOG_RATIO_MAX)
    weight = log_ratio.exp()
    if mode == "truncate":
        return weight.clamp(max=config.correction_max)
    inside = (weight >= config.correction_min) & (weight <= config.correction_max)
    return torch.where(inside, weight, torch.zeros_like(weight))


def kl_k3(logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy ‖ reference) on the policy's own tokens, `[M]`, ≥ 0."""
    difference = (reference - logp).clamp(-_LOG_RATIO_MAX, _LOG_RATIO_MAX)
    return torch.expm1(difference) - difference


def rollout_means(values: torch.Tensor, rollout: torch.Tensor, rollouts: int) -> torch.Tensor:
    """Mean over the tokens of each rollout, `[rollouts]`; 0 for one without tokens."""
    sums = values.new_zeros(rollouts).index_add(0, rollout, values)
    counts = torch.bincount(rollout, minlength=rollouts).clamp(min=1)
    return sums / counts


def token_weights(
    normalize: Literal["token", "rollout", "constant"],
    rollout: NDArray[np.int64],
    constant_tokens: int,
) -> NDArray[np.float32]:
    """What each token's loss counts in the loss of an optimizer step: float32 `[M]`.

    rollout int64 `[M]`: which rollout each trained token of the whole step belongs to. Because the
    weights are those of the whole step, its passes may be cut anywhere.
    """
    _, place, counts = np.unique(rollout, return_inverse=True, return_counts=True)
    if normalize == "token":
        weights = np.full(len(rollout), 1.0 / len(rollout))
    elif normalize == "rollout":
        weights = 1.0 / (counts[place] * len(counts))
    else:
        weights = np.full(len(rollout), 1.0 / (len(counts) * constant_tokens))
    return weights.astype(np.float32)
