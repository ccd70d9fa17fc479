"""A part that died reaches everybody who waits, with the cause, at once: real processes, SIGKILL.

Three wait in the driver: a learner's take, a producer's put for room, another producer's draw. None
of them has a deadline that could end the wait before the news does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import actors
from shmstore import Store
from shmstore.testing import unique_name
from tests.trainer.lifecycle.cast import (
    EngineProcess,
    LearnerProcess,
    ProducerProcess,
    SilentJudge,
)
from tests.trainer.lifecycle.kit import Questions
from trainer.dispatch import Dispatcher
from trainer.engine.scripted import Script
from trainer.errors import PartFailed
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.testing import store_group
from trainer.trace import TraceStore
from trainer.work import DispatchConfig

P, OTHER, L = "producer-0", "producer-1", "learner"
VICTIMS = (P, "engine", "judge", L)


async def _parts(
    runtime: actors.Runtime, dispatcher: Dispatcher, victim: str
) -> dict[str, actors.Handle]:
    """All processes of a run, at work on one group that will never be finished."""
    script = Script(stall_rate=0.0 if victim == "judge" else 1.0)
    desk = await runtime.host(dispatcher, name="desk")
    engine = await runtime.spawn(EngineProcess, script, name="engine")
    judge = await runtime.spawn(SilentJudge, name="judge")
    producer = await runtime.spawn(ProducerProcess, desk, engine, script, P, judge, name=P)
    await producer.start(0, False)
    learner = await runtime.spawn(LearnerProcess, script, name=L)
    return {P: producer, "engine": engine, "judge": judge, L: learner}


async def _tell_of_death(dispatcher: Dispatcher, part: str, handle: actors.Handle) -> None:
    """What a driver without a supervisor's patience does."""
    async for event in handle.watch():
        if event.kind == "died":
            await dispatcher.fail(part, event.reason)


@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_dead_part_reaches_everybody_who_waits_with_the_cause(victim: str) -> None:
    name = unique_name("channel")
    async with actors.Runtime(store="16MiB", name=name) as runtime:
        store = runtime.store
        assert isinstance(store, Store)
        buffer = ReplayBuffer(store, max_bytes=1)
        dispatcher = Dispatcher(
            buffer,
            PromptSampler({"math": Questions()}),
            DispatchConfig(batch_groups=1, group_size=2),
        )
        parts = await _parts(runtime, dispatcher, victim)
        while not dispatcher._in_production:
            await asyncio.sleep(0.01)
        traces = TraceStore(store)
        groups = [store_group(traces, uid, owner=OTHER, task="code") for uid in ("a", "b")]
        await buffer.put(groups[0], owner=OTHER)
        waiting: list[asyncio.Task[Any]] = [
            asyncio.create_task(dispatcher.take(1, owner=L)),
            asyncio.create_task(buffer.put(groups[1], owner=OTHER)),
            asyncio.create_task(dispatcher.draw(OTHER)),
        ]
        watching = asyncio.create_task(_tell_of_death(dispatcher, victim, parts[victim]))
        await asyncio.wait(waiting, timeout=0.1)
        told = "\n".join(dispatcher.describe())
        for line in (
            f"{P} is producing 1 groups: math-0",
            f"{OTHER} waits for work: no more may be drawn now",
            "take waits for {'math': 1}, completed now {'math': 0}",
            "put of code waits for",
        ):
            assert line in told
        os.kill(parts[victim].pid, signal.SIGKILL)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        for error in ended:
            assert isinstance(error, PartFailed), error
            assert error.part == victim
            assert "SIGKILL" in error.cause
        watching.cancel()
    assert name not in Store.list()
