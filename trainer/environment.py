"""What user code plugs into the producer: environments that run a conversation, judges that score
it.

A `Session` is handed to `Environment.run`. It records every token with its log-probability, model
step and routing as one path of the session's trace, and feeds the next request the very tokens that
were sampled: text is never re-tokenised. An environment that raises, or a judge that raises or runs
out of time, fails one rollout (lifecycle L13), never the producer.

Protocols only; implementations are in `trainer.environments` and `trainer.judge`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trainer.engine.protocol import SamplingParams
from trainer.rollout import FinishReason, Message, Prompt
from trainer.segment import Trace

__all__ = ["Environment", "Judge", "RolloutAborted", "Session", "Turn"]


class RolloutAborted(BaseException):
    """Ends an environment's task because its rollout was stopped part-way; it can go on later.

    Not an `Exception`, so that user code which catches those lets it pass.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one `Session.generate` came to. `node` is the segment of the trace that holds it."""

    text: str
    token_ids: NDArray[np.int32]
    finish_reason: FinishReason
    node: int


class Session(Protocol):
    """One conversation under way; made by the producer, used by one environment at a time."""

    @property
    def id(self) -> str:
        """Id of the trace session in the arena."""
        ...

    @property
    def prompt(self) -> Prompt:
        """The task instance."""
        ...

    @property
    def text(self) -> str:
        """Everything that the model sampled so far on the current path, as text."""
        ...

    async def append(self, content: str | Sequence[int] | Sequence[Message]) -> None:
        """Add tokens that no model sampled (prompt, tool output); they are stored by `generate`.

        Text is encoded, messages go through the chat template, token ids are taken as they are.
        """
        ...

    async def generate(
        self,
        content: str | Sequence[int] | Sequence[Message] | None = None,
        params: SamplingParams | None = None,
    ) -> Turn:
        """Append `content` when given, then let the policy continue; default parameters otherwise.

        Raises `EngineError`. An abort ends the environment's task with `RolloutAborted`, which
        environments must let pass.
        """
        ...

    def rewind(self, to: Turn | None = None) -> None:
        """Go back to the end of an earlier turn of this session (None: to the very beginning) and
        go on from there; the path that is left stays, and is trained as well.

        For agents that branch. Turns that paths share are trained with each of them. `text` and the
        next request are of the new path; what was appended and not yet generated from is dropped.
        `TraceError` for a turn of another session.
        """
        ...


@runtime_checkable
class Environment(Protocol):
    """Runs one conversation. One instance serves many sessions at the same time."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        """Talk to the policy through `session` until the task is over. May raise `ToolError`.

        An aborted rollout is gone on with by running it again: what it says and does is compared
        with the record, finished turns come back without the engine, and it is at the old point
        again. So it should say the same when it hears the same.
        """
        ...


@runtime_checkable
class Judge(Protocol):
    """Scores a finished rollout."""

    def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float | Awaitable[float]:
        """A finite reward for what the policy answered; plain, or something to await for it.

        `text`: all that it sampled; `trace`: every token, when `ProducerParts.judge_reads_trace`.

        May raise `JudgeError`; the producer adds the time limit. A plain function answers at once:
        the producer's loop stands still meanwhile, so it can have no limit, and needs no task.
        """
        ...
