"""Computed contexts kept for group mates and for the next turn of a session.

Owns copies of keys, values and routing, at most `limit_bytes` of them, least recently used first
out. An entry is valid for the weights that computed it: `clear` when they change. Worker thread
only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.engine.kv_cache import Prefix

__all__ = ["Entry", "PrefixCache"]

Key = tuple[str, str]
"""("group", group id) or ("session", session id)."""


@dataclass(frozen=True)
class Entry:
    """A computed context. `logits` float32 `[V]` follow its last token, where they are known."""

    tokens: NDArray[np.int32]
    prefix: Prefix
    logits: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        logits = 0 if self.logits is None else self.logits.nbytes
        return self.tokens.nbytes + self.prefix.nbytes + logits

    def common(self, tokens: NDArray[np.int32]) -> int:
        """How many leading tokens are the same."""
        size = min(len(tokens), len(self.tokens))
        different = np.flatnonzero(tokens[:size] != self.tokens[:size])
        return int(different[0]) if len(different) else size


class PrefixCache:
    """Entries by group and by session."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._entries: OrderedDict[Key, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, keys: list[Key], tokens: NDArray[np.int32]) -> tuple[Entry | None, int]:
        """The entry under one of `keys` that shares the longest prefix with `tokens`, and its
        length: less than all tokens, unless the entry knows what follows them.
        """
        best: tuple[Entry | None, int] = (None, 0)
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            self._entries.move_to_end(key)
            length = entry.common(tokens)
            complete = length == len(tokens) == len(entry.tokens) and entry.logits is not None
            if not complete:
                length = min(length, len(tokens) - 1)
            if length > best[1]:
                best = (entry, length)
        return best

    def has_room(self, nbytes: int) -> bool:
        """Whether an entry of this size would be kept at all; ask before copying."""
        return nbytes <= self.limit_bytes

    def put(self, key: Key, entry: Entry) -> None:
        """Keeps the entry, in place of an older one and of the least recently used."""
        self.drop(key)
        if not self.has_room(entry.nbytes):
            return
        while self.nbytes + entry.nbytes > self.limit_bytes:
            _, old = self._entries.popitem(last=False)
            self.nbytes -= old.nbytes
        self._entries[key] = entry
        self.nbytes += entry.nbytes

    def drop(self, key: Key) -> None:
        """Forgets one entry, if it is there."""
        old = self._entries.pop(key, None)
        self.nbytes -= 0 if old is None else old.nbytes

    def clear(self) -> None:
        """Forgets everything: the weights have changed."""
        self._entries.clear()
        self.nbytes = 0
