"""Who ends with whom: children with owners, helpers with actors, everything with the driver."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import actors

from .conftest import is_alive, wait_until_gone
from .victims import NOTICE_S, Victim


class Owner:
    """Owns a child that it can be asked to crash, beyond its restarts."""

    async def start_child(self) -> tuple[actors.Handle, int]:
        self.child = await actors.current().runtime.spawn(
            Victim, name="child", restart=actors.Restart(max=0, within=60)
        )
        return self.child, await self.child.pid()

    async def incarnation(self) -> int:
        return actors.current().incarnation

    async def pid(self) -> int:
        return os.getpid()


async def test_a_child_that_gives_up_takes_its_owner_down_which_restarts() -> None:
    async with actors.Runtime() as rt:
        owner = await rt.spawn(Owner, name="owner", restart=actors.Restart(max=1, within=60))
        events = owner.watch()
        child, pid = await owner.start_child()
        assert await child.pid() == pid
        os.kill(pid, signal.SIGKILL)
        seen: list[actors.Event] = []
        async for event in events:
            seen.append(event)
            if event.kind == "restarted":
                break
        assert [e.kind for e in seen] == ["started", "died", "restarted"]
        assert "escalated from actor 'child'" in seen[1].reason
        assert await owner.incarnation() == 2


async def test_children_die_with_their_owner() -> None:
    async with actors.Runtime() as rt:
        owner = await rt.spawn(Owner)
        child, pid = await owner.start_child()
        os.kill(await owner.pid(), signal.SIGKILL)
        assert await asyncio.to_thread(wait_until_gone, [pid], NOTICE_S) == []
        with pytest.raises(actors.ActorDied, match="its owner"):
            await child.pid.using(timeout=NOTICE_S)()


async def test_what_an_actor_started_dies_with_it() -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim)
        helper = await victim.start_helper()
        with pytest.raises(actors.ActorDied):
            await victim.segfault()
        assert await asyncio.to_thread(wait_until_gone, [helper], NOTICE_S) == []


class Stoppable:
    def __init__(self, name: str, file: str) -> None:
        self.name, self.file = name, file

    async def work(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def on_stop(self) -> None:
        with open(self.file, "a") as out:
            out.write(self.name + "\n")


async def test_stop_lets_accepted_calls_finish_and_runs_on_stop_in_reverse_order(
    tmp_path: Path,
) -> None:
    log = tmp_path / "order"
    async with actors.Runtime() as rt:
        first = await rt.spawn(Stoppable, "first", str(log))
        await rt.spawn(Stoppable, "second", str(log))
        third = await rt.spawn(Stoppable, "third", str(log))
        call = third.work(0.2)
        await third.stop()
        assert await call == "done"
        with pytest.raises(actors.ActorDied, match="stopped"):
            await third.work(0)
        assert await first.work(0) == "done"
    assert log.read_text().split() == ["third", "second", "first"]


async def test_stopping_an_owner_whose_child_was_killed_does_not_hang() -> None:
    async with actors.Runtime() as rt:
        owner = await rt.spawn(Owner)
        _, pid = await owner.start_child()
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(owner.stop(), 5)


class Orphan(Victim):
    async def look_up_soon(self, name: str) -> None:
        self.task = asyncio.ensure_future(self.look_up(name))

    async def look_up(self, name: str) -> None:
        while True:
            await asyncio.sleep(0.01)
            try:
                await actors.current().runtime.lookup(name)
            except actors.NoSuchActor:
                continue
            except actors.ActorError as error:
                print(f"{type(error).__name__}: {error}")
                return


DRIVER = """
import asyncio, json, os, subprocess, sys
sys.path[:0] = {path!r}
import actors

class Sleeper:
    def __init__(self):
        self.helper = subprocess.Popen(["sleep", "600"])
    async def pids(self):
        return [os.getpid(), self.helper.pid]
    def busy(self):
        while True: pass
    async def spawn_more(self):
        self.child = await actors.current().runtime.spawn(Sleeper)
        return await self.child.pids()

async def main():
    async with actors.Runtime(name={name!r}, stop_timeout=0.2) as rt:
        pids = [rt._spawner.pid]
        for _ in range(2):
            s = await rt.spawn(Sleeper)
            pids += await s.pids()
        pids += await s.spawn_more()
        asyncio.ensure_future(s.busy())
        print(json.dumps(pids), flush=True)
        await asyncio.Event().wait()

actors.run(main())
"""


def start_driver(name: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = DRIVER.format(path=[p for p in sys.path if p], name=name)
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert driver.stdout is not None
    pids: list[int] = json.loads(driver.stdout.readline())
    return driver, pids


@pytest.mark.parametrize("stop_one", [False, True])
def test_after_kill_9_of_the_driver_nothing_of_the_run_is_alive_a_second_later(
    stop_one: bool,
) -> None:
    name = f"kill9-{os.getpid()}-{int(stop_one)}"
    driver, pids = start_driver(name)
    try:
        assert all(is_alive(pid) for pid in pids)
        if stop_one:
            os.kill(pids[1], signal.SIGSTOP)
        driver.kill()
        driver.wait()
        assert wait_until_gone(pids, 1.0) == []
    finally:
        driver.stdout.close()  # type: ignore[union-attr]
    from actors.rundir import runs_root, sweep

    sweep()
    assert not (runs_root() / name).exists()


def test_ctrl_c_of_the_driver_ends_the_run_in_order() -> None:
    driver, pids = start_driver(f"sigint-{os.getpid()}")
    driver.send_signal(signal.SIGINT)
    assert driver.wait(20) != 0
    assert wait_until_gone(pids, 1.0) == []
    driver.stdout.close()  # type: ignore[union-attr]


async def test_a_detached_actor_outlives_its_run_and_knows_that_its_hub_is_gone(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Orphan, detached=True, log=log)
        pid = await victim.pid()
        await victim.look_up_soon("nobody")
    assert is_alive(pid)
    for _ in range(500):
        if "ActorDied" in log.read_text():
            break
        await asyncio.sleep(0.01)
    assert "ActorDied: actor 'hub' died" in log.read_text()
    os.kill(pid, signal.SIGKILL)
    import shutil

    from actors.rundir import runs_root

    shutil.rmtree(runs_root() / rt.name)
