"""An engine in another process: requests and answers in batches, each answer to its own request,
also when the process is killed in the middle of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest

import actors
from actors import ActorDied
from actors.context import CURRENT_CALL, CallContext
from actors.testing import LocalRuntime
from shmstore import Store, StoreFull
from shmstore.testing import unique_name
from tests.trainer.lifecycle.cast import EngineProcess
from trainer.engine.protocol import (
    Answers,
    EngineInfo,
    GenerateRequest,
    Generation,
    SamplingParams,
    WeightsVersion,
    awaited,
)
from trainer.engine.router import EngineRouter
from trainer.engine.scripted import Script, ScriptedEngine
from trainer.errors import EngineError
from trainer.rollout import FinishReason
from trainer.run import engine_link
from trainer.run.engine_link import EngineLink, ServedEngine

PARAMS = SamplingParams(max_new_tokens=64)
QUICK = Script(tokens_max=40, token_s=0.001)
#: The same answers, but every other never comes to its end.
HALF = Script(tokens_max=40, token_s=0.001, stall_rate=0.5)


class HeldEngine:
    """Answers when told to."""

    info = EngineInfo(vocab_size=10, context_max=64, n_layers_moe=2, top_k=2, n_experts=8)
    model_step = 3

    def __init__(self) -> None:
        self.calls: list[list[GenerateRequest]] = []
        self.dropped: list[str] = []
        self.asked: dict[str, tuple[GenerateRequest, Callable[[Answers], None]]] = {}
        self.changed = asyncio.Condition()

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        self.calls.append(list(requests))
        self.asked.update({one.request_id: (one, answered) for one in requests})

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        self.dropped += [request.request_id for request in requests]

    def end(self, outcomes: dict[str, Any]) -> None:
        """All at the same time."""
        told: dict[Callable[[Answers], None], list[tuple[GenerateRequest, Any]]] = {}
        for name, outcome in outcomes.items():
            request, answered = self.asked.pop(name)
            told.setdefault(answered, []).append((request, outcome))
        for answered, answers in told.items():
            answered(answers)

    async def generate(self, request: GenerateRequest) -> Generation:
        return await awaited(self, request)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        found = [name for name in self.asked if request_ids is None or name in request_ids]
        self.end({name: generation(1, FinishReason.ABORT) for name in found})
        return len(found)

    async def load_weights(self, weights: WeightsVersion, mode: str = "pause") -> None:
        self.model_step = weights.model_step

    async def aclose(self) -> None: ...


class Heard:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.twice: list[str] = []
        self._some = asyncio.Event()

    def __call__(self, answers: Answers) -> None:
        for request, answer in answers:
            if request.request_id in self.answers:
                self.twice.append(request.request_id)
            self.answers[request.request_id] = answer
        self._some.set()

    async def have(self, n: int) -> dict[str, Any]:
        while len(self.answers) < n:
            self._some.clear()
            await self._some.wait()
        assert not self.twice
        return self.answers


def request(name: str, *tokens: int, **changes: Any) -> GenerateRequest:
    context = np.array(tokens or (1, 2), np.int32)
    return GenerateRequest(name, f"s-{name}", context, PARAMS, **changes)


def generation(
    n: int, reason: FinishReason = FinishReason.STOP, rows: int | None = 0
) -> Generation:
    """Everything in it tells of `n`, which is its length as well; `rows` None: without routing."""
    ids = np.full(n, n, np.int32)
    logprobs = (ids / -8).astype(np.float32)
    routed = None if rows is None else np.full((n + rows, 2, 2), n, np.uint8)
    return Generation(ids, logprobs, ids + np.int32(1), "ä" * n, reason, routed)


def assert_same(found: Generation, wanted: Generation) -> None:
    for name in ("token_ids", "logprobs", "model_steps", "routed_experts"):
        one, two = getattr(found, name), getattr(wanted, name)
        np.testing.assert_array_equal(one, two)
        assert (one is None) == (two is None)
        assert one is None or (one.dtype == two.dtype and not one.flags.writeable)
    assert (found.text, found.finish_reason, found.error) == (
        wanted.text,
        wanted.finish_reason,
        wanted.error,
    )


@asynccontextmanager
async def linked(engine: Any, store: str | None = None) -> AsyncIterator[EngineLink]:
    """A link to an engine of this process, with everything between them but the process."""
    name = unique_name("link")
    async with LocalRuntime(store=store, name=name) as runtime:
        link = EngineLink(await runtime.host(ServedEngine(engine), name="engine"))
        try:
            yield link
        finally:
            await link.aclose()


async def until(there: Callable[[], bool]) -> None:
    while not there():
        await asyncio.sleep(0)


async def test_each_answer_of_a_batch_is_that_of_its_own_request() -> None:
    """They end in another order than they were asked, with as many tokens and rows as they like."""
    engine, heard = HeldEngine(), Heard()
    names = ["a", "b", "c", "d", "e", "f"]
    wanted = {
        "a": generation(3),
        "b": generation(5, FinishReason.LENGTH, rows=4),
        "c": generation(0, FinishReason.ABORT, rows=None),
        "d": generation(1),
        "e": generation(7, rows=None),
        "f": Generation(*[np.ones(0, kind) for kind in (np.int32, np.float32, np.int32)], "",
                        FinishReason.ERROR, error="it says so"),
    }  # fmt: skip
    wanted["d"].routed_experts = np.full((2, 2, 2), 300, np.uint16)
    async with linked(engine) as link:
        link.submit([request(name, *range(k + 1)) for k, name in enumerate(names)], heard)
        await until(lambda: bool(engine.calls))
        engine.end({name: wanted[name] for name in ("e", "c", "a")})
        await heard.have(3)
        engine.end({name: wanted[name] for name in ("f", "d", "b")})
        found = await heard.have(6)
    for name in names:
        assert_same(found[name], wanted[name])
    asked = engine.calls[0]
    assert [one.token_ids.tolist() for one in asked] == [list(range(k + 1)) for k in range(6)]


async def test_what_is_asked_in_one_turn_goes_in_one_message_and_mates_share_a_context() -> None:
    engine, heard, other = HeldEngine(), Heard(), Heard()
    context = np.arange(4, dtype=np.int32)
    mates = [request(f"m{k}").evolve(token_ids=context, group_id="m") for k in range(2)]
    async with linked(engine) as link:
        link.submit(mates, heard)
        link.submit([request("x")], other)
        await until(lambda: bool(engine.calls))
        ((one, two, three),) = engine.calls
        assert one.token_ids is two.token_ids
        assert not one.token_ids.flags.writeable, "so that the engine checks it once"
        assert one.params is three.params == PARAMS
        assert (one.request_id, one.session_id, one.group_id) == ("m0", "s-m0", "m")
        served = ServedEngine(engine)
        parcels = served.answers(mates)
        first = asyncio.ensure_future(anext(parcels))
        await until(lambda: len(engine.calls) == 2)
        engine.end({"m1": generation(2), "m0": generation(1)})
        assert [place for place, _ in (await first)[0]] == [1, 0], "and together they come"
        assert [parcel async for parcel in parcels] == []
        engine.end({"x": generation(1)})
        await other.have(1)


class TwoArguments(Exception):
    """Cannot be made again from its pickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


