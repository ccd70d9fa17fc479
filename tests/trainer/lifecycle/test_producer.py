"""The producer with a scripted engine on virtual time and a real arena: L05, L08, L13,
filters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from shmstore import Store, StoreFull
from shmstore.testing import temporary_store
from tests.trainer.lifecycle.kit import (
    SLOW,
    WIDE,
    CountingJudge,
    OneTurn,
    Questions,
    TwoTurns,
    check_trace,
    desk,
)
from trainer.dispatch import Dispatcher
from trainer.engine.protocol import Answers, GenerateRequest, Generation
from trainer.engine.scripted import ByteTokenizer, Script, ScriptedEngine
from trainer.environment import Session
from trainer.errors import BadGroup, ToolError
from trainer.pending import ProducerConfig, ProducerParts
from trainer.producer import Producer
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.rollout import FinishReason, Group, Prompt, Rollout, Status, Trace
from trainer.staleness import StalenessBudget
from trainer.testing import make_segment, run_virtual
from trainer.trace import TraceStore
from trainer.work import DispatchConfig


@pytest.mark.parametrize("environment", [OneTurn(), TwoTurns()])
def test_what_the_learner_gets_is_what_the_engine_saw(store: Store, environment: Any) -> None:
    async def main() -> None:
        async with desk(store, environment=environment, dispatch=WIDE) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            for rollout in batch.rollouts:
                trace = check_trace(made, rollout)
                assert bytes(
                    trace.token_ids[: rollout.n_prompt_tokens].astype(np.uint8)
                ).decode() == ("question " + rollout.prompt_uid.split("/")[1])
                assert len(rollout.turns) == (2 if isinstance(environment, TwoTurns) else 1)
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def test_L05_the_prompt_of_a_group_is_stored_once_for_all_its_sessions(store: Store) -> None:
    async def main() -> None:
        async with desk(store, dispatch={**WIDE, "group_size": 4, "batch_groups": 1}) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            firsts = {store.sessions.objects(sid)[0].ref for sid in batch.session_ids}
            assert len(batch.session_ids) == 4
            assert len(firsts) == 1
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def test_a_rollout_of_one_turn_runs_no_environment_unless_it_has_a_record(store: Store) -> None:
    class Counted(OneTurn):
        runs = 0

        async def run(self, session: Session, prompt: Prompt) -> None:
            self.runs += 1
            await super().run(session, prompt)

    async def main() -> None:
        counted = Counted()
        options: Any = {"environment": counted, "one_turn": True, "dispatch": WIDE}
        async with desk(store, script=SLOW, **options) as made:
            await made.train(1)
            assert counted.runs == 0
            await asyncio.sleep(2.5)
            assert (await made.producer.pause(10)).cancelled_rollouts == 0
            assert made.buffer.count("math", Status.ABORTED) > 0
            await made.producer.resume()
            await asyncio.sleep(100)
            assert counted.runs > 0
            assert made.producer.report().errors == {}

    run_virtual(main())


def test_L08_production_goes_on_while_the_learner_trains(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, dispatch=WIDE) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            before = made.producer.report().rollouts
            await asyncio.sleep(30)  # the learner's step
            assert made.producer.report().rollouts >= before + 4
            assert made.traces.release(batch.session_ids, owner="learner") == list(
                batch.session_ids
            )
            await made.train(2)  # what was produced meanwhile is whole

    run_virtual(main())


class _Raises:
    """An environment, judge or filter that fails for some of the rollouts."""

    def __init__(self, error: BaseException | float | str | None, every: int = 3) -> None:
        self.error = error
        self.every = every
        self.calls = 0

    def _next(self) -> bool:
        self.calls += 1
        return self.calls % self.every == 0

    async def run(self, session: Session, prompt: Prompt) -> None:
        await session.generate(prompt.text)
        if self._next():
            assert isinstance(self.error, BaseException)
            raise self.error

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        if not self._next():
            return float(self.calls)
        if isinstance(self.error, BaseException):
            raise self.error
        if self.error is None:
            await asyncio.sleep(math.inf)
        return self.error  # type: ignore[return-value]


class _RaisesAtOnce(_Raises):
    """The same as a plain function."""

    def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:  # type: ignore[override]
        if not self._next():
            return float(self.calls)
        if isinstance(self.error, BaseException):
            raise self.error
        return self.error  # type: ignore[return-value]


class _Mute(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        return str(1 / 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"script": Script(failure_rate=0.3)}, "EngineError: scripted failure"),
        ({"environment": _Raises(ToolError("no such tool"))}, "ToolError: no such tool"),
        ({"environment": _Raises(TimeoutError("tool"))}, "TimeoutError: tool"),
        ({"environment": _Raises(asyncio.CancelledError())}, "CancelledError: user code let a"),
        ({"environment": _Raises(SystemExit(3))}, "RolloutError: user code called sys.exit(3)"),
        (
            {"environment": _Raises(BaseExceptionGroup("x", [asyncio.CancelledError()]))},
            "BaseExceptionGroup",
        ),
        ({"environment": _Raises(_Mute())}, "_Mute: (its __str__ raised ZeroDivisionError)"),
        (
            {"environment": _Raises(OSError(2, "no", "a\udcff"))},
            r"FileNotFoundError: [Errno 2] no: 'a\udcff'",
        ),
        ({"judge": _Raises(ValueError("\ud800"))}, r"ValueError: \ud800"),
        ({"judge": _Raises(_Mute())}, "_Mute: (its __str__ raised ZeroDivisionError)"),
        ({"judge": _RaisesAtOnce(SystemExit(_Mute()))}, "RolloutError: user code called sys.exit("),
        ({"judge": _RaisesAtOnce(ValueError("x" * 100_000))}, "ValueError: xxx"),
        ({"judge": _Raises(asyncio.CancelledError())}, "CancelledError: user code let a"),
        ({"judge": _Raises(SystemExit(3))}, "RolloutError: user code called sys.exit(3)"),
        ({"judge": _Raises(ZeroDivisionError("division"))}, "ZeroDivisionError: division"),
        ({"judge": _Raises(math.nan)}, "JudgeError: the judge returned nan"),
        ({"judge": _Raises("ten points")}, "JudgeError: the judge returned 'ten points'"),
        ({"judge": _Raises(True)}, "JudgeError: the judge returned True"),
        ({"judge": _Raises(None)}, "the judge took more than 60.0 s"),
        ({"judge": _Raises(TimeoutError("mine"))}, "TimeoutError: mine"),
        ({"judge": _RaisesAtOnce(asyncio.CancelledError())}, "CancelledError: user code let a"),
        ({"judge": _RaisesAtOnce(SystemExit(3))}, "RolloutError: user code called sys.exit(3)"),
        ({"judge": _RaisesAtOnce(TimeoutError("mine"))}, "TimeoutError: mine"),
        ({"judge": _RaisesAtOnce("ten points")}, "JudgeError: the judge returned 'ten points'"),
    ],
)
def test_L13_an_error_fails_one_rollout_and_never_the_producer(
    store: Store, options: dict[str, Any], said: str
) -> None:
    async def main() -> None:
        async with desk(store, dispatch=WIDE, **options) as made:
            for step in (1, 2, 3):
                batch = await made.train(step)
                assert all(r.error_msg is None for r in batch.rollouts)
            await asyncio.sleep(100)  # judges that never answer run out of their time
            errors = made.producer.report().errors
            assert errors
            assert all(text.startswith(said) and len(text) < 20_000 for text in errors)
            if said == "TimeoutError: tool":  # the user's own environment
                assert all(f'File "{__file__}", line' in text for text in errors), errors
            assert made.dispatcher.report()["failed"] > 0

    run_virtual(main())


def test_L13_an_environment_without_a_turn_fails_its_rollout(store: Store) -> None:
    class Silent(OneTurn):
        async def run(self, session: Session, prompt: Prompt) -> None:
            if not prompt.uid.endswith("/0"):
                await super().run(session, prompt)

    async def main() -> None:
        async with desk(store, environment=Silent(), dispatch=WIDE) as made:
            await made.train(1)
            assert made.producer.report().errors == {
                "the environment ended without a turn of the model": 2
            }

    run_virtual(main())


class _Broken(ScriptedEngine):
    """Answers that break the protocol in one way."""

    def __init__(self, flaw: str) -> None:
        super().__init__(Script())
        self.flaw = flaw
        self.answers = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        self.answers += 1
        if self.answers == 1:
            assert generation.routed_experts is not None
            if self.flaw == "no routing":
                generation.routed_experts = None
            elif self.flaw == "short routing":
                generation.routed_experts = generation.routed_experts[1:]
            elif self.flaw == "log-probs":
                generation.logprobs = generation.logprobs[:-1]
            else:
                generation.finish_reason = FinishReason.ERROR
                generation.error = "out of pages"
        return generation


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("no routing", "without routed experts"),
        ("short routing", "routed experts have shape"),
        ("log-probs", "log-probs and"),
        ("error", "EngineError: out of pages"),
    ],
)
def test_L13_an_engine_that_breaks_its_promise_fails_that_rollout(
    store: Store, flaw: str, said: str
) -> None:
    async def main() -> None:
        async with desk(store, dispatch=WIDE, run=False) as made:
            made.producer._parts = made.producer._parts.__class__(
                **{
                    name: getattr(made.producer._parts, name)
                    for name in ("traces", "tokenizer", "environment", "judge")
                },
                engine=_Broken(flaw),
            )
            running = asyncio.create_task(made.producer.run())
            await made.train(1)
            await asyncio.sleep(1)  # the desk's answer is on its way
            (text,) = made.producer.report().errors
            assert said in text
            await made.producer.stop(10)
            await running

    run_virtual(main())


class _CountingDesk:
    """Passes on what the producer asks, and keeps how many groups each call handed in."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.handed_in: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[Status | None]:
        self.handed_in.append(len(groups))
        return await self._dispatcher.put_all(groups, owner=owner)


