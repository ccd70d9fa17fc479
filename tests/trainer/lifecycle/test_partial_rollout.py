"""Rollouts that stop part-way and go on: L11, time limits, retries after expiry; on virtual
time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import (
    SLOW,
    WIDE,
    OneTurn,
    TwoTurns,
    check_trace,
    desk,
)
from trainer.engine.protocol import WeightsVersion
from trainer.engine.scripted import Script
from trainer.environment import Session
from trainer.expiry import Expiry
from trainer.record import Record
from trainer.rollout import Prompt, Status
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual, store_group
from trainer.trace import TraceStore


@pytest.mark.parametrize("environment", [OneTurn(), TwoTurns()])
@pytest.mark.parametrize("pause_at_s", [0.0, 0.5, 2.5, 6.5, 9.5])
def test_L11_an_aborted_rollout_goes_on_where_it_stopped_with_the_new_model_step(
    store: Store, environment: Any, pause_at_s: float
) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, environment=environment, dispatch=WIDE) as made:
            await asyncio.sleep(pause_at_s)
            report = await made.producer.pause(10)
            assert (report.cancelled_rollouts, report.seconds) == (0, 0)
            kept = made.engine.generated_tokens
            await made.engine.load_weights(WeightsVersion(b"", 1))
            await made.dispatcher.set_steps(model_step=1)
            await made.producer.resume()
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            assert len(batch.groups) == 2
            crossing = 0
            for rollout in batch.rollouts:
                trace = check_trace(made, rollout)
                steps = trace.model_steps[trace.model_steps >= 0].tolist()
                assert steps == sorted(steps)
                crossing += len(set(steps)) == 2
                assert rollout.status is Status.COMPLETED
            assert (crossing > 0) == (kept > 0 and not _just_finished(environment, pause_at_s))
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def _just_finished(environment: Any, pause_at_s: float) -> bool:
    """All first turns end at 5 s; a one-turn rollout is then complete."""
    return isinstance(environment, OneTurn) and pause_at_s > 5


def test_L11_with_partial_rollout_off_the_response_is_cut_and_starts_over(store: Store) -> None:
    async def main() -> None:
        async with desk(
            store, script=SLOW, dispatch=WIDE, produce={"partial_rollout": False}
        ) as made:
            await asyncio.sleep(2.5)
            await made.producer.pause(10)
            sessions = store.sessions.list("replay")
            assert sessions
            assert {made.traces.length(session) for session in sessions} == {1}
            await made.engine.load_weights(WeightsVersion(b"", 1))
            await made.dispatcher.set_steps(model_step=1)
            await made.producer.resume()
            for rollout in (await made.train(1)).rollouts:
                assert (rollout.model_step_min, rollout.model_step_max) == (1, 1)

    run_virtual(main())


class _InATaskGroup:
    """Talks to the policy from a task of its own."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._talk(session, prompt))

    async def _talk(self, session: Session, prompt: Prompt) -> None:
        await session.generate(prompt.text)


def test_L11_an_abort_out_of_a_task_group_of_the_environment_is_an_abort(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, environment=_InATaskGroup(), dispatch=WIDE) as made:
            await asyncio.sleep(2.5)
            assert (await made.producer.pause(10)).cancelled_rollouts == 0
            assert made.buffer.count("math", Status.ABORTED) > 0
            assert made.dispatcher.report()["failed"] == 0
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())


def test_a_rollout_that_takes_too_long_is_aborted_with_its_tokens(store: Store) -> None:
    async def main() -> None:
        script = Script(token_s=1.0, tokens_min=1, tokens_max=6)
        produce = {"rollout_timeout_s": 2.5}
        async with desk(store, script=script, dispatch=WIDE, produce=produce) as made:
            for step in range(1, 5):
                batch = await made.dispatcher.take(step, owner="learner", timeout=99)
                for rollout in batch.rollouts:
                    check_trace(made, rollout)
                made.traces.release(batch.session_ids, owner="learner")
            assert made.producer.report().put["aborted"] > 0

    run_virtual(main())


def test_user_code_that_catches_everything_does_not_hide_an_abort(store: Store) -> None:
    class Greedy:
        async def run(self, session: Session, prompt: Prompt) -> None:
            try:
                await session.generate(prompt.text)
            except BaseException:  # what users write
                return

    async def main() -> None:
        async with desk(store, script=SLOW, environment=Greedy(), dispatch=WIDE) as made:
            await asyncio.sleep(2)
            await made.producer.pause(10)
            assert made.buffer.count("math", Status.ABORTED) == 8
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())


def test_a_tool_that_answers_otherwise_the_second_time_leaves_the_record_there(
    store: Store,
) -> None:
    class Clock:
        """Its tool tells the time, which is another one when the rollout is gone on with."""

        async def run(self, session: Session, prompt: Prompt) -> None:
            await session.generate(prompt.text)
            now = int(asyncio.get_running_loop().time())
            await session.generate(f"it is {now // 8} o'clock")

    async def main() -> None:
        async with desk(store, script=SLOW, environment=Clock(), dispatch=WIDE) as made:
            await asyncio.sleep(8.5)  # in the second turn
            await made.producer.pause(10)
            await made.producer.resume()
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            for rollout in batch.rollouts:
                trace = check_trace(made, rollout)
                assert b"it is 1 o'clock" in bytes(trace.token_ids.astype(np.uint8))
                assert b"it is 0 o'clock" not in bytes(trace.token_ids.astype(np.uint8))
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def test_expired_members_are_produced_again_and_fresh_ones_are_kept(store: Store) -> None:
    async def main() -> None:
        budget = StalenessBudget(max_staleness=0)
        async with desk(
            store,
            expiry=Expiry(max_staleness=0),
            dispatch={"batch_groups": 2, "budget": budget},
        ) as made:
            await asyncio.sleep(10)
            assert made.buffer.count("math", Status.COMPLETED) == 2
            await made.engine.load_weights(WeightsVersion(b"", 1), "in_flight")
            await made.dispatcher.set_steps(train_step=2, model_step=1)
            batch = await made.dispatcher.take(2, owner="learner", timeout=100)
            assert {g.uid for g in batch.groups} == {"math-0", "math-1"}
            for rollout in batch.rollouts:
                assert (rollout.model_step_min, rollout.attempt) == (1, 1)
                check_trace(made, rollout)
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def test_L11_the_record_of_an_attempt_pins_nothing_of_it(store: Store, traces: TraceStore) -> None:
    """What is cut away from the session gives its bytes back while the next attempt goes on."""
    (session_id, other) = store_group(traces, "g", n_response=2000).session_ids
    record = Record.of_session(traces, session_id, (1,))
    used = store.stats().used
    traces.truncate(session_id, keep=1)
    stats = store.stats()
    assert stats.deferred_bytes == 0
    assert used - stats.used > 2000 * 12
    assert record.take_said(None, list(range(4))) is not None
    assert len(record.take_turn(0)[0].token_ids) == 2000
    traces.release([session_id, other], owner="producer-0")