async def test_L13_the_error_of_one_request_is_that_ones_and_keeps_its_class() -> None:
    engine, heard = HeldEngine(), Heard()
    out_of_step = generation(2)
    out_of_step.token_ids = np.array(["no", "number"])  # type: ignore[assignment]
    async with linked(engine) as link:
        link.submit([request(name) for name in "abcde"], heard)
        await until(lambda: bool(engine.calls))
        engine.end(
            {
                "a": EngineError("too long"),
                "b": generation(3),
                "c": TwoArguments(1, 2),
                "d": out_of_step,
                "e": generation(4),
            }
        )
        found = await heard.have(5)
    assert type(found["a"]) is EngineError
    assert str(found["a"]) == "too long"
    assert type(found["c"]) is EngineError
    assert str(found["c"]) == "TwoArguments: 1 and 2"
    assert isinstance(found["d"], ValueError)
    assert_same(found["b"], generation(3))
    assert_same(found["e"], generation(4))


async def test_L13_a_request_that_cannot_be_carried_fails_alone() -> None:
    engine, heard = HeldEngine(), Heard()
    foreign = request("bad").evolve(params=SamplingParams(stop=(iter(()),)))  # type: ignore[arg-type]
    foreign = foreign.evolve(group_id=(one for one in "ab"))
    async with linked(engine) as link:
        link.submit([request("a"), foreign, request("b")], heard)
        await until(lambda: len(engine.calls) == 2)
        engine.end({"a": generation(1), "b": generation(2)})
        found = await heard.have(3)
    assert isinstance(found["bad"], actors.NotSerializable)
    assert_same(found["a"], generation(1))
    assert_same(found["b"], generation(2))


