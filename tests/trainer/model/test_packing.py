"""Packing changes where tokens lie, never what is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.model.families import FAMILIES, family, sampled_traces
from trainer.learner import Learner
from trainer.model_config import LearnerConfig
from trainer.packing import LayoutMissing, PackedLayout, pack_in_passes

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
