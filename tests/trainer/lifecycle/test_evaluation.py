"""Evaluation owns its sessions and releases exactly those (L22)."""

from __future__ import annotations

import asyncio
import math

import pytest

from shmstore import SessionExists, Store
from tests.trainer.lifecycle.kit import CountingJudge, OneTurn, Questions, desk
from trainer.engine.scripted import ByteTokenizer, Script, ScriptedEngine
from trainer.environment import Session
from trainer.errors import ConfigError
from trainer.evaluation import Evaluator
from trainer.pending import ProducerConfig, ProducerParts
from trainer.rollout import Prompt, Status
from trainer.segment import Trace
from trainer.testing import run_virtual, store_group
from trainer.trace import TraceStore


def _evaluator(
    traces: TraceStore,
    *,
    judge: CountingJudge | None = None,
    environment: OneTurn | None = None,
    n: int = 5,
) -> Evaluator:
    parts = ProducerParts(
        ScriptedEngine(Script(token_s=0.1)),
        traces,
        ByteTokenizer(),
        environment or OneTurn(),
        judge or CountingJudge(),
    )
    prompts = [Questions().prompt(i) for i in range(n)]
    return Evaluator(parts, ProducerConfig(group_size=2, groups_max=2), prompts)


def test_L22_the_very_first_evaluation_leaves_an_empty_arena(store: Store) -> None:
    async def main() -> None:
        report = await _evaluator(TraceStore(store)).run()
        assert (report.rollouts, report.failed) == (10, 0)
        assert report.reward_mean == sum(range(1, 11)) / 10
        assert report.reward_mean_by_task == {"math": report.reward_mean}

    run_virtual(main())
    assert store.stats().sessions == store.stats().objects == 0


def test_L22_it_never_touches_sessions_of_others_nor_the_buffer(store: Store) -> None:
    async def main() -> None:
        traces = TraceStore(store)
        async with desk(store, script=Script(token_s=0.5)) as made:
            await asyncio.sleep(1)
            await made.producer.pause(10)  # ABORTED groups go to the buffer
            store_group(traces, "somebody", owner="eval")
            before = set(store.sessions.list())
            counts = {s: made.buffer.count("math", s) for s in Status}
            assert counts[Status.ABORTED] > 0
            await _evaluator(traces).run()
            assert set(store.sessions.list()) == before
            assert {s: made.buffer.count("math", s) for s in Status} == counts
            store.sessions.release_owned("eval")
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())


class _Sour(CountingJudge):
    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        raise RuntimeError("no verdict")


def test_L22_rollouts_that_fail_are_reported_and_released(store: Store) -> None:
    report = run_virtual(_evaluator(TraceStore(store), judge=_Sour()).run())
    assert (report.rollouts, report.failed) == (10, 10)
    (error,) = report.errors
    assert error.splitlines()[0] == "RuntimeError: no verdict"
    assert math.isnan(report.reward_mean)
    assert store.stats().sessions == 0


def test_L22_an_evaluator_that_raises_or_is_cancelled_releases_its_sessions(store: Store) -> None:
    class Abandoned(OneTurn):
        async def run(self, session: Session, prompt: Prompt) -> None:
            await session.generate(prompt.text)
            await asyncio.sleep(math.inf)

    async def main() -> None:
        traces = TraceStore(store)
        evaluating = asyncio.create_task(_evaluator(traces, environment=Abandoned()).run())
        await asyncio.sleep(5)
        assert len(store.sessions.list("eval")) == 4
        evaluating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await evaluating
        assert store.sessions.list() == []

    run_virtual(main())


def test_an_evaluation_without_prompts_is_refused(traces: TraceStore) -> None:
    with pytest.raises(ConfigError, match="at least one prompt"):
        _evaluator(traces, n=0)


def test_L22_when_a_session_cannot_be_opened_those_opened_before_are_released(
    store: Store,
) -> None:
    async def main() -> None:
        store.sessions.open("eval-0-1-0", owner="somebody")  # the second of the first prompt
        with pytest.raises(ExceptionGroup) as error:
            await _evaluator(TraceStore(store)).run()
        assert error.group_contains(SessionExists)
        assert store.sessions.list() == ["eval-0-1-0"]
        store.sessions.release(["eval-0-1-0"], owner="somebody")

    run_virtual(main())