async def test_an_engine_that_refuses_all_says_so_to_each() -> None:
    class Closed(HeldEngine):
        def submit(self, requests: object, answered: object) -> None:
            raise EngineError("closed")

    heard = Heard()
    async with linked(Closed()) as link:
        link.submit([request("a"), request("b")], heard)
        found = await heard.have(2)
    assert all(isinstance(one, EngineError) and str(one) == "closed" for one in found.values())


async def test_routing_goes_through_the_arena_and_no_parcel_grows_beyond_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_link, "_ROUTING_BYTES_MAX", 300_000)
    engine, heard = HeldEngine(), Heard()
    wanted = {}
    for k, name in enumerate("abcde"):
        wanted[name] = generation(k + 1)
        wanted[name].routed_experts = np.full((300, 24, 16), k, np.uint8)  # 115,200 bytes
    async with linked(engine, store="16MiB") as link:
        link.submit([request(name) for name in wanted], heard)
        await until(lambda: bool(engine.calls))
        parcels = list(engine_link._packed([(k, one) for k, one in enumerate(wanted.values())]))
        assert [len(plain) for plain, _ in parcels] == [2, 2, 1]
        engine.end(wanted)
        found = await heard.have(5)
        for name, one in wanted.items():
            assert_same(found[name], one)


async def test_a_batch_that_waits_for_its_last_answer_keeps_no_bytes_of_the_others() -> None:
    engine, heard = HeldEngine(), Heard()
    long = generation(2)
    long.routed_experts = np.ones((300, 24, 16), np.uint8)
    async with LocalRuntime(store="16MiB", name=unique_name("link")) as runtime:
        used = runtime.store.stats().used
        link = EngineLink(await runtime.host(ServedEngine(engine), name="engine"))
        link.submit([request("a"), request("b")], heard)
        await until(lambda: bool(engine.calls))
        engine.end({"a": long})
        await heard.have(1)
        assert runtime.store.stats().used > used
        heard.answers.clear()
        await until(lambda: runtime.store.stats().used == used)
        engine.end({"b": generation(1)})
        await heard.have(1)
        await link.aclose()


def fill(store: Store, size: int) -> None:
    while True:
        store.put(bytes(size), session="ballast")


async def test_an_answer_for_which_the_arena_has_no_room_fails_alone() -> None:
    """Those that came or would have come with it are asked for again, each in its own message."""
    engine, heard = HeldEngine(), Heard()
    name = unique_name("link")
    async with LocalRuntime(store="4MiB", name=name) as runtime:
        link = EngineLink(await runtime.host(ServedEngine(engine), name="engine"))
        assert runtime.store is not None
        runtime.store.sessions.open("ballast", owner="somebody")
        for size in (1 << 16, 64):
            with pytest.raises(StoreFull):
                fill(runtime.store, size)
        link.submit([request(name) for name in "abc"], heard)
        await until(lambda: len(engine.calls) == 1)
        engine.end({"a": generation(1), "b": generation(2, rows=20_000)})
        await until(lambda: len(engine.calls) == 4)
        engine.end({"a": generation(1), "b": generation(2, rows=20_000), "c": generation(3)})
        found = await heard.have(3)
        assert_same(found["a"], generation(1))
        assert isinstance(found["b"], StoreFull)
        assert_same(found["c"], generation(3))
        runtime.store.sessions.release_owned("somebody")
        await link.aclose()
    assert name not in Store.list()


async def test_what_is_dropped_ends_and_is_not_heard_of_sent_or_not() -> None:
    engine, heard = HeldEngine(), Heard()
    asked = [request(name) for name in "abc"]
    async with linked(engine) as link:
        link.submit(asked, heard)
        link.drop(asked[:1])
        await until(lambda: bool(engine.calls))
        assert [one.request_id for one in engine.calls[0]] == ["b", "c"]
        link.drop(asked[1:2])
        await until(lambda: list(engine.asked) == ["c"])
        engine.end({"c": generation(2)})
        await heard.have(1)
        assert list(heard.answers) == ["c"]
        link.drop(asked)  # of those that have ended nothing is left to be said
        assert not link._asked


async def test_an_abort_reaches_what_was_asked_just_before_and_keeps_what_it_has() -> None:
    engine, heard = HeldEngine(), Heard()
    async with linked(engine) as link:
        link.submit([request("a"), request("b")], heard)
        assert await link.abort(["b"]) == 1
        found = await heard.have(1)
        assert_same(found["b"], generation(1, FinishReason.ABORT))
        assert list(engine.asked) == ["a"]


