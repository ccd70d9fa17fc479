"""From traces to the log-probabilities of their trained tokens, in one packed forward pass.

Owns the shift (the hidden state before a token predicts it), the trimming (tokens behind the last
trained one are not computed, so the unknown routing of a trace's last token is never needed), and
the head in chunks, so that logits of a bounded size are alive at once. Used by the learner and by
the supervised warm-up; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from trainer.errors import TrainerError
from trainer.packing import PackedLayout
from trainer.rollout import IGNORE_LABEL, Trace
from trainer.routing import Routing

__all__ = ["PackedTraces", "RoutingMissing", "TokenScores", "score", "trained_positions"]


class RoutingMissing(TrainerError):
    """Replay is on, and a trace carries no routed experts for this model."""


@dataclass(frozen=True)
class TokenScores:
    """Float32 `[M]`: log-prob of each trained token, and the entropy it was drawn with."""

    logp: torch.Tensor
    entropy: torch.Tensor


def trained_positions(trace: Trace, mask: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Positions of the tokens that are trained on: labelled, not the first, and kept by `mask`."""
    kept = trace.labels != IGNORE_LABEL
    if mask is not None:
        kept = kept & mask
    positions = np.flatnonzero(kept)
    return positions[positions > 0]


class PackedTraces:
    """Traces side by side, on one device. Each has at least one trained position."""

    def __init__(
        self,
        traces: Sequence[Trace],
        positions: Sequence[NDArray[np.int64]],
        device: torch.device,
        *,
        routing: bool,
    ) -> None:
        """`routing`: take the recorded experts along (RoutingMissing if a trace has none)."""
        lengths = [int(trained[-1]) for trained in positions]
        starts = np.cumsum([0, *lengths[:-1]])
        self.rollouts = len(traces)
        self.layout = PackedLayout(lengths, device)
        self.input_ids = _int64(
            [trace.token_ids[:length] for trace, length in zip(traces, lengths, strict=True)],
            device,
        ).unsqueeze(0)
        pairs = list(zip(traces, positions, strict=True))
        self.rows = _int64(
            [start + trained - 1 for start, trained in zip(starts, positions, strict=True)], device
        )
        self.targets = _int64([trace.token_ids[trained] for trace, trained in pairs], device)
        sizes = [len(trained) for trained in positions]
        self.rollout = torch.from_numpy(np.repeat(np.arange(len(traces)), sizes)).to(device)
        logprobs = np.concatenate([trace.logprobs[trained] for trace, trained in pairs])
        self.rollout_logp = torch.from_numpy(logprobs.astype(np.float32)).to(device)
        self.routed = _routed(traces, lengths, device) if routing else None

    def __len__(self) -> int:
        """Trained tokens."""
        return self.targets.shape[0]

    def replay(self, hooks: Routing) -> AbstractContextManager[None]:
        """The context in which forward and backward use the recorded experts, if there are any."""
        return nullcontext() if self.routed is None else hooks.replay(self.routed)


def _int64(parts: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def _routed(traces: Sequence[Trace], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    parts = []
    for trace, length in zip(traces, lengths, strict=True):
        if trace.routed_experts is None:
            raise RoutingMissing(
                f"a trace of {len(trace)} tokens has no routed experts; the engine did not record "
                "them (or set learner.replay to false)"
            )
        parts.append(trace.routed_experts[:length])
    packed = np.concatenate(parts)
    # uint16 has few operations in torch: widened here, once, for one pass only.
    return torch.from_numpy(packed.astype(np.int32 if packed.dtype == np.uint16 else np.uint8)).to(
        device
    )


def score(
    model: Any, packed: PackedTraces, *, temperature: float, logit_bytes: int, entropy_grad: bool
) -> TokenScores:
    """Scores of the trained tokens under `temperature`; `entropy_grad`: the entropy has one, too.

    More than `logit_bytes` of logits are computed in chunks, each again in the backward pass.
    """
    hidden = (
        model.model(
            input_ids=packed.input_ids,
            position_ids=packed.layout.position_ids,
            layout=packed.layout,
            use_cache=False,
        )
        .last_hidden_state[0]
        .index_select(0, packed.rows)
    )
    rows_max = max(1, logit_bytes // (model.config.vocab_size * 4))
    if len(packed) <= rows_max:
        logp, entropy = _head(model.lm_head, hidden, packed.targets, temperature, entropy_grad)
        return TokenScores(logp, entropy)
    parts = []
    for first in range(0, len(packed), rows_max):
        chunk, targets = hidden[first : first + rows_max], packed.targets[first : first + rows_max]
        parts.append(
            checkpoint(
                _head, model.lm_head, chunk, targets, temperature, entropy_grad, use_reentrant=False
            )
        )
    return TokenScores(
        torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])
    )


def _head(
    lm_head: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = lm_head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    spread = torch.log_softmax(logits, dim=-1)
    logp = spread.gather(1, targets.unsqueeze(1)).squeeze(1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(spread.exp() * spread).sum(dim=-1)
    return logp, entropy
