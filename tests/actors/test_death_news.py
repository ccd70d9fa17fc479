"""News of a death reaches those who wait, whatever they are doing and whatever overtakes it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import actors
from actors.peers import Notice, State

from .victims import NOTICE_S, Victim


async def test_a_caller_that_dies_cancels_its_calls_and_disturbs_nobody() -> None:
    async with actors.Runtime() as rt:
        service = await rt.spawn(Service)
        caller = await rt.spawn(Caller, service)
        in_flight = caller.call_forever()
        await service.began(1)
        os.kill(await caller.pid(), signal.SIGKILL)
        with pytest.raises(actors.ActorDied):
            await in_flight
        assert await asyncio.wait_for(service.ended(1), NOTICE_S) == 1


class Service:
    def __init__(self) -> None:
        self.n_began = self.n_ended = 0
        self.change = asyncio.Condition()

    async def forever(self) -> None:
        await self._count("n_began")
        try:
            await asyncio.Event().wait()
        finally:
            await self._count("n_ended")

    async def _count(self, what: str) -> None:
        async with self.change:
            setattr(self, what, getattr(self, what) + 1)
            self.change.notify_all()

    async def began(self, n: int) -> int:
        async with self.change:
            await self.change.wait_for(lambda: self.n_began >= n)
        return self.n_began

    async def ended(self, n: int) -> int:
        async with self.change:
            await self.change.wait_for(lambda: self.n_ended >= n)
        return self.n_ended


class Caller:
    def __init__(self, service: actors.Handle) -> None:
        self.service = service

    async def pid(self) -> int:
        return os.getpid()

    async def call_forever(self) -> None:
        await self.service.forever()


class Late:
    """Is being constructed while another actor dies."""

    def __init__(self, other: actors.Handle, folder: str) -> None:
        self.other = other
        (Path(folder) / "begun").touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.01)

    async def ask(self) -> int:
        found: int = await self.other.pid()
        return found


async def test_who_is_constructed_while_another_dies_hears_of_it(tmp_path: Path) -> None:
    async with actors.Runtime() as rt:
        other = await rt.spawn(Victim)
        spawning = asyncio.create_task(rt.spawn(Late, other, str(tmp_path)))
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        os.kill(await other.pid(), signal.SIGKILL)
        with pytest.raises(actors.ActorDied, match="SIGKILL"):
            await other.forever()
        (tmp_path / "go").touch()
        late = await spawning
        with pytest.raises(actors.ActorDied, match="killed by SIGKILL"):
            await late.ask()


class SlowAgain:
    """Whose second start takes until somebody says so."""

    def __init__(self, folder: str) -> None:
        if actors.current().incarnation > 1:
            (Path(folder) / "again").touch()
            while not (Path(folder) / "up").exists():
                time.sleep(0.01)

    async def pid(self) -> int:
        return os.getpid()


class Asker:
    async def ask(self, other: actors.Handle, folder: str) -> int:
        """Looks at the answer of the hub, where the other is, when newer news has come."""
        node = actors.current().runtime._node
        real = node.resolve
        assert real is not None

        async def resolve(uid: int) -> Notice:
            answer: Notice = await real(uid)
            (Path(folder) / "up").touch()
            while node.peers[uid].state != State.UP:
                await asyncio.sleep(0.001)
            return answer

        node.resolve = resolve
        found: int = await other.pid.using(when_down="wait", timeout=20)()
        return found + await other.pid()


async def test_news_that_overtakes_the_answer_of_the_hub_is_not_undone_by_it(
    tmp_path: Path,
) -> None:
    async with actors.Runtime() as rt:
        restart = actors.Restart(max=3, within=60)
        other = await rt.spawn(SlowAgain, str(tmp_path), restart=restart)
        os.kill(await other.pid(), signal.SIGKILL)
        while not (tmp_path / "again").exists():
            await asyncio.sleep(0.01)
        asker = await rt.spawn(Asker)
        twice = await asker.ask.using(timeout=60)(other, str(tmp_path))
        assert twice == 2 * await other.pid()
