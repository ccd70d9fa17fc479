"""Agents that branch: several paths of one session through the convenient API, all of them trained,
also when the rollout is stopped on any of them and goes on later (L05, L11).
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import Desk, desk
from trainer.engine.protocol import SamplingParams, WeightsVersion
from trainer.engine.scripted import Script, routing_of
from trainer.environment import Session
from trainer.rollout import FinishReason, Prompt, Rollout, Status
from trainer.segment import IGNORE_LABEL
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual

SLOW = Script(token_s=1.0, tokens_min=6, tokens_max=6)
WIDE = {"batch_groups": 1, "budget": StalenessBudget(max_staleness=5)}


class _Branching:
    """As `kit.Branches`, and looks at where it is."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        opening = await session.generate(prompt.text)
        await session.generate("go on; ")
        session.rewind(opening)
        assert session.text == opening.text
        await session.append("said and taken back")
        session.rewind(opening)
        await session.generate("or rather; ")
        session.rewind()
        assert session.text == ""
        await session.generate("something else; ")


def _paths(made: Desk, rollout: Rollout) -> list[str]:
    """The tokens of every leaf's path as text, with `*` for what the model sampled."""
    found = []
    for leaf in rollout.leaves:
        trace = made.traces.export(rollout.session_id, node=leaf)
        assert trace.routed_experts is not None
        wanted = routing_of(made.engine.script, trace.token_ids)
        np.testing.assert_array_equal(trace.routed_experts[:-1], wanted[:-1])
        sampled = trace.labels != IGNORE_LABEL
        assert (trace.model_steps >= 0).tolist() == sampled.tolist()
        said = bytes(trace.token_ids.astype(np.uint8))
        text = "".join("*" if s else chr(c) for c, s in zip(said, sampled, strict=True))
        found.append("*".join(part for part in text.split("*") if part) + "*")
    return found


def test_every_path_of_a_branching_agent_is_a_leaf_and_is_trained(store: Store) -> None:
    async def main() -> None:
        async with desk(store, environment=_Branching(), dispatch=WIDE) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            for rollout in batch.rollouts:
                question = f"question {rollout.prompt_uid.split('/')[1]}"
                assert _paths(made, rollout) == [
                    f"{question}*go on; *",
                    f"{question}*or rather; *",
                    "something else; *",
                ]
                described = made.traces.describe(Rollout(rollout.session_id))
                assert rollout.leaves == described.leaves
                assert rollout.n_prompt_nodes == described.n_prompt_nodes == 1
                assert rollout.n_tokens == described.n_tokens
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


@pytest.mark.parametrize("pause_at_s", [2.5, 6.5, 8.5, 11.5, 13.5, 16.5, 18.5])
def test_L11_a_branching_rollout_goes_on_on_the_path_where_it_was_stopped(
    store: Store, pause_at_s: float
) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, environment=_Branching(), dispatch=WIDE) as made:
            await asyncio.sleep(pause_at_s)
            assert (await made.producer.pause(10)).cancelled_rollouts == 0
            kept = made.engine.generated_tokens
            n_rollouts = len(store.sessions.list("replay"))
            await made.engine.load_weights(WeightsVersion(b"", 1))
            await made.dispatcher.set_steps(model_step=1)
            await made.producer.resume()
            batch = await made.dispatcher.take(1, owner="learner", timeout=1000)
            for rollout in batch.rollouts:
                assert rollout.status is Status.COMPLETED
                assert len(_paths(made, rollout)) == 3
                assert made.traces.describe(Rollout(rollout.session_id)).leaves == rollout.leaves
                assert (rollout.model_step_min, rollout.model_step_max) == (0, 1)
                steps = [
                    made.traces.segment(rollout.session_id, node).model_steps.tolist()
                    for node in range(made.traces.length(rollout.session_id))
                ]
                # All rollouts are alike: what was sampled before the pause is still there.
                assert sum(row.count(0) for row in steps) * n_rollouts == kept
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


class _RewindsWrong:
    async def run(self, session: Session, prompt: Prompt) -> None:
        turn: Any = await session.generate(prompt.text)
        session.rewind(type("OfAnother", (), {"node": turn.node + 7})())


def test_L13_going_back_to_a_turn_that_is_none_fails_the_rollout_by_name(store: Store) -> None:
    async def main() -> None:
        async with desk(store, environment=_RewindsWrong(), dispatch=WIDE) as made:
            await asyncio.sleep(1)
            (error, *_) = made.producer.report().errors
            assert "has no turn that ends at node 8; its turns end at [1]" in error

    run_virtual(main())


class _Swaps:
    """Two rollouts at once, one of which goes back to the other's turn."""

    def __init__(self) -> None:
        self.turns: list[Any] = []

    async def run(self, session: Session, prompt: Prompt) -> None:
        self.turns.append(await session.generate(prompt.text))
        await session.generate("go on; ")
        session.rewind(next(t for t in self.turns if t is not self.turns[-1]))
        session.rewind(self.turns[-1])


def test_L13_a_turn_of_another_session_is_refused_although_its_number_is_the_same(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store, environment=_Swaps(), dispatch=WIDE) as made:
            await asyncio.sleep(5)
            (error, *_) = made.producer.report().errors
            assert "a turn of another session was given" in error

    run_virtual(main())


class _Notes:
    """Two turns, and why they ended."""

    def __init__(self) -> None:
        self.reasons: list[list[FinishReason]] = []

    async def run(self, session: Session, prompt: Prompt) -> None:
        reasons: list[FinishReason] = []
        self.reasons.append(reasons)
        for content in (prompt.text, "go on; "):
            reasons.append((await session.generate(content)).finish_reason)


@pytest.mark.parametrize(
    ("tokens_max", "reason"), [(6, FinishReason.LENGTH), (60, FinishReason.STOP)]
)
def test_L11_a_turn_on_record_says_again_why_it_ended(
    store: Store, tokens_max: int, reason: FinishReason
) -> None:
    notes = _Notes()
    params = SamplingParams(max_new_tokens=tokens_max)

    async def main() -> None:
        script = Script(token_s=1.0, tokens_min=8, tokens_max=8)
        options = {"dispatch": WIDE, "produce": {"params": params}}
        async with desk(store, script=script, environment=notes, **options) as made:
            await asyncio.sleep(7.5)  # in every second turn
            await made.producer.pause(10)
            await made.producer.resume()
            batch = await made.dispatcher.take(1, owner="learner", timeout=1000)
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())
    assert len(notes.reasons) > len([one for one in notes.reasons if len(one) == 2]) > 0
    assert {reason} == {found for one in notes.reasons for found in one}
