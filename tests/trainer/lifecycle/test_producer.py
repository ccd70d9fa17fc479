"""What the producer makes, with a scripted engine on virtual time and a real arena: L05, L08, L12,
filters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import (
    SLOW,
    WIDE,
    CountingJudge,
    OneTurn,
    Questions,
    SubmittedEngine,
    TwoTurns,
    check_trace,
    desk,
)
from trainer.dispatch import Dispatcher
from trainer.engine.protocol import Answers, GenerateRequest, Generation
from trainer.engine.scripted import ByteTokenizer, Script, ScriptedEngine
from trainer.environment import Session
from trainer.pending import ProducerConfig, ProducerParts
from trainer.producer import Producer
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.rollout import Prompt, Status
from trainer.segment import Trace
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual
from trainer.trace import TraceStore
from trainer.work import DispatchConfig


@pytest.mark.parametrize("environment", [OneTurn(), TwoTurns()])
def test_what_the_learner_gets_is_what_the_engine_saw(store: Store, environment: Any) -> None:
    async def main() -> None:
        async with desk(store, environment=environment, dispatch=WIDE) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            for rollout in batch.rollouts:
                trace = check_trace(made, rollout)
                assert bytes(
                    trace.token_ids[: rollout.n_prompt_tokens].astype(np.uint8)
                ).decode() == ("question " + rollout.prompt_uid.split("/")[1])
                assert len(rollout.turns) == (2 if isinstance(environment, TwoTurns) else 1)
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def test_L29_tokens_are_counted_that_the_model_sampled_and_not_what_a_tool_said(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store, environment=TwoTurns(), budget=StalenessBudget(0)) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=1e4)
            sampled = sum(check_trace(made, rollout).n_trainable for rollout in batch.rollouts)
            assert batch.report.total.produced_tokens == sampled
            assert sampled < sum(rollout.n_response_tokens for rollout in batch.rollouts)
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def test_L05_the_prompt_of_a_group_is_stored_once_for_all_its_sessions(store: Store) -> None:
    async def main() -> None:
        async with desk(store, dispatch={**WIDE, "group_size": 4, "batch_groups": 1}) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            firsts = {store.sessions.objects(sid)[0].ref for sid in batch.session_ids}
            assert len(batch.session_ids) == 4
            assert len(firsts) == 1
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def test_a_rollout_of_one_turn_runs_no_environment_unless_it_has_a_record(store: Store) -> None:
    class Counted(OneTurn):
        runs = 0

        async def run(self, session: Session, prompt: Prompt) -> None:
            self.runs += 1
            await super().run(session, prompt)

    async def main() -> None:
        counted = Counted()
        options: Any = {"environment": counted, "one_turn": True, "dispatch": WIDE}
        async with desk(store, script=SLOW, **options) as made:
            await made.train(1)
            assert counted.runs == 0
            await asyncio.sleep(2.5)
            assert (await made.producer.pause(10)).cancelled_rollouts == 0
            assert made.buffer.count("math", Status.ABORTED) > 0
            await made.producer.resume()
            await asyncio.sleep(100)
            assert counted.runs > 0
            assert made.producer.report().errors == {}

    run_virtual(main())


class _Noted(SubmittedEngine):
    """Somebody's own, who knows of `generate` only."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request.session_id)
        return await super().generate(request)


class _SubmitsAgain(_Noted):
    """What is further down in the same class."""

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        self.asked += [f"submitted {request.session_id}" for request in requests]
        super().submit(requests, answered)


class _SaysItTwice(SubmittedEngine):
    """Breaks its promise to answer a request once."""

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        super().submit(requests, lambda answers: answered([*answers, *answers]))


def test_an_answer_that_comes_again_is_not_heard(store: Store) -> None:
    async def main() -> None:
        async with desk(store, engine=_SaysItTwice(Script(token_s=0.1)), one_turn=True) as made:
            for step in (1, 2):
                batch = await made.train(step)
                assert {r.status for r in batch.rollouts} == {Status.COMPLETED}

    run_virtual(main())


@pytest.mark.parametrize(("kind", "submits"), [(_Noted, False), (_SubmitsAgain, True)])
def test_an_engine_is_asked_by_that_of_its_methods_which_was_overridden_last(
    store: Store, kind: type[_Noted], submits: bool
) -> None:
    """`generate` of a class whose base has `submit` was passed by for rollouts of one turn."""

    async def main() -> None:
        engine = kind()
        async with desk(store, engine=engine, one_turn=True) as made:
            await made.train(1)
            assert engine.asked
            assert all(one.startswith("submitted") == submits for one in engine.asked)

    run_virtual(main())