def test_groups_that_end_in_one_turn_of_the_loop_are_handed_in_by_one_call(store: Store) -> None:
    async def main() -> None:
        script = Script(token_s=1.0, tokens_min=4, tokens_max=4)  # all end at the same time
        dispatch = {"batch_groups": 4, "group_size": 2}
        async with desk(store, script=script, dispatch=dispatch, run=False) as made:
            counting = made.producer._dispatcher = _CountingDesk(made.dispatcher)
            running = asyncio.create_task(made.producer.run())
            await made.train(1)
            assert counting.handed_in[0] == 8  # two batches, as the budget allows
            await made.producer.stop(10)
            await running

    run_virtual(main())


def test_an_error_at_one_group_of_a_call_keeps_no_other_from_its_place(store: Store) -> None:
    async def main() -> None:
        async with desk(store, run=False) as made:
            stranger = Group(uid="never-drawn", task="math", rollouts=(Rollout("s"),))
            works = await made.dispatcher.draw("producer-0", 1)
            made.traces.open("t", owner="producer-0")
            member = Rollout("t", status=Status.COMPLETED, reward=1.0)
            mine = Group(uid=works[0].uid, task="math", rollouts=(member,))
            with pytest.raises(BadGroup, match="never-drawn"):
                await made.dispatcher.put_all([stranger, mine], owner="producer-0")
            assert store.sessions.owner("t") == "replay"

    run_virtual(main())


