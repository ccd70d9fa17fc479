"""Refs and large values in flight (lifecycle L02): held until received, leaked by nobody."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic
import pytest

import actors
from actors import faults, testing
from shmstore import ObjectFreed, ObjectRef
from shmstore.testing import assert_sound, unique_name

from .conftest import death_is_known

BIG = 1 << 20


@dataclass
class Box:
    label: str
    ref: ObjectRef
    inner: dict[str, list[ObjectRef]]


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    ref: ObjectRef


def store_of_this_actor() -> Any:
    return actors.current().runtime.store


class Service:
    """Takes and gives refs in every position."""

    def __init__(self, first: Any = None) -> None:
        self.first = first
        self.kept: Any = None
        self.go_on, self.paused = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def total(self, array: np.ndarray[Any, Any]) -> float:
        assert not isinstance(array, ObjectRef)
        return float(array.sum())

    def total_in_thread(self, array: np.ndarray[Any, Any]) -> float:
        return float(array.sum())

    async def is_read_only(self, array: np.ndarray[Any, Any]) -> bool:
        return not array.flags.writeable

    async def total_of_box(self, box: Box) -> float:
        store = store_of_this_actor()
        refs = [box.ref, *box.inner["refs"]]
        return float(sum(store.get(ref).sum() for ref in refs))

    async def total_of_model(self, model: Model) -> float:
        return float(store_of_this_actor().get(model.ref).sum())

    async def keep(self, box: Any) -> None:
        self.kept = box

    async def kept_total(self) -> float:
        return float(store_of_this_actor().get(self.kept[0]).sum())

    async def drop(self) -> None:
        self.kept = None

    async def make(self, n: int) -> list[ObjectRef]:
        return [store_of_this_actor().put(np.full(1000, i)) for i in range(n)]

    async def ones(self, n: int) -> np.ndarray[Any, Any]:
        return np.ones(n)

    async def make_stream(self, n: int) -> AsyncIterator[ObjectRef]:
        for i in range(n):
            await self.go_on.wait()
            yield store_of_this_actor().put(np.full(1000, i))

    async def pause(self) -> None:
        self.go_on.clear()
        self.paused.set()

    async def reached_pause(self) -> None:
        await self.paused.wait()

    async def first_nested_total(self) -> float:
        return float(store_of_this_actor().get(self.first[0]).sum())

    async def forget_first(self) -> None:
        self.first = None

    async def first_total(self) -> float:
        return float(self.first.sum())

    async def note(self, x: int) -> int:
        return x

    async def die_at(self, point: str) -> None:
        testing.die_at(point)

    async def pid(self) -> int:
        return os.getpid()


class Caller:
    """Calls a service from a process that can be killed, too."""

    def __init__(self, service: actors.Handle) -> None:
        self.service = service

    async def die_at(self, point: str) -> None:
        testing.die_at(point)

    async def round_trip(self) -> int:
        """Refs nested and top-level, a large array, and refs back."""
        store = store_of_this_actor()
        try:
            ref = store.put(np.ones(1000))
            await self.service.keep([ref, np.ones(BIG // 8)])
            await self.service.total(ref)
            made = await self.service.make(3)
            await self.service.drop()
            return len(made)
        except actors.ActorDied:
            return -1


def runtime(**options: Any) -> actors.Runtime:
    return actors.Runtime(store="64MiB", name=unique_name("actors"), **options)


async def assert_empty_soon(rt: actors.Runtime) -> None:
    """No object is left, once the last ACK has come in (each step is an event, none is a sleep)."""
    for _ in range(200):
        gc.collect()
        rt.store.sweep()
        if rt.store.stats().objects == 0:
            break
        await asyncio.sleep(0.01)
    assert_sound(rt.store)
    stats = rt.store.stats()
    assert (stats.objects, stats.sessions, stats.used) == (0, 0, 0)


async def test_a_top_level_ref_arrives_as_its_value_and_a_nested_one_as_a_ref() -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        ref = rt.store.put(np.ones(1000))
        assert await service.total(ref) == 1000
        assert await service.total(array=ref) == 1000
        assert await service.total_in_thread(ref) == 1000
        box = Box("x", ref, {"refs": [ref, ref]})
        assert await service.total_of_box(box) == 3000
        assert await service.total_of_model(Model(ref=ref)) == 1000
        del ref, box
        await assert_empty_soon(rt)


async def test_a_large_array_goes_through_the_store_and_a_small_one_does_not() -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        before = rt.store.stats().counters.puts
        assert await service.total(np.ones(8)) == 8
        assert rt.store.stats().counters.puts == before
        assert await service.total(np.ones(BIG // 8)) == BIG // 8
        assert rt.store.stats().counters.puts == before + 1
        assert await service.is_read_only(np.ones(8))
        assert await service.is_read_only(np.ones(BIG // 8))
        answer = await service.ones(BIG // 8)
        assert answer.sum() == BIG // 8
        assert (await service.total(np.asfortranarray(np.ones((512, 256))))) == 512 * 256
        assert len(await service.note(b"x" * BIG)) == BIG
        del answer
        await assert_empty_soon(rt)


async def test_torch_tensors_travel_as_buffers_through_the_store() -> None:
    import torch

    async with runtime() as rt:
        service = await rt.spawn(Service)
        before = rt.store.stats().counters.puts
        tensor = torch.ones(1 << 18, dtype=torch.bfloat16)
        back = await service.note(tensor)
        assert rt.store.stats().counters.puts == before + 2
        assert back.dtype == torch.bfloat16
        assert float(back.sum()) == 1 << 18
        del back
        await assert_empty_soon(rt)


async def test_what_the_sender_drops_lives_on_with_the_receiver() -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        await service.keep([rt.store.put(np.ones(1000))])
        gc.collect()
        assert await service.kept_total() == 1000
        await service.drop()
        await assert_empty_soon(rt)


async def test_refs_in_results_and_streams_are_alive_when_they_arrive() -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        refs = await service.make(5)
        assert [int(rt.store.get(r)[0]) for r in refs] == list(range(5))
        streamed = [ref async for ref in service.make_stream.stream(50)]
        assert [int(rt.store.get(r)[0]) for r in streamed] == list(range(50))
        del refs, streamed
        await assert_empty_soon(rt)


async def test_arguments_of_init_may_be_refs_and_survive_a_restart() -> None:
    async with runtime() as rt:
        ref = rt.store.put(np.ones(1000))
        service = await rt.spawn(Service, ref, restart=actors.Restart(max=1, within=60))
        del ref
        gc.collect()
        assert await service.first_total() == 1000
        os.kill(await service.pid(), 9)
        await death_is_known(service)
        assert await service.first_total.using(when_down="wait")() == 1000
        await service.stop()
        await assert_empty_soon(rt)
        once = await rt.spawn(Service, [rt.store.put(np.ones(1000)), np.ones(BIG // 8)])
        assert rt.store.stats().used > BIG
        assert await once.first_nested_total() == 1000
        await once.forget_first()
        await assert_empty_soon(rt)  # nobody will start it again


async def test_a_freed_ref_is_an_error_of_that_call() -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        ref = rt.store.put(np.ones(1000))
        rt.store.free([ref])
        with pytest.raises(ObjectFreed):
            await service.total(ref)
        assert await service.note(1) == 1


async def test_a_call_that_waits_for_an_argument_holds_up_its_group_only() -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        with rt.store.build((1000,), np.float64) as draft:
            ref = draft.ref
            waiting = service.total(ref)
            behind = service.note(1)
            assert await service.note.using(group="other")(2) == 2
            assert not waiting.done()
            assert not behind.done()
            draft.array[...] = 1
        assert await waiting == 1000
        assert await behind == 1


async def test_a_call_that_waits_for_an_argument_can_be_cancelled() -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        with rt.store.build((1000,), np.float64) as draft:
            with pytest.raises(actors.CallTimeout):
                await service.total.using(timeout=0.1)(draft.ref)
            draft.array[...] = 1
        assert await asyncio.wait_for(service.note(1), 5) == 1


CALLER_POINTS = [p for p in faults.POINTS if p in ("call.encoded", "call.sent")] + [
    p for p in faults.POINTS if p.startswith("reply.") and p.split(".")[1] in
    ("received", "decoded", "acked")
]  # fmt: skip
ACTOR_POINTS = [p for p in faults.POINTS if p not in CALLER_POINTS]


@pytest.mark.parametrize("point", CALLER_POINTS)
async def test_a_caller_killed_between_two_steps_leaks_nothing(point: str) -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        caller = await rt.spawn(Caller, service)
        await caller.die_at(point)
        with pytest.raises(actors.ActorDied):
            await asyncio.wait_for(caller.round_trip(), 5)
        await service.drop()
        await assert_empty_soon(rt)


@pytest.mark.parametrize("point", ACTOR_POINTS)
async def test_an_actor_killed_between_two_steps_leaks_nothing(point: str) -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        caller = await rt.spawn(Caller, service)
        await service.die_at(point)
        assert await asyncio.wait_for(caller.round_trip(), 5) == -1
        await assert_empty_soon(rt)


@pytest.mark.parametrize("who", ["actor", "reader"])
async def test_a_stream_of_refs_that_breaks_off_leaks_nothing(who: str) -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        reader = await rt.spawn(Reader, service)
        pid = await (service if who == "actor" else reader).pid()
        reading = reader.read(10_000, stop_at=300)
        await service.reached_pause.using(group="other")()
        os.kill(pid, 9)
        if who == "actor":
            assert await asyncio.wait_for(reading, 5) >= 300
        else:
            with pytest.raises(actors.ActorDied):
                await asyncio.wait_for(reading, 5)
        await assert_empty_soon(rt)


class Reader:
    """Reads a stream of refs, keeps what it got, and tells the service when it has had enough."""

    def __init__(self, service: actors.Handle) -> None:
        self.service = service

    async def pid(self) -> int:
        return os.getpid()

    async def read(self, n: int, stop_at: int) -> int:
        kept = []
        try:
            async for ref in self.service.make_stream.stream(n):
                kept.append(ref)
                if len(kept) == stop_at:
                    self.service.pause.tell()
        except actors.ActorDied:
            return len(kept)
        return -len(kept)


async def test_ten_thousand_refs_leave_nothing_behind() -> None:
    async with runtime() as rt:
        service = await rt.spawn(Service)
        array = np.ones(16)

        async def one() -> None:
            ref = rt.store.put(array)
            await service.total(ref)

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(1000)))
        await assert_empty_soon(rt)
