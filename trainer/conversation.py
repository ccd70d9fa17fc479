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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmstore import StoreFull
from trainer.engine.protocol import Engine, GenerateRequest, Generation, SamplingParams, Tokenizer
from trainer.environment import RolloutAborted, Turn
from trainer.errors import EngineError, TraceError
from trainer.record import Record, Recorded
from trainer.rollout import (
    IGNORE_LABEL,
    NO_MODEL_STEP,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    Segment,
    narrowest_unsigned,
)
from trainer.trace import TraceStore

__all__ = ["Content", "Conversation", "Gate", "SharedPrompt"]

#: What can be said to the policy.
Content = str | Sequence[int] | Sequence[Message]

Routing = NDArray[Any]


@dataclass(slots=True)
class Gate:
    """Shared by the conversations of one producer: whether new requests may start, and which
    run.
    """

    stopping: bool = False
    running: dict[str, Conversation] = field(default_factory=dict)


class SharedPrompt:
    """The first segment of a group's sessions: stored once, by the member that knows its routing
    first.
    """

    def __init__(self, session_ids: Sequence[str]) -> None:
        #: Sessions that lack it and will get it.
        self.session_ids = tuple(session_ids)
        self.tokens: list[int] | None = None
        self.lock = asyncio.Lock()


class Conversation:
    """See the module. Keeps `trainer.environment.Session`."""

    def __init__(
        self,
        *,
        traces: TraceStore,
        engine: Engine,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Prompt,
        rollout: Rollout,
        group_uid: str,
        shared: SharedPrompt,
        gate: Gate,
        fresh: bool,
        arena_wait_s: float,
    ) -> None:
        self.aborted = False
        self.request_id: str | None = None
        self._traces = traces
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = params
        self._prompt = prompt
        self._rollout = rollout
        self._group_uid = group_uid
        self._shared = shared
        self._gate = gate
        self._arena_wait_s = arena_wait_s
        self._stopping = self._closed = False
        self._n_requests = 0
        old = rollout.turns
        self._record = Record([], ()) if fresh else Record.of_session(traces, self.id, old)
        # The path so far: everything below describes stored segments only.
        self._node: int | None = None
        self._tokens: list[int] = []
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
        self._pending: list[int] = []

    # -- what environments use -------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Id of the trace session."""
        return self._rollout.session_id

    @property
    def prompt(self) -> Prompt:
        """The task instance."""
        return self._prompt

    @property
    def text(self) -> str:
        """Everything that the model sampled on this path."""
        return "".join(self._sampled_text)

    async def append(self, content: Content) -> None:
        """Add tokens that no model sampled; they are stored with the next `generate`."""
        self._pending.extend(self._encode(content))

    async def generate(
        self, content: Content | None = None, params: SamplingParams | None = None
    ) -> Turn:
        """Append `content` when given, then let the policy continue to the end of its turn."""
        if self._closed:
            raise RolloutAborted
        if content is not None:
            await self.append(content)
        params = params or self._params
        self._follow_record_through_pending()
        replayed = self._replay_turn(params)
        if replayed is not None:
            return replayed
        partial = self._replay_partial_turn()
        if len(partial) >= params.max_new_tokens:
            return self._finish_turn(partial, FinishReason.LENGTH)
        if partial:
            left = params.max_new_tokens - len(partial)
            params = dataclasses.replace(params, max_new_tokens=left)
        generation = await self._request(params)
        await self._store(generation)
        partial.extend(generation.token_ids.tolist())
        if generation.finish_reason is FinishReason.ABORT:
            self.aborted = True
            raise RolloutAborted
        if generation.finish_reason is FinishReason.ERROR:
            raise EngineError(generation.error or "the engine reported an error without a text")
        return self._finish_turn(partial, generation.finish_reason)

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
        self._node, self._n_routed = None, 0
        self._tokens.clear()
        self._sampled_text.clear()
        for one in self._path(None if to is None else to.node):
            segment = self._traces.segment(self.id, one)
            self._go_to(one, segment.token_ids.tolist(), segment.n_routed)
            if one in self._turns:
                self._sampled_text.append(self._turns[one].text)

    # -- what the producer uses ------------------------------------------------------------------

    async def stop(self) -> None:
        """End this conversation part-way: abort its request, refuse the next one."""
        self._stopping = True
        if self.request_id is not None:
            await self._engine.abort([self.request_id])

    def close(self) -> None:
        """Its environment has ended or is abandoned: whoever still holds this gets no more turns,
        for the session may be another attempt's by then.
        """
        self._closed = True

    @property
    def node(self) -> int | None:
        """The segment at the end of the path; None before the first is stored."""
        return self._node

    @property
    def has_sampled(self) -> bool:
        """Whether the path holds a token of the model."""
        return self._step_min is not None

    def outcome(self, **changes: Any) -> Rollout:
        """The rollout with everything that is known from the trace, and the caller's `changes`."""
        return self._rollout.evolve(
            **changes,
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
        if not record or (not self._pending and record.samples_after(self._node)):
            return
        said = record.take_said(self._node, self._pending)
        if said is None:
            self._leave_record()
            return
        self._pending.clear()
        self._step_over([said])

    def _replay_turn(self, params: SamplingParams) -> Turn | None:
        """The next finished turn on record; None when there is none."""
        turn = [] if self._pending else self._record.take_turn(self._node)
        if not turn:
            return None
        tokens = self._step_over(turn)
        return self._finish_turn(tokens, self._reason_of(tokens, params))

    def _reason_of(self, tokens: list[int], params: SamplingParams) -> FinishReason:
        """Why a turn on record ended: a record holds no reasons, but what it holds tells."""
        stopped = tokens[-1] in (self._tokenizer.eos_token_id, *params.stop_token_ids)
        room = self._engine.info.context_max - len(self._tokens)
        full = len(tokens) >= params.max_new_tokens or room <= 0
        return FinishReason.LENGTH if full and not stopped else FinishReason.STOP

    def _replay_partial_turn(self) -> list[int]:
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
            self._traces.truncate(self.id, keep=keep)

    def _step_over(self, segments: Sequence[Recorded]) -> list[int]:
        """Go on behind segments on record; -> their tokens."""
        found: list[int] = []
        for recorded in segments:
            tokens = recorded.token_ids.tolist()
            found += tokens
            self._advance(recorded.node, tokens, recorded.n_routed)
            if recorded.sampled:
                self._note_sampled(recorded.model_steps)
            elif self._step_min is None:
                self._note_prompt(len(tokens))
        return found

    # -- requests --------------------------------------------------------------------------------

    async def _request(self, params: SamplingParams) -> Generation:
        if self._gate.stopping or self._stopping:
            self.aborted = True
            raise RolloutAborted
        context = np.array(self._tokens + self._pending, np.int32)
        if not len(context):
            raise EngineError("generate without any content: there is no token to continue from")
        self._n_requests += 1
        request_id = f"{self.id}/{self._rollout.attempt}.{self._n_requests}"
        request = GenerateRequest(
            request_id=request_id,
            session_id=self.id,
            token_ids=context,
            params=params,
            group_id=self._group_uid,
            n_routed_known=self._n_routed,
        )
        self._gate.running[request_id] = self
        self.request_id = request_id
        try:
            generation = await self._engine.generate(request)
        finally:
            self.request_id = None
            self._gate.running.pop(request_id, None)
        return self._checked(generation, len(context))

    def _checked(self, generation: Generation, n_context: int) -> Generation:
        """An engine's answer is the world's, not ours: check it before it is stored."""
        k = len(generation.token_ids)
        if len(generation.logprobs) != k or len(generation.model_steps) != k:
            raise EngineError(
                f"the engine returned {k} tokens, {len(generation.logprobs)} log-probs and "
                f"{len(generation.model_steps)} model steps"
            )
        info = self._engine.info
        routed = generation.routed_experts
        if not info.routes or k == 0:
            if routed is not None:
                generation = dataclasses.replace(generation, routed_experts=None)
            return generation
        if routed is None:
            raise EngineError(f"the engine returned {k} tokens without routed experts")
        wanted = (n_context + k - 1 - self._n_routed, info.n_layers_moe, info.top_k)
        if routed.shape != wanted:
            raise EngineError(f"routed experts have shape {routed.shape}; {wanted} was asked for")
        narrow: Routing = routed.astype(narrowest_unsigned(info.n_experts), copy=False)
        if narrow is routed:
            return generation
        return dataclasses.replace(generation, routed_experts=narrow)

    # -- storing ---------------------------------------------------------------------------------

    async def _store(self, generation: Generation) -> None:
        """The tokens that were kept back, then the sampled ones, each with its rows of routing."""
        k = len(generation.token_ids)
        if k == 0:
            return  # aborted before the first token: what is pending is said again next time
        routed = generation.routed_experts
        before = None
        if routed is not None:
            n_before = len(self._tokens) - self._n_routed
            before, routed = (routed[:n_before] if n_before else None), routed[n_before:]
        if self._pending:
            n = len(self._pending)
            await self._insert_said(None if routed is None else routed[:n], before)
            before = None
            routed = None if routed is None else routed[n:]
            self._pending.clear()
        segment = Segment(
            token_ids=generation.token_ids,
            labels=generation.token_ids,
            logprobs=generation.logprobs,
            model_steps=generation.model_steps,
            text=generation.text,
            routed_experts=routed,
            routed_before=before,
        )
        node = await self._insert([self.id], segment)
        self._advance(node, segment.token_ids.tolist(), segment.n_routed)
        self._note_sampled(segment.model_steps)

    async def _insert_said(self, rows: Routing | None, before: Routing | None) -> None:
        """Tokens that no model sampled. The first of a group are stored once for all its
        sessions.
        """
        said = self._pending
        if not self._parents and self.id in self._shared.session_ids:
            node = await self._insert_shared(said, rows, before)
        else:
            node = await self._insert([self.id], self._said(said, rows, before))
        self._advance(node, said, 0 if rows is None else len(rows))
        if self._step_min is None:
            self._note_prompt(len(said))

    def _said(self, tokens: list[int], rows: Routing | None, before: Routing | None) -> Segment:
        n = len(tokens)
        return Segment(
            token_ids=np.array(tokens, np.int32),
            labels=np.full(n, IGNORE_LABEL, np.int32),
            logprobs=np.zeros(n, np.float32),
            model_steps=np.full(n, NO_MODEL_STEP, np.int32),
            text=self._tokenizer.decode(tokens),
            routed_experts=rows,
            routed_before=before,
        )

    async def _insert_shared(
        self, said: list[int], rows: Routing | None, before: Routing | None
    ) -> int:
        """Store the prompt for all members, or use what a mate stored for this one."""
        shared = self._shared
        async with shared.lock:
            if shared.tokens is None:
                mates = [sid for sid in shared.session_ids if sid != self.id]
                node = await self._insert([self.id, *mates], self._said(said, rows, before))
                shared.tokens = list(said)
                return node
        if shared.tokens == said:
            return 0
        # This member was told something else than its mates: a prompt of its own.
        self._traces.truncate(self.id, keep=0)
        return await self._insert([self.id], self._said(said, rows, before))

    async def _insert(self, session_ids: Sequence[str], segment: Segment) -> int:
        """-> node in the first session. A full arena is waited for in a thread, so the loop goes
        on; the session is written to here, for this may be cancelled while the thread waits.
        """
        parent = self._node
        try:
            return self._traces.insert_shared(session_ids, segment, parent)[0]
        except StoreFull:
            stored = await asyncio.to_thread(self._traces.put_apart, segment, self._arena_wait_s)
            return self._traces.attach(session_ids, stored, parent)[0]

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
        paths = [self._path(node) for node in dict.fromkeys([*self._ends, self._node])]
        inner = {node for path in paths for node in path[:-1]}
        return tuple(
            path[-1]
            for path in paths
            if path and path[-1] not in inner and not self._sampled_nodes.isdisjoint(path)
        )

    def _advance(self, node: int, tokens: list[int], n_routed: int) -> None:
        """A segment that the session got, or had from an earlier attempt, at the end of the
        path.
        """
        if node not in self._parents:
            self._n_tokens += len(tokens)
        self._parents[node] = self._node
        self._go_to(node, tokens, n_routed)

    def _go_to(self, node: int, tokens: list[int], n_routed: int) -> None:
        self._node = node
        if n_routed:
            self._n_routed = len(self._tokens) + n_routed
        self._tokens += tokens

    def _note_prompt(self, n_tokens: int) -> None:
        self._n_prompt_nodes += 1
        self._n_prompt_tokens += n_tokens

    def _note_sampled(self, model_steps: NDArray[np.int32]) -> None:
        assert self._node is not None
        self._sampled_nodes.add(self._node)
        steps = model_steps.tolist()  # a handful: numpy's reductions cost more than the list
        low, high = min(steps), max(steps)
        self._step_min = low if self._step_min is None else min(low, self._step_min)
        self._step_max = high if self._step_max is None else max(high, self._step_max)

    def _finish_turn(self, tokens: list[int], reason: FinishReason) -> Turn:
        assert self._node is not None
        self._reason = reason
        text = self._tokenizer.decode(tokens)
        turn = Turn(text, np.array(tokens, np.int32), reason, self._node)
        self._turns[self._node] = turn
        self._sampled_text.append(text)
        return turn

    def _encode(self, content: Content) -> list[int]:
        if isinstance(content, str):
            return self._tokenizer.encode(content)
        if not content:
            return []
        if isinstance(content[0], (int, np.integer)):
            return [int(token) for token in content]  # type: ignore[arg-type]
        return self._tokenizer.apply_chat_template(content)  # type: ignore[arg-type]