def test_L31_a_group_that_waits_for_room_holds_up_none_that_ended_with_it(store: Store) -> None:
    """Nor the slot of one: its task may be what the learner lacks."""

    async def main() -> None:
        sources = {"math": Questions("math"), "code": Questions("code")}
        dispatch = {"batch_groups": 4, "group_size": 2}
        async with desk(store, sources=sources, dispatch=dispatch, run=False) as made:
            works = await made.dispatcher.draw("producer-0", 4)
            groups = []
            for work in works:
                made.traces.open(work.uid, owner="producer-0")
                made.traces.insert(work.uid, make_segment(4))
                member = Rollout(work.uid, status=Status.COMPLETED, reward=1.0)
                groups.append(Group(uid=work.uid, task=work.task, rollouts=(member,)))
            made.buffer.max_bytes = 1
            told = await made.dispatcher.put_all(groups, owner="producer-0")
            assert told == [Status.COMPLETED, None, None, None]  # an empty buffer takes any
            assert len(store.sessions.list("producer-0")) == 3
            taker = asyncio.create_task(made.dispatcher.take(1, owner="learner"))
            await asyncio.sleep(0)
            told = await made.dispatcher.put_all(groups[1:], owner="producer-0")
            assert told == [Status.COMPLETED] * 3  # what a taker lacks
            assert len(await taker) == 4
            store.sessions.release_owned("learner")

    run_virtual(main())


