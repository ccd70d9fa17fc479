"""What the engine generates: batching, prefixes and limits change nothing of it."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.trainer.model.engines import Brake, endless, running, same_generation
from tests.trainer.model.families import FAMILIES, MIXTURES, family, generate, prompts, request
from trainer.engine.batching import Batcher
from trainer.engine.model_runner import ModelRunner
from trainer.engine.protocol import Engine, Generation, WeightsVersion
from trainer.engine.sequence import Sequence as Waiting
from trainer.engine.torch_engine import PromptTooLong
from trainer.errors import EngineError
from trainer.model.config import EngineConfig
from trainer.rollout import FinishReason


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
        same_generation(made, generate(model, tokenizer, [one])[0])


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


def test_an_answer_holds_no_tensor_whose_end_would_let_the_gil_go() -> None:
    model, tokenizer = family("qwen3_moe")
    (made,) = generate(model, tokenizer, [request("r", prompts(tokenizer, 5)[4])])
    for array in (made.routed_experts, made.token_ids, made.logprobs, made.model_steps):
        assert array is not None
        assert array.flags.owndata


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
        same_generation(result, generate(model, tokenizer, [replace(one, group_id=None)])[0])


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
    same_generation(second, fresh)
    assert second.routed_experts is not None
    # The last token of turn one, the two tokens of the tool, and the new ones but the last.
    assert len(second.routed_experts) == 1 + 2 + len(second.token_ids) - 1


def test_nothing_is_kept_of_a_last_turn_unless_it_was_aborted() -> None:
    async def kept(is_last: bool, abort: bool) -> bool:
        async with running() as engine:
            brake = Brake(engine, at=4)
            asked = replace(endless("r"), is_last=is_last)
            task = asyncio.create_task(engine.generate(asked))
            await brake.reached()
            if abort:
                await engine.abort()
            brake.let_go()
            await task
            return engine.counters.prefix_bytes > 0

    found = {pair: asyncio.run(kept(*pair)) for pair in product((False, True), repeat=2)}
    assert [pair for pair, is_kept in found.items() if not is_kept] == [(True, False)]


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
    same_generation(made, generate(model, tokenizer, [request("b", context)])[0])


def test_a_context_in_several_passes_is_that_of_one_pass() -> None:
    model, tokenizer = family("qwen3_moe")
    asked = [request(f"r{i}", list(range(2, 42 + i))) for i in range(3)]
    whole = generate(model, tokenizer, asked)
    pieces = generate(model, tokenizer, asked, EngineConfig(prefill_tokens_max=16))
    for one, other in zip(whole, pieces, strict=True):
        same_generation(one, other)


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


def test_slots_are_refilled_once_they_have_been_empty_for_a_pass_of_the_batch() -> None:
    model, tokenizer = family("qwen3_moe")
    config = EngineConfig(max_batch=8)
    batcher = Batcher(ModelRunner(model, config), config, tokenizer.decode)
    for length in (20, 3, 20, 9, 20, 15, 6, 20, *range(10, 18)):
        asked = endless(f"of {length}", length)
        batcher.waiting.append(Waiting(asked, asked.token_ids, 3 + length, 0, frozenset()))
    empty, refills = 0, []
    with torch.inference_mode():
        while batcher.busy:
            there, waiting = len(batcher.running), len(batcher.waiting)
            if there and waiting > 8 - there:
                empty += 8 - there
            batcher.admit(0)
            if waiting and len(batcher.running) > there > 0:
                refills.append((empty, len(batcher.running) - there))
                empty = 0
            batcher.decode(0)
    batcher.runner.close()
    assert len(batcher.take_outcomes()) == 16
    # (slots x passes that were empty while more waited than fits, sequences that came in); 8 of the
    # first are a pass of the whole batch, and the last four did fit.
    assert refills == [(9, 2), (8, 2), (5, 4)]


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
