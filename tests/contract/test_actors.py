"""The actors' interface by behaviour, point by point of the design, as a stranger would try it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import actors
from actors import ActorDied, CallCycle, QueueFull, RemoteError, Restart
from tests import tree
from tests.contract.cast import FailsToStart, Trouble, Worker

LIMIT_S = 30


@pytest.fixture
async def rt() -> AsyncIterator[actors.Runtime]:
    async with actors.Runtime(store="16MiB") as runtime:
        yield runtime


async def gone(pid: int) -> bool:
    """Whether the process is no more, within the limit."""
    for _ in range(LIMIT_S * 100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_call_is_awaitable_whatever_the_method_is(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker, 10, name="worker")
    assert await worker.add(2) == 12
    assert await worker.add_in_a_thread(3) == 15
    assert await asyncio.gather(*(worker.add(1) for _ in range(5))) == [16, 17, 18, 19, 20]


async def test_streams_tell_using_and_lookup(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker, name="worker")
    assert [item async for item in worker.count.stream(5)] == [0, 1, 2, 3, 4]
    assert [item async for item in worker.count_in_a_thread.stream(3)] == [0, 1, 2]
    worker.note.tell(7)
    assert await worker.other_group.using(timeout=5, group="io")() == "io"
    found = await rt.lookup("worker")
    assert found == worker
    assert await found.notes() == [7]
    with pytest.raises(LookupError):
        await rt.lookup("nobody")


async def test_point_1_calls_of_one_caller_start_in_order(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    calls = [worker.note(i) for i in range(300)]
    await asyncio.gather(*calls)
    assert await worker.notes() == list(range(300))


async def test_point_1_a_long_step_does_not_silence_the_process(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    long = worker.block(1.0)
    assert await asyncio.wait_for(worker.other_group(), LIMIT_S) == "io"
    assert not long.done()
    assert await long == "blocked"


async def test_point_2_a_call_fails_when_its_actor_dies(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker, name="victim")
    pid = await worker.pid()
    waiting = worker.nap(LIMIT_S)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied) as died:
        await waiting
    assert time.monotonic() - begin < LIMIT_S
    assert died.value.exit_code == -signal.SIGKILL
    assert "victim" in str(died.value)


async def test_point_2_a_death_tells_the_last_lines_of_stderr(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    with pytest.raises(ActorDied) as died:
        await worker.die()
    assert "last words" in died.value.stderr_tail


async def test_point_2_a_call_is_not_repeated_unless_idempotent(
    rt: actors.Runtime, tmp_path: Path
) -> None:
    worker = await rt.spawn(Worker, restart=Restart(max=3, within=60))
    with pytest.raises(ActorDied):
        await worker.die.using(retries=2)()
    marker = str(tmp_path / "died")
    call = worker.die_once.using(retries=2, when_down="wait", timeout=LIMIT_S)
    assert await call(marker) == "alive"


async def test_point_2_a_sys_exit_in_a_method_is_an_answer(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    with pytest.raises((ActorDied, RemoteError)):
        await asyncio.wait_for(worker.leave(3), LIMIT_S)


async def test_point_3_a_remote_error_is_what_was_raised(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    with pytest.raises(Trouble, match="on purpose") as raised:
        await worker.fail()
    assert isinstance(raised.value, RemoteError)
    assert "raise Trouble" in raised.value.remote_traceback
    with pytest.raises(RemoteError, match="Unpicklable"):
        await asyncio.wait_for(worker.fail_strangely(), LIMIT_S)


async def test_point_3_a_constructor_that_raises_fails_the_spawn(rt: actors.Runtime) -> None:
    with pytest.raises(Trouble, match="no start"):
        await rt.spawn(FailsToStart)


async def test_point_3_an_unpicklable_argument_fails_at_the_caller(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    with pytest.raises(TypeError):
        await worker.add(threading.Lock())
    assert await worker.add(1) == 1


async def test_point_4_cancelling_the_await_cancels_the_call(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.nap(LIMIT_S), 0.05)
    with pytest.raises(TimeoutError):
        await worker.nap.using(timeout=0.05)(LIMIT_S)
    assert await worker.add(1) == 1


async def test_point_5_tell_is_refused_when_too_much_is_under_way() -> None:
    async with actors.Runtime(in_flight_max=8) as rt:
        worker = await rt.spawn(Worker)
        calls = [worker.nap(0.2) for _ in range(50)]
        with pytest.raises(QueueFull):
            _tell_many(worker)
        assert await asyncio.gather(*calls) == ["rested"] * 50


def _tell_many(worker: actors.Handle) -> None:
    for i in range(100):
        worker.note.tell(i)


async def test_point_6_an_actor_restarts_and_then_escalates(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker, 5, name="phoenix", restart=Restart(max=1, within=60))
    kinds = []

    async def watch() -> None:
        async for event in worker.watch():
            kinds.append(event.kind)

    watching = asyncio.create_task(watch())
    with pytest.raises(ActorDied):
        await worker.die()
    assert await worker.add.using(when_down="wait", timeout=LIMIT_S)(1) == 6
    with pytest.raises(ActorDied):
        await worker.die()
    await asyncio.wait_for(watching, LIMIT_S)
    assert kinds[0] == "started"
    assert "died" in kinds
    assert "restarted" in kinds
    with pytest.raises(ActorDied):
        await worker.add.using(when_down="wait", timeout=LIMIT_S)(1)


async def test_point_6_stop_and_kill_end_the_process(rt: actors.Runtime) -> None:
    for end in ("stop", "kill"):
        worker = await rt.spawn(Worker)
        pid = await worker.pid()
        await getattr(worker, end)()
        assert await gone(pid)
        with pytest.raises(ActorDied):
            await worker.add(1)


DRIVER = """
import asyncio, actors
from tests.contract.cast import Worker

