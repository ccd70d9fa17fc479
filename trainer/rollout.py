"""The records of the lifecycle: prompt, rollout, group, batch.

All of them are values: frozen, compared by content, changed only by making a new one. A status that
was read stays what it was, so a failed group cannot turn into a completed one because somebody
wiped its fields (lifecycle L09). A rollout names its session and positions in it; it never holds a
reference to an object of the arena (L05), so dropping a rollout frees nothing and keeping one keeps
nothing alive. Rollouts and groups are msgspec structs, because every process makes many:
as frozen dataclasses they took ten times as long to make and to change.

Who writes what: the sampler makes a `Prompt`; the producer makes `Rollout` and `Group` and fills in
what engine and judge answered; the replay buffer changes `status` on expiry; nobody else writes.

Imports msgspec only. Used by every file of the trainer, in every process.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import msgspec
from msgspec.structs import force_setattr, replace

from trainer.errors import BadGroup
from trainer.json_values import text_problem
from trainer.members import Members

if TYPE_CHECKING:
    from trainer.window import WindowReport

__all__ = [
    "Batch",
    "FinishReason",
    "Group",
    "Message",
    "Prompt",
    "Rollout",
    "Status",
    "as_carried",
]

_T = TypeVar("_T")

#: One chat message: {"role": ..., "content": ...} and whatever the chat template reads.
Message = Mapping[str, Any]


class Status(enum.Enum):
    """Status of a rollout, and by precedence of a group (lifecycle, "Words")."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"  # stopped part-way, can go on
    EXPIRED = "expired"  # too stale
    FAILED = "failed"  # engine, tool or judge error
    FILTERED = "filtered"  # valid but useless

    __hash__ = object.__hash__  # that of Enum is a function of Python, and sets of these are many


