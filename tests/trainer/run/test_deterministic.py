"""What a deterministic run trains depends on no time: neither on who is computed with whom, nor on
who ends first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shmstore import Store
from tests.trainer.run.runs import TINY
from trainer.config import load
from trainer.engine.protocol import GenerateRequest, Generation, SamplingParams
from trainer.rollout import Batch, Group, Rollout
from trainer.run.driver import Driver, _Clock
from trainer.run.engine_actor import make_engine
from trainer.run.learner_actor import StepDone

EXACT = ("run.deterministic=true", "schedule=sync")


def _request(n: int) -> GenerateRequest:
    """Its context is that of others of its group; lengths differ from group to group."""
    group = n // 4
    return GenerateRequest(
        request_id=f"r{n}",
        session_id=f"s{n}",
        token_ids=np.arange(3, 8 + group % 5, dtype=np.int32),
        params=SamplingParams(max_new_tokens=4 + group % 9),
        group_id=f"g{group}",
    )


async def _answers(engine: Any, company: Sequence[int]) -> dict[int, Generation]:
    found = await asyncio.gather(*(engine.generate(_request(n)) for n in company))
    return dict(zip(company, found, strict=True))


async def test_an_engine_of_a_deterministic_run_computes_the_same_bits_in_any_company(
    store: Store,
) -> None:
    config = load(TINY, (*EXACT, "engine.max_batch=8", "engine.waiting_max=32"))
    engine, _ = make_engine(config, 1, store)
    try:
        together = await _answers(engine, range(40))  # all that it accepts
        for company in ([39], [7, 3], range(0, 40, 3), range(39, -1, -1)):
            for n, alone in (await _answers(engine, company)).items():
                np.testing.assert_array_equal(alone.token_ids, together[n].token_ids)
                np.testing.assert_array_equal(alone.logprobs, together[n].logprobs)
    finally:
        await engine.aclose()


@pytest.mark.parametrize("settings", [EXACT, ()])
async def test_the_learner_of_a_deterministic_run_gets_a_batch_in_one_order(settings: Any) -> None:
    given: list[str] = []

    async def train(groups: Sequence[Group], step: int, publish: bool) -> StepDone:
        given.extend(group.uid for group in groups)
        return StepDone(step, {}, 0)

    driver = object.__new__(Driver)
    driver._config = load(TINY, settings)
    driver._parts = cast(Any, SimpleNamespace(learner=SimpleNamespace(train=train)))
    driver._clock, driver._moved = _Clock(0.0), lambda _: None
    rollouts = (Rollout("s", "p", "sort"),)
    groups = tuple(Group(uid=f"sort-{n}", task="sort", rollouts=rollouts) for n in (2, 0, 3, 1))
    await driver.train(Batch(groups, cast(Any, None), 1), 1)
    order = range(4) if settings else (2, 0, 3, 1)
    assert given == [f"sort-{n}" for n in order]
