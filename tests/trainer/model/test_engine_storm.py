"""Everything at once: random arrivals, turns, aborts, cancellations and weight swaps.

Whatever the interleaving, a request that ends by itself gives what it gives alone, one that was
aborted gives a prefix of that, and afterwards the engine holds nothing.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from tests.trainer.model.families import family, generate, request
from trainer.engine.protocol import GenerateRequest, Generation, WeightsVersion
from trainer.engine.torch_engine import TorchEngine
from trainer.model.config import EngineConfig
from trainer.rollout import FinishReason


def _requests(rng: random.Random, seed: int) -> list[GenerateRequest]:
    contexts = [[rng.randrange(2, 80) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    made = []
    for index in range(40):
        group = rng.randrange(6)
        made.append(
            request(
                f"{seed}-{index}",
                contexts[group],
                group=f"g{group}" if rng.random() < 0.7 else None,
                max_new_tokens=rng.randint(1, 40),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_k=rng.choice([0, 0, 5]),
                top_p=rng.choice([1.0, 1.0, 0.8]),
            )
        )
    return made


async def _storm(
    engine: TorchEngine, asked: list[GenerateRequest], rng: random.Random
) -> list[Generation | None]:
    """Runs all; at random forward passes something happens. None: cancelled."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[Generation]] = []
    waiting = list(asked)
    swaps: list[asyncio.Task[None]] = []

    def act() -> None:
        for one in waiting[: rng.randint(1, 6)]:
            tasks.append(loop.create_task(engine.generate(one)))
            waiting.remove(one)
        choice = rng.random()
        if choice < 0.1 and tasks:
            rng.choice(tasks).cancel()
        elif choice < 0.3:
            names = [one.request_id for one in rng.sample(asked, 2)]
            swaps.append(loop.create_task(_abort(engine, names)))
        elif choice < 0.5:
            mode: Any = rng.choice(["in_flight", "in_flight", "pause"])
            version = WeightsVersion(b"", len(swaps))
            swaps.append(loop.create_task(engine.load_weights(version, mode)))

    def before_each_pass(*_: Any) -> None:  # in the worker's thread
        if rng.random() < 0.5:
            loop.call_soon_threadsafe(act)

    engine._runner.model.model.register_forward_pre_hook(before_each_pass)
    act()
    while waiting:  # when all that came have ended, nothing would bring the rest
        running = [task for task in tasks if not task.done()]
        if running:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        act()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*swaps)
    made: dict[str, Generation | None] = {}
    for result, one in zip(results, asked, strict=True):  # taken from the front, so in order
        if isinstance(result, asyncio.CancelledError):
            made[one.request_id] = None
        else:
            assert isinstance(result, Generation), result
            made[one.request_id] = result
    return [made[one.request_id] for one in asked]


async def _abort(engine: TorchEngine, names: list[str]) -> None:
    await engine.abort(names)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_no_interleaving_changes_what_a_request_gives(name: str, seed: int) -> None:
    rng = random.Random(seed)
    model, tokenizer = family(name)
    asked = _requests(rng, seed)
    config = EngineConfig(
        max_batch=rng.choice([2, 5, 9]),
        kv_bytes=rng.choice([1 << 18, 1 << 24]),
        prefix_bytes=rng.choice([0, 1 << 15, 1 << 24]),
        prefill_tokens_max=rng.choice([8, 1000]),
    )

    async def run() -> list[Generation | None]:
        engine = TorchEngine(model, tokenizer, config, load_weights=lambda *_: None)
        try:
            made = await _storm(engine, asked, rng)
            counters = engine.counters
            assert (counters.running, counters.waiting) == (0, 0)
            assert counters.kv_bytes <= config.kv_bytes
            assert counters.prefix_bytes <= config.prefix_bytes
            return made
        finally:
            await engine.aclose()

    made = asyncio.run(run())
    alone = generate(*family(name), asked)
    whole = 0
    for result, wanted in zip(made, alone, strict=True):
        if result is None:
            continue
        size = len(result.token_ids)
        assert result.token_ids.tolist() == wanted.token_ids.tolist()[:size]
        np.testing.assert_allclose(result.logprobs, wanted.logprobs[:size], atol=1e-4)
        if result.finish_reason is not FinishReason.ABORT:
            assert size == len(wanted.token_ids)
            whole += 1
        if result.routed_experts is not None and wanted.routed_experts is not None:
            rows = len(result.routed_experts)
            np.testing.assert_array_equal(result.routed_experts, wanted.routed_experts[:rows])
    assert whole > 10
