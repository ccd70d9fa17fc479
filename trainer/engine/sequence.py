"""One request on its way through the engine.

Owns the tokens sampled so far. Made by the event loop, then changed by the engine's worker thread
only; `cancelled` alone is written by the loop and read by the worker.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer.engine.protocol import Answers, GenerateRequest, Generation
from trainer.rollout import FinishReason

__all__ = ["Cancelled", "Sequence"]


class Cancelled(enum.Enum):
    """Why a sequence is to end early."""

    NO = enum.auto()
    ABORT = enum.auto()  # keep what it has
    DROP = enum.auto()  # nobody waits for it any more


@dataclass(slots=True, eq=False)
class Sequence:
    """A context, its continuation so far, and where it may end."""

    request: GenerateRequest
    context: NDArray[np.int32]
    length_max: int
    """Tokens of context and continuation together."""
    seed: int
    stop_ids: frozenset[int]
    answered: Callable[[Answers], None] = lambda answers: None
    """Who is told of its end; on the loop."""
    cancelled: Cancelled = Cancelled.NO
    weights_seen: int = 0
    """Which weights of the engine computed its first token; see `Batcher.weights_changed`."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_steps: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of context and continuation so far."""
        return len(self.context) + len(self.tokens)

    @property
    def group_key(self) -> tuple[str, str] | None:
        group = self.request.group_id
        return None if group is None else ("group", group)

    @property
    def session_key(self) -> tuple[str, str]:
        return ("session", self.request.session_id)

    def append(self, token: int, logprob: float, model_step: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.model_steps.append(model_step)

    def computed(self) -> NDArray[np.int32]:
        """The tokens whose keys and values are known: all but the last one sampled."""
        return np.concatenate([self.context, np.array(self.tokens[:-1], dtype=np.int32)])

    def generation(
        self,
        text: str,
        reason: FinishReason,
        routing: NDArray[np.uint8] | NDArray[np.uint16] | None,
    ) -> Generation:
        """The result as it stands."""
        return Generation(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            model_steps=np.array(self.model_steps, dtype=np.int32),
            text=text,
            finish_reason=reason,
            routed_experts=routing,
        )
