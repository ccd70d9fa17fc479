"""One group in production: its rollouts run at once, are scored, filtered, and come out as a
finished `Group`.

What a rollout comes to is found in `trainer.attempt`; only cancellation and errors of the store
about ownership leave this file as exceptions. Belongs to the producer's loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainer.attempt import Attempt, give_up
from trainer.engine.protocol import Answers, Engine, SamplingParams, Tokenizer
from trainer.environment import Environment, Judge
from trainer.error_text import error_text
from trainer.errors import ConfigError
from trainer.group_context import Content, Gate, GroupContext
from trainer.one_turn import OneTurn
from trainer.rollout import Group, Prompt, Rollout, Status
from trainer.trace import TraceStore
from trainer.work import Work

__all__ = ["PendingGroup", "ProducerConfig", "ProducerParts", "session_id"]

#: Ids of sessions have at most this many bytes of UTF-8.
SESSION_ID_BYTES_MAX = 63
_log = logging.getLogger("trainer")


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
    is given the trace; it costs an export for each rollout. `one_turn`: what the environment says
    about a prompt, if it says that and no more: it is not run then, and its rollouts cost half.
    """

    engine: Engine
    traces: TraceStore
    tokenizer: Tokenizer
    environment: Environment
    judge: Judge
    valid: Callable[[Group], bool] | None = None
    judge_reads_trace: bool = False
    one_turn: Callable[[Prompt], Content | None] | None = None


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
        self._begun = False
        #: Latest known members; complete enough at any time to give the group up.
        self.rollouts: tuple[Rollout, ...] = work.group.rollouts if work.group else ()

    @property
    def group(self) -> Group:
        """The group as far as it is known."""
        work = self.work
        return Group(uid=work.uid, task=work.task, prompt=work.prompt, rollouts=self.rollouts)

    @property
    def is_prepared(self) -> bool:
        """A new group that waits for weights: neither an engine nor user code was asked for it."""
        return not self._begun and self.work.group is None

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
        traces, config, work = self._parts.traces, self._config, self.work
        context = GroupContext(
            traces=traces,
            engine=self._parts.engine,
            tokenizer=self._parts.tokenizer,
            params=config.params,
            prompt=work.prompt,
            group_uid=work.uid,
            gate=self._gate,
            arena_wait_s=config.arena_wait_s,
            lack_prompt=[
                r.session_id
                for r in self.rollouts
                if work.group is None or traces.length(r.session_id) == 0
            ],
            fresh=work.group is None,
            opening=self._opening(),
        )
        members = {r.session_id: r for r in self.rollouts}
        for rollout in await self._run_all(context):
            members[rollout.session_id] = rollout
        self.rollouts = tuple(members.values())
        group = self.group
        if group.status is Status.COMPLETED and self._is_useless(group):
            self.rollouts = tuple(r.evolve(status=Status.FILTERED) for r in self.rollouts)
            group = self.group
        return group

    def _opening(self) -> Content | None:
        """What each member says when that is all. One with a record or a time limit goes through
        its environment, in a task.
        """
        one_turn, prompt = self._parts.one_turn, self.work.prompt
        if one_turn is None or self.work.group or self._config.rollout_timeout_s is not None:
            return None
        try:
            return one_turn(prompt)
        # Whatever it raises ends no run: what comes out of the environment counts (L13).
        except (Exception, SystemExit) as error:
            _log.warning(
                "one_turn of %s: %s; its environment is run", prompt.uid, error_text(error)
            )
            return None

    async def _run_all(self, context: GroupContext) -> list[Rollout]:
        """Run the members that are not complete, all at once; -> what they came to."""
        loop = asyncio.get_running_loop()
        attempts: list[OneTurn | Attempt] = []
        ended: list[OneTurn | Attempt] = []
        done: list[Rollout] = []
        some_ended = loop.create_future()

        def note(attempt: OneTurn | Attempt) -> None:
            ended.append(attempt)
            if not some_ended.done():
                some_ended.set_result(None)

        kind = Attempt if context.opening is None else OneTurn
        try:
            for rollout in self.rollouts:
                if rollout.status is Status.COMPLETED:
                    continue
                if not context.fresh:  # a fresh one has its attempt already
                    rollout = rollout.evolve(attempt=rollout.attempt + 1, error_msg=None)
                attempts.append(kind(self._parts, self._config, context, rollout, note))
            if self.work.model_step is not None:
                await self._gate.weights(self._parts.engine, self.work.model_step)
            self._begun = True
            for attempt in attempts:
                attempt.begin()
            _submit(attempts, context)
            while len(done) < len(attempts):
                await some_ended
                some_ended = loop.create_future()
                found, ended[:] = ended[:], ()
                done += [r for attempt in found if (r := attempt.advance()) is not None]
        finally:
            await give_up(attempts, self._config.grace_s)
        return done

    def _is_useless(self, group: Group) -> bool:
        rewards = {rollout.reward for rollout in group.rollouts}
        if self._config.filter_equal_rewards and len(group.rollouts) > 1 and len(rewards) == 1:
            return True
        return self._parts.valid is not None and not self._parts.valid(group)


def _submit(attempts: Sequence[OneTurn | Attempt], context: GroupContext) -> None:
    """Give the engine what they ask, all at once."""
    one_turns = [a for a in attempts if isinstance(a, OneTurn)]
    asking = {a.request.request_id: a for a in one_turns if a.request is not None}

    def answered(answers: Answers) -> None:
        for request, answer in answers:
            asking[request.request_id].answer(answer)

    requests = [a.request for a in asking.values() if a.request is not None]
    if requests and context.submits is not None:
        try:
            context.submits.submit(requests, answered)
        except (Exception, SystemExit) as error:  # whatever an engine raises, it fails these (L13)
            for attempt in asking.values():
                attempt.answer(error)


def session_id(run_name: str, group_uid: str, k: int, attempt: int) -> str:
    """`RUN-GROUP-k-attempt`; at most 63 bytes, `ConfigError` when the names are too long."""
    found = f"{run_name}-{group_uid}-{k}-{attempt}"
    if len(found.encode()) > SESSION_ID_BYTES_MAX:
        raise ConfigError(
            f"the session id {found!r} has more than {SESSION_ID_BYTES_MAX} bytes; "
            "shorten the run's or the task's name"
        )
    return found
