"""The kinds of bugs that users of other actor systems paid for: each cannot happen here.

Where a name ends in a number, it is that of the public report in which somebody met it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actors
from shmstore.testing import unique_name

from .conftest import is_alive, wait_until_gone

SOON_S = 2.0


class CannotBeUnpickled(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class CannotBePickled(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Worker:
    def __init__(self) -> None:
        self.helper: subprocess.Popen[bytes] | None = None
        self.log: list[Any] = []
        self.cancelled = asyncio.Event()

    async def ping(self) -> str:
        return "pong"

    async def pid(self) -> int:
        return os.getpid()

    async def raise_unpicklable(self, which: str) -> None:
        raise CannotBeUnpickled(1, 2) if which == "unpickle" else CannotBePickled()

    def sys_exit(self) -> None:
        sys.exit(5)

    async def forever(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def was_cancelled(self) -> bool:
        await self.cancelled.wait()
        return True

    async def note(self, x: Any) -> None:
        self.log.append(x)

    async def noted(self) -> list[Any]:
        return self.log

    async def start_helper(self) -> int:
        self.helper = subprocess.Popen(["sleep", "600"])
        return self.helper.pid

    async def segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    async def total(self, array: np.ndarray[Any, Any]) -> float:
        return float(array.sum())

    def hang(self) -> None:
        while True:
            time.sleep(1)

    async def lambda_result(self) -> Any:
        return threading.Lock()


class FailsInInit:
    def __init__(self) -> None:
        raise KeyError("missing")

    async def ping(self) -> str:
        return "pong"


class Pair:
    """Two of them call each other."""

    def __init__(self) -> None:
        self.other: actors.Handle | None = None

    async def meet(self, other: actors.Handle) -> None:
        self.other = other

    async def ask(self, depth: int) -> int:
        assert self.other is not None
        answer: int = await self.other.ask(depth - 1)
        return answer

    def ask_blocking(self) -> int:
        assert self.other is not None
        answer: int = self.other.ask_blocking.result()
        return answer

    @actors.method(reentrant=True)
    async def ask_reentrant(self, depth: int) -> int:
        if depth == 0:
            return 0
        assert self.other is not None
        answer: int = await self.other.ask_reentrant(depth - 1)
        return answer + 1

    async def ask_self(self) -> Any:
        return await actors.current().handle.ask_self()

    async def tell_self(self) -> None:
        actors.current().handle.noop.tell()

    async def noop(self) -> None:
        """Nothing."""

    async def ask_later(self) -> None:
        """Leaves a task that calls the other one, who calls back: no cycle, this returned."""
        self.task = asyncio.ensure_future(self.loop())

    async def loop(self) -> Any:
        assert self.other is not None
        await asyncio.sleep(0.05)
        return await self.other.call_back(actors.current().handle)

    async def call_back(self, caller: actors.Handle) -> None:
        await caller.noop()

    async def outcome(self) -> Any:
        return await self.task


@pytest.mark.parametrize("which", ["unpickle", "pickle"])
async def test_an_exception_that_cannot_travel_arrives_all_the_same_ray_21075(which: str) -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        expected = CannotBeUnpickled if which == "unpickle" else CannotBePickled
        with pytest.raises(expected) as caught:
            await asyncio.wait_for(worker.raise_unpicklable(which), SOON_S)
        assert isinstance(caught.value, actors.RemoteError)
        assert ("1 and 2" if which == "unpickle" else "holds a lock") in str(caught.value)


async def test_a_result_that_cannot_be_pickled_is_an_error_with_its_type() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        with pytest.raises(actors.NotSerializable, match="lock"):
            await asyncio.wait_for(worker.lambda_result(), SOON_S)
        with pytest.raises(actors.NotSerializable):
            worker.note(threading.Lock())


async def test_a_temporary_handle_does_not_die_before_its_call_ray_783() -> None:
    async with actors.Runtime() as rt:
        calls = [(await rt.spawn(Worker, name=f"w{i}")).ping() for i in range(3)]
        assert await asyncio.gather(*calls) == ["pong"] * 3
        assert await (await rt.lookup("w0")).ping() == "pong"


async def test_sys_exit_in_a_method_does_not_hang_the_caller_ray_1049() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        with pytest.raises(actors.ActorDied) as caught:
            await asyncio.wait_for(worker.sys_exit(), SOON_S)
        assert caught.value.exit_code == 5


async def test_a_call_to_a_dead_actor_raises_and_returns_nothing_ray_12567() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        await worker.kill()
        for _ in range(3):
            with pytest.raises(actors.ActorDied):
                await worker.ping()
            with pytest.raises(actors.ActorDied):
                await asyncio.to_thread(worker.ping.result)


async def test_the_death_notice_is_not_late_ray_26772() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        waiting = worker.forever()
        pid = await worker.pid()
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(actors.ActorDied):
            await waiting
        assert time.monotonic() - began < 1.0  # the contract's "within a second"


async def test_a_cancel_right_behind_its_call_is_not_ignored_ray_52628() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        for _ in range(100):
            call = worker.forever()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await asyncio.wait_for(worker.ping(), SOON_S) == "pong"
        row = (await rt.snapshot())["actors"][0]
        assert row["running"] == 0
        assert row["waiting"] == 0


async def test_wait_for_twice_on_one_call_gives_its_answer_ray_8841() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        call = worker.was_cancelled()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(call), 0.02)
        other = worker.forever()
        await worker.ping()
        other.cancel()
        assert await asyncio.wait_for(call, SOON_S) is True


def test_ctrl_c_interrupts_a_blocking_result_ray_6923(tmp_path: Path) -> None:
    script = tmp_path / "blocking.py"
    script.write_text(
        "import asyncio, threading, actors, sys\n"
        "class W:\n"
        "    async def forever(self): await asyncio.Event().wait()\n"
        "ready = threading.Event()\n"
        "box = {}\n"
        "async def main():\n"
        "    async with actors.Runtime(stop_timeout=0.1) as rt:\n"
        "        box['w'] = await rt.spawn(W)\n"
        "        box['end'] = asyncio.Event(); box['loop'] = asyncio.get_running_loop()\n"
        "        ready.set()\n"
        "        await box['end'].wait()\n"
        "t = threading.Thread(target=lambda: asyncio.run(main()))\n"
        "t.start(); ready.wait()\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        "    box['w'].forever.result()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "box['loop'].call_soon_threadsafe(box['end'].set); t.join()\n"
    )
    root = str(Path(actors.__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=20)
    assert "interrupted" in out
    assert child.returncode == 0


async def test_a_segfault_does_not_leak_what_the_actor_started_ray_26118() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        helper = await worker.start_helper()
        with pytest.raises(actors.ActorDied):
            await worker.segfault()
        assert await asyncio.to_thread(wait_until_gone, [helper], 1.0) == []


async def test_a_call_waiting_for_an_argument_does_not_block_another_group_ray_52825() -> None:
    async with actors.Runtime(store="64MiB", name=unique_name("paid")) as rt:
        worker = await rt.spawn(Worker)
        with rt.store.build((8,), np.float64) as draft:
            waiting = worker.total(draft.ref)
            assert await asyncio.wait_for(worker.ping.using(group="other")(), SOON_S) == "pong"
            assert not waiting.done()
            draft.array[...] = 2
        assert await asyncio.wait_for(waiting, SOON_S) == 16


async def test_sends_are_bounded_by_an_error_or_by_waiting_ray_18703() -> None:
    async with actors.Runtime(in_flight_max=10, stop_timeout=0.1) as rt:
        worker = await rt.spawn(Worker)
        pid = await worker.pid()
        os.kill(pid, signal.SIGSTOP)
        for i in range(10):
            worker.note.tell(i)
        with pytest.raises(actors.QueueFull, match="10 messages"):
            worker.note.tell(10)
        calls = [worker.note(100 + i) for i in range(30)]
        assert rt._node.peers[worker.uid].in_flight == 10
        os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(asyncio.gather(*calls), SOON_S)
        assert await worker.noted() == [*range(10), *range(100, 130)]


async def test_the_error_of_init_appears_at_spawn_monarch_2050() -> None:
    async with actors.Runtime() as rt:
        with pytest.raises(KeyError, match="missing"):
            await rt.spawn(FailsInInit)


async def test_two_actors_that_call_each_other_raise_and_do_not_deadlock_xoscar_57() -> None:
    async with actors.Runtime() as rt:
        a, b = await rt.spawn(Pair, name="a"), await rt.spawn(Pair, name="b")
        await a.meet(b)
        await b.meet(a)
        with pytest.raises(actors.CallCycle, match=r"a -> b -> a\.ask"):
            await asyncio.wait_for(a.ask(5), SOON_S)
        with pytest.raises(actors.CallCycle):
            await asyncio.wait_for(a.ask_blocking(), SOON_S)
        with pytest.raises(actors.CallCycle):
            await asyncio.wait_for(a.ask_self(), SOON_S)
        assert await asyncio.wait_for(a.ask_reentrant(5), SOON_S) == 5
        await a.tell_self()
        await a.ask_later()
        assert await asyncio.wait_for(a.outcome(), SOON_S) is None


async def test_stop_does_not_hang_after_an_actor_was_killed_xoscar_164() -> None:
    async with actors.Runtime() as rt:
        team = await rt.spawn_many(Worker, 3)
        os.kill(await team[1].pid(), signal.SIGKILL)
        await asyncio.wait_for(team.stop(), 10)
        assert all(member.state == "dead" for member in team)


async def test_a_method_that_never_returns_does_not_keep_the_run_from_ending() -> None:
    async with actors.Runtime(stop_timeout=0.1) as rt:
        worker = await rt.spawn(Worker)
        hanging = worker.hang()
        pid = await worker.pid()
    assert not is_alive(pid)
    with pytest.raises(actors.ActorError):
        await hanging


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_reads_do_not_stop_waking_while_both_sides_send_pyzmq_1203(transport: Any) -> None:
    async with actors.Runtime(transport=transport) as rt:
        a, b = await rt.spawn(Chatter), await rt.spawn(Chatter)
        await a.meet(b)
        await b.meet(a)
        chats = [x.chat(40) for x in (a, b) for _ in range(40)]
        assert sum(await asyncio.wait_for(asyncio.gather(*chats), 30)) == 80 * 40


class Chatter:
    async def meet(self, other: actors.Handle) -> None:
        self.other = other

    async def chat(self, n: int) -> int:
        for _ in range(n):
            await self.other.hear(b"x" * 100)
        return n

    @actors.method(reentrant=True)
    async def hear(self, text: bytes) -> int:
        return len(text)
