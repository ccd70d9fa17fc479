"""What the producer asks of an engine and of a tokenizer; nothing of how they do it.

An engine runs many requests at once, records for each sampled token its log-probability and the
model step that sampled it, and for a mixture-of-experts model the experts that every token but the
last was routed to. The calls are coroutines of one event loop; an engine in a process of its own is
reached through a handle with the same methods.

Implementations: `trainer.engine.scripted` (no model), the torch engine. Imports no torch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainer.errors import ConfigError
from trainer.rollout import FinishReason, Message

__all__ = [
    "Answers",
    "Engine",
    "EngineInfo",
    "GenerateRequest",
    "Generation",
    "SamplingParams",
    "Submits",
    "SyncMode",
    "Tokenizer",
    "WeightsVersion",
    "awaited",
]

#: How new weights are taken (lifecycle L20): with nothing running, or between two decode steps.
SyncMode = Literal["pause", "in_flight"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples. `top_k` 0 and `top_p` 1.0 mean no cut; `temperature` 0 means
    greedy.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = (
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1"),
            (
                self.temperature >= 0.0 and math.isfinite(self.temperature),
                "temperature",
                "finite and at least 0",
            ),
            (0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1"),
            (self.top_k >= 0, "top_k", "at least 0 (0: no cut)"),
        )
        for good, name, allowed in checks:
            if not good:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")


class GenerateRequest(msgspec.Struct, frozen=True, eq=False):
    """One continuation of a context.

    token_ids int32 [P]: the whole context so far. `group_id`: requests of one group share a prefix
    that the engine may compute once. `n_routed_known`: rows of routing that the caller already has;
    the engine returns rows from there on. `is_last`: no turn of this session follows, so that the
    engine need not keep what it computed for it.
    """

    request_id: str
    session_id: str
    token_ids: NDArray[np.int32]
    params: SamplingParams
    group_id: str | None = None
    n_routed_known: int = 0
    is_last: bool = False

    def evolve(self, **changes: Any) -> GenerateRequest:
        """A copy with `changes`; the only way to alter a request."""
        return replace(self, **changes)


@dataclass(slots=True, eq=False)
class Generation:
    """What came of a request: `k` new tokens after a context of P.

    token_ids int32 [k], logprobs float32 [k] under the sampling distribution, model_steps int32
    [k], routed_experts uint8 or uint16 [P + k - 1 - n_routed_known, layers, top_k] or None: rows of
    the context from `n_routed_known` on, then of the new tokens but the last. An abort before the
    first decode step may return no tokens and no routing, and only then may routing be missing from
    an engine that routes.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    model_steps: NDArray[np.int32]
    text: str
    finish_reason: FinishReason
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine runs. `n_layers_moe` 0 and `routes` False for a dense model. `context_max` in
    tokens.
    """

    vocab_size: int
    context_max: int
    n_layers_moe: int = 0
    top_k: int = 0
    n_experts: int = 0
    routes: bool = False


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """One published version of the weights.

    `ref`: the 24 bytes that name the object of the arena which holds them (b"" for an engine
    without a model); the layout is inside the object. `nbytes`: its size.
    """

    ref: bytes
    model_step: int
    nbytes: int = 0


@runtime_checkable
class Engine(Protocol):
    """An engine. All methods may be called at any time from the loop that owns it."""

    @property
    def info(self) -> EngineInfo:
        """Constants of the model."""
        ...

    @property
    def model_step(self) -> int:
        """The step whose weights sample from now on."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Run one request to its end.

        Cancelling the awaiting task drops the request. Raises `EngineError`, which fails this one
        rollout.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End requests (None: all) with `FinishReason.ABORT` and what they have.

        -> how many of them were running.
        """
        ...

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        """Take new weights and set `model_step`.

        "in_flight" swaps between two decode steps and drops nothing; "pause" expects that nothing
        runs.
        """
        ...

    async def aclose(self) -> None:
        """End everything and give back what is held. Idempotent."""
        ...


#: Requests that have ended, each with what came of it.
Answers = Sequence[tuple[GenerateRequest, Generation | Exception]]


@runtime_checkable
class Submits(Protocol):
    """An engine that answers by a call, so that waiting for it needs no task."""

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        """As `Engine.generate` for each. `answered` is called on the loop, not before this has
        returned, with those that end at the same time; it must not raise. What is raised here is
        of all: none was taken.
        """
        ...

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        """Nobody waits for these any more: they end, and `answered` hears nothing of them."""
        ...


async def awaited(engine: Submits, request: GenerateRequest) -> Generation:
    """`Engine.generate` of an engine that answers by a call."""
    answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    def answered(answers: Answers) -> None:
        ((_, outcome),) = answers
        if not answer.done():
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

    engine.submit([request], answered)
    try:
        return await answer
    except asyncio.CancelledError:
        engine.drop([request])
        raise


class Tokenizer(Protocol):
    """What environments need of a tokenizer."""

    @property
    def eos_token_id(self) -> int: ...

    @property
    def pad_token_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]: ...
