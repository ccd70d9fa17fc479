"""The tree of errors that the trainer raises on purpose.

An error that one module alone raises is defined there and derives from this tree; docs/errors.md
names all of them and says what to do.

::

    TrainerError
    ├── ConfigError (ValueError)      a setting that cannot work; raised before any process starts
    ├── TraceError
    │   ├── TraceMismatch             a prefix leaves the stored trace; says at which token
    │   ├── RoutingGap                some turns of one trace carry routed experts and others do not
    │   └── BadSegment (ValueError)   arrays of one segment that do not fit together
    ├── ReplayError
    │   ├── BadGroup (ValueError)     a group that the buffer cannot file
    │   ├── TakeTimeout (TimeoutError) no full batch before the deadline; says what is missing
    │   ├── PutTimeout (TimeoutError) no room below `max_bytes` before the deadline
    │   ├── EndOfData                 the prompts ran out before the batch was full
    │   ├── PartFailed                a part of the run died; carries its name and the cause
    │   └── BufferClosed              the replay buffer was closed meanwhile, or before
    ├── RolloutError                  fails ONE rollout (L13); its text goes to `error_msg`
    │   ├── EngineError
    │   ├── ToolError
    │   └── JudgeError
    ├── LearnerLost                   the learner died in a step; a successor is ready (L07)
    ├── NotStarted                    a process that has just been started again is not ready yet
    ├── StalenessError                nothing usable can be produced, nothing trained (L23)
    ├── NoProgress                    nothing moved; lists what everybody waits for
    ├── LedgerError                   the books do not balance; states every counter (L26)
    └── SnapshotError
        └── SnapshotVersion           written by a format that this version does not read

Errors of the arena (`SessionReleased`, `NotOwner`, `ObjectFreed`, `StoreFull` ...) come from
`shmstore` and pass through unchanged. Callable from anywhere; imports nothing of the trainer.
"""

from __future__ import annotations

__all__ = [
    "BadGroup",
    "BadSegment",
    "BufferClosed",
    "ConfigError",
    "EndOfData",
    "EngineError",
    "JudgeError",
    "LearnerLost",
    "LedgerError",
    "NoProgress",
    "NotStarted",
    "PartFailed",
    "PutTimeout",
    "ReplayError",
    "RolloutError",
    "RoutingGap",
    "SnapshotError",
    "SnapshotVersion",
    "StalenessError",
    "TakeTimeout",
    "ToolError",
    "TraceError",
    "TraceMismatch",
    "TrainerError",
]


class TrainerError(Exception):
    """Base of all errors of the trainer."""


class ConfigError(TrainerError, ValueError):
    """A setting that cannot work; the text names the setting, the value and what is allowed."""


class TraceError(TrainerError):
    """Base of errors about the tree of segments of one session."""


class TraceMismatch(TraceError):
    """The asked prefix is not a path of the trace.

    `length` is how much of it matches (tokens, or characters when the prefix was given as text),
    `node` the last matching segment (-1 for none).
    """

    def __init__(self, message: str, length: int = 0, node: int = -1) -> None:
        super().__init__(message)
        self.length = length
        self.node = node

    def __reduce__(self) -> tuple[type[TraceMismatch], tuple[str, int, int]]:
        return type(self), (str(self), self.length, self.node)


class RoutingGap(TraceError):
    """Routed experts are known for some turns of a trace and not for others; `nodes` are those
    without.
    """

    def __init__(self, message: str, nodes: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes

    def __reduce__(self) -> tuple[type[RoutingGap], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.nodes)


class BadSegment(TraceError, ValueError):
    """Arrays of one segment whose lengths, types or values do not fit together."""


class ReplayError(TrainerError):
    """Base of errors of the replay buffer."""


class BadGroup(ReplayError, ValueError):
    """A group or rollout that the buffer cannot file (no rollouts, one still INIT, a value of
    another type, an id seen twice ...).
    """


class TakeTimeout(ReplayError, TimeoutError):
    """No complete batch before the deadline."""


class PutTimeout(ReplayError, TimeoutError):
    """No room below the byte limit of the buffer before the deadline."""


class EndOfData(ReplayError):
    """No more groups of `task` will come, and those that are left do not complete the batch."""

    def __init__(self, message: str, task: str = "") -> None:
        super().__init__(message)
        self.task = task

    def __reduce__(self) -> tuple[type[EndOfData], tuple[str, str]]:
        return type(self), (str(self), self.task)


class PartFailed(ReplayError):
    """A part of the run (producer, engine, judge, learner) died for good while somebody waited for
    it.
    """

    def __init__(self, part: str, cause: str) -> None:
        super().__init__(f"{part} failed: {cause}")
        self.part = part
        self.cause = cause

    def __reduce__(self) -> tuple[type[PartFailed], tuple[str, str]]:
        return type(self), (self.part, self.cause)


class BufferClosed(ReplayError):
    """The replay buffer was closed: nothing is put, lent or taken any more."""


class RolloutError(TrainerError):
    """Fails one rollout, never the producer: the text travels in `Rollout.error_msg` (L13)."""


class EngineError(RolloutError):
    """The engine could not generate for one request (context too long, worker lost, bad answer
    ...).
    """


class ToolError(RolloutError):
    """A tool of an agent loop failed or timed out."""


class JudgeError(RolloutError):
    """A judge raised, timed out, or returned something that is not a finite number."""


class NotStarted(TrainerError):
    """A process of the run died unseen and its successor has not been told to start: like a death,
    the call has done nothing.
    """


class LearnerLost(TrainerError):
    """The learner's process died in a step and a successor is ready: offer the batch again
    (L07).
    """


class StalenessError(TrainerError):
    """Neither producing, nor training, nor syncing can go on within the staleness budget (L23)."""


class NoProgress(TrainerError):
    """Nothing moved for the watchdog's time; the text lists what each part was waiting for."""


class LedgerError(TrainerError):
    """Produced rollouts and their ends do not add up (L26); the text states every counter."""


class SnapshotError(TrainerError):
    """A snapshot that cannot be written or read."""


class SnapshotVersion(SnapshotError):
    """A snapshot of a format version that this code does not read; the text names both versions."""
