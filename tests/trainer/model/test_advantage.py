"""Advantages against loops in plain Python."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantage import (
    Estimator,
    batch_advantages,
    compute_advantages,
    is_degenerate,
    overlong_penalty,
)
from trainer.errors import ConfigError

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@given(rewards)
def test_grpo_is_the_reward_in_deviations_from_the_mean(values: list[float]) -> None:
    if len(set(values)) == 1:
        return
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    wanted = [(value - mean) / (deviation + 1e-4) for value in values]
    np.testing.assert_allclose(compute_advantages(values, "grpo"), wanted, rtol=1e-4, atol=1e-4)


@given(rewards)
def test_rloo_compares_with_the_mean_of_the_others(values: list[float]) -> None:
    wanted = []
    for index, value in enumerate(values):
        others = values[:index] + values[index + 1 :]
        wanted.append(value - statistics.fmean(others))
    np.testing.assert_allclose(compute_advantages(values, "rloo"), wanted, rtol=1e-4, atol=1e-4)


@given(rewards)
def test_dr_grpo_does_not_divide(values: list[float]) -> None:
    wanted = [value - statistics.fmean(values) for value in values]
    np.testing.assert_allclose(compute_advantages(values, "dr_grpo"), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_a_group_that_agrees_teaches_exactly_nothing(estimator: str, value: float) -> None:
    advantages = compute_advantages([value] * 7, estimator)  # type: ignore[arg-type]
    assert advantages.tolist() == [0.0] * 7
    assert is_degenerate([value] * 7)
    assert not is_degenerate([value, value + 1])


def test_mean_uses_the_whole_batch_as_baseline() -> None:
    first, second = batch_advantages([[1.0, 1.0], [0.0, 0.0]], "mean")
    assert first == [0.5, 0.5]
    assert second == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("values", "estimator", "says"),
    [
        ([1.0, math.nan], "grpo", "finite"),
        ([], "grpo", "finite"),
        ([1.0], "rloo", "the others"),
        ([1.0, 2.0], "mean", "baseline"),
        ([1.0, 2.0], "ppo", "allowed are"),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    values: list[float], estimator: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        compute_advantages(values, estimator)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "mean"])
@pytest.mark.parametrize("values", [[1e308, 1.7e308], [1.2e154, -1.2e154, 0.0]])
def test_rewards_too_large_to_be_summed_do_not_end_the_run(
    values: list[float], estimator: Estimator
) -> None:
    """What is not finite then, the learner leaves out, and says so."""
    (found,) = batch_advantages([values], estimator)
    assert len(found) == len(values)


def test_the_penalty_of_length_falls_over_the_buffer_and_stays_at_minus_one() -> None:
    assert [overlong_penalty(n, 100, 20) for n in (0, 80, 85, 90, 100, 130)] == [
        0.0,
        0.0,
        -0.25,
        -0.5,
        -1.0,
        -1.0,
    ]
    assert overlong_penalty(1000, 100, 0) == 0.0
