"""Calls: answers, errors, order, cancellation, deadlines, streams."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import actors


class AppError(Exception):
    """A user's error with a constructor that does not take `args` back."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{detail} ({code})")
        self.code = code


class Worker:
    def __init__(self, start: int = 0) -> None:
        self.n = start
        self.seen: list[Any] = []
        self.cancelled = 0
        self.cancelled_now = asyncio.Event()

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    def blocking_add(self, k: int, pause_s: float = 0.0) -> int:
        time.sleep(pause_s)
        self.n += k
        return self.n

    async def pid(self) -> int:
        return os.getpid()

    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    async def fail(self, error: Exception) -> None:
        raise error

    async def fail_with_app_error(self) -> None:
        raise AppError(7, detail="broken")

    async def sleep(self, seconds: float) -> float:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.cancelled_now.set()
            raise
        return seconds

    async def cancellations(self, n: int) -> int:
        """Answer once that many calls were cancelled."""
        while self.cancelled < n:
            self.cancelled_now.clear()
            await self.cancelled_now.wait()
        return self.cancelled

    async def note(self, x: Any) -> None:
        self.seen.append(x)

    def note_blocking(self, x: Any) -> None:
        self.seen.append(x)

    async def noted(self) -> list[Any]:
        return self.seen

    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    def count_blocking(self, n: int) -> Iterator[int]:
        yield from range(n)

    async def count_then_fail(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        raise ValueError("the end is near")


async def test_a_call_returns_what_the_method_returns() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker, 5, name="w")
        assert await worker.add(3) == 8
        assert await worker.blocking_add(1) == 9
        assert await worker.echo(1, a=b"x") == ((1,), {"a": b"x"})
        assert await worker.pid() not in (0, os.getpid())


async def test_an_error_is_remote_error_and_the_class_that_was_raised() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        with pytest.raises(ValueError, match="boom") as caught:
            await worker.fail(ValueError("boom"))
        assert isinstance(caught.value, actors.RemoteError)
        assert "in fail" in caught.value.remote_traceback
        with pytest.raises(AppError, match=r"broken \(7\)") as app:
            await worker.fail_with_app_error()
        assert isinstance(app.value, actors.RemoteError)
        with pytest.raises(FileNotFoundError) as missing:
            await worker.fail(FileNotFoundError(2, "nope", "file"))
        assert missing.value.errno == 2
        assert missing.value.filename == "file"


async def test_streams_deliver_items_in_order_then_the_error() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        assert [x async for x in worker.count.stream(1000)] == list(range(1000))
        assert [x async for x in worker.count_blocking.stream(1000)] == list(range(1000))
        got = []

        async def read() -> None:
            async for x in worker.count_then_fail.stream(3):
                got.append(x)

        with pytest.raises(ValueError, match="the end is near"):
            await read()
        assert got == [0, 1, 2]


async def test_generators_and_methods_are_not_mistaken_for_each_other() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        for generator in (worker.count, worker.count_blocking):
            with pytest.raises(TypeError, match=r"call it with \.stream"):
                await generator(3)
        for method in (worker.add, worker.blocking_add):
            with pytest.raises(TypeError, match=r"call it without \.stream"):
                await anext(method.stream(3))
        assert await worker.add(0) == 0


async def test_cancelling_the_task_cancels_the_remote_call() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.sleep(60), 0.05)
        with pytest.raises(actors.CallTimeout):
            await worker.sleep.using(timeout=0.05)(60)
        assert await worker.cancellations(2) == 2


async def test_calls_of_one_caller_start_in_order() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        await asyncio.gather(
            *(worker.note(i) if i % 2 else worker.note_blocking(i) for i in range(200))
        )
        assert await worker.noted() == list(range(200))


async def test_result_blocks_a_thread_and_refuses_the_loop() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        assert await asyncio.to_thread(worker.add.result, 4) == 4
        with pytest.raises(actors.CallTimeout):
            await asyncio.to_thread(lambda: worker.sleep.result(60, timeout=0.05))
        with pytest.raises(actors.WouldBlockLoop):
            worker.add.result(1)


class Plain:
    """Has `def` methods only: its code runs in a thread, `__init__` too."""

    def __init__(self, name: str) -> None:
        self.runtime = actors.current().runtime
        self.worker = self.runtime.wait(self.runtime.lookup(name))

    def add(self, k: int) -> int:
        answer: int = self.worker.add.result(k)
        return answer

    def end_it(self) -> str:
        self.runtime.wait(self.worker.stop())
        state: str = self.worker.state
        return state

    def too_long(self) -> None:
        self.runtime.wait(self.runtime.lookup("never", timeout=60), timeout=0.05)


async def test_code_in_threads_looks_up_and_stops_actors_with_wait() -> None:
    async with actors.Runtime() as rt:
        await rt.spawn(Worker, 1, name="w")
        plain = await rt.spawn(Plain, "w")
        assert await plain.add(1) == 2
        with pytest.raises(actors.CallTimeout):
            await plain.too_long()
        assert await plain.end_it() == "dead"
        with pytest.raises(actors.WouldBlockLoop):
            rt.wait(rt.lookup("w"))


async def test_a_hosted_object_is_called_from_another_process() -> None:
    async with actors.Runtime() as rt:
        books = Worker(100)
        hosted = await rt.host(books, name="books")
        relay = await rt.spawn(Relay, hosted)
        assert await relay.add(1) == 101
        assert await relay.add_by_name("books", 2) == 103
        assert books.n == 103


class Relay:
    def __init__(self, target: actors.Handle) -> None:
        self.target = target

    async def add(self, k: int) -> int:
        answer: int = await self.target.add(k)
        return answer

    async def add_by_name(self, name: str, k: int) -> int:
        target = await actors.current().runtime.lookup(name)
        answer: int = await target.add(k)
        return answer


@pytest.mark.parametrize(
    "wrong",
    [{"timeout": "x"}, {"timeout": 0}, {"timeout": True}, {"retries": 1.5}, {"group": 5},
     {"when_down": "now"}],
)  # fmt: skip
async def test_impossible_call_options_are_refused_before_anything_is_sent(wrong: Any) -> None:
    async with actors.Runtime() as rt:
        worker = await rt.host(Worker(), name="worker")
        with pytest.raises(actors.UsageError, match="got"):
            worker.add.using(**wrong)
