"""The records of the lifecycle: prompt, rollout, group, batch, segment, trace.

All of them are values: frozen, compared by content, changed only by making a new one. A status that
was read stays what it was, so a failed group cannot turn into a completed one because somebody
wiped its fields (lifecycle L09). A rollout names its session and positions in it; it never holds a
reference to an object of the arena (L05), so dropping a rollout frees nothing and keeping one keeps
nothing alive. Rollouts, groups and segments are msgspec structs, because every process makes many:
as frozen dataclasses they took ten times as long to make and to change.

Who writes what: the sampler makes a `Prompt`; the producer makes `Rollout` and `Group` and fills in
what engine and judge answered; the replay buffer changes `status` on expiry; nobody else writes.

Imports numpy and msgspec only. Used by every file of the trainer, in every process.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr, replace
from numpy.typing import NDArray

from trainer.errors import BadGroup, BadSegment
from trainer.json_values import text_problem
from trainer.members import Members

if TYPE_CHECKING:
    from trainer.window import WindowReport

__all__ = [
    "IGNORE_LABEL",
    "Batch",
    "FinishReason",
    "Group",
    "Message",
    "Prompt",
    "Rollout",
    "Segment",
    "Status",
    "Trace",
    "as_carried",
    "narrowest_unsigned",
]

#: Label of a token that is not trained on (prompt, tool output, masked).
IGNORE_LABEL = -100

#: `model_step` of a token that no model sampled.
NO_MODEL_STEP = -1

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


class Group(msgspec.Struct, frozen=True):
    """The K rollouts of one prompt: scored, buffered and trained together.

    A loop of one's own may leave out all but `rollouts`: the uid is then the first session's id.
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

    @property
    def status(self) -> Status:
        """The first of FAILED, ABORTED, EXPIRED, FILTERED that any member has, else COMPLETED."""
        for rollout in self.rollouts:
            if rollout.status is not Status.COMPLETED:
                break
        else:  # as nearly always, and it is asked often
            return Status.COMPLETED
        present = {rollout.status for rollout in self.rollouts}
        return next((status for status in _PRECEDENCE if status in present), Status.COMPLETED)

    @property
    def session_ids(self) -> tuple[str, ...]:
        """Sessions of the members in order, each once."""
        return tuple(dict.fromkeys([rollout.session_id for rollout in self.rollouts]))

    @property
    def n_tokens(self) -> int:
        """Prompt and response tokens of all members."""
        return sum(rollout.n_tokens for rollout in self.rollouts)

    @property
    def model_step_min(self) -> int | None:
        """Oldest step that sampled a token of any member; None when no member has a response."""
        return min(
            (r.model_step_min for r in self.rollouts if r.model_step_min is not None), default=None
        )

    def evolve(self, **changes: Any) -> Group:
        """A copy with `changes`; the only way to alter a group."""
        return replace(self, **changes)

    def with_rollouts(self, rollouts: Sequence[Rollout]) -> Group:
        """The same group with other members."""
        return replace(self, rollouts=tuple(rollouts))


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


