"""One conversation under way: what an environment holds as its `Session` (lifecycle L05, L11, L13).

Token in, token out: what the policy sampled goes back into the next request as the same tokens, and
each run of tokens with one origin becomes one segment of the session's trace. A segment is stored
when its routing is known: the tokens of a prompt or a tool are kept back until the engine, at the
next request, reports the experts they were routed to.

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

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shmstore import ObjectRef, StoreFull
from trainer.engine.protocol import GenerateRequest, Generation, SamplingParams
from trainer.environment import RolloutAborted, Turn
from trainer.errors import EngineError, TraceError
from trainer.group_context import Content, GroupContext, Tokens, joined, same
from trainer.record import Record, Recorded
from trainer.rollout import (
    IGNORE_LABEL,
    NO_MODEL_STEP,
    FinishReason,
    Prompt,
    Rollout,
    Segment,
    Status,
    narrowest_unsigned,
)

__all__ = ["Conversation"]

Routing = NDArray[Any]

_NOTHING = Record([], ())


class Conversation:
    """See the module. Keeps `trainer.environment.Session`."""

    __slots__ = (
        "_apart",
        "_before",
        "_closed",
        "_context",
        "_ends",
        "_length",
        "_n_prompt_nodes",
        "_n_prompt_tokens",
        "_n_requests",
        "_n_routed",
        "_n_routed_asked",
        "_n_tokens",
        "_node",
        "_parents",
        "_path_tokens",
        "_pending",
        "_reason",
        "_record",
        "_rollout",
        "_sampled_nodes",
        "_sampled_text",
        "_step_max",
        "_step_min",
        "_stopping",
        "_turns",
        "_unfinished",
        "_unstored",
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
        # The path so far: everything below describes stored segments only.
        self._node: int | None = None
        self._path_tokens: list[Tokens] = []
        self._length = 0
        self._n_routed = 0
        self._sampled_text: list[str] = []
        # All paths of the session.
        self._parents: dict[int, int | None] = {}
        self._sampled_nodes: set[int] = set()
        self._turns: dict[int, Turn] = {}
        self._ends: list[int | None] = []
        self._n_tokens = 0
        self._n_prompt_nodes = 0
        self._n_prompt_tokens = 0
        self._step_min: int | None = None
        self._step_max: int | None = None
        self._reason: FinishReason | None = None
        # The turn under way: what was said and is not stored yet, the routing that the engine knows
        # to be known, what an earlier attempt sampled of it, and what waits for room.
        self._pending: list[Tokens] = []
        self._n_routed_asked = 0
        self._before: list[Tokens] = []
        self._unfinished: Generation | None = None
        self._unstored: Segment | None = None
        self._apart: ObjectRef | None = None

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
        self._say(content)

    async def generate(
        self, content: Content | None = None, params: SamplingParams | None = None
    ) -> Turn:
        """Append `content` when given, then let the policy continue to the end of its turn."""
        if self._closed:
            raise RolloutAborted
        if content is not None:
            self._say(content)
        params = params or self._context.params
        self._before.clear()
        if self._record:
            self._follow_record_through_pending()
            on_record = [] if self._pending else self._record.take_turn(self._node)
            if on_record:
                tokens = np.concatenate(self._step_over(on_record))
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
        self._ends.append(self._node)
        self._pending.clear()
        self._node, self._n_routed, self._length = None, 0, 0
        self._path_tokens.clear()
        self._sampled_text.clear()
        for one in self._path(None if to is None else to.node):
            segment = self._context.traces.segment(self.id, one)
            self._go_to(one, segment.token_ids.copy(), segment.n_routed)
            if one in self._turns:
                self._sampled_text.append(self._turns[one].text)

    # -- what the producer uses ------------------------------------------------------------------

    async def stop(self) -> None:
        """End this conversation part-way: abort its request, refuse the next one."""
        self._stopping = True
        if self.request_id is not None:
            await self._context.engine.abort([self.request_id])

    def ask(self, content: Content) -> GenerateRequest:
        """Begin a turn without waiting for it: the request that the caller gives to the engine, and
        its answer to `finish`. For a conversation of one turn, without a record.
        """
        self._say(content)
        return self._request(self._context.params, is_last=True)

    def close(self) -> None:
        """Its environment has ended or is abandoned: whoever still holds this gets no more turns,
        for the session may be another attempt's by then.
        """
        self._closed = True
        self._forget_request()

    @property
    def node(self) -> int | None:
        """The segment at the end of the path; None before the first is stored."""
        return self._node

    @property
    def has_sampled(self) -> bool:
        """Whether the path holds a token of the model."""
        return self._step_min is not None

    def outcome(
        self, status: Status, reward: float | None, error: str | None, generation_time_s: float
    ) -> Rollout:
        """The rollout as it ends, with everything that is known from the trace."""
        return replace(
            self._rollout,
            status=status,
            reward=reward,
            error_msg=error,
            generation_time_s=generation_time_s,
            leaves=self._leaves(),
            turns=tuple(self._turns),
            n_prompt_nodes=self._n_prompt_nodes,
            n_prompt_tokens=self._n_prompt_tokens,
            n_response_tokens=self._n_tokens - self._n_prompt_tokens,
            model_step_min=self._step_min,
            model_step_max=self._step_max,
            finish_reason=self._reason,
        )

    # -- the record of an earlier attempt --------------------------------------------------------

    def _follow_record_through_pending(self) -> None:
        """What was said again is on record: step over it. What differs ends the record."""
        record = self._record
        if not self._pending and record.samples_after(self._node):
            return
        said = record.take_said(self._node, joined(self._pending))
        if said is None:
            self._leave_record()
            return
        self._pending.clear()
        self._step_over([said])

    def _reason_of(self, tokens: Tokens, params: SamplingParams) -> FinishReason:
        """Why a turn on record ended: a record holds no reasons, but what it holds tells."""
        context = self._context
        stopped = tokens[-1] in (context.tokenizer.eos_token_id, *params.stop_token_ids)
        room = context.info.context_max - self._length
        full = len(tokens) >= params.max_new_tokens or room <= 0
        return FinishReason.LENGTH if full and not stopped else FinishReason.STOP

    def _replay_partial_turn(self) -> list[Tokens]:
        """Tokens of the turn that was aborted, if the conversation has come to it; what is still on
        record then is of another path than this one.
        """
        partial = [] if self._pending else self._record.take_sampled(self._node)
        tokens = self._step_over(partial)
        self._leave_record()
        return tokens

    def _leave_record(self) -> None:
        keep = self._record.leave()
        if keep is not None:
            self._context.traces.truncate(self.id, keep=keep)

    def _step_over(self, segments: Sequence[Recorded]) -> list[Tokens]:
        """Go on behind segments on record; -> their tokens."""
        for recorded in segments:
            self._advance(recorded.node, recorded.token_ids, recorded.n_routed)
            if recorded.sampled:
                self._note_sampled(recorded.model_steps)
            elif self._step_min is None:
                self._note_prompt(len(recorded.token_ids))
        return [recorded.token_ids for recorded in segments]

    # -- requests --------------------------------------------------------------------------------

    def _say(self, content: Content) -> None:
        tokens = self._context.encode(content)
        if len(tokens):
            self._pending.append(tokens)

    def _request(self, params: SamplingParams, is_last: bool = False) -> GenerateRequest:
        gate = self._context.gate
        if gate.stopping or self._stopping:
            self.aborted = True
            raise RolloutAborted
        tokens = joined(self._path_tokens + self._pending)
        if not len(tokens):
            raise EngineError("generate without any content: there is no token to continue from")
        self._n_requests += 1
        self._n_routed_asked = self._n_routed
        request_id = f"{self.id}/{self._rollout.attempt}.{self._n_requests}"
        gate.running[request_id] = self
        self.request_id = request_id
        group, known = self._context.group_uid, self._n_routed
        return GenerateRequest(request_id, self.id, tokens, params, group, known, is_last)

    def _forget_request(self) -> None:
        if self.request_id is not None:
            self._context.gate.running.pop(self.request_id, None)
            self.request_id = None

    def _checked(self, generation: Generation) -> Generation:
        """An engine's answer is the world's, not ours: check it before it is stored."""
        k = len(generation.token_ids)
        if len(generation.logprobs) != k or len(generation.model_steps) != k:
            raise EngineError(
                f"the engine returned {k} tokens, {len(generation.logprobs)} log-probs and "
                f"{len(generation.model_steps)} model steps"
            )
        info = self._context.info
        routed = generation.routed_experts
        if not info.routes or k == 0:
            if routed is not None:
                generation = dataclasses.replace(generation, routed_experts=None)
            return generation
        if routed is None:
            raise EngineError(f"the engine returned {k} tokens without routed experts")
        n_rows = self._length + sum(map(len, self._pending)) + k - 1 - self._n_routed
        wanted = (n_rows, info.n_layers_moe, info.top_k)
        if routed.shape != wanted:
            raise EngineError(f"routed experts have shape {routed.shape}; {wanted} was asked for")
        narrow = narrowest_unsigned(info.n_experts)
        if routed.dtype is narrow:
            return generation
        narrowed: Routing = routed.astype(narrow)
        return dataclasses.replace(generation, routed_experts=narrowed)

    # -- storing ---------------------------------------------------------------------------------

    def finish(self, generation: Generation) -> Turn | None:
        """Store what the engine answered and end the turn, or raise as `generate` does.

        None when the arena has no room, or a mate waits for room for their prompt: then
        `finish_later`.
        """
        return self._end_turn(self._checked(generation))

    async def finish_later(self) -> Turn:
        """The same, once there is room."""
        while True:
            await self._make_room()
            assert self._unfinished is not None
            turn = self._end_turn(self._unfinished)
            if turn is not None:
                return turn

    async def _make_room(self) -> None:
        """A full arena is waited for in a thread, so the loop goes on; the session is written to on
        the loop, for this may be cancelled while the thread waits.
        """
        context = self._context
        waits_for_prompt = context.prompt_tokens is None and self._lacks_prompt()
        async with context.storing if waits_for_prompt else nullcontext():
            segment, self._unstored = self._unstored, None
            if waits_for_prompt and context.prompt_tokens is not None:
                return  # a mate has stored it, and the next that is stored is another segment
            if segment is not None:
                wait_s = context.arena_wait_s
                self._apart = await asyncio.to_thread(context.traces.put_apart, segment, wait_s)

    def _end_turn(self, generation: Generation) -> Turn | None:
        """What was stored before the arena was full is not stored again."""
        try:
            sampled = self._store(generation)
        except StoreFull:
            self._unfinished = generation
            return None
        if generation.finish_reason is FinishReason.ABORT:
            self.aborted = True
            raise RolloutAborted
        if generation.finish_reason is FinishReason.ERROR:
            raise EngineError(generation.error or "the engine reported an error without a text")
        if self._before:
            tokens = np.concatenate([*self._before, sampled])
            return self._finish_turn(tokens, generation.finish_reason)
        return self._finish_turn(sampled, generation.finish_reason, generation.text)

    def _store(self, generation: Generation) -> Tokens:
        """The tokens that were kept back, then the sampled ones, each with its rows of routing;
        -> the sampled ones.
        """
        if not len(generation.token_ids):  # aborted before the first: what is pending is said again
            return joined(())
        if self._pending:
            self._store_said(generation)
        before, rows = self._rows(generation, len(generation.token_ids))
        segment = Segment(
            generation.token_ids,
            generation.token_ids,
            generation.logprobs,
            generation.model_steps,
            generation.text,
            rows,
            -1,
            before,
        )
        node = self._insert((self.id,), segment)
        self._advance(node, segment.token_ids, segment.n_routed)
        self._note_sampled(segment.model_steps)
        return segment.token_ids

    def _rows(self, generation: Generation, n: int) -> tuple[Routing | None, Routing | None]:
        """Of the routing, what the end of the path lacks, and that of `n` tokens behind it."""
        routed = generation.routed_experts
        if routed is None:
            return None, None
        known, end = self._n_routed - self._n_routed_asked, self._length - self._n_routed_asked
        return (routed[known:end] if known < end else None), routed[end : end + n]

    def _store_said(self, generation: Generation) -> None:
        """Tokens that no model sampled. The first of a group are stored once for all its sessions,
        by the member that knows their routing first.
        """
        context, said = self._context, joined(self._pending)
        before, rows = self._rows(generation, len(said))
        stored = context.prompt_tokens
        if not self._lacks_prompt():
            node = self._insert((self.id,), self._segment(said, rows, before))
        elif stored is None:
            if context.storing.locked():
                raise StoreFull("a mate waits for room for the prompt")
            mates = [sid for sid in context.lack_prompt if sid != self.id]
            node = self._insert([self.id, *mates], self._segment(said, rows, before))
            context.prompt_tokens = said
        elif same(stored, said):
            node = 0  # a mate has stored it
        else:  # it was told something else than its mates: a prompt of its own
            context.traces.truncate(self.id, keep=0)
            node = self._insert((self.id,), self._segment(said, rows, before))
        self._pending.clear()
        self._advance(node, said, 0 if rows is None else len(rows))
        if self._step_min is None:
            self._note_prompt(len(said))

    def _lacks_prompt(self) -> bool:
        return not self._parents and self.id in self._context.lack_prompt

    def _segment(self, said: Tokens, rows: Routing | None, before: Routing | None) -> Segment:
        n = len(said)
        return Segment(
            token_ids=said,
            labels=np.full(n, IGNORE_LABEL, np.int32),
            logprobs=np.zeros(n, np.float32),
            model_steps=np.full(n, NO_MODEL_STEP, np.int32),
            text=self._context.tokenizer.decode(said.tolist()),
            routed_experts=rows,
            routed_before=before,
        )

    def _insert(self, session_ids: Sequence[str], segment: Segment) -> int:
        """-> node in the first session. Raises StoreFull, and `_make_room` helps."""
        traces, parent = self._context.traces, self._node
        if self._apart is not None:
            stored, self._apart = self._apart, None
            return traces.attach(session_ids, stored, parent)[0]
        try:
            if len(session_ids) == 1:
                return traces.insert(self.id, segment, parent)
            return traces.insert_shared(session_ids, segment, parent)[0]
        except StoreFull:
            self._unstored = segment
            raise

    # -- the path --------------------------------------------------------------------------------

    def _path(self, node: int | None) -> list[int]:
        """From the root to `node`."""
        path = []
        while node is not None:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def _leaves(self) -> tuple[int, ...]:
        """Where paths end that hold tokens of the model."""
        if not self._ends and self._node is not None:  # it never went back: one path of all nodes
            return (self._node,) if self._sampled_nodes else ()
        paths = [self._path(node) for node in dict.fromkeys([*self._ends, self._node])]
        inner = {node for path in paths for node in path[:-1]}
        return tuple(
            path[-1]
            for path in paths
            if path and path[-1] not in inner and not self._sampled_nodes.isdisjoint(path)
        )

    def _advance(self, node: int, tokens: Tokens, n_routed: int) -> None:
        """A segment that the session got, or had from an earlier attempt, at the end of the
        path.
        """
        if node not in self._parents:
            self._n_tokens += len(tokens)
        self._parents[node] = self._node
        self._go_to(node, tokens, n_routed)

    def _go_to(self, node: int, tokens: Tokens, n_routed: int) -> None:
        self._node = node
        if n_routed:
            self._n_routed = self._length + n_routed
        self._path_tokens.append(tokens)
        self._length += len(tokens)

    def _note_prompt(self, n_tokens: int) -> None:
        self._n_prompt_nodes += 1
        self._n_prompt_tokens += n_tokens

    def _note_sampled(self, model_steps: Tokens) -> None:
        assert self._node is not None
        self._sampled_nodes.add(self._node)
        steps = model_steps.tolist()  # a handful: numpy's reductions cost more than the list
        low, high = min(steps), max(steps)
        self._step_min = low if self._step_min is None else min(low, self._step_min)
        self._step_max = high if self._step_max is None else max(high, self._step_max)

    def _finish_turn(self, tokens: Tokens, reason: FinishReason, text: str | None = None) -> Turn:
        """`text`: of these tokens, where it is known."""
        assert self._node is not None
        self._reason = reason
        if text is None:
            text = self._context.tokenizer.decode(tokens.tolist())
        turn = self._turns[self._node] = Turn(text, tokens.copy(), reason, self._node)
        self._sampled_text.append(text)
        return turn
