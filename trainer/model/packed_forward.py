"""From traces to the log-probabilities of their trained tokens, in one packed forward pass.

Owns the shift (the hidden state before a token predicts it), the trimming (tokens behind the last
trained one are not computed, so the unknown routing of a trace's last token is never needed), the
sharing of prompts, and the head in chunks, so that logits of a bounded size are alive at once.
Used by the learner and by the supervised warm-up; one thread at a time.
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
from trainer.model.shared_packing import SharedLayout, Tail
from trainer.packing import PackedLayout
from trainer.routing import Routing
from trainer.segment import IGNORE_LABEL, Trace

__all__ = [
    "PackedTraces",
    "RoutingMissing",
    "TokenScores",
    "score",
    "share_key",
    "trained_positions",
]

_SHARED_LENGTH_MAX = {"cpu": 4096, "cuda": 512}
"""Tokens of a trace that shares its prompt. Its attention needs a mask where a whole sequence needs
none; with one, CUDA's kernels hold all scores in memory, the square of the length."""


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


@dataclass(frozen=True)
class _Placed:
    """Where a trace's tokens lie: the first `head` of them from row `head_row` on, the rest from
    `tail_row` on."""

    head: int
    head_row: int
    tail_row: int

    def rows_before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the hidden states that predict the tokens at `positions`."""
        place = positions - 1
        return np.where(place < self.head, self.head_row + place, self.tail_row + place - self.head)


def share_key(
    trace: Trace, positions: NDArray[np.int64], device: torch.device, *, routing: bool
) -> tuple[bytes, bytes] | None:
    """Traces with an equal key may share the tokens before their first trained one: the same
    tokens through the same experts. None: a trace too long to share (see `_SHARED_LENGTH_MAX`).
    """
    head = int(positions[0])
    if len(trace) > _SHARED_LENGTH_MAX.get(device.type, 0):
        return None
    routed = trace.routed_experts if routing else None
    return trace.token_ids[:head].tobytes(), b"" if routed is None else routed[:head].tobytes()


class PackedTraces:
    """Traces side by side, on one device. Each has at least one trained position."""

    def __init__(
        self,
        traces: Sequence[Trace],
        positions: Sequence[NDArray[np.int64]],
        device: torch.device,
        *,
        routing: bool,
        share: bool = True,
    ) -> None:
        """`routing`: take the recorded experts along (RoutingMissing if a trace has none). `share`:
        compute what traces have in common before their first trained token once.
        """
        pairs = list(zip(traces, positions, strict=True))
        if routing:
            _check_routing(traces)
        self.rollouts = len(traces)
        spans, placed = self._place(pairs, device, routing=routing, share=share)
        tokens = [traces[index].token_ids[span] for index, span in spans]
        self.input_ids = _int64(tokens, device).unsqueeze(0)
        self.rows = _int64(
            [where.rows_before(trained) for where, trained in zip(placed, positions, strict=True)],
            device,
        )
        self.targets = _int64([trace.token_ids[trained] for trace, trained in pairs], device)
        sizes = [len(trained) for trained in positions]
        self.rollout = torch.from_numpy(np.repeat(np.arange(len(traces)), sizes)).to(device)
        logprobs = np.concatenate([trace.logprobs[trained] for trace, trained in pairs])
        self.rollout_logp = torch.from_numpy(logprobs.astype(np.float32)).to(device)
        self.routed = _routed(traces, spans, device) if routing else None

    def _place(
        self,
        pairs: Sequence[tuple[Trace, NDArray[np.int64]]],
        device: torch.device,
        *,
        routing: bool,
        share: bool,
    ) -> tuple[list[tuple[int, slice]], list[_Placed]]:
        """Makes the layout; → which tokens of which trace lie there in turn, and where each trace's
        are.
        """
        groups: dict[object, list[int]] = {}
        for index, (trace, trained) in enumerate(pairs):
            key = share_key(trace, trained, device, routing=routing) if share else None
            groups.setdefault(index if key is None else key, []).append(index)
        # A head that nobody shares is the whole trace, which needs no mask in attention.
        heads = [
            (members, int(pairs[members[0]][1][-1 if len(members) == 1 else 0]))
            for members in groups.values()
        ]
        heads.sort(key=lambda one: -one[1])
        lengths = [int(trained[-1]) for _, trained in pairs]
        spans: list[tuple[int, slice]] = []
        tails: list[tuple[int, int]] = []  # (trace, its head's number)
        where: dict[int, _Placed] = {}
        row = 0
        for number, (members, head) in enumerate(heads):
            spans.append((members[0], slice(0, head)))
            for index in members:
                where[index] = _Placed(head, row, -1)
                if lengths[index] > head:
                    tails.append((index, number))
            row += head
        tails.sort(key=lambda one: -lengths[one[0]])
        for index, number in tails:
            head = heads[number][1]
            spans.append((index, slice(head, lengths[index])))
            where[index] = _Placed(head, where[index].head_row, row)
            row += lengths[index] - head
        sizes = [head for _, head in heads]
        self.layout: PackedLayout | SharedLayout = PackedLayout(sizes, device)
        if tails:
            rest = [Tail(number, lengths[index] - sizes[number]) for index, number in tails]
            self.layout = SharedLayout(sizes, rest, device)
        return spans, [where[index] for index in range(len(pairs))]

    def __len__(self) -> int:
        """Trained tokens."""
        return self.targets.shape[0]

    def replay(self, hooks: Routing) -> AbstractContextManager[None]:
        """The context in which forward and backward use the recorded experts, if there are any."""
        return nullcontext() if self.routed is None else hooks.replay(self.routed)


def _int64(parts: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def _check_routing(traces: Sequence[Trace]) -> None:
    for trace in traces:
        if trace.routed_experts is None:
            raise RoutingMissing(
                f"a trace of {len(trace)} tokens has no routed experts; the engine did not record "
                "them (or set learner.replay to false)"
            )


def _routed(
    traces: Sequence[Trace], spans: Sequence[tuple[int, slice]], device: torch.device
) -> torch.Tensor:
    parts = []
    for index, span in spans:
        routed = traces[index].routed_experts
        assert routed is not None, "checked before"
        parts.append(routed[span])
    packed = np.concatenate(parts)
    # uint16 has few operations in torch: widened here, once, for one pass only.
    kind = np.int32 if packed.dtype == np.uint16 else np.uint8
    return torch.from_numpy(packed.astype(kind)).to(device)


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