#: The first of these that any member has is the status of the group.
_PRECEDENCE = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task instance. `uid` is stable across resume, so a prompt is never handed out twice or
    skipped.

    Exactly one of `text`, `messages` and `token_ids` is the source; an environment may fill
    `token_ids` from the others. `answer` and `metadata` must be JSON values: they go into
    snapshots.
    """

    uid: str
    task: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[Prompt], tuple[Any, ...]]:
        """As one call: a frozen dataclass is pickled field by field in Python otherwise."""
        return Prompt, (
            self.uid,
            self.task,
            self.text,
            self.messages,
            self.token_ids,
            self.answer,
            self.metadata,
        )


#: What the fields of a rollout may hold; looked at when it is carried (`as_carried`).
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Step = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
_Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class Rollout(msgspec.Struct, frozen=True):
    """One attempt at a prompt. Its tokens are in the session `session_id`, at the nodes below.

    `leaves`: positions in the session of the segments that end a trainable path (several for one
    agent session that branched). `turns`: nodes at which a turn of the model was finished; what the
    model sampled after the last of them is a turn that was aborted and can go on.
    `n_prompt_nodes`: how many leading segments of the session are the prompt; expiry by retry cuts
    the session back to them. `model_step_min` / `max`: oldest and newest step that sampled a
    trainable token, None while there is none. `n_sampled_tokens`: of the response, what the model
    sampled and nobody else said; None where that was not counted.
    """

    session_id: str
    uid: str = ""
    prompt_uid: str = ""
    task: str = ""
    status: Status = Status.INIT
    reward: _Finite | None = None
    leaves: tuple[_Count, ...] = ()
    turns: tuple[_Count, ...] = ()
    n_prompt_nodes: _Count = 1
    n_prompt_tokens: _Count = 0
    n_response_tokens: _Count = 0
    model_step_min: _Step | None = None
    model_step_max: _Step | None = None
    finish_reason: FinishReason | None = None
    error_msg: str | None = None
    attempt: _Count = 0
    generation_time_s: _Finite = 0.0
    metrics: Mapping[str, _Finite] = msgspec.field(default_factory=dict)
    n_sampled_tokens: _Count | None = None

    def __post_init__(self) -> None:
        if type(self.uid) is not str:
            _check_uid("rollout", self.uid)
        if not self.uid:
            force_setattr(self, "uid", self.session_id)
        if type(self.status) is not Status:  # a text would be none of those that end a group (L09)
            raise BadGroup(
                f"the status of rollout {self.uid!r} is {self.status!r}; give a member of Status"
            )

    @property
    def n_sampled(self) -> int:
        """Response tokens that the model sampled; all, where nobody has said which."""
        counted = self.n_sampled_tokens
        return self.n_response_tokens if counted is None else counted

    @property
    def n_tokens(self) -> int:
        """Prompt and response tokens together."""
        return self.n_prompt_tokens + self.n_response_tokens

    def evolve(self, **changes: Any) -> Rollout:
        """A copy with `changes`; the only way to alter a rollout."""
        return replace(self, **changes)

    def cut_to_prompt(self, status: Status) -> Rollout:
        """Without its response: what remains when an attempt is given up but the prompt is kept."""
        return self.evolve(
            status=status,
            reward=None,
            leaves=(),
            turns=(),
            n_response_tokens=0,
            n_sampled_tokens=0,
            model_step_min=None,
            model_step_max=None,
            finish_reason=None,
            error_msg=None,
            metrics={},
        )


class _Once(Generic[_T]):
    """A property that is worked out once. functools.cached_property takes a lock for that, which
    costs more than what is worked out here.
    """

    def __init__(self, find: Callable[[Any], _T]) -> None:
        self._find = find
        self._name = find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, of: Any, kind: type) -> _T:
        if of is None:
            raise AttributeError(f"{self._name} is known of a {kind.__name__}, not of the class")
        found = of.__dict__[self._name] = self._find(of)
        return found


class Group(msgspec.Struct, frozen=True, dict=True):
    """The K rollouts of one prompt: scored, buffered and trained together.

    A loop of one's own may leave out all but `rollouts`: the uid is then the first session's id.
    What follows from the members is worked out once.
    """

    uid: str = ""
    task: str = ""
    prompt: Prompt | None = None
    rollouts: tuple[Rollout, ...] = ()
    #: Bytes that the sessions hold in the arena, shared segments once; measured at `put`.
    nbytes: int = 0

    def __post_init__(self) -> None:
        if type(self.rollouts) is not tuple:
            force_setattr(self, "rollouts", tuple(self.rollouts))
        if not self.rollouts:
            raise BadGroup(f"group {self.uid!r} has no rollouts; a group holds at least one")
        for member in self.rollouts:
            if type(member) is not Rollout and not isinstance(member, Rollout):
                raise BadGroup(f"the members of a group are Rollouts, not {member!r}")
        if type(self.uid) is not str:
            _check_uid("group", self.uid)
        if not self.uid:
            force_setattr(self, "uid", self.rollouts[0].session_id)

    def __reduce__(self) -> tuple[Callable[..., Group], tuple[Any, ...]]:
        """Pickled inside messages with its members as one block: a tenth of the time of its parts
        one by one. `BadGroup` names what cannot be carried.
        """
        members = _MEMBERS.encode(self.uid, self.rollouts)
        return _unpickled, (self.uid, self.task, self.prompt, members, self.nbytes)

    @_Once
    def status(self) -> Status:
        """The first of FAILED, ABORTED, EXPIRED, FILTERED that any member has, else COMPLETED."""
        for rollout in self.rollouts:
            if rollout.status is not Status.COMPLETED:
                break
        else:  # as nearly always
            return Status.COMPLETED
        present = {rollout.status for rollout in self.rollouts}
        return next((status for status in _PRECEDENCE if status in present), Status.COMPLETED)

    @_Once
    def session_ids(self) -> tuple[str, ...]:
        """Sessions of the members in order, each once."""
        return tuple(dict.fromkeys([rollout.session_id for rollout in self.rollouts]))

    @property
    def n_tokens(self) -> int:
        """Prompt and response tokens of all members."""
        return sum(rollout.n_tokens for rollout in self.rollouts)

    @_Once
    def model_step_min(self) -> int | None:
        """Oldest step that sampled a token of any member; None when no member has a response."""
        steps = [r.model_step_min for r in self.rollouts if r.model_step_min is not None]
        return min(steps, default=None)

    def evolve(self, **changes: Any) -> Group:
        """A copy with `changes`; the only way to alter a group."""
        made = replace(self, **changes)
        if "rollouts" not in changes:
            made.__dict__.update(self.__dict__)
        return made

    def with_rollouts(self, rollouts: Sequence[Rollout]) -> Group:
        """The same group with other members."""
        return self.evolve(rollouts=tuple(rollouts))


def _check_uid(what: str, uid: object) -> None:
    if uid is not None and not isinstance(uid, str):
        raise BadGroup(f"{what} {uid!r:.100}: {text_problem(uid, 'its uid')}; or leave it out")


def as_carried(group: Group) -> tuple[Rollout, ...]:
    """The members as a message or a snapshot brings them back: numpy's numbers as Python's, lists
    as tuples. `BadGroup` names the field that neither would.
    """
    return _MEMBERS.decode(group.uid, _MEMBERS.encode(group.uid, group.rollouts))


def _unpickled(uid: str, task: str, prompt: Prompt | None, members: bytes, nbytes: int) -> Group:
    return Group(uid, task, prompt, _MEMBERS.decode(uid, members), nbytes)


_MEMBERS = Members(Rollout)


@dataclass(frozen=True, slots=True)
class Batch:
    """What `ReplayBuffer.take` hands out: groups whose sessions now belong to the taker, and the
    window's report.
    """

    groups: tuple[Group, ...]
    report: WindowReport
    train_step: int = 0

    @property
    def session_ids(self) -> tuple[str, ...]:
        """Sessions of all groups, each once, in order: exactly what the learner has to release
        (L06).
        """
        return tuple(dict.fromkeys(sid for group in self.groups for sid in group.session_ids))

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """Members of all groups, in order."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)
