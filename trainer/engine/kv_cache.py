"""Keys, values and routing of the running sequences, one slot a sequence.

Owns one rectangle `slots × length` of memory, never more than its limit. Running sequences stand in
the slots 0 … n-1 without a gap, so a decode step attends over a view and copies nothing; when one
ends, the last moves into its place. `ExtendLayout` computes context tokens, `DecodeLayout` one
token for each running sequence; both are what `packing.py` calls an `Attend`. The engine's worker
thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from trainer.packing import PackedLayout

__all__ = ["CacheShape", "DecodeLayout", "ExtendLayout", "Extension", "Prefix", "SlotCache"]

_LENGTH_STEP = 32
"""Lengths are rounded up to this many tokens, so that growth is rare."""


@dataclass(frozen=True)
class CacheShape:
    """What one token takes."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    routers: int
    top_k: int
    routing_dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys, values and routing."""
        attention = self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize
        return attention + self.routers * self.top_k * self.routing_dtype.itemsize


@dataclass(frozen=True)
class Prefix:
    """Keys, values and routing of the first tokens of some context."""

    kv: torch.Tensor  # [layers, 2, tokens, kv_heads, head_dim]
    routing: torch.Tensor  # [tokens, routers, top_k]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.routing.nbytes


class SlotCache:
    """The rectangle. `limit_bytes` bounds it at rest; while it grows, old and new both exist."""

    def __init__(self, shape: CacheShape, slots_max: int, limit_bytes: int) -> None:
        self.shape, self.slots_max, self.limit_bytes = shape, slots_max, limit_bytes
        #: Tokens that a single sequence may have.
        self.length_max = limit_bytes // (_LENGTH_STEP * shape.token_bytes) * _LENGTH_STEP
        self.slots = self.length = 0
        self.kv, self.routing = self._empty(0, 0)

    def fits(self, slots: int, length: int) -> bool:
        """Whether so many sequences of up to `length` tokens can run at once."""
        rounded = _rounded(length)
        return slots <= self.slots_max and (
            slots * rounded * self.shape.token_bytes <= self.limit_bytes
        )

    def reserve(self, slots: int, length: int, used: int) -> None:
        """Makes room; the first `used` slots keep their contents. Only what `fits` may be asked."""
        assert self.fits(slots, length), "reserve() without fits()"
        if slots <= self.slots and length <= self.length:
            return
        length = _rounded(length)
        wide = min(self.slots_max, 1 << (slots - 1).bit_length())
        for new_slots, new_length in (
            (max(wide, self.slots), max(length, self.length)),
            (max(wide, self.slots), length),
            (wide, length),
        ):
            if self.fits(new_slots, new_length):
                self._allocate(new_slots, new_length, used)
                return
        self._allocate(slots, length, used)

    def _empty(self, slots: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        # Zeros: a masked position must not hold a NaN, because 0 × NaN is NaN.
        kv = torch.zeros(
            (shape.layers, 2, slots, length, shape.kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )
        routing = torch.zeros(
            (slots, length, shape.routers, shape.top_k),
            dtype=shape.routing_dtype,
            device=shape.device,
        )
        return kv, routing

    def _allocate(self, slots: int, length: int, used: int) -> None:
        kv, routing = self._empty(slots, length)
        if used:
            kept = min(length, self.length)
            kv[:, :, :used, :kept] = self.kv[:, :, :used, :kept]
            routing[:used, :kept] = self.routing[:used, :kept]
        self.kv, self.routing, self.slots, self.length = kv, routing, slots, length

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.routing.nbytes

    def move(self, src: int, dst: int) -> None:
        """Slot `dst` becomes what `src` is."""
        self.kv[:, :, dst] = self.kv[:, :, src]
        self.routing[dst] = self.routing[src]

    def clear(self, slot: int) -> None:
        """Zeros: after a sequence whose values were not finite."""
        self.kv[:, :, slot] = 0
        self.routing[slot] = 0

    def prefix(self, slot: int, tokens: int, *, copy: bool) -> Prefix:
        """The first tokens of a slot: a view, or a copy that outlives it."""
        kv, routing = self.kv[:, :, slot, :tokens], self.routing[slot, :tokens]
        return Prefix(kv.clone(), routing.clone()) if copy else Prefix(kv, routing)

    def write_prefix(self, slot: int, prefix: Prefix, tokens: int) -> None:
        """Puts the first `tokens` of a prefix into a slot."""
        self.kv[:, :, slot, :tokens] = prefix.kv[:, :, :tokens]
        self.routing[slot, :tokens] = prefix.routing[:tokens]

    def store(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key and value `[tokens, kv_heads, head_dim]` at `rows` = slot × length + position."""
        flat = self.kv[layer].view(2, self.slots * self.length, *key.shape[1:])
        flat[0].index_copy_(0, rows, key)
        flat[1].index_copy_(0, rows, value)

    def store_routing(self, rows: torch.Tensor, routing: torch.Tensor) -> None:
        """routing `[tokens, routers, top_k]` at `rows`."""
        size = self.slots * self.length
        self.routing.view(size, *routing.shape[1:]).index_copy_(0, rows, routing)


