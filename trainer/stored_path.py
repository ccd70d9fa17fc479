"""The path that a conversation is on in its session, and how it gets there (lifecycle L05).

Owns what the session holds, the end of the path in it, and what was said there and is not stored
yet. Each run of tokens with one origin becomes one segment. A segment is stored when its routing is
known: the tokens of a prompt or a tool are kept back until the engine, at the next request, reports
the experts they were routed to. What all members of a group say first is stored once for all their
sessions.

Belongs to one conversation; one loop. Nothing here talks to the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmstore import ObjectRef, StoreFull
from trainer.engine.protocol import Generation
from trainer.errors import EngineError
from trainer.group_context import GroupContext, Tokens, joined, same
from trainer.record import Recorded
from trainer.rollout import FinishReason
from trainer.segment import IGNORE_LABEL, NO_MODEL_STEP, Segment

__all__ = ["StoredPath", "checked", "said_segment"]

Routing = NDArray[Any]


class StoredPath:
    """See the module. `node`, `length` and `n_routed` describe the path; `n_tokens` and what
    follows it, the session with all its paths.
    """

    __slots__ = (
        "_apart",
        "_context",
        "_ends",
        "_id",
        "_n_routed_asked",
        "_parents",
        "_sampled_nodes",
        "_tokens",
        "_unstored",
        "length",
        "n_prompt_nodes",
        "n_prompt_tokens",
        "n_routed",
        "n_sampled",
        "n_tokens",
        "node",
        "said",
        "step_max",
        "step_min",
    )

    def __init__(self, context: GroupContext, session_id: str) -> None:
        self._context = context
        self._id = session_id
        #: The segment at the end of the path; None before the first is stored.
        self.node: int | None = None
        #: Tokens that are stored, and up to where of these the routing is.
        self.length = 0
        self.n_routed = 0
        self._tokens: list[Tokens] = []
        #: What was said at its end and is not stored yet.
        self.said: list[Tokens] = []
        # All paths of the session.
        self._parents: dict[int, int | None] = {}
        self._sampled_nodes: set[int] = set()
        self._ends: list[int | None] = []
        self.n_tokens = 0
        self.n_prompt_nodes = 0
        self.n_prompt_tokens = 0
        self.n_sampled = 0
        self.step_min: int | None = None
        self.step_max: int | None = None
        # The routing that the engine knows to be known, and what waits for room.
        self._n_routed_asked = 0
        self._unstored: Segment | None = None
        self._apart: ObjectRef | None = None

    # -- what the conversation does with it ------------------------------------------------------

    def say(self, tokens: Tokens) -> None:
        """Add tokens that no model sampled; they are stored with the next generation."""
        if len(tokens):
            self.said.append(tokens)

    def asked(self) -> tuple[Tokens, int]:
        """What the engine is asked to continue; -> all tokens, those with known routing."""
        tokens = joined(self._tokens + self.said)
        if not len(tokens):
            chat = self._context.prompt.messages is not None
            hint = "; the prompt is a chat: say its messages, for its text is None" if chat else ""
            raise EngineError(f"generate without any content: no token to continue from{hint}")
        self._n_routed_asked = self.n_routed
        return tokens, self.n_routed

    def step_over(self, segments: Sequence[Recorded]) -> list[Tokens]:
        """Go on behind segments that the session has from before; -> their tokens."""
        for recorded in segments:
            steps = recorded.model_steps if recorded.sampled else None
            self._advance(recorded.node, recorded.token_ids, recorded.n_routed, steps)
        return [recorded.token_ids for recorded in segments]

    def go_back(self, node: int | None) -> list[int]:
        """To the end of an earlier segment (None: to the very beginning); what was said and not
        stored is dropped, what was stored stays as a path of its own. -> nodes from the root.
        """
        self._ends.append(self.node)
        self.said.clear()
        self.node, self.n_routed, self.length = None, 0, 0
        self._tokens.clear()
        path = self._to(node)
        for one in path:
            segment = self._context.traces.segment(self._id, one)
            self._advance(one, segment.token_ids.copy(), segment.n_routed)
        return path

    def leaves(self) -> tuple[int, ...]:
        """Where paths end that hold tokens of the model."""
        if not self._ends and self.node is not None:  # it never went back: one path of all nodes
            return (self.node,) if self._sampled_nodes else ()
        paths = [self._to(node) for node in dict.fromkeys([*self._ends, self.node])]
        inner = {node for path in paths for node in path[:-1]}
        return tuple(
            path[-1]
            for path in paths
            if path and path[-1] not in inner and not self._sampled_nodes.isdisjoint(path)
        )

    # -- storing ---------------------------------------------------------------------------------

    def checked(self, generation: Generation) -> Generation:
        """As the function `checked`, of an answer to what is said here."""
        n_said = sum(map(len, self.said))
        return checked(self._context, generation, self.length + n_said - self.n_routed)

    def store(self, generation: Generation) -> Tokens:
        """The tokens that were kept back, then the sampled ones, each with its rows of routing;
        -> the sampled ones.

        `StoreFull` when the arena has no room, or a mate waits for room for their prompt: then
        `make_room` and once more; what is stored already is not stored again.
        """
        if not len(generation.token_ids):  # aborted before the first: what was said is said again
            return joined(())
        if self.said:
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
        node = self._insert((self._id,), segment)
        self._advance(node, segment.token_ids, segment.n_routed, segment.model_steps)
        return segment.token_ids

    async def make_room(self) -> None:
        """A full arena is waited for in a thread, so the loop goes on; the session is written to on
        the loop, for this may be cancelled while the thread waits.
        """
        context = self._context
        waits_for_prompt = context.prompt_tokens is None and self._lacks_prompt()
        async with context.storing if waits_for_prompt else nullcontext():
            segment, self._unstored = self._unstored, None
            if waits_for_prompt and context.prompt_tokens is not None:
                return  # a mate has stored it, and the next that is stored is another segment
            if waits_for_prompt and context.no_room is not None:  # and the group has failed
                raise StoreFull(f"a mate waited for room in vain: {context.no_room}")
            if segment is not None:
                wait_s = context.arena_wait_s
                try:
                    self._apart = await asyncio.to_thread(context.traces.put_apart, segment, wait_s)
                except StoreFull as error:
                    if waits_for_prompt:
                        context.no_room = error
                    raise

    def _rows(self, generation: Generation, n: int) -> tuple[Routing | None, Routing | None]:
        """Of the routing, what the end of the path lacks, and that of `n` tokens behind it."""
        routed = generation.routed_experts
        if routed is None:
            return None, None
        known, end = self.n_routed - self._n_routed_asked, self.length - self._n_routed_asked
        return (routed[known:end] if known < end else None), routed[end : end + n]

    def _store_said(self, generation: Generation) -> None:
        """Tokens that no model sampled. The first of a group are stored once for all its sessions,
        by the member that knows their routing first.
        """
        context, said = self._context, joined(self.said)
        stored = context.prompt_tokens
        if not self._lacks_prompt():
            node = self._insert((self._id,), self._segment(said, generation))
        elif stored is None:
            if context.storing.locked():
                raise StoreFull("a mate waits for room for the prompt")
            mates = [sid for sid in context.lack_prompt if sid != self._id]
            node = self._insert([self._id, *mates], self._segment(said, generation))
            context.prompt_tokens = said
        elif same(stored, said):
            node = 0  # a mate has stored it
        else:  # it was told something else than its mates: a prompt of its own
            context.traces.truncate(self._id, keep=0)
            node = self._insert((self._id,), self._segment(said, generation))
        self.said.clear()
        self._advance(node, said, 0 if generation.routed_experts is None else len(said))

    def _lacks_prompt(self) -> bool:
        return not self._parents and self._id in self._context.lack_prompt

    def _segment(self, said: Tokens, generation: Generation) -> Segment:
        before, rows = self._rows(generation, len(said))
        return said_segment(self._context, said, rows, before)

    def _insert(self, session_ids: Sequence[str], segment: Segment) -> int:
        """-> node in the first session. Raises StoreFull, and `make_room` helps."""
        traces, parent = self._context.traces, self.node
        if self._apart is not None:
            stored, self._apart = self._apart, None
            return traces.attach(session_ids, stored, parent)[0]
        try:
            if len(session_ids) == 1:
                return traces.insert(self._id, segment, parent)
            return traces.insert_shared(session_ids, segment, parent)[0]
        except StoreFull:
            self._unstored = segment
            raise

    # -- where it is -----------------------------------------------------------------------------

    def _to(self, node: int | None) -> list[int]:
        """From the root to `node`."""
        path = []
        while node is not None:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def _advance(
        self, node: int, tokens: Tokens, n_routed: int, steps: Tokens | None = None
    ) -> None:
        """On to a segment that the session got, or has from before. `steps`: of a new one that the
        model sampled.
        """
        n = len(tokens)
        if node not in self._parents:
            self._parents[node] = self.node
            self.n_tokens += n
            if steps is not None:
                self._sampled_nodes.add(node)
                self.n_sampled += n
                known = set(steps.tolist())  # one, or few: numpy's reductions cost more
                if self.step_min is not None and self.step_max is not None:
                    known |= {self.step_min, self.step_max}
                self.step_min, self.step_max = min(known), max(known)
            elif self.step_min is None:
                self.n_prompt_nodes += 1
                self.n_prompt_tokens += n
        self.node = node
        if n_routed:
            self.n_routed = self.length + n_routed
        self._tokens.append(tokens)
        self.length += n


def checked(context: GroupContext, generation: Generation, n_before: int) -> Generation:
    """An engine's answer is the world's, not ours: check it before it is stored. `n_before`: tokens
    before those that it sampled whose routing it was asked for.
    """
    k = len(generation.token_ids)
    if len(generation.logprobs) != k or len(generation.model_steps) != k:
        raise EngineError(
            f"the engine returned {k} tokens, {len(generation.logprobs)} log-probs and "
            f"{len(generation.model_steps)} model steps"
        )
    if not isinstance(generation.finish_reason, FinishReason):
        raise EngineError(f"the engine returned no FinishReason: {generation.finish_reason!r:.100}")
    routed = generation.routed_experts
    if context.routing_type is None or k == 0:
        if routed is not None:
            generation = dataclasses.replace(generation, routed_experts=None)
        return generation
    if routed is None:
        raise EngineError(f"the engine returned {k} tokens without routed experts")
    wanted = (n_before + k - 1, context.info.n_layers_moe, context.info.top_k)
    if routed.shape != wanted:
        raise EngineError(f"routed experts have shape {routed.shape}; {wanted} was asked for")
    if routed.dtype is context.routing_type:
        return generation
    narrowed: Routing = routed.astype(context.routing_type)
    return dataclasses.replace(generation, routed_experts=narrowed)


def said_segment(
    context: GroupContext, said: Tokens, rows: Routing | None, before: Routing | None
) -> Segment:
    """Tokens that no model sampled, with their rows of routing and those of tokens before them."""
    text = context.tokenizer.decode(said.tolist())
    return Segment(said, *_of_nobody(len(said)), text, rows, -1, before)


@functools.lru_cache(maxsize=256)
def _of_nobody(n: int) -> tuple[Tokens, NDArray[np.float32], Tokens]:
    """Labels, log-probs and model steps of `n` tokens that no model sampled."""
    columns = (
        np.full(n, IGNORE_LABEL, np.int32),
        np.zeros(n, np.float32),
        np.full(n, NO_MODEL_STEP, np.int32),
    )
    for column in columns:
        column.flags.writeable = False
    return columns
