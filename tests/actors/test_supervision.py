"""Deaths with real signals: who hears of it, what restarts, what is left (nothing)."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import actors
from actors.peers import Notice, State

from .conftest import death_is_known, is_alive, wait_until_gone

# A death must reach a waiting caller within this: docs/actors.md says a second.
NOTICE_S = 1.0


class Victim:
    def __init__(self, fail_file: str | None = None) -> None:
        if fail_file is not None and Path(fail_file).exists():
            raise RuntimeError("the file says no")
        self.helper: subprocess.Popen[bytes] | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def forever(self) -> None:
        await asyncio.Event().wait()

    def busy(self, seconds: float) -> None:
        time.sleep(seconds)

    async def incarnation(self) -> int:
        return actors.current().incarnation

    async def segfault(self) -> None:
        ctypes.string_at(0)

    async def os_exit(self, code: int) -> None:
        os._exit(code)

    async def sys_exit(self, code: int) -> None:
        sys.exit(code)

    def sys_exit_in_thread(self, code: int) -> None:
        sys.exit(code)

    async def complain(self, text: str) -> None:
        print(text, file=sys.stderr)

    async def start_helper(self) -> int:
        self.helper = subprocess.Popen(["sleep", "600"])
        return self.helper.pid

    def eat(self, n_bytes: int) -> int:
        return len(bytearray(n_bytes))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
async def test_a_signal_reaches_the_waiting_caller_with_reason_and_status(number: int) -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim, name="victim")
        await victim.complain("last words")
        waiting = victim.forever()
        await victim.pid()
        os.kill(await victim.pid(), number)
        with pytest.raises(actors.ActorDied) as caught:
            await asyncio.wait_for(waiting, NOTICE_S)
        assert caught.value.exit_code == -number
        assert signal.Signals(number).name in caught.value.reason
        assert "last words" in caught.value.stderr_tail
        with pytest.raises(actors.ActorDied):
            await victim.pid()


async def test_a_segfault_is_reported_with_its_python_stack() -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim)
        with pytest.raises(actors.ActorDied) as caught:
            await victim.segfault()
        assert caught.value.exit_code == -signal.SIGSEGV
        assert "segfault" in caught.value.stderr_tail


@pytest.mark.parametrize("method", ["os_exit", "sys_exit", "sys_exit_in_thread"])
async def test_an_exit_inside_a_method_is_a_death_with_that_status(method: str) -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim)
        with pytest.raises(actors.ActorDied) as caught:
            await asyncio.wait_for(getattr(victim, method)(7), NOTICE_S)
        assert caught.value.exit_code == 7


async def test_a_memory_limit_is_an_error_of_the_call_not_of_the_machine() -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim, memory="1GiB")
        with pytest.raises(MemoryError):
            await victim.eat(4 << 30)
        assert await victim.eat(1 << 20) == 1 << 20


async def test_init_failing_fails_spawn_with_the_class_that_was_raised(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    async with actors.Runtime() as rt:
        with pytest.raises(RuntimeError, match="the file says no") as caught:
            await rt.spawn(Victim, str(flag), name="v")
        assert isinstance(caught.value, actors.SpawnFailed)
        assert isinstance(caught.value, actors.RemoteError)
        flag.unlink()
        again = await rt.spawn(Victim, str(flag), name="v")  # the name is free again
        assert await again.pid()


class DiesInInit:
    def __init__(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    async def never(self) -> None:
        """Not reached."""


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("kill", -9)])
async def test_a_death_in_init_fails_spawn(how: str, code: int) -> None:
    async with actors.Runtime() as rt:
        with pytest.raises(actors.SpawnFailed) as caught:
            await asyncio.wait_for(rt.spawn(DiesInInit, how), 5)
        assert isinstance(caught.value, actors.ActorDied)
        assert caught.value.exit_code == code


async def test_a_restarted_actor_answers_and_calls_in_flight_ran_at_most_once() -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim, restart=actors.Restart(max=2, within=60))
        in_flight = victim.forever()
        first = await victim.pid()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(actors.ActorDied):
            await asyncio.wait_for(in_flight, NOTICE_S)
        second = await victim.pid.using(when_down="wait")()
        assert second != first
        assert await victim.incarnation() == 2


async def test_calls_during_a_restart_fail_fast_or_wait_as_asked() -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim, restart=actors.Restart(max=2, within=60))
        os.kill(await victim.pid(), signal.SIGKILL)
        await death_is_known(victim)
        assert await victim.incarnation.using(when_down="wait")() == 2


async def test_too_many_deaths_in_the_window_end_it_for_good() -> None:
    escalated: list[actors.Event] = []
    async with actors.Runtime(on_escalation=escalated.append) as rt:
        victim = await rt.spawn(Victim, name="v", restart=actors.Restart(max=2, within=60))
        events = victim.watch()
        for _ in range(3):
            pid = await victim.pid.using(when_down="wait")()
            os.kill(pid, signal.SIGKILL)
            await death_is_known(victim)
        seen = [event async for event in events]
        assert [event.kind for event in seen] == [
            "started", "died", "restarted", "died", "restarted", "died", "gave_up",
        ]  # fmt: skip
        assert all(e.exit_code == -signal.SIGKILL for e in seen if e.kind == "died")
        assert [e.name for e in escalated] == ["v"]
        with pytest.raises(actors.ActorDied, match="more than 2 times"):
            await victim.pid.using(when_down="wait")()


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


async def test_dead_actors_leave_no_zombie_behind() -> None:
    async with actors.Runtime() as rt:
        victims = [await rt.spawn(Victim) for _ in range(4)]
        pids = [await victim.pid() for victim in victims]
        for victim, pid in zip(victims, pids, strict=True):
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(actors.ActorDied):
                await victim.forever()
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


async def test_a_stopped_process_times_out_and_can_be_killed() -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim)
        pid = await victim.pid()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(actors.CallTimeout):
            await victim.pid.using(timeout=0.1)()
        await asyncio.wait_for(victim.kill(), NOTICE_S)
        assert not is_alive(pid)


async def test_leaving_the_block_ends_a_stopped_process_too() -> None:
    async with actors.Runtime(stop_timeout=0.1) as rt:
        victim = await rt.spawn(Victim)
        pid = await victim.pid()
        os.kill(pid, signal.SIGSTOP)
    assert not is_alive(pid)


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


async def test_the_death_of_the_template_is_survived() -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim, restart=actors.Restart(max=2, within=60))
        waiting = victim.forever()
        pid = await victim.pid()
        template = rt._spawner.pid  # type: ignore[union-attr]
        os.kill(template, signal.SIGKILL)
        with pytest.raises(actors.ActorDied):
            await asyncio.wait_for(waiting, NOTICE_S)
        assert wait_until_gone([pid], NOTICE_S) == []
        assert await victim.incarnation.using(when_down="wait")() == 2


async def test_the_death_of_the_template_under_a_restart_costs_another_try() -> None:
    async with actors.Runtime() as rt:
        victim = await rt.spawn(Victim, restart=actors.Restart(max=5, within=60))
        spawner = rt._spawner  # type: ignore[union-attr]
        send, killed = spawner._send, []

        async def killing(*message: object) -> None:
            await send(*message)
            if len(killed) < 2:
                killed.append(spawner.pid)
                os.kill(spawner.pid, signal.SIGSTOP)  # before it can answer
                os.kill(spawner.pid, signal.SIGKILL)

        spawner._send = killing
        waiting = victim.forever()
        os.kill(await victim.pid(), signal.SIGKILL)
        with pytest.raises(actors.ActorDied):
            await asyncio.wait_for(waiting, NOTICE_S)
        # A template that had answered before it was stopped costs a death of the child instead.
        assert await victim.incarnation.using(when_down="wait")() in (2, 3, 4)
        assert len(set(killed)) == 2


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
