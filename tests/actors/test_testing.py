"""The public helpers for tests: a runtime in one process, frames lost and held back."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

import actors
from actors import testing


class Counter:
    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("start must not be negative")
        self.n = start

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    def add_in_thread(self, k: int) -> int:
        self.n += k
        return self.n

    async def pid(self) -> int:
        return os.getpid()

    async def name(self) -> str:
        return actors.current().name

    async def forever(self) -> None:
        await asyncio.Event().wait()

    async def incarnation(self) -> int:
        return actors.current().incarnation


async def test_a_local_runtime_runs_the_same_code_without_processes() -> None:
    async with testing.LocalRuntime() as rt:
        children = psutil.Process().children()
        counter = await rt.spawn(Counter, 5, name="c")
        assert await counter.pid() == os.getpid()
        assert psutil.Process().children() == children
        assert await counter.add(1) == 6
        assert await counter.add_in_thread(1) == 7
        assert await counter.name() == "c"
        with pytest.raises(ValueError, match="negative"):
            await rt.spawn(Counter, -1)


async def test_a_local_actor_can_be_killed_and_restarts() -> None:
    async with testing.LocalRuntime() as rt:
        counter = await rt.spawn(Counter)
        waiting = counter.forever()
        assert await counter.add(1) == 1
        await counter.kill()
        with pytest.raises(actors.ActorDied, match="killed"):
            await waiting


async def test_a_lost_reply_is_a_timeout_and_nothing_else() -> None:
    async with testing.LocalRuntime() as rt:
        counter = await rt.spawn(Counter)
        with testing.drop("RESULT") as lost:
            with pytest.raises(actors.CallTimeout):
                await counter.add.using(timeout=0.05)(1)
            assert len(lost) == 1
            assert await counter.add(1) == 2


async def test_a_reply_that_comes_too_late_is_dropped() -> None:
    async with testing.LocalRuntime() as rt:
        counter = await rt.spawn(Counter)
        with testing.delay("RESULT", 0.1):
            with pytest.raises(actors.CallTimeout):
                await counter.add.using(timeout=0.02)(1)
            assert await counter.add(1) == 2
        await asyncio.sleep(0.15)  # the late frame arrives now
        assert rt._node.late_replies == 1
        assert await counter.add(0) == 2


def test_a_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(actors.UsageError, match=r"call\.sent"):
        testing.die_at("call.snet")