def test_groups_with_equal_rewards_are_filtered_and_their_rewards_still_count(store: Store) -> None:
    class Half(CountingJudge):
        async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
            self.calls += 1
            return 1.0 if int(prompt.uid.split("/")[1]) % 2 else float(self.calls)

    async def main() -> None:
        async with desk(store, judge=Half(), dispatch=WIDE) as made:
            for step in (1, 2, 3):
                batch = await made.train(step)
                assert {int(r.prompt_uid.split("/")[1]) % 2 for r in batch.rollouts} == {0}
            total = batch.report.total
            assert total.filtered_samples > 0
            assert total.raw_reward_count >= total.filtered_samples + len(batch.rollouts)

    run_virtual(main())


def test_a_validity_filter_of_the_user_filters_whole_groups(store: Store) -> None:
    async def main() -> None:
        async with desk(store, dispatch=WIDE, run=False) as made:
            parts = made.producer._parts
            made.producer._parts = parts.__class__(
                parts.engine,
                parts.traces,
                parts.tokenizer,
                parts.environment,
                parts.judge,
                valid=lambda group: group.uid != "math-0",
            )
            running = asyncio.create_task(made.producer.run())
            for step in range(1, 6):
                assert "math-0" not in {g.uid for g in (await made.train(step)).groups}
            assert made.dispatcher.report()["filtered"] == 2
            await made.producer.stop(10)
            await running

    run_virtual(main())


def test_a_producer_that_was_taken_for_dead_ends_with_the_cause(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, dispatch=WIDE, run=False) as made:
            running = asyncio.create_task(made.producer.run())
            await asyncio.sleep(1)
            made.dispatcher.owner_died("producer-0")  # somebody took it for dead
            with pytest.raises(BadGroup, match="not in production with 'producer-0'"):
                await running

    run_virtual(main())


class _BrokenDesk(_CountingDesk):
    """Has a bug where groups are handed in."""

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[Status | None]:
        raise ZeroDivisionError("a bug")


def test_an_error_at_a_hand_in_reaches_a_producer_that_waits_for_work(store: Store) -> None:
    """It was kept until the next draw, which waited for ever for what had been handed in."""

    async def main() -> None:
        async with desk(store, run=False) as made:
            made.producer._dispatcher = _BrokenDesk(made.dispatcher)
            with pytest.raises(ZeroDivisionError, match="a bug"):
                await asyncio.wait_for(made.producer.run(), 1000)
            made.dispatcher.owner_died("producer-0")
            store.sessions.release_owned("producer-0")

    run_virtual(main())


class _Raises(ScriptedEngine):
    """An engine that is awaited, in vain."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    async def generate(self, request: GenerateRequest) -> Generation:
        raise self._error


class _Refuses(_Raises):
    """Answers by a call, if it did not raise at once."""

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        raise self._error

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        raise AssertionError("none was taken")


@pytest.mark.parametrize("kind", [_Raises, _Refuses])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no"), "ValueError: no"),
        (StopIteration("no"), "StopIteration"),
        (SystemExit(2), "sys.exit(2)"),
    ],
)
def test_L13_whatever_comes_out_of_a_request_fails_its_rollout_and_not_the_run(
    store: Store, error: BaseException, says: str, kind: type[_Raises]
) -> None:
    async def main() -> None:
        async with desk(store, engine=kind(error)) as made:
            await asyncio.sleep(1)
            report = made.producer.report()
            assert set(report.put) == {"failed"}
            assert all(says in text for text in report.errors)

    run_virtual(main())


def test_L13_a_one_turn_that_raises_leaves_its_prompt_to_the_environment(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(prompt: Prompt) -> str:
        raise KeyError("question")

    async def main() -> None:
        async with desk(store) as made:
            parts = dataclasses.replace(made.producer._parts, one_turn=broken)
            made.producer._parts = parts
            await made.train(1)
            assert made.producer.report().errors == {}

    run_virtual(main())
    assert "KeyError: 'question'" in caplog.text


class _FailsWhenCancelled:
    """As environment and as judge: takes for ever, and its cleaning up goes wrong."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        await self._wait()

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        return await self._wait()

    async def _wait(self) -> float:
        waiting: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        try:
            return await waiting
        except asyncio.CancelledError:
            raise ValueError("cleaning up failed") from None


