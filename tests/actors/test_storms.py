"""Many callers at once: threads, loops, cancellations at random. Nothing lost, leaked or hung."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import actors

LIMIT_S = 60


class Worker:
    def __init__(self) -> None:
        self.n = 0

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def nap_in_thread(self, seconds: float) -> float:
        threading.Event().wait(seconds)
        return seconds

    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    async def total(self) -> int:
        return self.n

    async def echo(self, x: Any) -> Any:
        return x

    async def time_left(self) -> float | None:
        return actors.current().time_left_s


async def assert_nothing_pending(rt: actors.Runtime, actor: actors.Handle) -> None:
    """Neither side remembers a call, once what was cancelled has ended."""
    for _ in range(300):
        row = next(r for r in (await rt.snapshot())["actors"] if r["uid"] == actor.uid)
        if row["running"] == row["waiting"] == 0:
            break
        await asyncio.sleep(0.01)
    assert (row["running"], row["waiting"]) == (0, 0)
    assert rt._node.pending == {}
    assert rt._node.peers[actor.uid].in_flight == 0
    assert all(not link.kept for link in rt._node.links.values())


async def test_ten_thousand_calls_cancelled_at_random_lose_and_leak_nothing(
    record_property: Any,
) -> None:
    seed = random.randrange(1 << 32)
    record_property("seed", seed)
    print("seed", seed)
    dice = random.Random(seed)
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        outcomes = {"answered": 0, "cancelled": 0, "timed out": 0}

        async def one(i: int) -> None:
            kind = dice.randrange(4)
            try:
                if kind == 0:
                    assert await worker.echo(i) == i
                elif kind == 1:
                    await asyncio.wait_for(worker.nap(dice.random() * 0.02), dice.random() * 0.02)
                elif kind == 2:
                    await worker.nap.using(timeout=0.001 + dice.random() * 0.02)(0.01)
                else:
                    call = worker.nap(dice.random() * 0.02)
                    if dice.random() < 0.5:
                        await asyncio.sleep(dice.random() * 0.01)
                    call.cancel()
                    await call
                outcomes["answered"] += 1
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1
            except TimeoutError:
                outcomes["timed out"] += 1

        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(one(i) for i in range(10_000)))
            assert sum(outcomes.values()) == 10_000
            assert min(outcomes.values()) > 0
            assert await worker.echo("still there") == "still there"
            await assert_nothing_pending(rt, worker)


async def test_more_calls_than_may_be_in_flight_all_get_their_answers() -> None:
    async with actors.Runtime(in_flight_max=16) as rt:
        worker = await rt.spawn(Worker)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(worker, i)) for i in range(2000)]
        assert [t.result() for t in tasks] == list(range(2000))
        await assert_nothing_pending(rt, worker)


async def ask(worker: actors.Handle, i: int) -> int:
    answer: int = await worker.echo(i)
    return answer


async def test_threads_call_with_result_side_by_side() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)

        def many(k: int) -> None:
            for _ in range(100):
                worker.add.result(k)

        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(8) as pool:
            await asyncio.gather(*(loop.run_in_executor(pool, many, 1) for _ in range(8)))
        assert await worker.total() == 800


async def test_several_event_loops_in_one_process_share_an_actor() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)

        async def elsewhere() -> int:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(worker.nap(60), 0.02)
            with pytest.raises(actors.NoSuchMethod):
                await worker.nope()
            await asyncio.gather(*(worker.add(1) for _ in range(200)))
            total: int = await worker.total()
            return total

        totals = await asyncio.gather(
            *(asyncio.to_thread(lambda: asyncio.run(elsewhere())) for _ in range(3))
        )
        assert max(totals) == 600
        await assert_nothing_pending(rt, worker)


async def test_two_runtimes_in_one_process_do_not_mix() -> None:
    async with actors.Runtime() as one, actors.Runtime() as two:
        a, b = await one.spawn(Worker, name="w"), await two.spawn(Worker, name="w")
        await asyncio.gather(a.add(1), b.add(2))
        assert [await (await rt.lookup("w")).total() for rt in (one, two)] == [1, 2]


async def test_a_reader_that_leaves_a_stream_stops_its_generator() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        for _ in range(20):
            async for x in worker.count.stream(1_000_000):
                if x == 3:
                    break
        stream = worker.count.stream(1_000_000)
        assert await anext(stream) == 0
        await stream.aclose()
        await assert_nothing_pending(rt, worker)


async def test_a_slow_reader_holds_a_stream_back() -> None:
    async with actors.Runtime() as rt:
        worker = await rt.spawn(Worker)
        stream = worker.count.stream(10_000)
        assert await anext(stream) == 0
        assert await worker.echo(1) == 1
        from actors.calls import STREAM_WINDOW

        assert len(stream._state.items) <= STREAM_WINDOW
        assert [x async for x in stream] == list(range(1, 10_000))


async def test_deadlines_travel_with_the_calls_that_a_call_makes() -> None:
    async with actors.Runtime() as rt:
        inner = await rt.spawn(Worker)
        outer = await rt.spawn(Relay, inner)
        with pytest.raises(actors.CallTimeout):
            await outer.nap.using(timeout=0.1)(60)
        left = await outer.time_left.using(timeout=30)()
        assert 0 < left <= 30
        assert await outer.time_left() is None
        assert await outer.n_given_up() == 1
        passed_on = await outer.time_left_inside.using(timeout=30)()
        assert 0 < passed_on <= 30
        assert await outer.time_left_inside() is None


class Relay:
    def __init__(self, inner: actors.Handle) -> None:
        self.inner = inner
        self.given_up = 0
        self.changed = asyncio.Event()

    async def nap(self, seconds: float) -> None:
        try:
            await self.inner.nap(seconds)
        except (actors.CallTimeout, asyncio.CancelledError):
            self.given_up += 1
            self.changed.set()
            raise

    async def time_left(self) -> float | None:
        return actors.current().time_left_s

    async def time_left_inside(self) -> float | None:
        answer: float | None = await self.inner.time_left()
        return answer

    async def n_given_up(self) -> int:
        await self.changed.wait()
        return self.given_up


class Token:
    """Something whose end can be seen."""


class Failing:
    def __init__(self) -> None:
        self.seen: list[weakref.ref[Token]] = []
        gc.disable()

    async def inline(self, token: Token) -> None:
        self.seen.append(weakref.ref(token))
        raise ValueError("no")

    async def task(self, token: Token) -> None:
        await asyncio.sleep(0)
        await self.inline(token)

    def thread(self, token: Token) -> None:
        self.seen.append(weakref.ref(token))
        raise ValueError("no")

    async def stream(self, token: Token) -> AsyncIterator[int]:
        yield 1
        await self.inline(token)

    async def n_alive(self) -> int:
        return sum(ref() is not None for ref in self.seen)


async def test_an_error_keeps_nobodys_variables_until_the_garbage_collector_runs() -> None:
    async with actors.Runtime() as rt:
        failing = await rt.spawn(Failing)

        async def by_await(method: Any) -> weakref.ref[Token]:
            token = Token()
            with contextlib.suppress(ValueError):
                await method(token)
            return weakref.ref(token)

        async def by_stream() -> weakref.ref[Token]:
            token = Token()
            with contextlib.suppress(ValueError):
                async for _ in failing.stream.stream(token):
                    pass
            return weakref.ref(token)

        def by_result() -> weakref.ref[Token]:
            token = Token()
            with contextlib.suppress(ValueError):
                failing.inline.result(token)
            return weakref.ref(token)

        gc.collect()
        gc.disable()
        try:
            seen = [
                await by_await(failing.inline),
                await by_await(failing.task),
                await by_await(failing.thread),
                await by_stream(),
                await asyncio.to_thread(by_result),
            ]
            assert await failing.n_alive() == 0
            assert [ref() for ref in seen] == [None] * len(seen)
        finally:
            gc.enable()
