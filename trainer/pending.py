"""One group in production: its rollouts run at once, are scored, filtered, and come out as a
finished `Group`.

Every way in which a rollout can go wrong ends in its status and `error_msg` (lifecycle L13); only
cancellation and errors of the store about ownership leave this file as exceptions. Belongs to the
producer's loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

from trainer.conversation import Conversation, Gate, SharedPrompt
from trainer.engine.protocol import Engine, SamplingParams, Tokenizer
from trainer.environment import Environment, Judge, RolloutAborted
from trainer.errors import ConfigError, JudgeError, RolloutError, TrainerError
from trainer.rollout import Group, Rollout, Status
from trainer.trace import TraceStore
from trainer.work import Work

__all__ = ["PendingGroup", "ProducerConfig", "ProducerParts", "session_id"]

T = TypeVar("T")

_NOT_BEGUN = inspect.CORO_CREATED
_log = logging.getLogger("trainer")

#: Ids of sessions have at most this many bytes of UTF-8.
SESSION_ID_BYTES_MAX = 63
#: User code that did not end when it was cancelled; a loop holds its tasks only weakly.
_abandoned: set[asyncio.Task[Any]] = set()
#: The innermost frames of a traceback that an `error_msg` keeps.
_FRAMES_MAX = 8


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """How groups are produced. Times in seconds.

    `partial_rollout` (L11): an aborted rollout keeps its tokens and goes on; off, it starts over.
    `rollout_timeout_s`: a rollout that takes longer is aborted, keeping its tokens; one that does
    not react within `grace_s` is cancelled, and user code that goes on for `grace_s` after that is
    left to itself. `filter_equal_rewards`: a group whose rewards are all
    equal teaches nothing and is FILTERED. `arena_wait_s`: how long a full arena is waited for.
    `groups_max`: groups in production at once.
    """

    group_size: int
    groups_max: int = 32
    params: SamplingParams = field(default_factory=SamplingParams)
    partial_rollout: bool = True
    judge_timeout_s: float = 60.0
    rollout_timeout_s: float | None = None
    grace_s: float = 10.0
    arena_wait_s: float = 60.0
    filter_equal_rewards: bool = True

    def __post_init__(self) -> None:
        for name in ("group_size", "groups_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("judge_timeout_s", "grace_s", "arena_wait_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        if self.rollout_timeout_s is not None and not self.rollout_timeout_s > 0:
            raise ConfigError(f"rollout_timeout_s is {self.rollout_timeout_s}; it must be above 0")


@dataclass(frozen=True, slots=True)
class ProducerParts:
    """What rollouts are made with.

    `valid`: False filters a completed group (beyond equal rewards). `judge_reads_trace`: the judge
    is given the trace; it costs an export for each rollout.
    """

    engine: Engine
    traces: TraceStore
    tokenizer: Tokenizer
    environment: Environment
    judge: Judge
    valid: Callable[[Group], bool] | None = None
    judge_reads_trace: bool = False


class PendingGroup:
    """One `Work` under way. `open` first, then `produce` once."""

    def __init__(
        self,
        work: Work,
        parts: ProducerParts,
        config: ProducerConfig,
        *,
        owner: str,
        run_name: str,
        gate: Gate,
    ) -> None:
        self.work = work
        self._parts = parts
        self._config = config
        self._owner = owner
        self._run_name = run_name
        self._gate = gate
        #: Latest known members; complete enough at any time to give the group up.
        self.rollouts: tuple[Rollout, ...] = work.group.rollouts if work.group else ()

    @property
    def group(self) -> Group:
        """The group as far as it is known."""
        work = self.work
        return Group(uid=work.uid, task=work.task, prompt=work.prompt, rollouts=self.rollouts)

    def open(self) -> None:
        """Open the sessions of a fresh group, owned by the producer."""
        if self.work.group is not None:
            return
        work = self.work
        ids = [
            session_id(self._run_name, work.uid, k, work.attempt)
            for k in range(self._config.group_size)
        ]
        for one in ids:
            self._parts.traces.open(one, owner=self._owner)
            # One by one: what was opened before an error can then be released.
            self.rollouts += (
                Rollout(
                    session_id=one, prompt_uid=work.prompt.uid, task=work.task, attempt=work.attempt
                ),
            )

    async def produce(self) -> Group:
        """Run what is missing, score each as it ends, then filter; -> the group with its status."""
        traces, kept = self._parts.traces, self.work.group
        shared = SharedPrompt(
            [
                r.session_id
                for r in self.rollouts
                if kept is None or traces.length(r.session_id) == 0
            ]
        )
        self.rollouts = await self._each(
            [r for r in self.rollouts if r.status is not Status.COMPLETED],
            lambda rollout: self._run(rollout, shared),
        )
        if self.group.status is Status.COMPLETED and self._is_useless():
            self.rollouts = tuple(r.evolve(status=Status.FILTERED) for r in self.rollouts)
        return self.group

    async def _each(
        self, chosen: Sequence[Rollout], run: Callable[[Rollout], Coroutine[Any, Any, Rollout]]
    ) -> tuple[Rollout, ...]:
        """Run `run` for the chosen members at once and put the results in their places."""
        async with asyncio.TaskGroup() as tasks:
            running = {rollout.session_id: tasks.create_task(run(rollout)) for rollout in chosen}
        return tuple(
            running[r.session_id].result() if r.session_id in running else r for r in self.rollouts
        )

    async def _run(self, rollout: Rollout, shared: SharedPrompt) -> Rollout:
        """One rollout from where it stands to its end, whatever that is."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        if self.work.group is not None:  # a fresh one has its attempt already
            rollout = rollout.evolve(attempt=rollout.attempt + 1, error_msg=None)
        conversation = self._conversation(rollout, shared)
        status, error = await self._converse(conversation)
        generated = loop.time()
        reward = None
        if status is Status.COMPLETED:
            reward, error = await self._score(conversation)
            status = Status.COMPLETED if error is None else Status.FAILED
        done = conversation.outcome(
            status=status,
            reward=reward,
            error_msg=error,
            generation_time_s=rollout.generation_time_s + generated - started,
        )
        if status is Status.ABORTED and not self._config.partial_rollout:
            self._parts.traces.truncate(done.session_id, keep=done.n_prompt_nodes)
            done = done.cut_to_prompt(Status.ABORTED)
        return done

    async def _converse(self, conversation: Conversation) -> tuple[Status, str | None]:
        """Run the environment within the time limits; -> status and error text."""
        loop = asyncio.get_running_loop()
        soft_s = self._config.rollout_timeout_s
        stopper: asyncio.Task[None] | None = None

        def stop_softly() -> None:
            nonlocal stopper
            stopper = loop.create_task(_stop(conversation))

        timer = None if soft_s is None else loop.call_later(soft_s, stop_softly)
        hard_s = None if soft_s is None else soft_s + self._config.grace_s
        limit = None if hard_s is None else asyncio.timeout(hard_s)
        try:
            async with limit or nullcontext():
                await self._apart(
                    lambda: self._parts.environment.run(conversation, self.work.prompt)
                )
        except RolloutAborted:
            return Status.ABORTED, None
        except TimeoutError as error:
            if limit is not None and limit.expired():
                return Status.ABORTED, None
            return Status.FAILED, _text_with_place(error)
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            return Status.FAILED, _text_of(error)
        # User code and engines may raise anything: it fails this rollout and no other (L13).
        except (Exception, BaseExceptionGroup) as error:
            if conversation.aborted:  # out of a task group of the environment
                return Status.ABORTED, None
            return Status.FAILED, _text_with_place(error)
        finally:
            conversation.close()
            if timer is not None:
                timer.cancel()
            if stopper is not None:  # nothing is left to be stopped
                stopper.cancel()
                await asyncio.wait((stopper,))
        if conversation.aborted:
            return Status.ABORTED, None
        if not conversation.has_sampled:
            return Status.FAILED, "the environment ended without a turn of the model"
        return Status.COMPLETED, None

    def _conversation(self, rollout: Rollout, shared: SharedPrompt) -> Conversation:
        return Conversation(
            traces=self._parts.traces,
            engine=self._parts.engine,
            tokenizer=self._parts.tokenizer,
            params=self._config.params,
            prompt=self.work.prompt,
            rollout=rollout,
            group_uid=self.work.uid,
            shared=shared,
            gate=self._gate,
            fresh=self.work.group is None,
            arena_wait_s=self._config.arena_wait_s,
        )

    async def _score(self, conversation: Conversation) -> tuple[float | None, str | None]:
        """Ask the judge; -> reward and error: a time-out or a reward that is no number is one."""
        limit_s = self._config.judge_timeout_s
        limit: asyncio.Timeout | None = None
        asked: object = None
        try:
            verdict = asked = self._asked(conversation)
            if isinstance(asked, Awaitable):
                async with asyncio.timeout(limit_s) as limit:
                    verdict = await self._apart(lambda: asked)
            return _finite(verdict), None
        except TimeoutError as error:
            if limit is not None and limit.expired():
                return None, f"the judge took more than {limit_s} s"
            return None, _text_of(error)
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            return None, _text_of(error)
        # Judges are user code: whatever they raise fails this rollout and no other (L13).
        except (Exception, BaseExceptionGroup) as error:
            return None, _text_of(error)
        finally:
            if inspect.iscoroutine(asked) and inspect.getcoroutinestate(asked) == _NOT_BEGUN:
                asked.close()  # cancelled before its task ran

    def _asked(self, conversation: Conversation) -> float | Awaitable[float]:
        """The verdict of a plain judge, or what has yet to be run to have one."""
        trace = None
        if self._parts.judge_reads_trace:
            trace = self._parts.traces.export(conversation.id, node=conversation.node)
        try:
            return self._parts.judge.score(self.work.prompt, conversation.text, trace)
        except SystemExit as error:
            raise _exited(error) from error

    async def _apart(self, user_code: Callable[[], Awaitable[T]]) -> T:
        """Await user code in a task of its own, so that a cancellation that comes out of it is not
        taken for one of ours: a task group inside it leaves marks on the task in which it is.

        Code that catches our cancellation and goes on is abandoned after `grace_s`.
        """
        task = asyncio.get_running_loop().create_task(_guarded(user_code))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                _abandoned.add(task)
                task.add_done_callback(_forget)
                task.cancel()
                await asyncio.wait((task,), timeout=self._config.grace_s)
            raise

    def _is_useless(self) -> bool:
        rewards = {rollout.reward for rollout in self.rollouts}
        if self._config.filter_equal_rewards and len(self.rollouts) > 1 and len(rewards) == 1:
            return True
        return self._parts.valid is not None and not self._parts.valid(self.group)


