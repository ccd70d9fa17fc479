"""The learner sees what the engine saw: log-probs of every token, for every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.model.families import COMMON, FAMILIES, MIXTURES, SHARPEN, family, sampled_traces
from trainer.learner import Learner
from trainer.model.config import LearnerConfig, ModelConfig
from trainer.model.models import build_model
from trainer.model.packed_forward import RoutingMissing
from trainer.segment import Trace

BOUND = 1e-4


def _gap(logprobs: list[Any], traces: list[Trace]) -> float:
    return max(
        float(np.abs(mine - trace.logprobs).max())
        for mine, trace in zip(logprobs, traces, strict=True)
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_learner_and_engine_agree_on_every_token_with_equal_weights(
    name: str, temperature: float
) -> None:
    model, tokenizer = family(name)
    traces = sampled_traces(model, tokenizer, 24, temperature=temperature)
    learner = Learner(model, LearnerConfig(temperature=temperature))
    assert sum(trace.n_trainable for trace in traces) > 200
    assert _gap(learner.logprobs(traces), traces) < BOUND
    figures = learner.train_step(traces, [1.0] * len(traces))
    assert figures["logprob_diff_max"] < BOUND


@pytest.mark.parametrize("name", MIXTURES)
def test_log_probs_under_another_temperature_differ(name: str) -> None:
    model, tokenizer = family(name)
    traces = sampled_traces(model, tokenizer, 8, temperature=0.7)
    learner = Learner(model, LearnerConfig(temperature=1.0))
    assert _gap(learner.logprobs(traces), traces) > 0.01


@pytest.mark.parametrize("name", MIXTURES)
def test_permuted_experts_change_log_probs_and_loss(name: str) -> None:
    model, tokenizer = family(name)
    traces = sampled_traces(model, tokenizer, 8)
    permuted = []
    for trace in traces:
        assert trace.routed_experts is not None
        permuted.append(replace(trace, routed_experts=(trace.routed_experts + 1) % 8))
    learner = Learner(model, LearnerConfig(lr=0.0))
    assert _gap(learner.logprobs(permuted), traces) > 0.1
    advantages = np.linspace(-1.0, 1.0, len(traces)).tolist()
    same = learner.train_step(traces, advantages)["loss"]
    other = learner.train_step(permuted, advantages)["loss"]
    assert abs(same - other) > 1e-3


@pytest.mark.parametrize("name", MIXTURES)
def test_replay_removes_the_mismatch_that_moved_weights_make_in_the_routing(name: str) -> None:
    """The engine ran with bfloat16 weights, the learner holds float32: some tokens would go to
    other experts. Replay keeps the gap at the size of the rounding."""
    model, tokenizer = family(name)
    rounded = family(name)[0]
    with torch.no_grad():
        for value in rounded.parameters():
            value.copy_(value.bfloat16().float())
    traces = sampled_traces(rounded, tokenizer, 32)
    learner = Learner(model, LearnerConfig())
    with_replay = _gap(learner.logprobs(traces, replay=True), traces)
    without = _gap(learner.logprobs(traces, replay=False), traces)
    assert with_replay < without


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_the_router_and_only_the_forced_experts(
    name: str, checkpointing: bool
) -> None:
    model, tokenizer = family(name)
    traces = []
    for trace in sampled_traces(model, tokenizer, 8):
        assert trace.routed_experts is not None
        forced = np.zeros_like(trace.routed_experts)
        forced[:, :, 0], forced[:, :, 1] = 3, 5
        traces.append(replace(trace, routed_experts=forced))
    learner = Learner(model, LearnerConfig(lr=0.0, checkpointing=checkpointing))
    seen: dict[str, torch.Tensor] = {}
    original = learner.optimizer.clip

    def clip() -> torch.Tensor:
        seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        return original()

    learner.optimizer.clip = clip  # type: ignore[method-assign]
    learner.train_step(traces, np.linspace(-1.0, 1.0, len(traces)).tolist())
    routers = [grad for key, grad in seen.items() if key.endswith("gate.weight")]
    assert len(routers) == 3
    assert all(float(grad.abs().sum()) > 0 for grad in routers)
    for key, grad in seen.items():
        if ".experts." in key:
            touched = grad.abs().flatten(1).sum(dim=1).nonzero().flatten().tolist()
            assert touched == [3, 5], (key, touched)


def test_recomputed_layers_meet_the_same_experts() -> None:
    gradients = []
    for checkpointing in (False, True):
        model, tokenizer = family("qwen3_moe")
        traces = []
        for trace in sampled_traces(model, tokenizer, 8):
            assert trace.routed_experts is not None
            traces.append(replace(trace, routed_experts=(trace.routed_experts + 3) % 8))
        learner = Learner(model, LearnerConfig(checkpointing=checkpointing, warmup_steps=0))
        learner.train_step(traces, np.linspace(-1.0, 1.0, len(traces)).tolist())
        gradients.append([value.detach().clone() for value in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-4, atol=1e-6)


def test_more_than_256_experts_are_recorded_in_two_bytes_and_replayed() -> None:
    settings = {**COMMON, **FAMILIES["qwen3_moe"], "num_experts": 300, "moe_intermediate_size": 16}
    model, tokenizer = build_model(ModelConfig(config=settings, tokenizer="char"))
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim >= 2:
                value.mul_(SHARPEN)
    traces = sampled_traces(model, tokenizer, 16)
    for trace in traces:
        assert trace.routed_experts is not None
        assert trace.routed_experts.dtype == np.uint16
    assert max(int(trace.routed_experts.max()) for trace in traces) > 255  # type: ignore[union-attr]
    learner = Learner(model, LearnerConfig())
    assert _gap(learner.logprobs(traces), traces) < BOUND
    moved = [replace(t, routed_experts=(t.routed_experts + 1) % 300) for t in traces]  # type: ignore[operator]
    assert _gap(learner.logprobs(moved), traces) > 0.05


def test_a_trace_without_routing_is_an_error_when_replay_is_on() -> None:
    model, tokenizer = family("olmoe")
    trace = replace(sampled_traces(model, tokenizer, 4)[0], routed_experts=None)
    with pytest.raises(RoutingMissing, match="no routed experts"):
        Learner(model, LearnerConfig()).logprobs([trace])
    Learner(model, LearnerConfig(replay=False)).logprobs([trace])


def test_reference_with_equal_weights_has_no_divergence_and_then_some() -> None:
    model, tokenizer = family("qwen3_moe")
    traces = sampled_traces(model, tokenizer, 8)
    learner = Learner(model, LearnerConfig(kl_coef=0.1, lr=1e-2, warmup_steps=0))
    first = learner.train_step(traces, np.linspace(-1.0, 1.0, len(traces)).tolist())
    second = learner.train_step(traces, np.linspace(-1.0, 1.0, len(traces)).tolist())
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_reference"] > 1e-6
