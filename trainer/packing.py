"""Sequences side by side in one row of tokens, and the attention that keeps them apart.

Owns the packed layout: a forward pass sees `[1, T]` tokens of many sequences without one pad, so
that linear layers and experts do no wasted work; only attention pads, per block of similar lengths,
and no token sees another sequence (block-diagonal by construction, causal within). The model's
attention implementation is `ATTENTION`; every forward pass of such a model carries `layout=`, an
`Attend`. The learner packs with `PackedLayout`; the engine has its own layouts over its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from trainer.errors import TrainerError

__all__ = ["ATTENTION", "Attend", "LayoutMissing", "PackedLayout", "pack_in_passes"]

ATTENTION = "shmrl_packed"
_BLOCK_RATIO = 0.75
"""A block of sequences padded to one length holds none shorter than this share of it."""
_BLOCK_TOKENS_MIN = 1024
"""Below this many tokens a further block costs more in calls than its padding."""


class LayoutMissing(TrainerError, RuntimeError):
    """A model with packed attention was called without a layout."""


class Attend(Protocol):
    """Attention over one packed row."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """query `[1, heads, T, d]`, key and value `[1, kv_heads, T, d]` → `[1, T, heads, d]`."""


def _packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Attend | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer; `layout` comes from the forward call."""
    if layout is None:
        raise LayoutMissing(
            "this model packs sequences: call it with layout=PackedLayout(lengths), or build it "
            "with attention='sdpa' to use it outside the trainer"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(module.layer_idx, query, key, value, scale, sliding_window), None


def register_attention() -> None:
    """Makes `ATTENTION` known to transformers. Repeating it changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _packed_attention)


class _Block:
    """Neighbouring sequences of similar length: rows of the packed order `start` … `stop`."""

    def __init__(self, lengths: Sequence[int], start: int) -> None:
        self.rows, self.width = len(lengths), max(lengths)
        self.start, self.stop = start, start + sum(lengths)
        self.gather: torch.Tensor | None = None  # padded slot → packed token; None when no pads
        self.scatter: torch.Tensor | None = None  # packed token → padded slot
        if min(lengths) == self.width:
            return
        sizes = np.asarray(lengths)
        starts = np.cumsum(sizes) - sizes
        column = np.arange(self.width)
        real = column[None, :] < sizes[:, None]
        self.scatter = torch.from_numpy(np.flatnonzero(real))
        # A pad repeats the last token of its own sequence: were it another's, a value that is not
        # finite there would come through the mask, because 0 × NaN is NaN.
        slots = starts[:, None] + np.minimum(column[None, :], sizes[:, None] - 1)
        self.gather = torch.from_numpy(slots.reshape(-1))

    def to(self, device: torch.device) -> None:
        if self.gather is not None and self.scatter is not None:
            self.gather, self.scatter = self.gather.to(device), self.scatter.to(device)

    def pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[heads, T, d]` → `[rows, heads, width, d]`; pads repeat the last token."""
        part = tensor[:, self.start : self.stop]
        if self.gather is not None:
            part = part.index_select(1, self.gather)
        heads, _, size = part.shape
        return part.view(heads, self.rows, self.width, size).transpose(0, 1)

    def unpad(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, width, d]` → `[tokens, heads, d]`."""
        flat = tensor.transpose(1, 2).reshape(self.rows * self.width, tensor.shape[1], -1)
        return flat if self.scatter is None else flat.index_select(0, self.scatter)


class PackedLayout:
    """Sequences of the given lengths, longest first or in any order, in one row without pads.

    `position_ids` `[1, T]` start at 0 in each sequence. Pads stand on the right of each sequence,
    so the causal mask alone hides them and no mask tensor is built.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"each sequence needs at least one token; lengths are {list(lengths)}")
        self.lengths = list(lengths)
        self.tokens = sum(self.lengths)
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        self.position_ids = torch.from_numpy(positions).unsqueeze(0).to(device)
        self._blocks = _blocks(self.lengths)
        for block in self._blocks:
            block.to(torch.device(device))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        grouped = query.shape[1] != key.shape[1]
        parts = []
        for block in self._blocks:
            windowed = window is not None and block.width > window
            mixed = functional.scaled_dot_product_attention(
                block.pad(query[0]),
                block.pad(key[0]),
                block.pad(value[0]),
                attn_mask=_window_mask(block.width, window, query.device) if windowed else None,
                is_causal=not windowed,
                scale=scaling,
                enable_gqa=grouped,
            )
            parts.append(block.unpad(mixed))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def _window_mask(width: int, window: int | None, device: torch.device) -> torch.Tensor:
    assert window is not None
    place = torch.arange(width, device=device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)


def _blocks(lengths: Sequence[int]) -> list[_Block]:
    blocks: list[_Block] = []
    first, start = 0, 0
    for index in range(1, len(lengths) + 1):
        run = lengths[first:index]
        if index < len(lengths):
            low, high = min(min(run), lengths[index]), max(max(run), lengths[index])
            if low >= _BLOCK_RATIO * high or sum(run) < _BLOCK_TOKENS_MIN:
                continue
        blocks.append(_Block(run, start))
        first, start = index, start + sum(run)
    return blocks


def pack_in_passes(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Indices of the sequences of each forward pass: at most `tokens_max` tokens in one.

    Longest first, so that neighbours are of similar length; a sequence longer than the limit goes
    alone. Ties keep their order, so the passes depend on the lengths only.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    passes: list[list[int]] = []
    used = 0
    for index in order:
        if not passes or used + lengths[index] > tokens_max:
            passes.append([])
            used = 0
        passes[-1].append(index)
        used += lengths[index]
    return passes
