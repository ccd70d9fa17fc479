"""Packing changes where tokens lie, never what is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.model.families import FAMILIES, family, sampled_traces
from trainer.learner import Learner
from trainer.model.config import LearnerConfig
from trainer.model.packed_forward import PackedTraces
from trainer.model.shared_packing import SharedLayout, Tail, shared_passes
from trainer.packing import LayoutMissing, PackedLayout, pack_in_passes
from trainer.segment import IGNORE_LABEL, Trace

LENGTHS = [9, 1, 30, 30, 7, 2, 16]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_sequences_give_the_logits_that_each_gives_alone(name: str) -> None:
    model, _ = family(name)
    alone, _ = family(name, attention="sdpa")
    rows = [torch.randint(2, 96, (length,)) for length in LENGTHS]
    layout = PackedLayout(LENGTHS)
    with torch.no_grad():
        packed = model(
            input_ids=torch.cat(rows)[None],
            position_ids=layout.position_ids,
            layout=layout,
            use_cache=False,
        ).logits[0]
        single = torch.cat([alone(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    torch.testing.assert_close(packed, single, rtol=1e-4, atol=1e-4)


def test_a_sliding_window_is_kept_in_packed_attention() -> None:
    query, key, value = (torch.randn(1, 2, 40, 8) for _ in range(3))
    layout = PackedLayout([25, 15])
    windowed = layout.attend(0, query, key, value, 0.3, 4)[0]
    for start, stop in ((0, 25), (25, 40)):
        for place in range(start, stop):
            first = max(start, place - 3)
            scores = torch.einsum("hd,htd->ht", query[0, :, place], key[0, :, first : place + 1])
            mixed = torch.softmax(scores * 0.3, -1)[:, None] @ value[0, :, first : place + 1]
            torch.testing.assert_close(windowed[place], mixed[:, 0], rtol=1e-4, atol=1e-5)


def test_how_a_batch_is_cut_into_passes_and_chunks_does_not_change_the_update() -> None:
    after = []
    for cut in ({}, {"micro_tokens": 40}, {"logit_bytes": 96 * 4 * 10}, {"micro_tokens": 1}):
        model, tokenizer = family("qwen3_moe")
        traces = sampled_traces(model, tokenizer, 12)
        learner = Learner(model, LearnerConfig(normalize="rollout", lr=1e-3, **cut))  # type: ignore[arg-type]
        figures = learner.train_step(traces, np.linspace(-1.0, 1.0, 12).tolist())
        after.append((figures, [value.detach().clone() for value in model.parameters()]))
    for figures, values in after[1:]:
        assert figures["grad_norm"] == pytest.approx(after[0][0]["grad_norm"], rel=1e-4)
        assert figures["loss"] == pytest.approx(after[0][0]["loss"], abs=1e-5)
        for one, other in zip(after[0][1], values, strict=True):
            assert float((one - other).abs().max()) < 2e-4


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_each_sequence_is_in_one_pass_and_no_pass_is_too_large(
    lengths: list[int], tokens_max: int
) -> None:
    passes = pack_in_passes(lengths, tokens_max)
    assert sorted(index for one in passes for index in one) == list(range(len(lengths)))
    for one in passes:
        assert len(one) == 1 or sum(lengths[index] for index in one) <= tokens_max


def _update(traces: list[Trace], name: str, **settings: Any) -> tuple[Any, list[torch.Tensor]]:
    model, _ = family(name)
    learner = Learner(model, LearnerConfig(lr=1e-3, warmup_steps=0, clip_norm=1e9, **settings))
    seen: list[torch.Tensor] = []
    original = learner.optimizer.clip

    def clip() -> torch.Tensor:
        seen.extend(value.grad.clone() for value in model.parameters() if value.grad is not None)
        return original()

    learner.optimizer.clip = clip  # type: ignore[method-assign]
    advantages = np.linspace(-1.0, 1.0, len(traces)).tolist()
    return learner.train_step(traces, advantages), seen


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", [{}, {"micro_tokens": 50}, {"checkpointing": True}])
def test_a_shared_prompt_gives_the_log_probs_and_gradients_of_separate_ones(
    name: str, cut: dict[str, Any]
) -> None:
    model, tokenizer = family(name)
    traces = sampled_traces(model, tokenizer, 20)
    alone = traces[3].labels.copy()
    alone[: np.flatnonzero(alone != IGNORE_LABEL)[2]] = IGNORE_LABEL
    traces[3] = replace(traces[3], labels=alone)  # begins to be trained later than its siblings
    apart, gradients = _update(traces, name, share_prompts=False)
    shared, others = _update(traces, name, share_prompts=True, **cut)
    assert shared["logprob_diff_max"] < 1e-4
    assert shared["loss"] == pytest.approx(apart["loss"], abs=1e-5)
    for one, two in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5 * float(one.abs().max()) + 1e-7)


def test_a_prompt_that_went_through_other_experts_is_not_shared() -> None:
    model, tokenizer = family("qwen3_moe")
    traces = sampled_traces(model, tokenizer, 4)
    head = int(np.flatnonzero(traces[0].labels != IGNORE_LABEL)[0])
    assert traces[1].routed_experts is not None
    other = traces[1].routed_experts.copy()
    other[0] = (other[0] + 1) % 8
    traces[1] = replace(traces[1], routed_experts=other)
    positions = [np.flatnonzero(trace.labels != IGNORE_LABEL) for trace in traces]
    device = torch.device("cpu")
    with_routing = PackedTraces(traces, positions, device, routing=True)
    without = PackedTraces(traces, positions, device, routing=False)
    apart = PackedTraces(traces, positions, device, routing=True, share=False)
    whole = sum(int(trained[-1]) for trained in positions)
    assert apart.input_ids.shape[1] == whole
    assert with_routing.input_ids.shape[1] == whole - 2 * head
    assert without.input_ids.shape[1] == whole - 3 * head
    learner = Learner(model, LearnerConfig())
    separate = Learner(model, LearnerConfig(share_prompts=False))
    for one, two in zip(learner.logprobs(traces), separate.logprobs(traces), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


def test_sharers_meet_in_one_pass_and_no_pass_is_too_large() -> None:
    keys = ["a", "b", "a", "b", "a", "a"]
    passes = shared_passes(keys, [10] * 6, [15] * 6, 30)
    assert sorted(index for one in passes for index in one) == list(range(6))
    for one in passes:
        heads = {keys[index] for index in one}
        assert 10 * len(heads) + 5 * len(one) <= 30
    assert shared_passes(keys, [10] * 6, [15] * 6, 1000) == [[0, 2, 4, 5, 1, 3]]


def test_a_window_is_kept_between_tail_and_head() -> None:
    query, key, value = (torch.randn(1, 2, 22, 8) for _ in range(3))
    layout = SharedLayout([10], [Tail(0, 5), Tail(0, 7)])
    assert layout.position_ids[0, 10:].tolist() == [*range(10, 15), *range(10, 17)]
    mixed = layout.attend(0, query, key, value, 0.3, 4)[0]
    for start, count in ((10, 5), (15, 7)):
        rows = [*range(10), *range(start, start + count)]
        for step in range(count):
            seen = rows[: 11 + step][-4:]
            scores = torch.einsum("hd,htd->ht", query[0, :, start + step], key[0, :, seen])
            wanted = torch.softmax(scores * 0.3, -1)[:, None] @ value[0, :, seen]
            torch.testing.assert_close(mixed[start + step], wanted[:, 0], rtol=1e-4, atol=1e-5)


def test_a_sequence_that_is_not_finite_keeps_it_to_itself() -> None:
    query, key, value = (torch.randn(1, 2, 30, 8) for _ in range(3))
    for tensor in (query, key, value):
        tensor[:, :, 3:25] = float("nan")
    mixed = PackedLayout([3, 22, 5]).attend(0, query, key, value, 0.3, None)[0]
    assert mixed[:3].isfinite().all()
    assert mixed[25:].isfinite().all()
    assert mixed[3:25].isnan().all()


def test_a_packed_model_refuses_a_call_without_a_layout() -> None:
    model, _ = family("llama")
    with pytest.raises(LayoutMissing, match="layout=PackedLayout"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)
