"""Rollouts that find the arena full wait for room; real time, for they wait in threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shmstore import ObjectRef, Store, StoreFull
from shmstore.testing import temporary_store
from tests.trainer.lifecycle.kit import (
    WIDE,
    OneTurn,
    SubmittedEngine,
    check_trace,
    desk,
)
from trainer.engine.protocol import GenerateRequest, Generation
from trainer.engine.scripted import Script, ScriptedEngine
from trainer.errors import EndOfData
from trainer.segment import Segment
from trainer.trace import TraceStore


def _fill(store: Store, session_id: str, size: int) -> None:
    while True:
        store.put(bytes(size), session=session_id)


def _fill_up(store: Store) -> None:
    store.sessions.open("ballast", owner="somebody")
    for size in (1 << 16, 64):
        with pytest.raises(StoreFull):
            _fill(store, "ballast", size)


@pytest.mark.parametrize("environment", [None, OneTurn()])
async def test_a_full_arena_is_waited_for_and_fails_no_rollout(
    environment: OneTurn | None,
) -> None:
    with temporary_store("4MiB") as store:
        _fill_up(store)
        async with desk(store, script=Script(), environment=environment, dispatch=WIDE) as made:
            taking = asyncio.create_task(made.train(1))
            done, _ = await asyncio.wait([taking], timeout=0.3)
            assert not done
            report = made.producer.report()
            assert report.in_production > report.requests_running == 0  # the engine has answered
            store.sessions.release_owned("somebody")
            await asyncio.wait_for(taking, 30)
            assert made.producer.report().errors == {}


@pytest.mark.parametrize("environment", [None, OneTurn()])
async def test_mates_that_all_find_the_arena_full_store_their_prompt_once_and_then_their_answers(
    environment: OneTurn | None,
) -> None:
    with temporary_store("4MiB") as store:
        _fill_up(store)
        dispatch = {**WIDE, "group_size": 4}
        async with desk(store, script=Script(), environment=environment, dispatch=dispatch) as made:
            taking = asyncio.create_task(made.dispatcher.take(1, owner="learner", timeout=100))
            done, _ = await asyncio.wait([taking], timeout=0.3)
            assert not done
            store.sessions.release_owned("somebody")
            batch = await asyncio.wait_for(taking, 30)
            for rollout in batch.rollouts:
                check_trace(made, rollout)
            for group in batch:
                assert len({store.sessions.objects(s)[0].ref for s in group.session_ids}) == 1
            made.traces.release(batch.session_ids, owner="learner")


async def test_a_rollout_that_gave_up_waiting_for_room_is_not_written_to_afterwards() -> None:
    """Its session may be the buffer's by then, or another attempt's."""
    with temporary_store("4MiB") as store:
        _fill_up(store)
        produce = {"rollout_timeout_s": 0.1, "grace_s": 0.1, "groups_max": 1}
        async with desk(store, script=Script(), dispatch=WIDE, produce=produce) as made:
            while not made.producer.report().put:
                await asyncio.sleep(0.01)
            await made.producer.pause(30)
            held = store.sessions.list("replay")
            assert held
            store.sessions.release_owned("somebody")
            await asyncio.get_running_loop().shutdown_default_executor()  # the threads are done
            assert [made.traces.length(session_id) for session_id in held] == [0] * len(held)


async def test_mates_wait_for_room_for_their_prompt_together_and_not_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their group has failed with the first."""
    waited = []
    put_apart = TraceStore.put_apart

    def counted(traces: TraceStore, segment: Segment, wait_s: float | None = None) -> ObjectRef:
        if wait_s is not None:
            waited.append(wait_s)
        return put_apart(traces, segment, wait_s)

    monkeypatch.setattr(TraceStore, "put_apart", counted)
    with temporary_store("4MiB") as store:
        _fill_up(store)
        produce = {"arena_wait_s": 0.1, "groups_max": 1}
        dispatch = {**WIDE, "group_size": 4, "useless_in_row_max": 2}
        async with desk(store, script=Script(), dispatch=dispatch, produce=produce) as made:
            with pytest.raises(EndOfData, match=r"2 groups in a row .* StoreFull: no room for"):
                await made.dispatcher.take(1, owner="learner", timeout=100)
        store.sessions.release_owned("somebody")
    assert waited == [0.1, 0.1], "once a group"


class _AnswersLater(ScriptedEngine):
    """The second member of a group hears when `go` is set."""

    go: asyncio.Event

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.session_id.endswith("-1-0"):
            await self.go.wait()
        return await super().generate(request)


class _AnswersLaterByCall(SubmittedEngine, _AnswersLater):
    """The same, of an engine that answers by a call."""


@pytest.mark.parametrize("kind", [_AnswersLater, _AnswersLaterByCall])
async def test_a_mate_that_ends_while_another_waits_for_room_leaves_the_prompt_to_it(
    monkeypatch: pytest.MonkeyPatch, kind: type[_AnswersLater]
) -> None:
    """There may be room by then, and what waits would be taken for an answer."""
    waits, stored = threading.Event(), threading.Event()
    put_apart = TraceStore.put_apart

    def slow(traces: TraceStore, segment: Segment, wait_s: float | None = None) -> ObjectRef:
        if wait_s is not None:
            waits.set()
            assert stored.wait(30)
        return put_apart(traces, segment, wait_s)

    monkeypatch.setattr(TraceStore, "put_apart", slow)
    with temporary_store("4MiB") as store:
        _fill_up(store)
        engine = kind(Script())
        engine.go = asyncio.Event()
        produce = {"groups_max": 1}
        dispatch = {**WIDE, "batch_groups": 1}
        async with desk(store, engine=engine, dispatch=dispatch, produce=produce) as made:
            taking = asyncio.create_task(made.dispatcher.take(1, owner="learner", timeout=100))
            assert await asyncio.to_thread(waits.wait, 30)
            store.sessions.release_owned("somebody")
            engine.go.set()
            while made.producer.report().requests_running:
                await asyncio.sleep(0.01)
            stored.set()
            batch = await asyncio.wait_for(taking, 30)
            assert [made.traces.length(one) for one in batch.session_ids] == [2, 2]
            for rollout in batch.rollouts:
                check_trace(made, rollout)
            made.traces.release(batch.session_ids, owner="learner")
