"""The producer with a scripted engine on virtual time and a real arena: L05, L08, L11, L13, L20,
L21.
"""

from __future__ import annotations

import asyncio
import gc
import math
from typing import Any

import numpy as np
import pytest

from shmstore import Store, StoreFull
from shmstore.testing import temporary_store
from tests.trainer.lifecycle.kit import CountingJudge, Desk, OneTurn, TwoTurns, desk
from trainer.engine.protocol import GenerateRequest, Generation, WeightsVersion
from trainer.engine.scripted import Script, ScriptedEngine, routing_of
from trainer.environment import RolloutAborted, Session
from trainer.errors import BadGroup, ToolError
from trainer.expiry import Expiry
from trainer.rollout import IGNORE_LABEL, FinishReason, Prompt, Rollout, Status, Trace
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual

SLOW = Script(token_s=1.0, tokens_min=6, tokens_max=6)
WIDE = {"batch_groups": 2, "budget": StalenessBudget(max_staleness=5)}


def _check_trace(made: Desk, rollout: Rollout) -> Trace:
    """Every row of routing is that of its token at its place, whatever stops and goes produced
    it.
    """
    (leaf,) = rollout.leaves
    trace = made.traces.export(rollout.session_id, node=leaf)
    assert trace.routed_experts is not None
    wanted = routing_of(made.engine.script, trace.token_ids)
    np.testing.assert_array_equal(trace.routed_experts[:-1], wanted[:-1])
    sampled = trace.labels != IGNORE_LABEL
    assert (trace.labels[sampled] == trace.token_ids[sampled]).all()
    assert (trace.model_steps >= 0).tolist() == sampled.tolist()
    assert (trace.logprobs != 0).tolist() == sampled.tolist()
    assert (trace.model_steps[sampled].min(), trace.model_steps[sampled].max()) == (
        rollout.model_step_min,
        rollout.model_step_max,
    )
    assert len(trace) == rollout.n_tokens
    return trace


@pytest.mark.parametrize("environment", [OneTurn(), TwoTurns()])
def test_what_the_learner_gets_is_what_the_engine_saw(store: Store, environment: Any) -> None:
    async def main() -> None:
        async with desk(store, environment=environment, dispatch=WIDE) as made:
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            for rollout in batch.rollouts:
                trace = _check_trace(made, rollout)
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


@pytest.mark.parametrize("environment", [OneTurn(), TwoTurns()])
@pytest.mark.parametrize("pause_at_s", [0.0, 0.5, 2.5, 6.5, 9.5])
def test_L11_an_aborted_rollout_goes_on_where_it_stopped_with_the_new_model_step(
    store: Store, environment: Any, pause_at_s: float
) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, environment=environment, dispatch=WIDE) as made:
            await asyncio.sleep(pause_at_s)
            report = await made.producer.pause(10)
            assert (report.cancelled_rollouts, report.seconds) == (0, 0)
            kept = made.engine.generated_tokens
            await made.engine.load_weights(WeightsVersion(b"", 1))
            await made.dispatcher.set_steps(model_step=1)
            await made.producer.resume()
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            assert len(batch.groups) == 2
            crossing = 0
            for rollout in batch.rollouts:
                trace = _check_trace(made, rollout)
                steps = trace.model_steps[trace.model_steps >= 0].tolist()
                assert steps == sorted(steps)
                crossing += len(set(steps)) == 2
                assert rollout.status is Status.COMPLETED
            assert (crossing > 0) == (kept > 0 and not _just_finished(environment, pause_at_s))
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def _just_finished(environment: Any, pause_at_s: float) -> bool:
    """All first turns end at 5 s; a one-turn rollout is then complete."""
    return isinstance(environment, OneTurn) and pause_at_s > 5


def test_L11_with_partial_rollout_off_the_response_is_cut_and_starts_over(store: Store) -> None:
    async def main() -> None:
        async with desk(
            store, script=SLOW, dispatch=WIDE, produce={"partial_rollout": False}
        ) as made:
            await asyncio.sleep(2.5)
            await made.producer.pause(10)
            sessions = store.sessions.list("replay")
            assert sessions
            assert {made.traces.length(session) for session in sessions} == {1}
            await made.engine.load_weights(WeightsVersion(b"", 1))
            await made.dispatcher.set_steps(model_step=1)
            await made.producer.resume()
            for rollout in (await made.train(1)).rollouts:
                assert (rollout.model_step_min, rollout.model_step_max) == (1, 1)

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
            assert all(text.startswith(said) for text in errors)
            if said == "TimeoutError: tool":  # the user's own environment
                assert all(f'File "{__file__}", line' in text for text in errors), errors
            assert made.dispatcher.report()["failed"] > 0

    run_virtual(main())


