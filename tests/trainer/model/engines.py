"""A running engine for tests, and a brake that stops it at a known token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from tests.trainer.model.families import family, request
from trainer.engine.protocol import Generation
from trainer.engine.torch_engine import TorchEngine
from trainer.model.config import EngineConfig

LONG = 100


@asynccontextmanager
async def running(name: str = "qwen3_moe", **settings: Any) -> AsyncIterator[TorchEngine]:
    model, tokenizer = family(name)
    loader = settings.pop("load_weights", None)
    engine = TorchEngine(model, tokenizer, EngineConfig(**settings), load_weights=loader)
    try:
        yield engine
    finally:
        await engine.aclose()


def same_generation(one: Generation, other: Generation) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.text == other.text
    assert one.finish_reason is other.finish_reason
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    if one.routed_experts is None:
        assert other.routed_experts is None
    else:
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def endless(name: str, tokens: int = LONG) -> Any:
    """A request that only ends at its limit: greedy loops never sample the end."""
    return request(name, [3, 4, 5], max_new_tokens=tokens, temperature=0.0)


class Brake:
    """Stops the worker in front of its n-th forward pass, until it is let go."""

    def __init__(self, engine: TorchEngine, at: int) -> None:
        self._left, self._reached, self._go = at, threading.Event(), threading.Event()
        engine._runner.model.model.register_forward_pre_hook(self._pass)

    def _pass(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._reached.set()
            assert self._go.wait(timeout=30)

    async def reached(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._reached.wait, 30)

    def let_go(self) -> None:
        self._go.set()