def _rounded(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


@dataclass(frozen=True)
class Extension:
    """Context tokens to compute: positions `start` … `start + count` of the sequence in `slot`."""

    slot: int
    start: int
    count: int


class ExtendLayout:
    """Context tokens of several sequences, packed, on top of what the cache already holds."""

    def __init__(self, cache: SlotCache, parts: Sequence[Extension]) -> None:
        self._cache, self._parts = cache, parts
        device = cache.shape.device
        packed = PackedLayout([part.count for part in parts], device)
        # On the host: repeating on a GPU would wait for it, to learn the size of the result.
        positions = np.concatenate([np.arange(p.start, p.start + p.count) for p in parts])
        slots = np.repeat([part.slot for part in parts], [part.count for part in parts])
        self.position_ids = torch.from_numpy(positions).unsqueeze(0).to(device)
        self.rows = torch.from_numpy(slots * cache.length + positions).to(device)
        # From nothing, attention needs no cache and no mask.
        self._packed = packed if all(part.start == 0 for part in parts) else None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self._cache.store(layer, self.rows, keys, values)
        if self._packed is not None:
            return self._packed.attend(layer, query, key, value, scaling, window)
        mixed, first = [], 0
        for part in self._parts:
            mixed.append(
                self._attend_one(
                    layer, part, query[:, :, first : first + part.count], scaling, window
                )
            )
            first += part.count
        return torch.cat(mixed, dim=1)

    def _attend_one(
        self, layer: int, part: Extension, query: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        """query `[1, heads, count, d]` over the slot's tokens up to each own position."""
        end = part.start + part.count
        kv = self._cache.kv[layer, :, part.slot, :end].transpose(1, 2).unsqueeze(1)
        place = torch.arange(end, device=query.device)
        distance = place[part.start :, None] - place[None, :]
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        mixed = functional.scaled_dot_product_attention(
            query,
            kv[0],
            kv[1],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[1] != kv.shape[2],
        )
        return mixed.transpose(1, 2)


class DecodeLayout:
    """One token for each of the sequences in slots 0 … n-1, at the given positions."""

    def __init__(self, cache: SlotCache, positions: torch.Tensor, length: int) -> None:
        """positions int64 `[n]`, on the device; length: the greatest of them, plus one."""
        self._cache, self._length, self._count = cache, length, positions.shape[0]
        slots = torch.arange(self._count, device=positions.device)
        self.rows = slots * cache.length + positions
        self.position_ids = positions.unsqueeze(0)
        self._distance = positions[:, None] - torch.arange(length, device=positions.device)
        self._seen = (self._distance >= 0)[:, None, None, :]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self._cache.store(layer, self.rows, keys, values)
        kv = self._cache.kv[layer, :, : self._count, : self._length].transpose(2, 3)
        mask = self._seen
        if window is not None and self._length > window:
            mask = mask & (self._distance < window)[:, None, None, :]
        # The query heads of one kv head stand where query positions usually do: no copies of keys.
        heads, size = query.shape[1], query.shape[3]
        folded = query[0].transpose(0, 1).reshape(self._count, keys.shape[1], -1, size)
        mixed = functional.scaled_dot_product_attention(
            folded, kv[0], kv[1], attn_mask=mask, scale=scaling
        )
        return mixed.reshape(1, self._count, heads, size)
