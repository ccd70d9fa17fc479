"""Optimizer, schedules, and going on from a saved state bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.model.families import MIXTURES, family, sampled_traces
from trainer.errors import ConfigError, SnapshotError
from trainer.learner import Learner, UpdateNotFinite
from trainer.model.config import LearnerConfig
from trainer.optim import learning_rate
from trainer.segment import IGNORE_LABEL

ADVANTAGES = np.linspace(-1.0, 1.0, 8).tolist()


@pytest.fixture
def _deterministic_no_longer() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def _weights(model: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("through_folder", [False, True])
@pytest.mark.usefixtures("_deterministic_no_longer")
def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: Path, through_folder: bool) -> None:
    config = LearnerConfig(deterministic=True, weight_decay=0.1)
    model, tokenizer = family("qwen3_moe")
    traces = sampled_traces(model, tokenizer, 8)
    learner = Learner(model, config)
    for step in range(3):
        learner.train_step(traces, ADVANTAGES, train_step=step)
    if through_folder:
        learner.save(tmp_path)
    arrays = {name: np.array(value) for name, value in learner.state_arrays().items()}
    later = [learner.train_step(traces, ADVANTAGES) for _ in range(3)]

    other, _ = family("qwen3_moe")
    restored = Learner(other, config)
    if through_folder:
        restored.load(tmp_path)
    else:
        restored.load_state_arrays(arrays)
    assert restored.optimizer.steps == 3
    assert [restored.train_step(traces, ADVANTAGES) for _ in range(3)] == later
    for one, two in zip(_weights(model), _weights(other), strict=True):
        assert torch.equal(one, two)


def test_state_before_the_first_step_can_be_restored(tmp_path: Path) -> None:
    model, tokenizer = family("llama")
    traces = sampled_traces(model, tokenizer, 8)
    learner = Learner(model, LearnerConfig())
    learner.save(tmp_path)
    first = learner.train_step(traces, ADVANTAGES)
    learner.load(tmp_path)
    assert learner.optimizer.steps == 0
    assert learner.train_step(traces, ADVANTAGES) == first


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    Learner(family("llama")[0], LearnerConfig()).save(tmp_path)
    other = Learner(family("qwen3_moe")[0], LearnerConfig())
    with pytest.raises(SnapshotError, match="another model"):
        other.load(tmp_path)
    with pytest.raises(SnapshotError, match="cannot be read"):
        other.load(tmp_path / "nowhere")
    (tmp_path / "learner.safetensors").write_bytes(b"torn")
    with pytest.raises(SnapshotError, match="cannot be read"):
        other.load(tmp_path)


def test_training_raises_what_was_good_and_lowers_what_was_bad() -> None:
    model, tokenizer = family("qwen3_moe")
    traces = sampled_traces(model, tokenizer, 8)
    learner = Learner(model, LearnerConfig(lr=1e-3, warmup_steps=0))
    before = learner.logprobs(traces)
    for _ in range(5):
        learner.train_step(traces, [1.0] * 4 + [-1.0] * 4)
    after = learner.logprobs(traces)
    gained = [float((new - old).sum()) for new, old in zip(after, before, strict=True)]
    assert sum(gained[:4]) > 0 > sum(gained[4:])


def test_several_optimizer_steps_take_the_ratio_against_the_weights_before_them() -> None:
    model, tokenizer = family("qwen3_moe")
    traces = sampled_traces(model, tokenizer, 8)
    config = LearnerConfig(minibatches=4, old_logprobs="learner", lr=1e-2, warmup_steps=0)
    figures = Learner(model, config).train_step(traces, ADVANTAGES)
    assert abs(figures["ratio_mean"] - 1.0) > 1e-4
    assert figures["tokens"] == sum(trace.n_trainable for trace in traces)


def test_rollouts_with_several_traces_count_once() -> None:
    """A rollout cut into two traces weighs as much as the whole one."""
    model, tokenizer = family("llama")
    whole = sampled_traces(model, tokenizer, 4)
    long = max(whole, key=len)
    half = len(long) - long.n_trainable // 2
    first, second = long.labels.copy(), long.labels.copy()
    first[half:], second[:half] = IGNORE_LABEL, IGNORE_LABEL
    cut = [replace(long, labels=first), replace(long, labels=second)]
    rest = [trace for trace in whole if trace is not long]
    config = LearnerConfig(normalize="rollout", lr=0.0)
    one = Learner(model, config).train_step([long, *rest], [1.0, 0.5, -0.5, -1.0])
    two = Learner(model, config).train_step(
        [*cut, *rest], [1.0, 1.0, 0.5, -0.5, -1.0], rollout_ids=[7, 7, 8, 9, 10]
    )
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_L18_tokens_too_stale_are_left_out_of_the_loss() -> None:
    model, tokenizer = family("llama")
    traces = []
    for trace in sampled_traces(model, tokenizer, 4):
        steps = trace.model_steps.copy()
        steps[-3:] = 4
        traces.append(replace(trace, model_steps=steps))  # the others were sampled by step 0
    learner = Learner(model, LearnerConfig())
    figures = learner.train_step(traces, [1.0] * 4, train_step=6, max_token_staleness=1)
    assert figures["tokens"] == 12
    nothing = learner.train_step(traces, [1.0] * 4, train_step=9, max_token_staleness=1)
    assert nothing["tokens"] == 0
    assert "loss" not in nothing
    assert learner.optimizer.steps == 1


def test_gradients_that_are_not_finite_never_reach_the_weights() -> None:
    model, tokenizer = family("llama")
    traces = sampled_traces(model, tokenizer, 4)
    learner = Learner(model, LearnerConfig())
    before = _weights(model)
    for _ in range(2):
        assert learner.train_step(traces, [float("inf")] * 4)["updates_skipped"] == 1
    with pytest.raises(UpdateNotFinite, match="3 updates in a row"):
        learner.train_step(traces, [float("inf")] * 4)
    for one, two in zip(before, _weights(model), strict=True):
        assert torch.equal(one, two)


def test_the_learning_rate_warms_up_and_decays() -> None:
    config = LearnerConfig(
        lr=1.0, warmup_steps=4, schedule="linear", decay_steps=14, lr_min_ratio=0.2
    )
    rates = [learning_rate(config, step) for step in range(16)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[9] == pytest.approx(0.6)
    assert rates[14] == rates[15] == pytest.approx(0.2)
    cosine = replace(config, schedule="cosine")
    assert learning_rate(cosine, 9) == pytest.approx(0.6)
    assert learning_rate(cosine, 14) == pytest.approx(0.2)
    assert learning_rate(replace(config, schedule="constant"), 1000) == 1.0


def test_weight_decay_leaves_vectors_alone() -> None:
    model, _ = family("llama")
    learner = Learner(model, LearnerConfig(lr=0.1, weight_decay=0.5, warmup_steps=0))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    learner.optimizer.step()
    for name, value in model.named_parameters():
        wanted = before[name] * (0.95 if value.ndim >= 2 else 1.0)
        torch.testing.assert_close(value.detach(), wanted)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ranks": 2}, "several ranks are not built yet"),
        ({"lr": -1.0}, "at least 0"),
        ({"schedule": "linear"}, "decay_steps"),
        ({"loss": "ppo"}, "allowed are"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Learner(family("llama")[0], LearnerConfig(**settings))


def test_autocast_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    model, tokenizer = family("qwen3_moe")
    traces = sampled_traces(model, tokenizer, 8)
    figures = Learner(model, LearnerConfig(autocast=True)).train_step(traces, ADVANTAGES)
    assert all(value.dtype == torch.float32 for value in model.parameters())
    assert 1e-4 < figures["logprob_diff_max"] < 2.0  # the rounding of bfloat16, and no more
    assert np.isfinite(figures["grad_norm"])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_autocast_reaches_the_experts_and_their_gradients_stay_float32(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' grouped product follows the type of the weights, not autocast."""
    types: set[torch.dtype] = set()
    product = torch.nn.functional.grouped_mm

    def watched(left: torch.Tensor, right: torch.Tensor, **rest: Any) -> torch.Tensor:
        types.update((left.dtype, right.dtype))
        return product(left, right, **rest)

    model, tokenizer = family(name)
    traces = sampled_traces(model, tokenizer, 4)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    plain, narrow = (
        Learner(family(name)[0], LearnerConfig(autocast=autocast, checkpointing=checkpointing))
        for autocast in (False, True)
    )
    exact = plain.train_step(traces, ADVANTAGES[:4])
    assert types == {torch.float32}
    types.clear()
    rounded = narrow.train_step(traces, ADVANTAGES[:4])
    assert types == {torch.bfloat16}
    assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)


def test_weights_in_half_precision_are_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        Learner(family("llama")[0].bfloat16(), LearnerConfig())


def test_batches_that_do_not_fit_together_are_refused() -> None:
    model, tokenizer = family("llama")
    traces = sampled_traces(model, tokenizer, 4)
    learner = Learner(model, LearnerConfig())
    with pytest.raises(ConfigError, match="as many advantages"):
        learner.train_step(traces, [1.0])
    with pytest.raises(ConfigError, match="one for each"):
        learner.train_step(traces, [np.zeros(2)] * 4)
