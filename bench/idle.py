"""Who wakes in a second in which everybody waits: the "idle" part of `python -m bench replay`.

With strace, where it is installed and may look: every system call of the loop's thread. Without:
its voluntary context switches, which a call that does not sleep would not show. The waiters are a
producer that draws, a learner that takes, and a put that has no room.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from shmstore import Store
from shmstore.testing import temporary_store
from trainer.dispatch import Dispatcher
from trainer.prompts import PromptSampler, SequenceSource
from trainer.replay import ReplayBuffer
from trainer.rollout import Group, Prompt
from trainer.testing import store_group
from trainer.trace import TraceStore
from trainer.work import DispatchConfig

__all__ = ["context_switches", "count_idle_wakes", "system_calls"]

P, L = "producer-0", "learner"
_PR_SET_PTRACER = 0x59616D61
#: Being attached to interrupts a thread's sleep; what it does to sleep again is not counted.
_ATTACHING_S = 0.2

#: Counts what a thread does in so many seconds.
Counting = Callable[[int, float], int]


def count_idle_wakes(seconds: float) -> tuple[int, str]:
    """How often the loop's thread wakes while all wait; -> the number, and what was counted."""
    if shutil.which("strace") is not None:
        try:
            return _count(system_calls, seconds), "system calls, by strace"
        except PermissionError as error:
            why = f"strace may not look: {error}"
    else:
        why = "strace is not installed"
    return _count(context_switches, seconds), f"voluntary context switches; {why}"


def system_calls(thread_id: int, seconds: float) -> int:
    """System calls that the thread began or ended within `seconds`, by strace."""
    command = ["strace", "-ttt", "-p", str(thread_id)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        # Where only ancestors may trace (Yama), this lets a child do it.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(tracer.pid), 0, 0, 0)
        first = tracer.stderr.readline()
        if "attached" not in first:
            raise PermissionError(first.strip())
        begin = time.time() + _ATTACHING_S
        threading.Event().wait(_ATTACHING_S + seconds)
        tracer.send_signal(signal.SIGINT)
        rest = tracer.stderr.read()
    # The call in which the thread sleeps is told without a result; it is cut off at the end.
    calls = [line for line in rest.splitlines() if " = " in line]
    return sum(float(call.split()[0]) >= begin for call in calls)


def context_switches(thread_id: int, seconds: float) -> int:
    """Times that the thread went to sleep of itself within `seconds`."""
    before = _voluntary_switches(thread_id)
    threading.Event().wait(seconds)
    return _voluntary_switches(thread_id) - before


def _voluntary_switches(thread_id: int) -> int:
    status = Path(f"/proc/{os.getpid()}/task/{thread_id}/status").read_text()
    line = next(row for row in status.splitlines() if row.startswith("voluntary_ctxt_switches"))
    return int(line.split()[1])


def _count(counting: Counting, seconds: float) -> int:
    with temporary_store("16MiB") as store:
        found = asyncio.run(_while_all_wait(store, counting, seconds))
        store.sessions.release(store.sessions.list(), owner="*")
    return found


async def _while_all_wait(store: Store, counting: Counting, seconds: float) -> int:
    traces = TraceStore(store)
    buffer = ReplayBuffer(store, max_bytes=1)
    prompts = SequenceSource((Prompt("p", "math"),))
    dispatcher = Dispatcher(
        buffer,
        PromptSampler({"math": prompts}),
        DispatchConfig(batch_groups=1, group_size=1),
    )
    await dispatcher.draw(P)
    await buffer.put(store_group(traces, "first"), owner=P)
    waiting: list[Coroutine[Any, Any, Any]] = [
        dispatcher.draw(P),
        buffer.take({"math": 2}, train_step=1, owner=L),
        buffer.put(_of_another_task(store_group(traces, "other")), owner=P),
    ]
    tasks = [asyncio.ensure_future(one) for one in waiting]
    await asyncio.wait(tasks, timeout=0.05)
    loop = asyncio.get_running_loop()
    counted: asyncio.Future[int] = loop.create_future()
    thread_id = threading.get_native_id()

    def watch() -> None:
        threading.Event().wait(0.1)
        try:
            found = counting(thread_id, seconds)
        except PermissionError as error:
            loop.call_soon_threadsafe(counted.set_exception, error)
        else:
            loop.call_soon_threadsafe(counted.set_result, found)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return await counted
    finally:
        watcher.join()
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _of_another_task(group: Group) -> Group:
    return group.evolve(task="code")
