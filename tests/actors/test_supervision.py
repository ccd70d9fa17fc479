"""The death of one actor, with real signals: who hears of it, what restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import actors
from actors.logs import CRASH_LINES_MAX, TAIL_LINES_MAX, LogPump, make_pipe
from actors.peers import Peer, State

from .conftest import death_is_known, is_alive, wait_until_gone
from .victims import NOTICE_S, Victim


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


async def test_of_a_crash_the_cause_is_told_however_long_the_dump_behind_it_is() -> None:
    read, write = make_pipe()
    pump = LogPump(asyncio.get_running_loop(), read, "a", to_stderr=True, forward=False, file=None)
    dump = ["Fatal Python error: Segmentation fault", "", "Current thread 0x7f (most recent call"]
    lines = [*(f"before {n}" for n in range(9)), *dump, *(f"  File {n}" for n in range(90))]
    os.write(write, "\n".join([*lines, ""]).encode())
    os.close(write)
    pump.drain()
    told = pump.last_words().splitlines()
    assert told[:3] == dump
    assert told[3] == "  File 0"
    assert told[-1] == "  File 89"
    assert len(told) == CRASH_LINES_MAX + 1 + TAIL_LINES_MAX


def test_a_call_that_fails_in_a_restart_is_told_how_to_wait_for_its_end() -> None:
    peer = Peer(7, "victim", 1)
    peer.death = ("killed by SIGKILL", -9, "")
    for state, hint in ((State.DEAD, False), (State.RESTARTING, True)):
        peer.state = state
        assert str(peer.died()).startswith("actor 'victim' died: killed by SIGKILL")
        assert ('`using(when_down="wait")` waits for that' in str(peer.died())) == hint


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
