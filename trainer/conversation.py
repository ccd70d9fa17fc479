"""One conversation under way: what an environment holds as its `Session` (lifecycle L11, L13).

Token in, token out: what the policy sampled goes back into the next request as the same tokens.
How it is stored is `trainer.stored_path`'s; this file owns the turns.

A rollout that was aborted goes on by running its environment again: what it says is compared with
the recorded trace, and finished turns are answered from there, without the engine, until the point
where it stopped. An environment that says something else than before leaves the record there, and
the rest of the old trace is cut away.

An agent that branches (tries again, hands a part to a helper) goes back to an earlier turn with
`rewind` and goes on from there: each path that ends in tokens of the model is one leaf of the
rollout, and all are trained.

Belongs to one task of the producer's loop.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from msgspec.structs import replace

from shmstore import StoreFull
from trainer.engine.protocol import GenerateRequest, Generation, SamplingParams
from trainer.environment import RolloutAborted, Turn
from trainer.errors import EngineError, TraceError
from trainer.group_context import Content, GroupContext, Tokens, joined
from trainer.record import Record
from trainer.rollout import FinishReason, Prompt, Rollout, Status
from trainer.stored_path import StoredPath

__all__ = ["Conversation"]

_NOTHING = Record([], ())


class Conversation:
    """See the module. Keeps `trainer.environment.Session`."""

    __slots__ = (
        "_before",
        "_closed",
        "_context",
        "_n_requests",
        "_path",
        "_reason",
        "_record",
        "_rollout",
        "_sampled_text",
        "_stopping",
        "_turns",
        "_unfinished",
        "aborted",
        "id",
        "request_id",
    )

    def __init__(self, context: GroupContext, rollout: Rollout) -> None:
        #: Id of the trace session.
        self.id = rollout.session_id
        self.aborted = False
        self.request_id: str | None = None
        self._context = context
        self._rollout = rollout
        self._stopping = self._closed = False
        self._n_requests = 0
        self._record = (
            _NOTHING if context.fresh else Record.of_session(context.traces, self.id, rollout.turns)
        )
        self._path = StoredPath(context, self.id)
        self._sampled_text: list[str] = []  # on this path
        self._turns: dict[int, Turn] = {}  # of all paths
        self._reason: FinishReason | None = None
        # The turn under way: what an earlier attempt sampled of it, and what waits for room.
        self._before: list[Tokens] = []
        self._unfinished: Generation | None = None

    # -- what environments use -------------------------------------------------------------------

    @property
    def prompt(self) -> Prompt:
        """The task instance."""
        return self._context.prompt

    @property
    def text(self) -> str:
        """Everything that the model sampled on this path."""
        return "".join(self._sampled_text)

    async def append(self, content: Content) -> None:
        """Add tokens that no model sampled; they are stored with the next `generate`."""
        self.say(content)

    async def generate(
        self, content: Content | None = None, params: SamplingParams | None = None
    ) -> Turn:
        """Append `content` when given, then let the policy continue to the end of its turn."""
        if self._closed:
            raise RolloutAborted
        if content is not None:
            self.say(content)
        params = params or self._context.params
        self._before.clear()
        if self._record:
            self._follow_record_through_said()
            on_record = [] if self._path.said else self._record.take_turn(self._path.node)
            if on_record:
                tokens = np.concatenate(self._path.step_over(on_record))
                return self._finish_turn(tokens, self._reason_of(tokens, params))
            self._before = self._replay_partial_turn()
            left = params.max_new_tokens - sum(map(len, self._before))
            if left <= 0:
                return self._finish_turn(np.concatenate(self._before), FinishReason.LENGTH)
            params = dataclasses.replace(params, max_new_tokens=left)
        request = self._request(params)
        try:
            generation = await self._context.engine.generate(request)
        finally:
            self._forget_request()
        turn = self.finish(generation)
        return turn if turn is not None else await self.finish_later()

    def rewind(self, to: Turn | None = None) -> None:
        """Go back to the end of an earlier turn of this session, on whatever path (None: to the
        very beginning); what was stored since stays as a path of its own.

        What was appended and not yet generated from is dropped.
        """
        if to is not None and to.node not in self._turns:
            raise TraceError(
                f"session {self.id!r} has no turn that ends at node {to.node}; its turns end at "
                f"{sorted(self._turns)}"
            )
        if to is not None and self._turns[to.node] is not to:
            raise TraceError(
                f"a turn of another session was given, and session {self.id!r} cannot go back to "
                "it; give a turn that its own `generate` returned"
            )
        path = self._path.go_back(None if to is None else to.node)
        self._sampled_text = [self._turns[node].text for node in path if node in self._turns]

    # -- what the producer uses ------------------------------------------------------------------

    async def stop(self) -> None:
        """End this conversation part-way: abort its request, refuse the next one."""
        self._stopping = True
        if self.request_id is not None:
            await self._context.engine.abort([self.request_id])

    def say(self, content: Content) -> None:
        """As `append`. What `finish` is given then answers that."""
        self._path.say(self._context.encode(content))

    def close(self) -> None:
        """Its environment has ended or is abandoned: whoever still holds this gets no more turns,
        for the session may be another attempt's by then.
        """
        self._closed = True
        if self.request_id is not None:
            self._forget_request()

    @property
    def node(self) -> int | None:
        """The segment at the end of the path; None before the first is stored."""
        return self._path.node

    @property
    def has_sampled(self) -> bool:
        """Whether the path holds a token of the model."""
        return self._path.step_min is not None

    def outcome(
        self, status: Status, reward: float | None, error: str | None, generation_time_s: float
    ) -> Rollout:
        """The rollout as it ends, with everything that is known from the trace."""
        path = self._path
        return replace(
            self._rollout,
            status=status,
            reward=reward,
            error_msg=error,
            generation_time_s=generation_time_s,
            leaves=path.leaves(),
            turns=tuple(self._turns),
            n_prompt_nodes=path.n_prompt_nodes,
            n_prompt_tokens=path.n_prompt_tokens,
            n_response_tokens=path.n_tokens - path.n_prompt_tokens,
            n_sampled_tokens=path.n_sampled,
            model_step_min=path.step_min,
            model_step_max=path.step_max,
            finish_reason=self._reason,
        )

    # -- the record of an earlier attempt --------------------------------------------------------

    def _follow_record_through_said(self) -> None:
        """What was said again is on record: step over it. What differs ends the record."""
        record = self._record
        if not self._path.said and record.samples_after(self._path.node):
            return
        said = record.take_said(self._path.node, joined(self._path.said))
        if said is None:
            self._leave_record()
            return
        self._path.said.clear()
        self._path.step_over([said])

    def _reason_of(self, tokens: Tokens, params: SamplingParams) -> FinishReason:
        """Why a turn on record ended: a record holds no reasons, but what it holds tells."""
        context = self._context
        stopped = tokens[-1] in (context.tokenizer.eos_token_id, *params.stop_token_ids)
        room = context.info.context_max - self._path.length
        full = len(tokens) >= params.max_new_tokens or room <= 0
        return FinishReason.LENGTH if full and not stopped else FinishReason.STOP

    def _replay_partial_turn(self) -> list[Tokens]:
        """Tokens of the turn that was aborted, if the conversation has come to it; what is still on
        record then is of another path than this one.
        """
        partial = [] if self._path.said else self._record.take_sampled(self._path.node)
        tokens = self._path.step_over(partial)
        self._leave_record()
        return tokens

    def _leave_record(self) -> None:
        keep = self._record.leave()
        if keep is not None:
            self._context.traces.truncate(self.id, keep=keep)

    # -- requests --------------------------------------------------------------------------------

    def _request(self, params: SamplingParams) -> GenerateRequest:
        context = self._context
        gate = context.gate
        if gate.stopping or self._stopping:
            self.aborted = True
            raise RolloutAborted
        tokens, known = self._path.asked()
        self._n_requests += 1
        request_id = f"{self.id}/{self._rollout.attempt}.{self._n_requests}"
        gate.running.add(request_id)
        self.request_id = request_id
        return GenerateRequest(request_id, self.id, tokens, params, context.group_uid, known)

    def _forget_request(self) -> None:
        if self.request_id is not None:
            self._context.gate.running.discard(self.request_id)
            self.request_id = None

    # -- the end of a turn -----------------------------------------------------------------------

    def finish(self, generation: Generation) -> Turn | None:
        """Store what the engine answered and end the turn, or raise as `generate` does.

        None when the arena has no room, or a mate waits for room for their prompt: then
        `finish_later`.
        """
        self._forget_request()
        return self._end_turn(self._path.checked(generation))

    async def finish_later(self) -> Turn:
        """The same, once there is room."""
        while True:
            await self._path.make_room()
            generation, self._unfinished = self._unfinished, None
            assert generation is not None
            turn = self._end_turn(generation)
            if turn is not None:
                return turn

    def _end_turn(self, generation: Generation) -> Turn | None:
        """What was stored before the arena was full is not stored again."""
        try:
            sampled = self._path.store(generation)
        except StoreFull:
            self._unfinished = generation
            return None
        if generation.finish_reason is FinishReason.ABORT:
            self.aborted = True
            raise RolloutAborted
        if generation.finish_reason is FinishReason.ERROR:
            raise EngineError(generation.error or "the engine reported an error without a text")
        if not len(sampled) and not self._before:
            raise EngineError(
                f"the engine returned no token, and ended for {generation.finish_reason.value}"
            )
        if self._before:
            tokens = np.concatenate([*self._before, sampled])
            return self._finish_turn(tokens, generation.finish_reason)
        return self._finish_turn(sampled, generation.finish_reason, generation.text)

    def _finish_turn(self, tokens: Tokens, reason: FinishReason, text: str | None = None) -> Turn:
        """`text`: of these tokens, where it is known."""
        node = self._path.node
        assert node is not None
        self._reason = reason
        if text is None:
            text = self._context.tokenizer.decode(tokens.tolist())
        turn = self._turns[node] = Turn(text, tokens.copy(), reason, node)
        self._sampled_text.append(text)
        return turn