async def test_the_deadline_of_one_who_asks_is_not_that_of_those_who_ask_with_him() -> None:
    """An evaluation has one; the rollouts of the run, which go in the same message, have none."""
    engine, heard = HeldEngine(), Heard()
    async with linked(engine) as link:
        deadline_ns = time.monotonic_ns() + 50_000_000
        token = CURRENT_CALL.set(CallContext(cast(Any, None), deadline_ns=deadline_ns))
        evaluated = [request("evaluated")]
        link.submit(evaluated, heard)
        CURRENT_CALL.reset(token)
        link.submit([request("a")], heard)
        await until(lambda: bool(engine.calls))
        await until(lambda: time.monotonic_ns() > deadline_ns + 50_000_000)
        engine.end({"a": generation(1)})
        found = await heard.have(1)
        assert_same(found["a"], generation(1))
        token = CURRENT_CALL.set(CallContext(cast(Any, None), deadline_ns=deadline_ns))
        link.drop(evaluated)  # as what is given up when it has passed
        CURRENT_CALL.reset(token)
        await until(lambda: not engine.asked)


async def test_an_engine_ends_what_a_link_that_is_gone_had_asked() -> None:
    engine, heard = HeldEngine(), Heard()
    async with linked(engine) as link:
        link.submit([request("a"), request("b")], heard)
        await until(lambda: bool(engine.calls))
        engine.end({"a": generation(1)})
        await heard.have(1)
        await link.aclose()
        await until(lambda: engine.dropped == ["b"])


# -- real processes ------------------------------------------------------------------------------


class Caller:
    """A producer's process, as far as an engine knows it."""

    def __init__(self, engine: actors.Handle) -> None:
        self.link = EngineLink(engine)

    async def ask(self, n: int) -> None:
        self.link.submit([request(f"r{k}") for k in range(n)], Heard())


class CountedProcess(EngineProcess):
    """Says how many requests run."""

    async def running(self) -> int:
        engine = self._served
        assert isinstance(engine, ScriptedEngine)
        return engine.running


async def test_L12_a_killed_producers_requests_end_in_the_engine() -> None:
    async with actors.Runtime(name=unique_name("link")) as runtime:
        engine = await runtime.spawn(CountedProcess, Script(stall_rate=1.0), name="engine")
        caller = await runtime.spawn(Caller, engine, name="caller")
        await caller.ask(3)
        while await engine.running() < 3:
            pass
        await caller.kill()
        while await engine.running():
            pass


async def test_a_link_answers_what_its_dead_process_had_once_and_with_its_death() -> None:
    async with actors.Runtime(name=unique_name("link")) as runtime:
        engine = await runtime.spawn(EngineProcess, HALF, name="engine")
        link, heard = EngineLink(engine), Heard()
        link.submit([request(f"r{k}") for k in range(16)], heard)
        early = set(await heard.have(2))
        os.kill(engine.pid, signal.SIGKILL)
        found = await heard.have(16)
        link.submit([request("late")], heard)
        found = await heard.have(17)
        assert isinstance(found["late"], ActorDied), "it is not waited for: another may be asked"
        dead = {name for name, answer in found.items() if isinstance(answer, ActorDied)}
        assert dead
        assert not dead & early
        await link.aclose()
        assert not heard.twice


@pytest.mark.parametrize("answered_before", [0, 14])
async def test_L13_an_engine_killed_in_the_middle_of_a_batch_loses_and_doubles_nothing(
    answered_before: int,
) -> None:
    """Each rollout is what it would have been without the death, and is told of once."""
    name = unique_name("link")
    asked = [request(f"g{k % 4}-{k}", 1, k % 4, group_id=f"g{k % 4}") for k in range(24)]
    alone = ScriptedEngine(QUICK)
    await alone.load_weights(WeightsVersion(b"", 1))
    wanted = {one.request_id: await alone.generate(one) for one in asked}
    async with actors.Runtime(store="16MiB", name=name) as runtime:
        engines = {
            f"engine-{k}": await runtime.spawn(EngineProcess, script, name=f"engine-{k}")
            for k, script in enumerate((HALF, QUICK))
        }
        links = {one: EngineLink(handle) for one, handle in engines.items()}
        router = EngineRouter(links, alone.info, (ActorDied,))
        for one in engines:
            await router.up(one, WeightsVersion(b"", 1))
        heard = Heard()
        for group in range(4):
            router.submit([one for one in asked if one.group_id == f"g{group}"], heard)
        await heard.have(answered_before)
        os.kill(engines["engine-0"].pid, signal.SIGKILL)
        found = await heard.have(len(asked))
        assert (router.replicas_up, router.restarted_requests > 0) == (1, True)
        for request_id, one in wanted.items():
            assert_same(found[request_id], one)
        await router.aclose()
    assert name not in Store.list()
