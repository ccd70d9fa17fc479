"""The router over engine replicas: sessions stick, load spreads, a death costs a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from trainer.engine.protocol import (
    Answers,
    EngineInfo,
    GenerateRequest,
    Generation,
    SamplingParams,
    SyncMode,
    WeightsVersion,
)
from trainer.engine.router import EngineLost, EngineRouter
from trainer.rollout import FinishReason

INFO = EngineInfo(vocab_size=10, context_max=32)
V1, V2 = WeightsVersion("aa", 1), WeightsVersion("bb", 2)


class Gone(Exception):
    """The replica's process died."""


class Replica:
    """An engine that answers when told to, or dies."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.calls: list[int] = []
        self.model_step = -1
        self.waiting: dict[GenerateRequest, Callable[[Answers], None]] = {}

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        self.calls.append(len(requests))
        self.asked += [request.session_id for request in requests]
        self.waiting.update(dict.fromkeys(requests, answered))

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            del self.waiting[request]

    def end(self, *found: GenerateRequest, outcome: Generation | Exception) -> None:
        """All that are found end with it, at the same time."""
        told: dict[Callable[[Answers], None], list[tuple[GenerateRequest, Any]]] = {}
        for one in found:
            told.setdefault(self.waiting.pop(one), []).append((one, outcome))
        for answered, answers in told.items():
            answered(answers)

    def answer(self, reason: FinishReason = FinishReason.STOP) -> None:
        self.end(*self.waiting, outcome=generation(reason))

    def die(self) -> None:
        self.end(*self.waiting, outcome=Gone())

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        found = [r for r in self.waiting if request_ids is None or r.request_id in request_ids]
        self.end(*found, outcome=generation(FinishReason.ABORT))
        return len(found)

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        self.model_step = weights.model_step

    async def aclose(self) -> None: ...


def generation(reason: FinishReason) -> Generation:
    """Of one token."""
    one = np.ones(1, np.int32)
    return Generation(one, one.astype(np.float32), one, "", reason)


def request(session: str, group: str | None = None, turn: int = 0) -> GenerateRequest:
    ids = np.zeros(1, np.int32)
    return GenerateRequest(f"{session}/{turn}", session, ids, SamplingParams(), group)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def two_up() -> tuple[EngineRouter, Replica, Replica]:
    a, b = Replica(), Replica()
    router = EngineRouter({"a": a, "b": b}, INFO, (Gone,))
    await router.up("a", V1)
    await router.up("b", V1)
    return router, a, b


async def test_a_session_stays_and_new_ones_go_where_less_is_running() -> None:
    router, a, b = await two_up()
    tasks = [asyncio.create_task(router.generate(request(s))) for s in "wxyz"]
    await settle()
    assert (a.asked, b.asked) == (["w", "y"], ["x", "z"])
    a.answer()
    b.answer()
    await asyncio.gather(*tasks)
    again = asyncio.create_task(router.generate(request("x", turn=1)))
    await settle()
    assert b.asked == ["x", "z", "x"]
    b.answer()
    await again


async def test_mates_of_a_group_share_an_engine_so_that_the_prompt_is_computed_once() -> None:
    router, a, b = await two_up()
    tasks = [
        asyncio.create_task(router.generate(request(f"{g}{k}", g))) for g in "pq" for k in range(3)
    ]
    await settle()
    assert a.asked == ["p0", "p1", "p2"]
    assert b.asked == ["q0", "q1", "q2"]
    a.answer()
    b.answer()
    await asyncio.gather(*tasks)


async def test_a_dead_replicas_requests_start_again_elsewhere() -> None:
    router, a, b = await two_up()
    tasks = [asyncio.create_task(router.generate(request(s))) for s in "wxyz"]
    await settle()
    a.die()
    await settle()
    assert sorted(b.asked) == ["w", "x", "y", "z"]
    assert router.replicas_up == 1
    b.answer()
    assert all(g.finish_reason is FinishReason.STOP for g in await asyncio.gather(*tasks))
    assert router.restarted_requests == 2


async def test_with_no_replica_left_requests_wait_until_one_is_back_with_current_weights() -> None:
    router, a, b = await two_up()
    task = asyncio.create_task(router.generate(request("w")))
    await settle()
    a.die()
    await settle()
    b.die()
    await settle()
    assert not task.done()
    await router.load_weights(V2, "in_flight")
    a.model_step = -1  # a fresh process has the initial weights
    await router.up("a", V1)
    await settle()
    assert a.model_step == 2
    assert a.asked == ["w", "w"]
    a.answer()
    await task


async def test_an_engine_that_dies_each_time_fails_one_rollout_and_not_the_producer() -> None:
    router, a, _ = await two_up()
    router.down("b")
    task = asyncio.create_task(router.generate(request("w")))
    for _ in range(6):
        await settle()
        a.die()
        await settle()
        await router.up("a", V1)
    with pytest.raises(EngineLost, match="6 times"):
        await task


async def test_abort_reaches_the_replicas_that_have_the_requests() -> None:
    router, _, b = await two_up()
    tasks = [asyncio.create_task(router.generate(request(s))) for s in "wx"]
    await settle()
    assert await router.abort(["w/0"]) == 1
    aborted = await tasks[0]
    assert aborted.finish_reason is FinishReason.ABORT
    assert len(aborted.token_ids) == 1, "it keeps what it had"
    assert not tasks[1].done()
    b.answer()
    await tasks[1]


async def test_L21_an_aborted_request_that_has_no_engine_any_more_ends_with_nothing() -> None:
    """It is not begun again: a pause waits for it."""
    router, a, b = await two_up()
    tasks = [asyncio.create_task(router.generate(request(s))) for s in "wx"]
    await settle()

    async def dies(request_ids: Sequence[str] | None = None) -> int:
        a.die()
        raise Gone

    a.abort = dies  # type: ignore[method-assign]
    assert await router.abort(["w/0"]) == 0
    ended = await tasks[0]
    assert (ended.finish_reason, len(ended.token_ids)) == (FinishReason.ABORT, 0)
    b.die()  # and now none is up
    await settle()
    assert await router.abort() == 1
    ended = await tasks[1]
    assert (ended.finish_reason, len(ended.token_ids)) == (FinishReason.ABORT, 0)
    await router.up("a", V1)
    assert a.asked == ["w"], "they do not go to the next that comes up"


class Heard:
    """A listener that keeps what it was told, and when together."""

    def __init__(self) -> None:
        self.times: list[list[tuple[str, Any]]] = []

    def __call__(self, answers: Answers) -> None:
        self.times.append([(asked.session_id, answer) for asked, answer in answers])

    @property
    def sessions(self) -> list[str]:
        """In the order in which they were told, as often as they were."""
        return [session for time in self.times for session, _ in time]


async def test_what_is_submitted_together_goes_together_and_comes_together() -> None:
    router, a, b = await two_up()
    p, q = Heard(), Heard()
    router.submit([request(f"p{k}", "p") for k in range(3)], p)
    router.submit([request(f"q{k}", "q") for k in range(3)], q)
    assert (a.asked, b.asked) == (["p0", "p1", "p2"], ["q0", "q1", "q2"])
    assert (a.calls, b.calls) == ([3], [3])
    a.end(*list(a.waiting)[:2], outcome=generation(FinishReason.STOP))
    assert [len(time) for time in p.times] == [2]
    a.answer()
    assert p.sessions == ["p0", "p1", "p2"]
    assert not q.times


async def test_a_dead_replicas_requests_are_neither_lost_nor_answered_twice() -> None:
    """Also those that it had answered, and those whose answer was an error of their own."""
    router, a, b = await two_up()
    heard = Heard()
    router.submit([request(f"p{k}", "p") for k in range(4)], heard)
    first, second, *_ = a.waiting
    again = a.waiting[first]
    a.end(first, outcome=generation(FinishReason.STOP))
    a.end(second, outcome=ValueError("this one's"))
    a.die()
    assert b.asked == ["p2", "p3"]
    b.answer()
    assert heard.sessions == ["p0", "p1", "p2", "p3"]
    assert isinstance(heard.times[1][0][1], ValueError)
    assert router.restarted_requests == 2
    again([(first, generation(FinishReason.STOP)), (second, Gone())])
    assert len(heard.sessions) == 4, "what comes later is of no interest"
    assert not router._asked
    assert not any(router._running.values())


async def test_what_was_dropped_is_not_begun_again_and_its_listener_hears_nothing() -> None:
    router, a, b = await two_up()
    heard = Heard()
    asked = [request(f"p{k}", "p") for k in range(2)]
    router.submit(asked, heard)
    router.drop(asked[:1])
    assert list(a.waiting) == asked[1:]
    a.die()
    assert b.asked == ["p1"]
    b.die()
    router.drop(asked[1:])  # while it waits for a replica
    await router.up("a", V1)
    assert a.asked == ["p0", "p1"]
    assert not heard.times


async def test_an_engine_that_refuses_a_call_fails_its_requests_alone() -> None:
    router, a, b = await two_up()
    heard = Heard()

    def refuses(requests: object, answered: object) -> None:
        raise ValueError("closed")

    a.submit = refuses  # type: ignore[method-assign, assignment]
    router.submit([request("w"), request("x")], heard)
    assert not heard.times, "not before submit has returned"
    await settle()
    b.answer()
    assert [(session, type(answer)) for time in heard.times for session, answer in time] == [
        ("w", ValueError),
        ("x", Generation),
    ]


async def test_weights_reach_all_that_are_up_and_a_death_meanwhile_is_stepped_over() -> None:
    router, a, b = await two_up()

    async def gone(weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        raise Gone

    a.load_weights = gone  # type: ignore[method-assign]
    await router.load_weights(V2, "in_flight")
    assert (router.replicas_up, b.model_step, router.model_step) == (1, 2, 2)


async def test_new_weights_count_as_taken_only_when_each_replica_that_is_up_runs_them() -> None:
    """What is begun with them must not be asked of one that still has the old ones."""
    router, a, b = await two_up()
    loading: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def slow(weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        await loading

    b.load_weights = slow  # type: ignore[method-assign]
    router.down("a")
    await router.up("a", V2)  # it was started again, with weights that the others get now
    task = asyncio.create_task(router.load_weights(V2, "in_flight"))
    await settle()
    assert (a.model_step, router.model_step) == (2, 1)
    loading.set_result(None)
    await task
    assert router.model_step == 2
    router.down("a")
    router.down("b")
    assert router.model_step == 2, "whoever comes up takes them before anything is asked of it"