@pytest.mark.parametrize("part", ["environment", "judge"])
def test_L13_what_user_code_raises_at_its_time_limit_is_no_news(store: Store, part: str) -> None:
    async def main() -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, news: told.append(news))
        produce = {"rollout_timeout_s": 1.0, "judge_timeout_s": 1.0, "grace_s": 1.0}
        options: Any = {part: _FailsWhenCancelled(), "produce": produce}
        async with desk(store, **options) as made:
            await asyncio.sleep(5)
            assert made.producer.report().put
        gc.collect()
        assert told == []

    run_virtual(main())


def _fill(store: Store, session_id: str, size: int) -> None:
    while True:
        store.put(bytes(size), session=session_id)


def _fill_up(store: Store) -> None:
    store.sessions.open("ballast", owner="somebody")
    for size in (1 << 16, 64):
        with pytest.raises(StoreFull):
            _fill(store, "ballast", size)


async def test_a_full_arena_is_waited_for_and_fails_no_rollout() -> None:
    with temporary_store("4MiB") as store:
        _fill_up(store)
        async with desk(store, script=Script(), dispatch=WIDE) as made:
            taking = asyncio.create_task(made.train(1))
            done, _ = await asyncio.wait([taking], timeout=0.3)
            assert not done
            store.sessions.release_owned("somebody")
            await asyncio.wait_for(taking, 30)
            assert made.producer.report().errors == {}


@pytest.mark.parametrize("environment", [None, OneTurn()])
async def test_mates_that_all_find_the_arena_full_store_their_prompt_once_and_then_their_answers(
    environment: OneTurn | None,
) -> None:
    with temporary_store("4MiB") as store:
        _fill_up(store)
        dispatch = {**WIDE, "group_size": 4}
        async with desk(store, script=Script(), environment=environment, dispatch=dispatch) as made:
            taking = asyncio.create_task(made.dispatcher.take(1, owner="learner", timeout=100))
            done, _ = await asyncio.wait([taking], timeout=0.3)
            assert not done
            store.sessions.release_owned("somebody")
            batch = await asyncio.wait_for(taking, 30)
            for rollout in batch.rollouts:
                check_trace(made, rollout)
            for group in batch:
                assert len({store.sessions.objects(s)[0].ref for s in group.session_ids}) == 1
            made.traces.release(batch.session_ids, owner="learner")


async def test_a_rollout_that_gave_up_waiting_for_room_is_not_written_to_afterwards() -> None:
    """Its session may be the buffer's by then, or another attempt's."""
    with temporary_store("4MiB") as store:
        _fill_up(store)
        produce = {"rollout_timeout_s": 0.1, "grace_s": 0.1, "groups_max": 1}
        async with desk(store, script=Script(), dispatch=WIDE, produce=produce) as made:
            while not made.producer.report().put:
                await asyncio.sleep(0.01)
            await made.producer.pause(30)
            held = store.sessions.list("replay")
            assert held
            store.sessions.release_owned("somebody")
            await asyncio.get_running_loop().shutdown_default_executor()  # the threads are done
            assert [made.traces.length(session_id) for session_id in held] == [0] * len(held)


async def test_L12_a_producer_stopped_as_its_last_group_ends_draws_no_more(store: Store) -> None:
    """It would be work that nobody gives back: the stop has done so already."""
    dispatcher = Dispatcher(
        ReplayBuffer(store),
        PromptSampler({"math": Questions()}, seed=None),
        DispatchConfig(batch_groups=4, group_size=2, budget=StalenessBudget(5)),
    )
    parts = ProducerParts(
        ScriptedEngine(Script()), TraceStore(store), ByteTokenizer(), OneTurn(), CountingJudge()
    )
    producer = Producer(dispatcher, parts, ProducerConfig(group_size=2, groups_max=1))
    running = asyncio.create_task(producer.run())
    while not producer.report().in_production:
        await asyncio.sleep(0)
    while producer.report().in_production:
        await asyncio.sleep(0)
    await producer.stop(30)
    await running
    assert [line for line in dispatcher.describe() if "is producing" in line] == []
    dispatcher.buffer.close()
