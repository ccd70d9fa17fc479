"""Staleness, expiry and the budget agree with their definitions in lifecycle.md, by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.expiry import Expiry, ExpiryAction
from trainer.rollout import Group, Rollout, Status
from trainer.staleness import StalenessBudget, mask_stale_labels, token_staleness
from trainer.tail_batch import TailBatch

steps = st.integers(0, 30)
small = st.integers(0, 4)


@given(steps, small, st.integers(1, 4), st.none() | small, steps)
def test_L23_usable_batches_are_exactly_the_steps_that_can_still_train_it(
    model_step: int, m: int, s: int, max_token: int | None, next_step: int
) -> None:
    budget = StalenessBudget(m, s, max_token, batches_ahead_max=1000)
    expiry = Expiry(max_staleness=m, sync_interval=s, max_token_staleness=max_token)
    fresh = Rollout("s", model_step_min=model_step, model_step_max=model_step)
    deadline = expiry.rollout_deadline(fresh)
    assert deadline is not None
    can = [t for t in range(next_step, 200) if t < deadline]
    assert budget.batches_usable(model_step, next_step) == len(can)


@given(steps, small, st.integers(1, 4), st.none() | small, steps, st.integers(1, 60))
def test_L16_L18_a_rollout_is_due_exactly_when_its_definition_says_so(
    oldest: int, m: int, s: int, max_token: int | None, span: int, train_step: int
) -> None:
    newest = oldest + span
    expiry = Expiry(max_staleness=m, sync_interval=s, max_token_staleness=max_token)
    rollout = Rollout("s", model_step_min=oldest, model_step_max=newest)
    too_old = token_staleness(train_step, oldest) >= (m + 1) * s
    nothing_left = max_token is not None and token_staleness(train_step, newest) > max_token
    deadline = expiry.rollout_deadline(rollout)
    assert (deadline is not None and deadline <= train_step) == (too_old or nothing_left)


@given(st.lists(steps, min_size=1, max_size=40), st.integers(1, 60), small)
def test_L18_tokens_that_are_too_old_lose_their_label_and_no_others(
    model_steps: list[int], train_step: int, limit: int
) -> None:
    ages = np.array(model_steps, np.int32)
    labels = np.arange(len(ages), dtype=np.int32)
    masked = mask_stale_labels(labels, ages, train_step, limit)
    for label, age, after in zip(labels, ages, masked, strict=True):
        stale = token_staleness(train_step, int(age)) > limit
        assert after == (-100 if stale else label)


def test_L18_nothing_is_copied_when_nothing_is_stale() -> None:
    labels = np.array([1, -100, 3], np.int32)
    ages = np.array([4, -1, 4], np.int32)
    assert mask_stale_labels(labels, ages, 5, 0) is labels
    assert mask_stale_labels(labels, ages, 5, None) is labels


def test_L16_retry_cuts_the_stale_members_and_keeps_the_fresh_ones() -> None:
    expiry = Expiry(max_staleness=0)
    old = Rollout("old", status=Status.COMPLETED, leaves=(1,), model_step_min=0, model_step_max=3)
    new = Rollout("new", status=Status.COMPLETED, leaves=(1,), model_step_min=3, model_step_max=3)
    group, stale = expiry.cut_stale(Group("g", "t", None, (old, new)), train_step=4)
    assert stale == (old,)
    assert group.rollouts[1] is new
    assert group.status is Status.EXPIRED
    assert group.rollouts[0].leaves == ()
    assert expiry.group_deadline(group) == 5  # the fresh member's


@pytest.mark.parametrize(
    ("size", "expired", "was", "exhausted", "active", "retries"),
    [
        (-1, 9, False, False, False, False),
        (0, 1, False, False, False, True),
        (3, 2, False, False, False, False),
        (3, 3, False, False, True, True),
        (3, 1, True, False, True, True),
        (3, 0, True, False, False, False),
        (3, 1, False, True, True, True),
    ],
)
def test_L19_tail_batches_begin_and_end_where_they_should(
    size: int, expired: int, was: bool, exhausted: bool, active: bool, retries: bool
) -> None:
    tail = TailBatch(size)
    assert tail.active(expired, was, exhausted) is active
    assert tail.may_retry(active) is retries


def test_a_rule_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="tail_batch is -1 with action 'retry'"):
        Expiry(ExpiryAction.RETRY, tail_batch=-1)
    with pytest.raises(ConfigError, match="tail_batch is -2; allowed are -1"):
        Expiry(ExpiryAction.DROP, tail_batch=-2)
    with pytest.raises(ConfigError, match="tail_batch is 3 with action 'drop'"):
        Expiry(ExpiryAction.DROP, tail_batch=3)
    with pytest.raises(ConfigError, match="'burn' is unknown; allowed are 'retry', 'drop'"):
        Expiry("burn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_staleness is -1"):
        StalenessBudget(max_staleness=-1)