def session_id(run_name: str, group_uid: str, k: int, attempt: int) -> str:
    """`RUN-GROUP-k-attempt`; at most 63 bytes, `ConfigError` when the names are too long."""
    found = f"{run_name}-{group_uid}-{k}-{attempt}"
    if len(found.encode()) > SESSION_ID_BYTES_MAX:
        raise ConfigError(
            f"the session id {found!r} has more than {SESSION_ID_BYTES_MAX} bytes; "
            "shorten the run's or the task's name"
        )
    return found


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
        _log.warning("the engine did not abort %s: %s", conversation.id, _text_of(error))


def _forget(task: asyncio.Task[Any]) -> None:
    """Abandoned user code has ended; how is of no interest to anybody any more."""
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


def _exited(error: SystemExit) -> RolloutError:
    """For user code that calls sys.exit, which would end the process."""
    return RolloutError(f"user code called sys.exit({error})")


def _finite(verdict: object) -> float:
    if isinstance(verdict, bool) or not isinstance(verdict, Real) or not math.isfinite(verdict):
        raise JudgeError(f"the judge returned {verdict!r}; a finite number is needed")
    return float(verdict)


def _is_cancelled() -> bool:
    """Whether this very task is being cancelled, so that what was caught is no error of a user."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _text_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "CancelledError: user code let a cancellation out that nobody had asked for"
    return f"{type(error).__name__}: {error}"


def _text_with_place(error: BaseException) -> str:
    """An error of the user's environment with its traceback; one of ours says it all."""
    if isinstance(error, TrainerError):
        return _text_of(error)
    frames = traceback.format_tb(error.__traceback__, -_FRAMES_MAX)
    return f"{_text_of(error)}\n{''.join(frames)}".rstrip()