class Segment(msgspec.Struct, frozen=True, eq=False):
    """A run of tokens with one origin; `n` tokens, unshifted (the learner shifts).

    token_ids int32 [n]; labels int32 [n], equal to the token where the policy sampled it and it is
    trained on, else `IGNORE_LABEL`; logprobs float32 [n], 0.0 where not sampled; model_steps int32
    [n], -1 where not sampled; routed_experts uint8 or uint16 [n, layers, top_k] or None (wider
    integers are narrowed to what holds the largest index). `n_routed` rows of it are known: an
    engine does not know the row of the last token that it sampled until the next turn feeds it
    back.

    Arrays of another dtype or with gaps are converted once, here; `BadSegment` says what does not
    fit.
    """

    token_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    model_steps: NDArray[np.int32]
    text: str = ""
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    n_routed: int = -1
    #: Rows for the tokens just before this segment that became known only with it: [r, layers,
    #: top_k].
    routed_before: NDArray[np.uint8] | NDArray[np.uint16] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise BadSegment(f"text is {self.text!r}; a str is needed")
        if not self.text.isascii():
            _check_utf8(self.text)
        given: tuple[Any, ...] = self.token_ids, self.labels, self.logprobs, self.model_steps
        ids, labels, logp, steps = given
        # The common case (an engine's own arrays) costs a few comparisons and no call.
        if not (
            type(ids) is type(labels) is type(logp) is type(steps) is np.ndarray
            and ids.dtype is labels.dtype is steps.dtype is _INT32
            and logp.dtype is _FLOAT32
            and ids.shape == labels.shape == logp.shape == steps.shape
            and ids.strides == labels.strides == logp.strides == steps.strides == _WITHOUT_GAPS
        ):
            self._convert_columns()
        self._check_routing(self.token_ids.size)

    def _convert_columns(self) -> None:
        n = np.size(self.token_ids)
        for name, dtype in _COLUMNS:
            given = _converted(name, getattr(self, name), dtype)
            if given.shape != (n,):
                raise BadSegment(
                    f"{name} has shape {given.shape}, but there are {n} token_ids: need ({n},)"
                )
            force_setattr(self, name, given)

    def _check_routing(self, n: int) -> None:
        routed = self.routed_experts
        if routed is None:
            if self.n_routed > 0 or self.routed_before is not None:
                raise BadSegment("n_routed or routed_before is given, but routed_experts is None")
            force_setattr(self, "n_routed", 0)
            return
        routed = _narrowed("routed_experts", routed)
        before = self.routed_before
        if before is not None:
            before = _narrowed("routed_before", before)
            if before.dtype is not routed.dtype:
                routed, before = (part.astype(_UINT16, copy=False) for part in (routed, before))
        if not n - 1 <= len(routed) <= n:
            raise BadSegment(
                f"routed_experts has {len(routed)} rows for {n} tokens; "
                "allowed are all rows, or all but the last"
            )
        if before is not None and before.shape[1:] != routed.shape[1:]:
            raise BadSegment(
                f"routed_before has shape {before.shape}, but routed_experts {routed.shape}: "
                "layers and top_k must be the same"
            )
        known = len(routed) if self.n_routed < 0 else self.n_routed
        if not 0 <= known <= len(routed):
            raise BadSegment(f"n_routed is {known}, but routed_experts has {len(routed)} rows")
        force_setattr(self, "n_routed", known)
        if routed is not self.routed_experts:
            force_setattr(self, "routed_experts", routed)
        if before is not self.routed_before:
            force_setattr(self, "routed_before", before)

    def __len__(self) -> int:
        return len(self.token_ids)

    def evolve(self, **changes: Any) -> Segment:
        """A copy with `changes`; the only way to alter a segment."""
        return replace(self, **changes)

    @property
    def n_trainable(self) -> int:
        """Tokens that carry a label."""
        return int(np.count_nonzero(self.labels != IGNORE_LABEL))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One trainable path, root to leaf, as contiguous arrays of T tokens; fields as in `Segment`.

    routed_experts has T rows; rows that no engine reported (the last token's) are zero and are
    never used for a loss, because the loss of a token reads the position before it.
    """

    token_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    model_steps: NDArray[np.int32]
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    #: Positions in the session of the segments that make up the path.
    nodes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_trainable(self) -> int:
        """Tokens that carry a label."""
        return int(np.count_nonzero(self.labels != IGNORE_LABEL))


def _check_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSegment(f"text cannot be stored as UTF-8: {error}") from error


def _narrowed(name: str, given: object) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Routing without gaps in uint8 or uint16; what an engine gives in a wider type is narrowed."""
    array = given if isinstance(given, np.ndarray) else _as_array(name, given)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise BadSegment(
            f"{name} has shape {array.shape} and type {array.dtype}; need [tokens, layers, top_k] "
            "of whole numbers"
        )
    dtype: np.dtype[Any] = array.dtype
    if dtype is _UINT8 or dtype is _UINT16:
        if array.flags.c_contiguous:
            return array
    else:
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < 0 or high >= 1 << 16:
            raise BadSegment(f"{name} go from {low} to {high}; experts are numbered 0 to 65535")
        dtype = narrowest_unsigned(high + 1)
    return np.ascontiguousarray(array, dtype=dtype)


def _as_array(name: str, given: object) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except (ValueError, TypeError) as error:
        raise BadSegment(f"{name} is no array: {error}") from error


def _converted(name: str, given: object, dtype: np.dtype[Any]) -> NDArray[Any]:
    """`given` in the column's type; whole numbers stay what they are or are refused."""
    try:
        array = np.asarray(given)
        if array.ndim != 1:
            raise TypeError(f"it has {array.ndim} dimensions, and one is needed")
        if dtype.kind == "i" and array.size:
            if array.dtype.kind not in "iu":
                raise TypeError(f"they are {array.dtype}")
            limits = np.iinfo(dtype)
            if array.min() < limits.min or array.max() > limits.max:
                raise ValueError(f"they go from {array.min()} to {array.max()}")
        return np.ascontiguousarray(array, dtype=dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadSegment(f"{name} cannot be taken as {dtype}: {error}") from error


def narrowest_unsigned(n_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """The type in which expert indices travel: uint8 up to 256 experts, else uint16 (lifecycle,
    "segment").
    """
    if not 1 <= n_experts <= 1 << 16:
        raise BadSegment(f"{n_experts} experts; between 1 and 65536 fit the routing record")
    return _UINT8 if n_experts <= 256 else _UINT16


_UINT8 = np.dtype(np.uint8)
_UINT16 = np.dtype(np.uint16)
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)
_WITHOUT_GAPS = (4,)
_COLUMNS = (
    ("token_ids", _INT32),
    ("labels", _INT32),
    ("logprobs", _FLOAT32),
    ("model_steps", _INT32),
)
