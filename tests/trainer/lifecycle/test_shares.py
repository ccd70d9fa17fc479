"""The split of a batch over tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.shares import TaskMix

weights = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=1, max_size=5)


@given(weights, st.integers(1, 16), st.integers(1, 60))
def test_L31_every_batch_is_full_and_every_task_has_its_share_within_one(
    shares: dict[str, int], batch: int, last: int
) -> None:
    mix = TaskMix(shares)
    given_to = dict.fromkeys(shares, 0)
    for step in range(1, last + 1):
        split = mix.split(step, batch)
        assert sum(split.values()) == batch
        for task, count in split.items():
            given_to[task] += count
    for task, share in shares.items():
        assert abs(given_to[task] - last * batch * share / sum(shares.values())) < 1


@given(weights, st.integers(1, 16), st.integers(1, 10_000))
def test_L31_the_split_is_a_function_of_the_train_step_alone(
    shares: dict[str, int], batch: int, step: int
) -> None:
    assert TaskMix(shares).split(step, batch) == TaskMix(shares).split(step, batch)


def test_L31_fractions_are_exact() -> None:
    mix = TaskMix({"a": 0.75, "b": 0.25})
    assert mix.split(1, 4) == {"a": 3, "b": 1}


def test_a_task_without_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight of task 'a' is 0"):
        TaskMix({"a": 0})
