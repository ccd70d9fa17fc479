"""Each loss against a loop over rollouts and tokens, written from its paper's formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer.loss import correction_weights, kl_k3, policy_loss, rollout_means, token_weights
from trainer.model.config import LearnerConfig

SIZES = [3, 5, 1, 8]
RNG = np.random.default_rng(3)
LOGP = -RNG.exponential(1.0, sum(SIZES))
OLD = LOGP + RNG.normal(0, 0.4, sum(SIZES))
ENGINE = LOGP + RNG.normal(0, 0.6, sum(SIZES))
ADVANTAGE = np.repeat(RNG.normal(0, 1, len(SIZES)), SIZES)
ROLLOUT = np.repeat(np.arange(len(SIZES)), SIZES)


def _ours(config: LearnerConfig) -> list[float]:
    as_tensor = [torch.tensor(value, dtype=torch.float64) for value in (LOGP, OLD, ADVANTAGE)]
    made = policy_loss(config, *as_tensor, torch.tensor(ROLLOUT), len(SIZES))  # type: ignore[arg-type]
    return made.loss.tolist()


def _loop(term: Callable[[float, float, float], float], *, sequence: bool = False) -> list[float]:
    losses, first = [], 0
    for size in SIZES:
        part = range(first, first + size)
        mean = math.exp(sum(LOGP[t] - OLD[t] for t in part) / size)
        for t in part:
            ratio = mean if sequence else math.exp(LOGP[t] - OLD[t])
            losses.append(term(ratio, float(ADVANTAGE[t]), float(LOGP[t])))
        first += size
    return losses


def _clipped(low: float, high: float) -> Callable[[float, float, float], float]:
    def term(ratio: float, advantage: float, logp: float) -> float:
        bounded = min(max(ratio, 1 - low), 1 + high)
        return -min(ratio * advantage, bounded * advantage)

    return term


def _dual(ratio: float, advantage: float, logp: float) -> float:
    gain = -_clipped(0.2, 0.2)(ratio, advantage, logp)
    return -max(gain, 1.5 * advantage) if advantage < 0 else -gain


CASES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "grpo": ({"loss": "grpo"}, _loop(_clipped(0.2, 0.2))),
    "dapo_clip_higher": ({"loss": "grpo", "clip_high": 0.28}, _loop(_clipped(0.2, 0.28))),
    "dual_clip": ({"loss": "grpo", "clip_dual": 1.5}, _loop(_dual)),
    "decoupled_ppo": ({"loss": "decoupled_ppo"}, _loop(_clipped(0.2, 0.2))),
    "gspo": (
        {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.02},
        _loop(_clipped(0.01, 0.02), sequence=True),
    ),
    "cispo": (
        {"loss": "cispo", "clip_high": 0.1},
        _loop(lambda ratio, advantage, logp: -min(ratio, 1.1) * advantage * logp),
    ),
    "reinforce": (
        {"loss": "reinforce"},
        _loop(lambda ratio, advantage, logp: -advantage * logp),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_formula(name: str) -> None:
    settings, wanted = CASES[name]
    np.testing.assert_allclose(_ours(LearnerConfig(**settings)), wanted, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    """For cispo the weight is a constant, so its difference quotient holds it fixed."""
    config = LearnerConfig(**CASES[name][0])
    logp = torch.tensor(LOGP, requires_grad=True)
    others = torch.tensor(OLD), torch.tensor(ADVANTAGE), torch.tensor(ROLLOUT), len(SIZES)
    policy_loss(config, logp, *others).loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    step = 1e-6
    for index in range(len(LOGP)):
        moved = []
        for sign in (1, -1):
            shifted = torch.tensor(LOGP)
            shifted[index] += sign * step
            made = policy_loss(config, shifted, *others)
            if config.loss == "cispo":
                fixed = torch.exp(torch.tensor(LOGP - OLD)).clamp(max=1.1)
                moved.append(float((-fixed * others[1] * shifted).sum()))
            else:
                moved.append(float(made.loss.sum()))
        quotient = (moved[0] - moved[1]) / (2 * step)
        assert float(logp.grad[index]) == pytest.approx(quotient, rel=1e-4, abs=1e-7)


def test_at_equal_log_probs_every_loss_pulls_with_the_advantage() -> None:
    for name, (settings, _) in CASES.items():
        logp = torch.tensor(LOGP, requires_grad=True)
        made = policy_loss(
            LearnerConfig(**settings),
            logp,
            torch.tensor(LOGP),
            torch.tensor(ADVANTAGE),
            torch.tensor(ROLLOUT),
            len(SIZES),
        )
        made.loss.sum().backward()  # type: ignore[no-untyped-call]
        assert logp.grad is not None
        assert not made.clipped.any(), name
        np.testing.assert_allclose(logp.grad.numpy(), -ADVANTAGE, rtol=1e-9, err_msg=name)


def _corrected(**settings: Any) -> list[float]:
    weights = correction_weights(
        LearnerConfig(**settings), torch.tensor(LOGP), torch.tensor(ENGINE)
    )
    return weights.tolist()


def test_correction_truncates_or_masks_the_ratio_of_learner_and_engine() -> None:
    ratios = [math.exp(value) for value in LOGP - ENGINE]
    truncated = [min(ratio, 1.3) for ratio in ratios]
    masked = [ratio if 0.8 <= ratio <= 1.3 else 0.0 for ratio in ratios]
    limits = {"correction_min": 0.8, "correction_max": 1.3}
    assert _corrected(correction="none") == [1.0] * len(LOGP)
    np.testing.assert_allclose(_corrected(correction="truncate", **limits), truncated)
    np.testing.assert_allclose(_corrected(correction="mask", **limits), masked)
    np.testing.assert_allclose(_corrected(loss="decoupled_ppo", **limits), truncated)
    assert 0.0 in masked
    assert 1.3 in truncated


def test_k3_is_never_negative_and_its_mean_is_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.log_softmax(torch.randn(12, generator=generator), 0)
    reference = torch.log_softmax(torch.randn(12, generator=generator), 0)
    estimate = kl_k3(policy, reference)
    assert float(estimate.min()) >= 0.0
    exact = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * estimate).sum()) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("normalize", ["token", "rollout", "constant"])
def test_token_weights_make_the_average_that_they_are_named_after(normalize: str) -> None:
    values = RNG.normal(0, 1, len(LOGP))
    weights = token_weights(normalize, ROLLOUT, 50)  # type: ignore[arg-type]
    means = [values[rollout == ROLLOUT].mean() for rollout in range(len(SIZES))]
    wanted = {
        "token": values.mean(),
        "rollout": sum(means) / len(SIZES),
        "constant": values.sum() / (len(SIZES) * 50),
    }[normalize]
    assert float((values * weights).sum()) == pytest.approx(wanted, rel=1e-5)


def test_rollout_means_of_a_rollout_without_tokens_is_zero() -> None:
    means = rollout_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2]), 3)
    assert means.tolist() == [2.0, 0.0, 5.0]