class _Asked(SubmittedEngine):
    """Keeps count of who still waits for it."""

    @property
    def waiting(self) -> int:
        return len(self._tasks)


def test_an_engine_is_told_that_nobody_waits_for_what_was_given_up(store: Store) -> None:
    async def main() -> None:
        engine = _Asked(Script(token_s=1000.0))
        async with desk(store, engine=engine, dispatch=WIDE, run=False) as made:
            running = asyncio.create_task(made.producer.run())
            while not engine.waiting:
                await asyncio.sleep(1)
            running.cancel()
            await asyncio.wait([running])
            assert engine.waiting == 0
            assert made.producer.report().requests_running == 0

    run_virtual(main())


def test_L21_what_begins_as_a_pause_does_asks_the_engine_for_nothing(store: Store) -> None:
    async def main() -> None:
        engine = _SubmitsAgain()
        async with desk(store, engine=engine, one_turn=True, run=False) as made:
            for work in await made.dispatcher.draw("producer-0", n=2):
                made.producer._start(work)
            report = await made.producer.pause(10)
            assert (report.finished_groups, report.cancelled_rollouts) == (2, 0)
            assert made.buffer.count("math", Status.ABORTED) == 2
            assert engine.asked == []

    run_virtual(main())


def test_L08_production_goes_on_while_the_learner_trains(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, dispatch=WIDE) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            before = made.producer.report().rollouts
            await asyncio.sleep(30)  # the learner's step
            assert made.producer.report().rollouts >= before + 4
            assert made.traces.release(batch.session_ids, owner="learner") == list(
                batch.session_ids
            )
            await made.train(2)  # what was produced meanwhile is whole

    run_virtual(main())


def test_groups_with_equal_rewards_are_filtered_and_their_rewards_still_count(store: Store) -> None:
    class Half(CountingJudge):
        async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
            self.calls += 1
            return 1.0 if int(prompt.uid.split("/")[1]) % 2 else float(self.calls)

    async def main() -> None:
        async with desk(store, judge=Half(), dispatch=WIDE) as made:
            for step in (1, 2, 3):
                batch = await made.train(step)
                assert {int(r.prompt_uid.split("/")[1]) % 2 for r in batch.rollouts} == {0}
            total = batch.report.total
            assert total.filtered_samples > 0
            assert total.raw_reward_count >= total.filtered_samples + len(batch.rollouts)

    run_virtual(main())


def test_a_validity_filter_of_the_user_filters_whole_groups(store: Store) -> None:
    async def main() -> None:
        async with desk(store, dispatch=WIDE, run=False) as made:
            parts = made.producer._parts
            made.producer._parts = parts.__class__(
                parts.engine,
                parts.traces,
                parts.tokenizer,
                parts.environment,
                parts.judge,
                valid=lambda group: group.uid != "math-0",
            )
            running = asyncio.create_task(made.producer.run())
            for step in range(1, 6):
                assert "math-0" not in {g.uid for g in (await made.train(step)).groups}
            assert made.dispatcher.report()["filtered"] == 2
            await made.producer.stop(10)
            await running

    run_virtual(main())


async def test_L12_a_producer_stopped_as_its_last_group_ends_draws_no_more(store: Store) -> None:
    """It would be work that nobody gives back: the stop has done so already."""
    dispatcher = Dispatcher(
        ReplayBuffer(store),
        PromptSampler({"math": Questions()}, seed=None),
        DispatchConfig(batch_groups=4, group_size=2, budget=StalenessBudget(5)),
    )
    parts = ProducerParts(
        ScriptedEngine(Script()), TraceStore(store), ByteTokenizer(), OneTurn(), CountingJudge()
    )
    producer = Producer(dispatcher, parts, ProducerConfig(group_size=2, groups_max=1))
    running = asyncio.create_task(producer.run())
    while not producer.report().in_production:
        await asyncio.sleep(0)
    while producer.report().in_production:
        await asyncio.sleep(0)
    await producer.stop(30)
    await running
    assert [line for line in dispatcher.describe() if "is producing" in line] == []
    dispatcher.buffer.close()


def test_L12_what_was_drawn_and_not_begun_goes_out_again_when_its_producer_is_cancelled(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store, run=False) as made:
            running = asyncio.create_task(made.producer.run())
            while not made.dispatcher._in_production:
                await asyncio.sleep(0)
            running.cancel()  # between the draw and the start of what was drawn
            await asyncio.wait([running])
            assert running.cancelled()
            assert made.dispatcher._in_production == {}
            works = await made.dispatcher.draw("producer-1")
            assert works[0].prompt.uid == "math/0"
            await made.dispatcher.give_back("producer-1")

    run_virtual(main())
