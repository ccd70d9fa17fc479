"""An engine without a model: for tests of everything around one, here and in users' own projects.

What it samples is a pure function of the script's seed, the request's session and context, and the
model step; latency, failures, early ends and routed experts are set by a `Script`. It keeps the
promises of the protocol to the letter: aborts return what there is, weights swap between two
tokens, the row of the last token is missing. It runs on any event loop, also one with virtual time,
or as an actor in a process of its own. Imports no torch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer.engine.protocol import (
    EngineInfo,
    GenerateRequest,
    Generation,
    SyncMode,
    WeightsVersion,
)
from trainer.errors import ConfigError, EngineError
from trainer.rollout import FinishReason
from trainer.segment import narrowest_unsigned

__all__ = ["ByteTokenizer", "Script", "ScriptedEngine", "routing_of"]

#: Token that ends a generation; bytes are 0 to 255.
EOS = 256


@dataclass(frozen=True, slots=True)
class Script:
    """How the engine behaves. Times in seconds of the loop's clock.

    A response has between `tokens_min` and `tokens_max` tokens, each `token_s` apart after
    `first_token_s`. `failure_rate`: share of requests that raise `EngineError`; `stall_rate`: share
    that make no progress until they are aborted. `layers` 0: a dense model. Both rates are decided
    by the seed, not by luck.
    """

    seed: int = 0
    tokens_min: int = 2
    tokens_max: int = 8
    first_token_s: float = 0.0
    token_s: float = 0.0
    failure_rate: float = 0.0
    stall_rate: float = 0.0
    layers: int = 2
    top_k: int = 2
    n_experts: int = 8
    vocab_size: int = 257
    context_max: int = 4096
    #: Fixed answers by session id; others are scripted.
    answers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.tokens_min <= self.tokens_max:
            raise ConfigError(
                f"tokens_min {self.tokens_min} and tokens_max {self.tokens_max}: "
                "1 <= tokens_min <= tokens_max is needed"
            )


class ScriptedEngine:
    """See the module. Keeps `trainer.engine.protocol.Engine`."""

    def __init__(self, script: Script | None = None, model_step: int = 0) -> None:
        self.script = script or Script()
        self.model_step = model_step
        self.generated_tokens = 0
        self._running: dict[str, asyncio.Event] = {}
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        """Constants of the pretended model."""
        script = self.script
        return EngineInfo(
            vocab_size=script.vocab_size,
            context_max=script.context_max,
            n_layers_moe=script.layers,
            top_k=script.top_k if script.layers else 0,
            n_experts=script.n_experts if script.layers else 0,
            routes=script.layers > 0,
        )

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._running)

    async def generate(self, request: GenerateRequest) -> Generation:
        """One scripted continuation; see the protocol."""
        self._check(request)
        rng = _rng(self.script.seed, request.session_id, request.token_ids)
        fails, stalls = (
            rng.random() < self.script.failure_rate,
            rng.random() < self.script.stall_rate,
        )
        answer = self._answer(request, rng)
        aborted = asyncio.Event()
        self._running[request.request_id] = aborted
        tokens: list[int] = []
        steps: list[int] = []
        try:
            wait_s = self.script.first_token_s
            while len(tokens) < len(answer) and not await _aborted_within(aborted, wait_s, stalls):
                if fails:
                    raise EngineError(f"scripted failure of request {request.request_id!r}")
                tokens.append(answer[len(tokens)])
                steps.append(self.model_step)
                wait_s = self.script.token_s
        finally:
            del self._running[request.request_id]
        self.generated_tokens += len(tokens)
        return self._result(request, tokens, steps, len(tokens) < len(answer))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End requests with what they have; None: all."""
        ids = list(self._running) if request_ids is None else list(request_ids)
        events = [self._running[i] for i in ids if i in self._running]
        for event in events:
            event.set()
        return len(events)

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        """Later tokens carry the new model step."""
        if mode == "pause" and self._running:
            raise EngineError(f"load_weights in mode 'pause' while {self.running} requests run")
        self.model_step = weights.model_step

    async def aclose(self) -> None:
        """Abort everything and refuse more."""
        self._closed = True
        await self.abort()

    def _check(self, request: GenerateRequest) -> None:
        n = len(request.token_ids)
        if self._closed:
            raise EngineError("the engine is closed")
        if request.request_id in self._running:
            raise EngineError(f"request {request.request_id!r} is running already")
        if not 1 <= n < self.script.context_max:
            raise EngineError(f"the context has {n} tokens; 1 to {self.script.context_max - 1} fit")

    def _answer(self, request: GenerateRequest, rng: np.random.Generator) -> list[int]:
        text = self.script.answers.get(request.session_id)
        if text is not None:
            tokens = [*text.encode(), EOS]
        else:
            n = int(rng.integers(self.script.tokens_min, self.script.tokens_max + 1))
            tokens = [*rng.integers(97, 123, n - 1).tolist(), EOS]
        room = self.script.context_max - len(request.token_ids)
        return tokens[: min(request.params.max_new_tokens, room)]

    def _result(
        self, request: GenerateRequest, tokens: list[int], steps: list[int], aborted: bool
    ) -> Generation:
        token_ids = np.array(tokens, np.int32)
        context = np.concatenate([request.token_ids, token_ids])
        routed = None
        if self.script.layers and tokens:
            routed = routing_of(self.script, context)[request.n_routed_known : len(context) - 1]
        if aborted:
            reason = FinishReason.ABORT
        else:
            reason = FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH
        return Generation(
            token_ids=token_ids,
            logprobs=(-(token_ids % 7 + 1) / 8).astype(np.float32),
            model_steps=np.array(steps, np.int32),
            text=ByteTokenizer().decode(tokens),
            finish_reason=reason,
            routed_experts=routed,
        )


def routing_of(
    script: Script, context: NDArray[np.int32]
) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """The experts that the pretended model uses for each token of a context: [n, layers, top_k].

    Depends on the token and its position only, so a test can recompute what a trace must hold.
    """
    n = len(context)
    places = np.arange(n)[:, None, None]
    layers = np.arange(script.layers)[None, :, None]
    slots = np.arange(script.top_k)[None, None, :]
    mixed = context[:, None, None] * 31 + places * 17 + layers * 7 + slots
    experts = mixed % script.n_experts
    if narrowest_unsigned(script.n_experts).itemsize == 1:
        return experts.astype(np.uint8)
    return experts.astype(np.uint16)


class ByteTokenizer:
    """A token a byte and one to end; enough for scripts. Keeps
    `trainer.engine.protocol.Tokenizer`.
    """

    eos_token_id = EOS
    pad_token_id = EOS

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; broken UTF-8 is replaced."""
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        """`<role>content` of each message, then `<assistant>`."""
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + "<assistant>")


def _rng(seed: int, session_id: str, context: NDArray[np.int32]) -> np.random.Generator:
    digest = hashlib.blake2b(
        session_id.encode() + b"/" + np.ascontiguousarray(context, np.int32).tobytes(),
        key=str(seed).encode(),
        digest_size=8,
    ).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


async def _aborted_within(aborted: asyncio.Event, seconds: float, for_ever: bool) -> bool:
    """Let time pass; true as soon as the abort comes."""
    if for_ever:
        await aborted.wait()
        return True
    if seconds > 0:
        try:
            async with asyncio.timeout(seconds):
                await aborted.wait()
        except TimeoutError:
            return False
    return aborted.is_set()
