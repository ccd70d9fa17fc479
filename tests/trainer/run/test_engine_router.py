"""The router over engine replicas: sessions stick, load spreads, a death costs a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from trainer.engine.protocol import (
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

    info = INFO

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.model_step = -1
        self.waiting: dict[str, asyncio.Future[Generation]] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request.session_id)
        future = asyncio.get_running_loop().create_future()
        self.waiting[request.request_id] = future
        return await future

    def answer(self, reason: FinishReason = FinishReason.STOP) -> None:
        for future in self.waiting.values():
            empty = np.zeros(0, np.int32)
            future.set_result(Generation(empty, empty.astype(np.float32), empty, "", reason))
        self.waiting.clear()

    def die(self) -> None:
        for future in self.waiting.values():
            future.set_exception(Gone())
        self.waiting.clear()

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        count = len(self.waiting)
        self.answer(FinishReason.ABORT)
        return count

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        self.model_step = weights.model_step

    async def aclose(self) -> None: ...


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
    assert (await tasks[0]).finish_reason is FinishReason.ABORT
    assert not tasks[1].done()
    b.answer()
    await tasks[1]


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