async def main():
    async with actors.Runtime() as rt:
        team = await rt.spawn_many(Worker, 2)
        print(*[await w.pid() for w in team], flush=True)
        await asyncio.sleep(60)

actors.run(main())
"""


async def test_point_6_everything_dies_with_its_driver() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=tree.ROOT, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.wait()
    driver.stdout.close()
    for pid in pids:
        assert await gone(pid)


async def test_point_7_a_call_cycle_is_an_error(rt: actors.Runtime) -> None:
    one, two = await rt.spawn(Worker), await rt.spawn(Worker)
    with pytest.raises(CallCycle):
        await asyncio.wait_for(one.ask(two, one), LIMIT_S)
    assert await one.add(1) == 1


async def test_point_8_arguments_and_refs(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    array = np.arange(1 << 18)
    kind, total, writeable = await worker.total(array)
    assert (kind, total) == ("ndarray", int(array.sum()))
    ref = rt.store.put(array)
    kind, total, writeable = await worker.total(ref)
    assert (kind, total, writeable) == ("ndarray", int(array.sum()), False)
    assert await worker.kinds(ref, {"ref": ref}) == ("ndarray", "ObjectRef")
    del ref
    assert await worker.add(0) == 0  # the last call's refs are let go of by now
    for _ in range(LIMIT_S * 100):
        if rt.store.stats().objects == 0:
            break
        await asyncio.sleep(0.01)
    assert rt.store.stats().objects == 0


async def test_point_9_a_process_sees_only_its_devices() -> None:
    async with actors.Runtime(gpus=2) as rt:
        one = await rt.spawn(Worker, gpus=1)
        two = await rt.spawn(Worker, gpus=1)
        assert {await one.visible_devices(), await two.visible_devices()} == {"0", "1"}
        with pytest.raises(actors.PlacementError, match="2"):
            await rt.spawn(Worker, gpus=1)


async def test_teams(rt: actors.Runtime) -> None:
    team = await rt.spawn_many(Worker, 3, 10)
    assert await team.each.add(1) == [11, 11, 11]
    assert await team.any.add(1) == 12
    assert len({await worker.pid() for worker in team}) == 3


async def test_a_thread_without_a_loop_blocks_only_itself(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker)
    assert await asyncio.to_thread(worker.add.result, 2, timeout=LIMIT_S) == 2
    with pytest.raises(actors.ActorError):
        worker.add.result(1)


async def test_point_12_a_snapshot_tells_who_is_there(rt: actors.Runtime) -> None:
    worker = await rt.spawn(Worker, name="observed")
    pid = await worker.pid()
    text = repr(await rt.snapshot())
    assert "observed" in text
    assert str(pid) in text


def test_leaving_the_runtime_leaves_nothing() -> None:
    async def main() -> tuple[int, str]:
        async with actors.Runtime(store="4MiB") as rt:
            worker = await rt.spawn(Worker)
            return await worker.pid(), rt.store.name

    pid, arena = actors.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    from shmstore import Store

    assert arena not in Store.list()
