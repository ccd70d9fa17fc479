"""The next token of each sequence, and its log-probability.

A sequence's draws depend on its seed and on the position of the token only, never on who else is in
the batch: each draw is a hash of the two, turned into a token by the inverse of the cumulative
distribution. Log-probabilities are those of the whole distribution at the request's temperature
(what the learner recomputes), also when top-k or top-p narrowed what was drawn from; with
temperature 0 they are those at temperature 1. Pure functions; any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.engine.protocol import SamplingParams

__all__ = ["BatchSampling", "sample", "seed_of", "uniforms"]

_UNIFORM_MAX = 1.0 - 2.0**-40
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64's finalizer
_STEP = np.uint64(0x9E3779B97F4A7C15)


def seed_of(engine_seed: int, session_id: str) -> int:
    """The seed of a request that names none: the same in every process and after a resume."""
    text = f"{engine_seed}:{session_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position)."""
    with np.errstate(over="ignore"):
        state = _mixed(seeds) + positions * _STEP
        bits = _mixed(state) >> np.uint64(11)
    return np.minimum(bits.astype(np.float64) * 2.0**-53, _UNIFORM_MAX)


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + _STEP
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return state ^ (state >> np.uint64(31))


@dataclass(frozen=True)
class BatchSampling:
    """The sampling parameters of B sequences as arrays; made when the batch changes."""

    seeds: NDArray[np.uint64]
    temperatures: torch.Tensor  # [B, 1]; 1 where greedy
    greedy: torch.Tensor | None  # bool [B], None when nobody is
    cut: list[int]
    """Rows with top-k or top-p."""
    params: tuple[SamplingParams, ...]

    @staticmethod
    def of(
        params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device
    ) -> BatchSampling:
        greedy = [one.temperature == 0.0 for one in params]
        heat = [1.0 if one.temperature == 0.0 else one.temperature for one in params]
        return BatchSampling(
            seeds=np.array([seed % (1 << 64) for seed in seeds], dtype=np.uint64),
            temperatures=torch.tensor(heat, dtype=torch.float32, device=device).unsqueeze(1),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            cut=[row for row, one in enumerate(params) if one.top_k > 0 or one.top_p < 1.0],
            params=tuple(params),
        )


def sample(
    logits: torch.Tensor, batch: BatchSampling, positions: NDArray[np.uint64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 `[B, V]`; positions `[B]`, of the tokens to be drawn → tokens int64 `[B]` and
    log-probs float32 `[B]`. A row whose logits are not finite gets a log-prob that is not finite.
    """
    logp = torch.log_softmax(logits / batch.temperatures, dim=-1)
    draws = torch.from_numpy(uniforms(batch.seeds, positions)).to(logits.device)
    weights = logp.double().exp_()
    if batch.cut:
        rows = torch.tensor(batch.cut, device=logits.device)
        weights[rows] = _cut(weights[rows], [batch.params[row] for row in batch.cut])
    tokens = _inverse_cdf(weights, draws)
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, logits.argmax(dim=-1), tokens)
    return tokens, logp.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _inverse_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative weight first exceeds `draw` of the total; float64."""
    cumulative = weights.cumsum(dim=-1)
    target = draws.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return tokens.clamp_(max=weights.shape[1] - 1)


def _cut(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Weights outside the top k, or outside the smallest set that holds top_p, become zero."""
    size = weights.shape[1]
    top_k = [one.top_k if one.top_k > 0 else size for one in params]
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    device = weights.device
    rank = torch.arange(size, device=device)
    keep = rank < torch.tensor(top_k, device=device).unsqueeze(1)
    keep &= before < torch.tensor([one.top_p for one in params], device=device).unsqueeze(1)
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, ordered * keep)
