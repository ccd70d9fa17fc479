"""Whatever goes wrong in user code or in the engine fails one rollout, never the producer: L13."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import (
    WIDE,
    OneTurn,
    Questions,
    SubmittedEngine,
    desk,
)
from trainer.engine.protocol import Answers, GenerateRequest, Generation
from trainer.engine.scripted import Script, ScriptedEngine
from trainer.environment import Session
from trainer.errors import ToolError
from trainer.rollout import FinishReason, Prompt
from trainer.segment import Trace
from trainer.testing import run_virtual


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
    store: Store, options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
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
            for text in errors:  # each text is in the log once, at its first rollout
                assert caplog.messages.count(f"a rollout of math failed: {text}") == 1

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


@dataclasses.dataclass(frozen=True)
class _Chats(Questions):
    def prompt(self, index: int) -> Prompt:
        told = ({"role": "user", "content": f"question {index}"},)
        return Prompt(f"{self.task}/{index}", self.task, messages=told, answer=index)


def test_L13_an_environment_that_asks_a_chat_for_its_text_is_told_so(store: Store) -> None:
    async def main() -> None:
        sources = {"math": _Chats(size=1)}
        async with desk(store, environment=OneTurn(), sources=sources, epochs=1) as made:
            await asyncio.sleep(1)
            (text,) = made.producer.report().errors
            assert text.endswith("the prompt is a chat: say its messages, for its text is None")

    run_virtual(main())


class _Broken(ScriptedEngine):
    """Answers that break the protocol in one way."""

    flaw = ""
    answers = 0

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
            elif self.flaw == "reason":
                generation.finish_reason = cast(Any, "stop")
            elif self.flaw == "no tokens":
                for name in ("token_ids", "logprobs", "model_steps"):
                    setattr(generation, name, getattr(generation, name)[:0])
                generation.finish_reason = FinishReason.STOP
            else:
                generation.finish_reason = FinishReason.ERROR
                generation.error = "out of pages"
        return generation


class _BrokenByCall(SubmittedEngine, _Broken):
    """The same, of an engine that answers by a call."""


@pytest.mark.parametrize("kind", [_Broken, _BrokenByCall])
@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("no routing", "without routed experts"),
        ("short routing", "routed experts have shape"),
        ("log-probs", "log-probs and"),
        ("reason", "EngineError: the engine returned no FinishReason: 'stop'"),
        ("no tokens", "EngineError: the engine returned no token, and ended for stop"),
        ("error", "EngineError: out of pages"),
    ],
)
def test_L13_an_engine_that_breaks_its_promise_fails_that_rollout(
    store: Store, flaw: str, said: str, kind: type[_Broken]
) -> None:
    async def main() -> None:
        engine = kind()
        engine.flaw = flaw
        async with desk(store, engine=engine, dispatch=WIDE) as made:
            await made.train(1)
            await asyncio.sleep(1)  # the desk's answer is on its way
            (text,) = made.producer.report().errors
            assert said in text

    run_virtual(main())


class _Nonsense(ScriptedEngine):
    """Its first answer is none."""

    first: list[Any]

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        return self.first.pop() if self.first else generation


class _NonsenseByCall(SubmittedEngine, _Nonsense):
    pass


@pytest.mark.parametrize("answer", [None, "42", [], Generation])
def test_L13_an_answer_by_call_that_is_no_generation_fails_that_rollout(
    store: Store, answer: Any
) -> None:
    async def main() -> None:
        engine = _NonsenseByCall()
        engine.first = [answer]
        async with desk(store, engine=engine, dispatch=WIDE) as made:
            await made.train(1)
            await asyncio.sleep(1)
            (text,) = made.producer.report().errors
            assert text == f"EngineError: the engine answered {answer!r}, which is no Generation"

    run_virtual(main())


class _Lists(ScriptedEngine):
    """Answers in Python's own lists, as one over HTTP may."""

    async def generate(self, request: GenerateRequest) -> Generation:
        generation: Any = await super().generate(request)
        for name in ("token_ids", "logprobs", "model_steps"):
            setattr(generation, name, getattr(generation, name).tolist())
        return generation  # type: ignore[no-any-return]


class _ListsByCall(SubmittedEngine, _Lists):
    pass


@pytest.mark.parametrize("environment", [None, OneTurn()])
def test_an_engine_may_answer_in_lists(store: Store, environment: OneTurn | None) -> None:
    async def main() -> None:
        async with desk(
            store, engine=_ListsByCall(), environment=environment, dispatch=WIDE
        ) as made:
            batch = await made.train(1)
            assert {r.model_step_max for r in batch.rollouts} == {0}
            assert made.producer.report().errors == {}

    run_virtual(main())


class _Watched(ScriptedEngine):
    """Knows which of its answers' routing is still in memory."""

    routing: list[weakref.ref[Any]]

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        self.routing.append(weakref.ref(generation.routed_experts))
        return generation


class _WatchedByCall(SubmittedEngine, _Watched):
    pass


@pytest.mark.parametrize("environment", [None, OneTurn()])
def test_nothing_of_an_answer_but_what_is_stored_is_kept_while_a_judge_takes_its_time(
    store: Store, environment: OneTurn | None
) -> None:
    """Routing is nearly all of an answer, and from an engine process it pins the arena."""

    async def main() -> None:
        engine, judge = _WatchedByCall(), _Raises(None, every=1)
        engine.routing = []
        async with desk(store, engine=engine, environment=environment, judge=judge) as made:
            while judge.calls < 16:
                await asyncio.sleep(0.1)
            assert made.producer.report().in_production
            gc.collect()
            assert len(engine.routing) == 16
            assert [one for one in engine.routing if one() is not None] == []

    run_virtual(main())


class _RaisingEngine(ScriptedEngine):
    """An engine that is awaited, in vain."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    async def generate(self, request: GenerateRequest) -> Generation:
        raise self._error


class _RefusingEngine(_RaisingEngine):
    """Answers by a call, if it did not raise at once."""

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        raise self._error

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        raise AssertionError("none was taken")


@pytest.mark.parametrize("kind", [_RaisingEngine, _RefusingEngine])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no"), "ValueError: no"),
        (StopIteration("no"), "StopIteration"),
        (SystemExit(2), "sys.exit(2)"),
    ],
)
def test_L13_whatever_comes_out_of_a_request_fails_its_rollout_and_not_the_run(
    store: Store, error: BaseException, says: str, kind: type[_RaisingEngine]
) -> None:
    async def main() -> None:
        async with desk(store, engine=kind(error)) as made:
            await asyncio.sleep(1)
            report = made.producer.report()
            assert set(report.put) == {"failed"}
            assert all(says in text for text in report.errors)

    run_virtual(main())


@pytest.mark.parametrize("error", [KeyError("question"), SystemExit(3)])
def test_L13_a_one_turn_that_raises_leaves_its_prompt_to_the_environment(
    store: Store, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def broken(prompt: Prompt) -> str:
        raise error

    async def main() -> None:
        async with desk(store) as made:
            parts = dataclasses.replace(made.producer._parts, one_turn=broken)
            made.producer._parts = parts
            await made.train(1)
            assert made.producer.report().errors == {}

    run_virtual(main())
    assert f"{type(error).__name__}: {error}; its environment is run" in caplog.text


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
