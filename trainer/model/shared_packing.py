"""Prompts that several traces share are computed once, in forward and backward.

Owns the layout of *heads* (what traces have in common, at the front) and *tails* (the rest of
each): all of them lie side by side in one packed row, linear layers and experts see each token
once, and in attention a tail looks at its head and at itself. Gradients of a head are the sums over
its tails, so the update is the one that separate traces would give (but for rounding). Used by
`packed_forward.py`; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from trainer.packing import PackedLayout, pack_in_passes

__all__ = ["SharedLayout", "Tail", "shared_passes"]

_MASK_ELEMENTS_MAX = 1 << 23
"""Of one block of tails; a longer block is cut."""
_BLOCK_RATIO = 0.75
"""A block of tails holds none whose length, head included, is below this share of its longest."""
_BLOCK_TAILS_MIN = 32
"""Below this many tails a further block costs more in calls than its padding."""


@dataclass(frozen=True)
class Tail:
    """What follows head number `head` in one trace: `count` tokens, at least one."""

    head: int
    count: int


class _TailBlock:
    """Neighbouring tails of similar length, padded to one rectangle of queries and one of keys."""

    def __init__(
        self,
        tails: Sequence[Tail],
        heads: Sequence[int],
        head_starts: Sequence[int],
        start: int,
        device: torch.device,
    ) -> None:
        """`start`: the packed row of the first tail's first token."""
        counts = np.array([tail.count for tail in tails])
        before = np.array([heads[tail.head] for tail in tails])
        starts = start + np.cumsum(counts) - counts
        self.rows, self.width = len(tails), int(counts.max())
        self.keys_width = int((before + counts).max())
        column = np.arange(self.width)
        own = np.minimum(column, counts[:, None] - 1)  # a pad repeats its own tail's last token
        self.queries = _index(starts[:, None] + own, device)
        self.scatter = _index(np.flatnonzero(column < counts[:, None]), device)
        place = np.minimum(np.arange(self.keys_width), (before + counts)[:, None] - 1)
        head_rows = np.array([head_starts[tail.head] for tail in tails])[:, None] + place
        tail_rows = starts[:, None] + place - before[:, None]
        self.keys = _index(np.where(place < before[:, None], head_rows, tail_rows), device)
        position = (before[:, None] + own)[:, None, :, None]
        self.distance = torch.from_numpy(position - np.arange(self.keys_width)).to(device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Over the whole packed row; → `[tokens of the block, heads, d]`."""
        mask = self.distance >= 0
        if window is not None:
            mask = mask & (self.distance < window)
        mixed = functional.scaled_dot_product_attention(
            self._gather(query, self.queries, self.width),
            self._gather(key, self.keys, self.keys_width),
            self._gather(value, self.keys, self.keys_width),
            attn_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        flat = mixed.transpose(1, 2).reshape(self.rows * self.width, query.shape[0], -1)
        return flat.index_select(0, self.scatter)

    def _gather(self, tensor: torch.Tensor, index: torch.Tensor, width: int) -> torch.Tensor:
        """`[heads, T, d]` → `[rows, heads, width, d]`."""
        taken = tensor.index_select(1, index)
        return taken.view(tensor.shape[0], self.rows, width, tensor.shape[2]).transpose(0, 1)


def _index(
    array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device
) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1)).to(device)


class SharedLayout:
    """Heads of the given lengths in one packed row, then the tails; what `packing.py` calls an
    `Attend`. `position_ids` `[1, T]`: a tail goes on where its head ends.
    """

    def __init__(
        self, heads: Sequence[int], tails: Sequence[Tail], device: torch.device | str = "cpu"
    ) -> None:
        target = torch.device(device)
        self._heads = PackedLayout(heads, target)
        self.tokens = self._heads.tokens + sum(tail.count for tail in tails)
        positions = [np.arange(heads[tail.head], heads[tail.head] + tail.count) for tail in tails]
        rest = torch.from_numpy(np.concatenate(positions)).unsqueeze(0).to(target)
        self.position_ids = torch.cat([self._heads.position_ids, rest], dim=1)
        head_starts = (np.cumsum(heads) - np.asarray(heads)).tolist()
        self._blocks: list[_TailBlock] = []
        start = self._heads.tokens
        for block in _tail_blocks(tails, heads):
            self._blocks.append(_TailBlock(block, heads, head_starts, start, target))
            start += sum(tail.count for tail in block)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        size = self._heads.tokens
        first = (query[:, :, :size], key[:, :, :size], value[:, :, :size])
        parts = [self._heads.attend(layer, *first, scaling, window)[0]]
        for block in self._blocks:
            parts.append(block.attend(query[0], key[0], value[0], scaling, window))
        return torch.cat(parts).unsqueeze(0)


def _tail_blocks(tails: Sequence[Tail], heads: Sequence[int]) -> list[list[Tail]]:
    """Runs of neighbours of similar length, none with too large a mask."""
    blocks: list[list[Tail]] = []
    longest = shortest = width = 0
    for tail in tails:
        size = heads[tail.head] + tail.count
        low, high, wide = min(shortest, size), max(longest, size), max(width, tail.count)
        if blocks:
            rows = len(blocks[-1])
            similar = low >= _BLOCK_RATIO * high or rows < _BLOCK_TAILS_MIN
            if similar and (rows + 1) * wide * high <= _MASK_ELEMENTS_MAX:
                blocks[-1].append(tail)
                longest, shortest, width = high, low, wide
                continue
        blocks.append([tail])
        longest = shortest = size
        width = tail.count
    return blocks


def shared_passes(
    keys: Sequence[Hashable], heads: Sequence[int], lengths: Sequence[int], tokens_max: int
) -> list[list[int]]:
    """Indices of the traces of each forward pass, sharers together where they fit.

    keys: traces with an equal one share their first `heads[i]` tokens of `lengths[i]`. A pass has
    at most `tokens_max` tokens, heads counted once; a longer trace goes alone.
    """
    units: dict[tuple[Hashable, int], list[int]] = {}
    costs: dict[tuple[Hashable, int], int] = {}
    part: dict[Hashable, int] = {}
    for index, key in enumerate(keys):
        tail = lengths[index] - heads[index]
        unit = (key, part.get(key, 0))
        if unit in units and costs[unit] + tail > tokens_max:
            part[key] = unit[1] + 1  # a group that is too large for one pass
            unit = (key, part[key])
        units.setdefault(unit, []).append(index)
        costs[unit] = costs.get(unit, heads[index]) + tail
    names = list(units)
    passes = pack_in_passes([costs[name] for name in names], tokens_max)
    return [[index for unit in chosen for index in units[names[unit]]] for chosen in passes]
