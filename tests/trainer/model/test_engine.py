"""The engine: batching changes nothing, aborts keep what there is, errors fail one rollout."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.trainer.model.families import FAMILIES, MIXTURES, family, generate, prompts, request
from trainer.engine.protocol import Engine, Generation, WeightsVersion
from trainer.engine.torch_engine import EngineClosed, PromptTooLong, TorchEngine
from trainer.errors import EngineError
from trainer.model.config import EngineConfig
from trainer.rollout import FinishReason

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


def _same(one: Generation, other: Generation) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.text == other.text
    assert one.finish_reason is other.finish_reason
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    if one.routed_experts is None:
        assert other.routed_experts is None
    else:
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def test_the_engine_is_an_engine() -> None:
    async def run() -> None:
        async with running() as engine:
            assert isinstance(engine, Engine)
            assert engine.info.n_layers_moe == 3
            assert engine.info.routes

    asyncio.run(run())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_gives_what_each_request_gives_alone(name: str, temperature: float) -> None:
    model, tokenizer = family(name)
    asked = [
        request(f"r{i}", context, temperature=temperature, max_new_tokens=5 + 3 * i)
        for i, context in enumerate(prompts(tokenizer, 7))
    ]
    together = generate(model, tokenizer, asked, EngineConfig(max_batch=3))
    for one, made in zip(asked, together, strict=True):
        _same(made, generate(model, tokenizer, [one])[0])


def test_greedy_generation_is_that_of_transformers() -> None:
    model, tokenizer = family("mixtral")
    reference, _ = family("mixtral", attention="sdpa")
    context = prompts(tokenizer, 3)[2]
    made = generate(model, tokenizer, [request("r", context, temperature=0.0)])[0]
    ids = torch.tensor([context])
    for token in made.token_ids.tolist():
        with torch.no_grad():
            logits = reference(input_ids=ids, use_cache=False).logits[0, -1]
        assert token == int(logits.argmax())
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


@pytest.mark.parametrize("name", MIXTURES)
def test_routing_is_known_for_all_tokens_but_the_last(name: str) -> None:
    model, tokenizer = family(name)
    reference, _ = family(name, attention="sdpa")
    context = prompts(tokenizer, 5)[4]
    made = generate(model, tokenizer, [request("r", context)])[0]
    routed = made.routed_experts
    assert routed is not None
    assert routed.dtype == np.uint8
    assert routed.shape == (len(context) + len(made.token_ids) - 1, 3, 2)
    ids = torch.tensor([[*context, *made.token_ids.tolist()[:-1]]])
    with torch.no_grad():
        logits = reference(input_ids=ids, output_router_logits=True).router_logits
    for layer, scores in enumerate(logits):
        wanted = scores.topk(2, dim=-1).indices.sort().values.numpy()
        np.testing.assert_array_equal(np.sort(routed[:, layer], axis=-1), wanted)


def test_a_group_computes_its_prompt_once_and_shares_its_routing() -> None:
    model, tokenizer = family("qwen3_moe")
    context = prompts(tokenizer, 6)[5]
    asked = [request(f"r{i}", context, group="g") for i in range(9)]

    async def run() -> list[Generation]:
        async with running(max_batch=4) as engine:  # so that some of the group come later
            made = await asyncio.gather(*[engine.generate(one) for one in asked])
            assert engine.counters.contexts_computed == 1
            assert engine.counters.contexts_reused == 8
            return made

    made = asyncio.run(run())
    routed = [one.routed_experts for one in made]
    assert routed[0] is not None
    for other in routed[1:]:
        assert other is not None
        np.testing.assert_array_equal(routed[0][: len(context)], other[: len(context)])
    for one, result in zip(asked, made, strict=True):
        _same(result, generate(model, tokenizer, [replace(one, group_id=None)])[0])


def test_the_next_turn_goes_on_from_the_kept_prefix_and_returns_only_new_routing() -> None:
    async def run(prefix_bytes: int) -> tuple[Generation, Generation, int]:
        async with running(prefix_bytes=prefix_bytes) as engine:
            first = await engine.generate(request("a", [5, 6, 7], session="s"))
            context = [5, 6, 7, *first.token_ids.tolist(), 20, 21]
            known = 3 + len(first.token_ids) - 1
            second = await engine.generate(request("b", context, session="s", known=known))
            return first, second, engine.counters.contexts_reused

    _, second, reused = asyncio.run(run(1 << 20))
    _, fresh, reused_without = asyncio.run(run(0))
    assert (reused, reused_without) == (1, 0)
    _same(second, fresh)
    assert second.routed_experts is not None
    # The last token of turn one, the two tokens of the tool, and the new ones but the last.
    assert len(second.routed_experts) == 1 + 2 + len(second.token_ids) - 1


def test_a_turn_that_saw_two_versions_of_the_weights_is_computed_anew_for_the_next() -> None:
    def negate(model: Any, weights: WeightsVersion) -> None:
        for value in model.parameters():
            value.data.neg_()

    async def run() -> tuple[Generation, int, list[int]]:
        async with running("llama", load_weights=negate) as engine:
            brake = Brake(engine, at=6)
            task = asyncio.create_task(engine.generate(request("a", [3, 4, 5], session="s")))
            await brake.reached()
            swap = asyncio.create_task(engine.load_weights(WeightsVersion(b"", 1), "in_flight"))
            await asyncio.sleep(0)  # it is in the worker's inbox
            brake.let_go()
            await swap
            context = [3, 4, 5, *(await task).token_ids.tolist(), 9]
            made = await engine.generate(request("b", context, session="s"))
            return made, engine.counters.contexts_reused, context

    made, reused, context = asyncio.run(run())
    assert reused == 0
    model, tokenizer = family("llama")
    negate(model, WeightsVersion(b"", 1))
    _same(made, generate(model, tokenizer, [request("b", context)])[0])


def test_a_context_in_several_passes_is_that_of_one_pass() -> None:
    model, tokenizer = family("qwen3_moe")
    asked = [request(f"r{i}", list(range(2, 42 + i))) for i in range(3)]
    whole = generate(model, tokenizer, asked)
    pieces = generate(model, tokenizer, asked, EngineConfig(prefill_tokens_max=16))
    for one, other in zip(whole, pieces, strict=True):
        _same(one, other)


def test_memory_stays_within_kv_bytes_and_everybody_is_served() -> None:
    token_bytes = 3 * 2 * 2 * 32 * 4 + 3 * 2
    limit = 3 * 64 * token_bytes  # 43 tokens take 64 rows, so three sequences run at once

    async def run() -> None:
        async with running(kv_bytes=limit, prefix_bytes=0) as engine:
            sizes: list[tuple[int, int]] = []
            engine._runner.model.model.register_forward_pre_hook(
                lambda *_: sizes.append((engine.counters.kv_bytes, engine.counters.running))
            )
            asked = [request(f"r{i}", [2, 3, 4 + i], max_new_tokens=40) for i in range(8)]
            made = await asyncio.gather(*[engine.generate(one) for one in asked])
            assert all(len(one.token_ids) for one in made)
            assert max(size for size, _ in sizes) == limit
            assert max(count for _, count in sizes) == 3
            long = await engine.generate(request("long", [2] * 10, max_new_tokens=110))
            assert len(long.token_ids)

    asyncio.run(run())


def test_a_request_that_can_never_fit_fails_at_once() -> None:
    async def run() -> None:
        async with running(kv_bytes=50_000) as engine:
            with pytest.raises(EngineError, match="which do not fit"):
                await engine.generate(request("big", [2] * 10, max_new_tokens=110))

    asyncio.run(run())


def test_stop_tokens_and_stop_strings_end_a_sequence() -> None:
    model, tokenizer = family("qwen3_moe")
    context = prompts(tokenizer, 2)[1]
    free = generate(model, tokenizer, [request("r", context, max_new_tokens=30)])[0]
    tokens = free.token_ids.tolist()
    stop = tokens[6]
    by_token = generate(
        model, tokenizer, [request("r", context, max_new_tokens=30, stop_token_ids=(stop,))]
    )[0]
    assert by_token.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
    assert by_token.finish_reason is FinishReason.STOP
    text = tokenizer.decode(tokens[4:6])
    by_text = generate(model, tokenizer, [request("r", context, max_new_tokens=30, stop=(text,))])[
        0
    ]
    assert by_text.finish_reason is FinishReason.STOP
    assert by_text.text.endswith(text)
    assert free.text.startswith(by_text.text)


def test_generation_ends_where_the_context_of_the_model_ends() -> None:
    model, tokenizer = family("llama")
    made = generate(model, tokenizer, [request("r", [3] * 120, max_new_tokens=500)])[0]
    assert len(made.token_ids) <= 8
    assert made.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize(
    ("context", "error", "says"),
    [
        ([], EngineError, "no context"),
        ([3] * 128, PromptTooLong, "context holds 128"),
        ([3, 4000], EngineError, "token ids outside"),
    ],
)
def test_a_bad_request_fails_alone(context: list[int], error: type[Exception], says: str) -> None:
    async def run() -> None:
        async with running() as engine:
            good = asyncio.create_task(engine.generate(request("good", [3, 4])))
            with pytest.raises(error, match=says):
                await engine.generate(request("bad", context))
            assert len((await good).token_ids)

    asyncio.run(run())


def _endless(name: str, tokens: int = LONG) -> Any:
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


def test_the_time_that_the_worker_is_busy_is_known_while_it_still_is() -> None:
    async def run() -> None:
        async with running() as engine:
            brake = Brake(engine, at=6)
            task = asyncio.create_task(engine.generate(_endless("r")))
            await brake.reached()
            first = engine.counters.busy_s
            assert first > 0
            brake.let_go()
            await task
            assert engine.counters.busy_s > first

    asyncio.run(run())


def test_what_ends_while_the_engine_computes_is_handed_over_every_few_passes() -> None:
    """Twelve requests end in twelve passes while a long one goes on."""

    async def run() -> None:
        async with running(max_batch=16) as engine:
            handed_over: list[int] = []
            deliver = engine._deliver

            def counted(outcomes: list[Any]) -> None:
                handed_over.append(len(outcomes))
                deliver(outcomes)

            engine._deliver = counted  # type: ignore[method-assign]
            long = asyncio.create_task(engine.generate(_endless("long")))
            short = [_endless(f"r{n}", n) for n in range(1, 13)]
            await asyncio.gather(*(engine.generate(one) for one in short))
            assert not long.done()
            await long
            assert sum(handed_over) == 13
            assert len(handed_over) <= 5

    asyncio.run(run())


def test_abort_keeps_what_there_is_and_leaves_the_others_alone() -> None:
    async def run() -> None:
        async with running(max_batch=2) as engine:
            brake = Brake(engine, at=6)
            asked = [_endless(f"r{i}") for i in range(3)]
            tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
            await brake.reached()
            assert await engine.abort(["r0", "r2", "unknown"]) == 2
            brake.let_go()
            first, other, waiting = await asyncio.gather(*tasks)
        assert first.finish_reason is FinishReason.ABORT
        assert len(first.token_ids) == 6
        assert first.routed_experts is not None
        assert len(first.routed_experts) == 3 + len(first.token_ids) - 1
        assert other.finish_reason is not FinishReason.ABORT
        assert len(other.token_ids) == LONG
        assert first.token_ids.tolist() == other.token_ids.tolist()[:6]
        # It never started: nothing sampled, and only then may routing be missing.
        assert waiting.finish_reason is FinishReason.ABORT
        assert len(waiting.token_ids) == 0
        assert waiting.routed_experts is None

    asyncio.run(run())


def test_weights_swap_between_two_decode_steps_and_each_token_says_which_step_made_it() -> None:
    def negate(model: Any, weights: WeightsVersion) -> None:
        model.lm_head.weight.data.neg_()

    async def run() -> Generation:
        async with running("llama", load_weights=negate) as engine:
            brake = Brake(engine, at=6)
            task = asyncio.create_task(engine.generate(_endless("r")))
            await brake.reached()
            swap = asyncio.create_task(engine.load_weights(WeightsVersion(b"", 7), "in_flight"))
            await asyncio.sleep(0)  # the swap's first step: into the worker's inbox
            brake.let_go()
            await swap
            assert engine.model_step == 7
            made = await task
            after = await engine.generate(request("after", [3, 4], max_new_tokens=3))
        assert set(after.model_steps.tolist()) == {7}
        return made

    made = asyncio.run(run())
    assert made.model_steps.tolist() == [0] * 6 + [7] * (LONG - 6)
    old = generate(*family("llama"), [_endless("r")])[0].token_ids.tolist()
    assert made.token_ids.tolist()[:6] == old[:6]
    assert made.token_ids.tolist()[6:] != old[6:]


def test_pause_lets_running_sequences_end_under_the_old_weights() -> None:
    async def run() -> None:
        async with running(load_weights=lambda model, weights: None) as engine:
            brake = Brake(engine, at=4)
            task = asyncio.create_task(engine.generate(_endless("r")))
            await brake.reached()
            swap = asyncio.create_task(engine.load_weights(WeightsVersion(b"", 4), "pause"))
            later = asyncio.create_task(engine.generate(request("later", [3, 4])))
            await asyncio.sleep(0)  # both are in the worker's inbox
            brake.let_go()
            await swap
            assert set((await task).model_steps.tolist()) == {0}
            assert set((await later).model_steps.tolist()) == {4}

    asyncio.run(run())


def test_prefixes_of_the_old_weights_are_not_used_under_the_new() -> None:
    def negate(model: Any, weights: WeightsVersion) -> None:
        for value in model.parameters():
            value.data.neg_()

    async def run() -> tuple[Generation, int]:
        async with running("llama", load_weights=negate) as engine:
            await engine.generate(request("a", [3, 4, 5], group="g"))
            await engine.load_weights(WeightsVersion(b"", 1), "in_flight")
            made = await engine.generate(request("b", [3, 4, 5], group="g"))
            return made, engine.counters.contexts_reused

    made, reused = asyncio.run(run())
    model, tokenizer = family("llama")
    negate(model, WeightsVersion(b"", 1))
    assert reused == 0
    assert made.token_ids.tolist() == (
        generate(model, tokenizer, [request("b", [3, 4, 5])])[0].token_ids.tolist()
    )


def test_weights_that_cannot_be_loaded_fail_the_load_and_not_the_rollouts() -> None:
    def load(model: Any, weights: WeightsVersion) -> None:
        raise ValueError("no such object")

    async def run() -> None:
        async with running(load_weights=load) as engine:
            task = asyncio.create_task(engine.generate(_endless("r")))
            with pytest.raises(EngineError, match="no such object"):
                await engine.load_weights(WeightsVersion(b"", 3), "in_flight")
            assert engine.model_step == 0
            assert len((await task).token_ids) == LONG

    asyncio.run(run())


def test_a_cancelled_request_leaves_the_batch() -> None:
    async def run() -> None:
        async with running(max_batch=1) as engine:
            brake = Brake(engine, at=4)
            task = asyncio.create_task(engine.generate(_endless("r")))
            await brake.reached()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            brake.let_go()
            await engine.generate(request("next", [3, 4], max_new_tokens=2))
            assert engine.counters.running == 0
            assert engine.counters.decode_steps < LONG

    asyncio.run(run())


def test_logits_that_are_not_finite_fail_one_rollout_and_poison_nobody() -> None:
    long, short = [3, 4, 5, 6, 7, 8, 9, 10], [3, 4]

    async def run() -> None:
        async with running("llama", prefix_bytes=0) as engine:
            embedding = engine._runner.model.model.embed_tokens
            poisoned = embedding.weight.detach().clone()  # untied: the head must stay finite
            poisoned[50] = float("nan")
            embedding.weight = torch.nn.Parameter(poisoned)
            bad = [request(f"bad{i}", [50] * 20) for i in range(2)]
            good = asyncio.create_task(engine.generate(request("good", short, temperature=0.0)))
            for failure in await asyncio.gather(
                *[engine.generate(one) for one in bad], return_exceptions=True
            ):
                assert isinstance(failure, EngineError)
                assert "not finite" in str(failure)
            made = await good
            # In the slots of the failed, one long and one short: what lies behind the short one's
            # end is masked, and must be finite all the same.
            _, again = await asyncio.gather(
                engine.generate(request("long", long, temperature=0.0)),
                engine.generate(request("again", short, temperature=0.0)),
            )
            assert made.token_ids.tolist() == again.token_ids.tolist()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_sequences_that_run_go_on_when_the_cache_grows_under_them(name: str) -> None:
    first, later = request("first", [3, 4, 5], max_new_tokens=20), request("later", [6] * 70)

    async def run() -> list[Generation]:
        async with running(name) as engine:
            brake = Brake(engine, at=5)
            task = asyncio.create_task(engine.generate(first))
            await brake.reached()
            more = asyncio.create_task(engine.generate(later))
            await asyncio.sleep(0)  # it is in the worker's inbox
            brake.let_go()
            return [await task, await more]

    made = asyncio.run(run())
    assert len(made[0].token_ids) > 5
    model, tokenizer = family(name)
    for asked, result in zip((first, later), made, strict=True):
        _same(result, generate(model, tokenizer, [asked])[0])


def test_closing_ends_everybody_with_what_they_have() -> None:
    async def run() -> None:
        async with running() as engine:
            brake = Brake(engine, at=4)
            task = asyncio.create_task(engine.generate(_endless("r")))
            await brake.reached()
            closing = asyncio.create_task(engine.aclose())
            await asyncio.sleep(0)  # it has asked the worker to end
            brake.let_go()
            await closing
            assert (await task).finish_reason is FinishReason.ABORT
            with pytest.raises(EngineClosed):
                await engine.generate(request("late", [3]))

    asyncio.run(run())


def test_a_broken_worker_is_an_error_for_all_and_a_hang_for_none() -> None:
    async def run() -> None:
        async with running() as engine:

            def broken(*_: Any) -> None:
                raise RuntimeError("our own mistake")

            engine._batcher.admit = broken  # type: ignore[method-assign]
            with pytest.raises(EngineError, match="our own mistake"):
                await engine.generate(request("r", [3]))
            with pytest.raises(EngineError, match="our own mistake"):
                await engine.generate(request("s", [3]))

    asyncio.run(run())