class _InATaskGroup:
    """Talks to the policy from a task of its own."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._talk(session, prompt))

    async def _talk(self, session: Session, prompt: Prompt) -> None:
        await session.generate(prompt.text)


def test_L11_an_abort_out_of_a_task_group_of_the_environment_is_an_abort(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, environment=_InATaskGroup(), dispatch=WIDE) as made:
            await asyncio.sleep(2.5)
            assert (await made.producer.pause(10)).cancelled_rollouts == 0
            assert made.buffer.count("math", Status.ABORTED) > 0
            assert made.dispatcher.report()["failed"] == 0
            await made.producer.resume()
            await made.train(1)

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
            (text,) = made.producer.report().errors
            assert said in text
            await made.producer.stop(10)
            await running

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


def test_L20_in_flight_no_rollout_is_thrown_away_and_each_token_has_its_step(store: Store) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, dispatch=WIDE) as made:
            for step in (1, 2, 3):
                await asyncio.sleep(2)
                await made.engine.load_weights(WeightsVersion(b"", step), "in_flight")
                await made.dispatcher.set_steps(model_step=step)
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            for rollout in batch.rollouts:
                steps = _check_trace(made, rollout).model_steps
                # A token a second from second 0 on; weights change at seconds 2 and 4.
                assert sorted(set(steps[steps >= 0].tolist())) == [0, 1, 2]
                assert rollout.attempt == 0
            made.traces.release(batch.session_ids, owner="learner")
            assert made.producer.report().put.get("aborted", 0) == 0

    run_virtual(main())


def test_L21_a_pause_ends_at_its_deadline_and_reports_what_it_cancelled(store: Store) -> None:
    class Stuck(ScriptedEngine):
        async def abort(self, request_ids: Any = None) -> int:
            return 0  # an engine that does not listen

    async def main() -> None:
        async with desk(store, script=Script(stall_rate=1.0), dispatch=WIDE, run=False) as made:
            parts = made.producer._parts
            made.producer._parts = parts.__class__(
                Stuck(Script(stall_rate=1.0)),
                parts.traces,
                parts.tokenizer,
                parts.environment,
                parts.judge,
            )
            running = asyncio.create_task(made.producer.run())
            await asyncio.sleep(1)
            started = asyncio.get_running_loop().time()
            report = await made.producer.pause(7)
            assert asyncio.get_running_loop().time() - started == pytest.approx(7)
            assert (report.finished_groups, report.cancelled_rollouts) == (0, 16)
            assert store.sessions.list() == []
            assert made.dispatcher.report()["cancelled"] == 16
            made.dispatcher.check_books()
            await made.producer.stop(10)
            await running

    run_virtual(main())


@pytest.mark.parametrize("drain", [False, True])
def test_L21_a_pause_loses_no_rollout_and_nothing_starts_until_resume(
    store: Store, drain: bool
) -> None:
    async def main() -> None:
        async with desk(store, script=SLOW, dispatch=WIDE) as made:
            await asyncio.sleep(2)
            report = await made.producer.pause(100, drain=drain)
            assert report.cancelled_rollouts == 0
            assert report.finished_groups == 8
            status = Status.COMPLETED if drain else Status.ABORTED
            assert made.buffer.count("math", status) == 8
            assert store.sessions.list("producer-0") == []
            await asyncio.sleep(1000)
            assert made.producer.report().in_production == 0
            assert made.engine.running == 0
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())


def test_a_slow_judge_does_not_keep_a_pause_beyond_its_deadline(store: Store) -> None:
    async def main() -> None:
        judge = _Raises(None, every=1)
        async with desk(store, judge=judge, dispatch=WIDE) as made:
            await asyncio.sleep(3)
            report = await made.producer.pause(5)
            assert report.seconds == pytest.approx(5)
            assert report.cancelled_rollouts == 16

    run_virtual(main())


class _Deaf:
    """User code that takes cancellations for hiccups, and tries again after a minute."""

    def __init__(self) -> None:
        self.deaf = True
        self.refused = 0

    async def run(self, session: Session, prompt: Prompt) -> None:
        while True:
            try:
                await session.generate(prompt.text)
            except RolloutAborted:
                self.refused += 1
            await self._sleep()

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        while True:
            await self._sleep()

    async def _sleep(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not self.deaf:
                raise
            await asyncio.sleep(60)


@pytest.mark.parametrize("part", ["environment", "judge"])
def test_L21_user_code_that_goes_on_when_cancelled_keeps_neither_a_pause_nor_its_session(
    store: Store, part: str
) -> None:
    async def main() -> None:
        deaf = _Deaf()
        options: Any = {part: deaf, "produce": {"grace_s": 2.0}}
        async with desk(store, script=Script(), dispatch=WIDE, **options) as made:
            await asyncio.sleep(30)
            report = await made.producer.pause(5)
            assert report.seconds == pytest.approx(5 + 2)
            assert report.cancelled_rollouts == 16
            assert store.sessions.list() == []
            made.producer._stopped = True
            await made.producer.resume()
            await asyncio.sleep(60)  # what was left behind tries again
            assert deaf.refused == (16 if part == "environment" else 0)
            assert store.sessions.list() == []
            deaf.deaf = False
            left = [t for t in asyncio.all_tasks() if "_guarded" in repr(t.get_coro())]
            assert len(left) == 16
            for task in left:
                task.cancel()

    run_virtual(main())


@pytest.mark.parametrize("turns_of_the_loop", range(5))
def test_a_rollout_that_is_cancelled_before_it_began_leaves_no_coroutine_behind(
    store: Store, turns_of_the_loop: int
) -> None:
    """A warning would be an error: user code is called only when its task runs."""

    async def main() -> None:
        async with desk(store, dispatch=WIDE) as made:
            while not made.producer._groups:
                await asyncio.sleep(0)
            for _ in range(turns_of_the_loop):
                await asyncio.sleep(0)
            for task in made.producer._groups:
                task.cancel()

    run_virtual(main())
    gc.collect()


def test_a_rollout_that_takes_too_long_is_aborted_with_its_tokens(store: Store) -> None:
    async def main() -> None:
        script = Script(token_s=1.0, tokens_min=1, tokens_max=6)
        produce = {"rollout_timeout_s": 2.5}
        async with desk(store, script=script, dispatch=WIDE, produce=produce) as made:
            for step in range(1, 5):
                batch = await made.dispatcher.take(step, owner="learner", timeout=99)
                for rollout in batch.rollouts:
                    _check_trace(made, rollout)
                made.traces.release(batch.session_ids, owner="learner")
            assert made.producer.report().put["aborted"] > 0

    run_virtual(main())


def test_user_code_that_catches_everything_does_not_hide_an_abort(store: Store) -> None:
    class Greedy:
        async def run(self, session: Session, prompt: Prompt) -> None:
            try:
                await session.generate(prompt.text)
            except BaseException:  # what users write
                return

    async def main() -> None:
        async with desk(store, script=SLOW, environment=Greedy(), dispatch=WIDE) as made:
            await asyncio.sleep(2)
            await made.producer.pause(10)
            assert made.buffer.count("math", Status.ABORTED) == 8
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())


def test_a_tool_that_answers_otherwise_the_second_time_leaves_the_record_there(
    store: Store,
) -> None:
    class Clock:
        """Its tool tells the time, which is another one when the rollout is gone on with."""

        async def run(self, session: Session, prompt: Prompt) -> None:
            await session.generate(prompt.text)
            now = int(asyncio.get_running_loop().time())
            await session.generate(f"it is {now // 8} o'clock")

    async def main() -> None:
        async with desk(store, script=SLOW, environment=Clock(), dispatch=WIDE) as made:
            await asyncio.sleep(8.5)  # in the second turn
            await made.producer.pause(10)
            await made.producer.resume()
            batch = await made.dispatcher.take(1, owner="learner", timeout=100)
            for rollout in batch.rollouts:
                trace = _check_trace(made, rollout)
                assert b"it is 1 o'clock" in bytes(trace.token_ids.astype(np.uint8))
                assert b"it is 0 o'clock" not in bytes(trace.token_ids.astype(np.uint8))
            made.traces.release(batch.session_ids, owner="learner")

    run_virtual(main())


def test_expired_members_are_produced_again_and_fresh_ones_are_kept(store: Store) -> None:
    async def main() -> None:
        budget = StalenessBudget(max_staleness=0)
        async with desk(
            store,
            expiry=Expiry(max_staleness=0),
            dispatch={"batch_groups": 2, "budget": budget},
        ) as made:
            await asyncio.sleep(10)
            assert made.buffer.count("math", Status.COMPLETED) == 2
            await made.engine.load_weights(WeightsVersion(b"", 1), "in_flight")
            await made.dispatcher.set_steps(train_step=2, model_step=1)
            batch = await made.dispatcher.take(2, owner="learner", timeout=100)
            assert {g.uid for g in batch.groups} == {"math-0", "math-1"}
            for rollout in batch.rollouts:
                assert (rollout.model_step_min, rollout.attempt) == (1, 1)
                _check_trace(made, rollout)
            made.traces.release(batch.session_ids, owner="learner")

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


def _fill(store: Store, session_id: str, size: int) -> None:
    while True:
        store.put(bytes(size), session=session_id)


async def test_a_full_arena_is_waited_for_and_fails_no_rollout() -> None:
    with temporary_store("4MiB") as store:
        store.sessions.open("ballast", owner="somebody")
        for size in (1 << 16, 64):
            with pytest.raises(StoreFull):
                _fill(store, "ballast", size)
        async with desk(store, script=Script(), dispatch=WIDE) as made:
            taking = asyncio.create_task(made.train(1))
            done, _ = await asyncio.wait([taking], timeout=0.3)
            assert not done
            store.sessions.release_owned("somebody")
            await asyncio.wait_for(taking, 30)
            assert made.producer.report().errors == {}
