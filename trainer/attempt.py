"""One rollout of a group under way: its conversation, then its verdict.

Owns the task in which user code runs for it, and its time limits. Every way in which that can go
wrong ends in the status and `error_msg` of the rollout (lifecycle L13). Made, then begun, perhaps
much later; one that `trainer.one_turn` has begun goes on here with `hear` or `wait_for` when a task
is needed, or when it did not end as nearly all do. Whenever `ended` is told, `advance`, until that
returns the rollout. Belongs to the task of its group.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trainer.conversation import Conversation
from trainer.engine.protocol import Generation
from trainer.environment import RolloutAborted
from trainer.error_text import carried_text, error_text
from trainer.errors import JudgeError, RolloutError, TrainerError
from trainer.group_context import GroupContext
from trainer.rollout import Rollout, Status

if TYPE_CHECKING:
    from trainer.pending import ProducerConfig, ProducerParts

__all__ = ["Attempt", "Outcome", "give_up", "verdict_of"]

T = TypeVar("T")

#: The rollout as it ends: of status, reward, error text and seconds.
Outcome = Callable[[Status, float | None, str | None, float], Rollout]
#: What a judge came to: a reward, something to await for it, or the text of its failure.
Verdict = float | Awaitable[float] | str

_NOT_BEGUN = inspect.CORO_CREATED
_log = logging.getLogger("trainer")

#: User code that did not end when it was cancelled; a loop holds its tasks only weakly.
_abandoned: set[asyncio.Future[Any]] = set()
#: The innermost frames of a traceback that an `error_msg` keeps.
_FRAMES_MAX = 8


class Attempt:
    """See the module. User code runs in a task of its own, so that a cancellation that comes out
    of it is not taken for one of ours: a task group inside it leaves marks on the task in which it
    is. Code that catches our cancellation and goes on is left behind after `grace_s`.
    """

    __slots__ = (
        "_answer",
        "_config",
        "_context",
        "_ended",
        "_expired",
        "_loop",
        "_outcome",
        "_parts",
        "_rollout",
        "_started",
        "_stopper",
        "_talked_s",
        "_task",
        "_timers",
        "_verdict",
        "conversation",
        "is_open",
    )

    def __init__(
        self,
        parts: ProducerParts,
        config: ProducerConfig,
        context: GroupContext,
        rollout: Rollout,
        ended: Callable[[Attempt], None],
    ) -> None:
        self._parts = parts
        self._config = config
        self._context = context
        self._rollout = rollout
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._started = 0.0
        self._talked_s = 0.0
        self._expired = False
        self._timers: list[asyncio.TimerHandle] = []
        self._stopper: asyncio.Task[None] | None = None
        self._verdict: Awaitable[float] | None = None  # what the judge is asked to come to
        #: Whether `give_up` has something to end.
        self.is_open = True
        self.conversation = Conversation(context, rollout)
        self._outcome: Outcome = self.conversation.outcome
        self._task: asyncio.Task[Any] | None = None
        self._answer: Generation | BaseException | None = None

    def begin(self) -> None:
        """Its user code runs, and from now on its time counts."""
        self._started = self._loop.time()
        self._run(self._talk)
        soft_s = self._config.rollout_timeout_s
        if soft_s is not None:
            self._call_later(soft_s, self._stop_softly)
            self._call_later(soft_s + self._config.grace_s, self._expire)

    def hear(self, answer: Generation | BaseException, started: float) -> Rollout | None:
        """Instead of `begin`, as `advance`: its one turn was asked for then, and is over."""
        self._started = started
        self._answer = answer
        if isinstance(answer, Generation):
            assert self._context.opening is not None
            self.conversation.say(self._context.opening)
        return self.advance()

    def wait_for(
        self, verdict: Awaitable[float] | str, outcome: Outcome, talked_s: float
    ) -> Rollout | None:
        """Instead of `begin`, as `advance`: all that is left is what the judge comes to."""
        self._outcome, self._talked_s = outcome, talked_s
        return self._judge(verdict)

    def advance(self) -> Rollout | None:
        """What it has come to; -> the rollout, or None while it goes on."""
        if self._verdict is not None:
            self._end_timers()
            return self._judged(self._verdict)
        talked = self._talked()
        if talked is None:
            return None
        if self._timers:
            self._end_timers()
        self.conversation.close()
        self._talked_s = self._loop.time() - self._started
        status, error = talked
        if status is not Status.COMPLETED:
            return self._done(status, error=error)
        conversation = self.conversation
        node = conversation.node
        assert node is not None
        verdict = verdict_of(self._parts, self._context, conversation.id, node, conversation.text)
        return self._judge(verdict)

    # -- the environment -------------------------------------------------------------------------

    def _talk(self) -> Awaitable[None]:
        return self._parts.environment.run(self.conversation, self._context.prompt)

    def _talked(self) -> tuple[Status, str | None] | None:
        """How the conversation has ended: status and error text; None while it waits for room."""
        if self._expired:
            return Status.ABORTED, None
        try:
            if self._task is not None:
                self._task.result()
            answer, self._answer = self._answer, None
            if isinstance(answer, SystemExit):
                raise _exited(answer)
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None and self.conversation.finish(answer) is None:
                self._run(self.conversation.finish_later)
                return None
        except RolloutAborted:
            return Status.ABORTED, None
        except asyncio.CancelledError as error:
            return Status.FAILED, _failure(error)
        # User code and engines may raise anything: it fails this rollout and no other (L13).
        except (Exception, BaseExceptionGroup) as error:
            if self.conversation.aborted:  # out of a task group of the environment
                return Status.ABORTED, None
            return Status.FAILED, _text_with_place(error)
        if self.conversation.aborted:
            return Status.ABORTED, None
        if not self.conversation.has_sampled:
            return Status.FAILED, "the environment ended without a turn of the model"
        return Status.COMPLETED, None

    def _done(
        self, status: Status, *, reward: float | None = None, error: str | None = None
    ) -> Rollout:
        done = self._outcome(
            status, reward, error, self._rollout.generation_time_s + self._talked_s
        )
        self.is_open = self._stopper is not None
        if status is Status.ABORTED and not self._config.partial_rollout:
            self._parts.traces.truncate(done.session_id, keep=done.n_prompt_nodes)
            done = done.cut_to_prompt(Status.ABORTED)
        return done

    # -- the judge -------------------------------------------------------------------------------

    def _judge(self, verdict: Verdict) -> Rollout | None:
        """A verdict that is to be awaited gets a task and a time limit."""
        if isinstance(verdict, float):
            return self._done(Status.COMPLETED, reward=verdict)
        if isinstance(verdict, str):
            return self._done(Status.FAILED, error=verdict)
        self._verdict = verdict
        self._run(lambda: verdict)
        self._call_later(self._config.judge_timeout_s, self._expire)
        return None

    def _judged(self, verdict: Awaitable[float]) -> Rollout:
        _close_unless_begun(verdict)
        if self._expired:
            limit_s = self._config.judge_timeout_s
            return self._done(Status.FAILED, error=f"the judge took more than {limit_s} s")
        assert self._task is not None
        try:
            return self._done(Status.COMPLETED, reward=_finite(self._task.result()))
        except (Exception, BaseExceptionGroup, asyncio.CancelledError) as error:
            return self._done(Status.FAILED, error=_failure(error))

    # -- user code and its limits ----------------------------------------------------------------

    def _run(self, user_code: Callable[[], Awaitable[Any]]) -> None:
        self._task = self._loop.create_task(_guarded(user_code))
        self._task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Future[Any]) -> None:
        self._ended(self)

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(delay_s, callback))

    def _end_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _stop_softly(self) -> None:
        self._stopper = self._loop.create_task(_stop(self.conversation))

    def _expire(self) -> None:
        """The time limit of what runs now: it ends within `grace_s`, or without us."""
        self._expired = True
        if self._task is not None:
            self._task.add_done_callback(_forget)
            self._task.cancel()
            self._call_later(self._config.grace_s, self._leave)

    def _leave(self) -> None:
        assert self._task is not None
        if self._task.done():  # word of it is on its way
            return
        self._task.remove_done_callback(self._task_ended)
        _leave_behind(self._task)
        self._ended(self)

    def close(self) -> list[asyncio.Future[Any]]:
        """End what it has started; -> what is still to be awaited."""
        self._end_timers()
        ending: list[asyncio.Future[Any]] = []
        if self._stopper is not None:  # nothing is left to be stopped
            _leave_behind(self._stopper)
            ending.append(self._stopper)
        if self._task is None:
            pass
        elif self._task.done():
            _forget(self._task)
        elif self._task not in _abandoned:
            self._task.remove_done_callback(self._task_ended)
            _leave_behind(self._task)
            ending.append(self._task)
        for task in ending:
            task.cancel()
        return ending

    def closed(self) -> None:
        """What `close` ended is over, or left behind."""
        self.conversation.close()
        if self._verdict is not None:
            _close_unless_begun(self._verdict)


def verdict_of(
    parts: ProducerParts, context: GroupContext, session_id: str, node: int, text: str
) -> Verdict:
    """Ask the judge, which is user code: what it raises fails this rollout and no other (L13)."""
    try:
        trace = parts.traces.export(session_id, node=node) if parts.judge_reads_trace else None
        verdict = parts.judge.score(context.prompt, text, trace)
        if type(verdict) is not float and isinstance(verdict, Awaitable):
            return verdict
        return _finite(verdict)
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        return _failure(error)
    except SystemExit as error:
        return _failure(_exited(error))
    except (Exception, BaseExceptionGroup) as error:
        return _failure(error)


class Endable(Protocol):
    """What `give_up` ends; the methods as those of `Attempt`."""

    @property
    def is_open(self) -> bool: ...
    def close(self) -> list[asyncio.Future[Any]]: ...
    def closed(self) -> None: ...


async def give_up(attempts: Iterable[Endable], grace_s: float) -> None:
    """End all that attempts have going. Code that goes on for `grace_s` is left to itself."""
    attempts = [attempt for attempt in attempts if attempt.is_open]
    ending = [task for attempt in attempts for task in attempt.close()]
    try:
        if ending:
            await asyncio.wait(ending, timeout=grace_s)
    finally:
        for attempt in attempts:
            attempt.closed()


def _leave_behind(task: asyncio.Future[Any]) -> None:
    _abandoned.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Future[Any]) -> None:
    """It has ended; how is of no interest to anybody any more."""
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


async def _guarded(user_code: Callable[[], Awaitable[T]]) -> T:
    """User code without the one exception that would end the process."""
    try:
        return await user_code()
    except SystemExit as error:
        raise _exited(error) from error


async def _stop(conversation: Conversation) -> None:
    """At its soft limit; an engine that fails at this leaves it to the hard one (L13)."""
    try:
        await conversation.stop()
    except Exception as error:
        _log.warning("the engine did not abort %s: %s", conversation.id, _failure(error))


def _close_unless_begun(verdict: object) -> None:
    """For a judge that was cancelled before its task ran."""
    if inspect.iscoroutine(verdict) and inspect.getcoroutinestate(verdict) == _NOT_BEGUN:
        verdict.close()


def _exited(error: SystemExit) -> RolloutError:
    """For user code that calls sys.exit, which would end the process."""
    return RolloutError(f"user code called sys.exit({error.code!r:.100})")


def _finite(verdict: object) -> float:
    if type(verdict) is float and math.isfinite(verdict):
        return verdict
    if isinstance(verdict, bool) or not isinstance(verdict, Real) or not math.isfinite(verdict):
        raise JudgeError(f"the judge returned {verdict!r}; a finite number is needed")
    return float(verdict)


def _is_cancelled() -> bool:
    """Whether this very task is being cancelled, so that what was caught is no error of a user."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failure(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "CancelledError: user code let a cancellation out that nobody had asked for"
    return error_text(error)


def _text_with_place(error: BaseException) -> str:
    """An error of the user's environment with its traceback; one of ours says it all."""
    if isinstance(error, TrainerError):
        return _failure(error)
    frames = traceback.format_tb(error.__traceback__, -_FRAMES_MAX)
    return carried_text(f"{_failure(error)}\n{''.join(frames)}".rstrip())
