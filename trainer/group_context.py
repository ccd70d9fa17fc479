"""What the conversations of one group have in common, and the tokens that they hold.

Made by the group in production, read and written by its conversations; one loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shmstore import StoreFull
from trainer.engine.protocol import (
    Engine,
    SamplingParams,
    Submits,
    Tokenizer,
)
from trainer.rollout import Message, Prompt
from trainer.segment import narrowest_unsigned
from trainer.trace import TraceStore

__all__ = ["Content", "Gate", "GroupContext", "Tokens", "joined", "same"]

#: What can be said to the policy.
Content = str | Sequence[int] | Sequence[Message]

Tokens = NDArray[np.int32]


@dataclass(slots=True)
class Gate:
    """Shared by the conversations of one producer: whether new requests may start, the ids of those
    that run, and word of new weights.
    """

    stopping: bool = False
    running: set[str] = field(default_factory=set)
    _newer: asyncio.Event = field(default_factory=asyncio.Event)

    def weights_taken(self) -> None:
        """The engine runs new weights."""
        self._newer.set()
        self._newer.clear()

    async def weights(self, engine: Engine, model_step: int) -> None:
        """Returns when the engine runs these weights or newer ones."""
        while engine.model_step < model_step:
            await self._newer.wait()


class GroupContext:
    """What the conversations of one group have in common.

    Their first segment is stored once, by the member that knows its routing first, and what they
    all say is encoded once. `lack_prompt`: the sessions that lack that segment and will get it;
    `fresh`: no member has a record of an earlier attempt. `submits`: the engine, if it answers by a
    call. `opening`: all that a member says to such an engine; None when an environment has to run.
    `routing_type`: of its experts' numbers in a segment; None for one that does not route.
    """

    __slots__ = (
        "_encoded",
        "_opening_tokens",
        "arena_wait_s",
        "engine",
        "fresh",
        "gate",
        "group_uid",
        "info",
        "lack_prompt",
        "no_room",
        "opening",
        "params",
        "prompt",
        "prompt_tokens",
        "routing_type",
        "storing",
        "submits",
        "tokenizer",
        "traces",
    )

    def __init__(
        self,
        *,
        traces: TraceStore,
        engine: Engine,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Prompt,
        group_uid: str,
        gate: Gate,
        arena_wait_s: float,
        lack_prompt: Sequence[str],
        fresh: bool,
        opening: Content | None,
    ) -> None:
        self.traces = traces
        self.engine = engine
        self.info = info = engine.info
        self.routing_type = narrowest_unsigned(info.n_experts) if info.routes else None
        self.tokenizer = tokenizer
        self.params = params
        self.prompt = prompt
        self.group_uid = group_uid
        self.gate = gate
        self.arena_wait_s = arena_wait_s
        self.lack_prompt = tuple(lack_prompt)
        self.fresh = fresh
        self.submits = cast(Submits, engine) if _submits(type(engine)) else None
        self.opening = opening if self.submits is not None else None
        self.prompt_tokens: Tokens | None = None  # once the segment is stored
        self.storing = asyncio.Lock()
        self.no_room: StoreFull | None = None  # of the prompt: a member waited for it in vain
        self._encoded: tuple[str, Tokens] | None = None
        self._opening_tokens: Tokens | None = None

    def opening_tokens(self) -> Tokens:
        """The opening as tokens, one array for all members."""
        if self._opening_tokens is None:
            assert self.opening is not None
            self._opening_tokens = self.encode(self.opening)
        return self._opening_tokens

    def encode(self, content: Content) -> Tokens:
        """The content as tokens; text that was encoded last is not encoded again."""
        if not isinstance(content, str):
            return _fixed(self._encode(content))
        if self._encoded is None or self._encoded[0] != content:
            self._encoded = content, _fixed(self.tokenizer.encode(content))
        return self._encoded[1]

    def _encode(self, content: Sequence[int] | Sequence[Message]) -> Sequence[int]:
        if not len(content) or isinstance(content[0], (int, np.integer)):
            return content  # type: ignore[return-value]
        return self.tokenizer.apply_chat_template(content)  # type: ignore[arg-type]


@functools.cache
def _submits(kind: type) -> bool:
    """Whether it has `submit`, and no class that overrides `generate` without it."""
    if not issubclass(kind, Submits):  # to look at a protocol costs 20 µs
        return False
    newest = next(one for one in kind.__mro__ if {"generate", "submit"} & one.__dict__.keys())
    return "submit" in newest.__dict__


def joined(parts: Sequence[Tokens]) -> Tokens:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else _NO_TOKENS


def same(one: Tokens, other: Tokens) -> bool:
    return one is other or np.array_equal(one, other)


def _fixed(token_ids: Sequence[int]) -> Tokens:
    """As an array that several conversations and the engine may share."""
    array = np.array(token_ids, np.int32)
    array.flags.writeable = False
    return array


_NO_TOKENS = _fixed(())
