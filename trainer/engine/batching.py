"""Continuous batching: who runs, who waits, who has ended.

Owns the waiting queue, the running sequences (in slot order) and the kept prefixes. Promises that a
sequence is admitted in order of arrival, and only when all that it may grow to fits the cache; that
a context shared by the members of a group is computed once; that an error of one sequence ends that
one, and an error of a forward pass those that were in it. The engine's worker thread only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.engine.kv_cache import Extension
from trainer.engine.model_runner import ModelRunner
from trainer.engine.prefix_cache import Entry, PrefixCache
from trainer.engine.protocol import Generation
from trainer.engine.sampling import BatchSampling, sample
from trainer.engine.sequence import Cancelled, Sequence
from trainer.errors import EngineError
from trainer.model.config import EngineConfig
from trainer.rollout import FinishReason
from trainer.routing import narrow_array

__all__ = ["Batcher", "Outcome"]

Outcome = tuple[Sequence, Generation | EngineError]
_STOP_TAIL_TOKENS = 8
"""Tokens beyond a stop string's bytes that are decoded to find it: some decode to nothing."""


class Batcher:
    """The engine without threads. Call `admit`, then `decode`, as long as `busy`."""

    def __init__(
        self, runner: ModelRunner, config: EngineConfig, decode_text: Callable[[list[int]], str]
    ) -> None:
        self.runner = runner
        self.prefixes = PrefixCache(config.prefix_bytes)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prompts_computed = self.prompts_reused = 0
        self._weights_seen = 0  # how often the weights have changed
        self.length_max = runner.cache.length_max  # of a sequence that has all of it
        self._prefill_max = config.prefill_tokens_max
        self._decode_text = decode_text
        self._sampling: BatchSampling | None = None  # of the running ones; None after a change
        self._outcomes: list[Outcome] = []
        # Passes of a whole batch that free slots have cost while others waited.
        self._empty_passes = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def take_outcomes(self) -> list[Outcome]:
        """What has ended since the last call."""
        done, self._outcomes = self._outcomes, []
        return done

    def weights_changed(self) -> None:
        """Kept prefixes belong to the old weights. Running sequences keep their keys and values,
        each token that follows says which step sampled it, and what is a mixture of old and new
        is not kept for a next turn.
        """
        self.prefixes.clear()
        self._weights_seen += 1

    # --- cancelling -----------------------------------------------------------------------------

    def end_cancelled(self) -> None:
        """Ends what the loop asked to end, waiting or running."""
        if any(one.cancelled is not Cancelled.NO for one in self.waiting):
            for one in self.waiting:
                if one.cancelled is Cancelled.ABORT:
                    self._outcomes.append((one, one.generation("", FinishReason.ABORT, None)))
            self.waiting = deque(one for one in self.waiting if one.cancelled is Cancelled.NO)
        for slot in range(len(self.running) - 1, -1, -1):
            if self.running[slot].cancelled is not Cancelled.NO:
                self._finish(slot, FinishReason.ABORT)

    # --- admission and context ------------------------------------------------------------------

    def admit(self, model_step: int) -> None:
        """Moves into the batch what fits, computes the contexts, and samples each first token.

        That costs about as much as a pass. So when more waits than fits, it is done once the slots
        that are free have been empty for a pass of the whole batch: no slot at a time in a batch of
        many, and at no length of the responses is more than twice as much lost as at best.
        """
        first, cache = len(self.running), self.runner.cache
        longest = max((one.length_max for one in self.running), default=0)
        count = 0
        for one in self.waiting:
            needed = max(longest, one.length_max)
            if not cache.fits(first + count + 1, needed):
                break
            longest, count = needed, count + 1
        if not count:
            return
        if first and count < len(self.waiting):
            self._empty_passes += count / (first + count)
            if self._empty_passes < 1.0:
                return
        self._empty_passes = 0.0
        fresh = [self.waiting.popleft() for _ in range(count)]
        for one in fresh:
            one.weights_seen = self._weights_seen
        cache.reserve(first + len(fresh), longest, used=first)
        self.running += fresh
        self._sampling = None
        try:
            logits = self._contexts(fresh, first)
        except Exception as error:  # a forward pass: whatever it raises ends those that were in it
            for slot in range(len(self.running) - 1, first - 1, -1):
                self._fail(slot, f"computing the context failed: {error!r}")
            return
        batch = self._batch_sampling(fresh)
        self._take(logits, batch, fresh, first, model_step)

    def _contexts(self, fresh: list[Sequence], first: int) -> torch.Tensor:
        """Fills the slots of `fresh`; → logits `[len(fresh), V]` after each context."""
        logits: dict[int, torch.Tensor] = {}  # by slot
        leaders: dict[tuple[tuple[str, str], bytes], int] = {}
        followers: list[tuple[int, int]] = []  # (slot, slot of its leader)
        todo: list[tuple[int, int]] = []  # (slot, first token to compute)
        for slot, one in enumerate(fresh, start=first):
            group = one.group_key
            keys = [one.session_key] if group is None else [one.session_key, group]
            entry, known = self.prefixes.find(keys, one.context)
            if entry is not None:
                self.prompts_reused += 1
                self.runner.cache.write_prefix(slot, entry.prefix, known)
                if known == len(one.context):
                    assert entry.logits is not None, "a complete prefix without logits"
                    logits[slot] = entry.logits
                    continue
            if group is not None and entry is None:
                leader = leaders.setdefault((group, one.context.tobytes()), slot)
                if leader != slot:
                    followers.append((slot, leader))
                    continue
            todo.append((slot, known))
        self._extend(todo, fresh, first, logits)
        for slot, leader in followers:
            tokens = len(fresh[slot - first].context)
            prefix = self.runner.cache.prefix(leader, tokens, copy=False)
            self.runner.cache.write_prefix(slot, prefix, tokens)
            logits[slot] = logits[leader]
        self.prompts_reused += len(followers)
        for (group, _), slot in leaders.items():
            self._keep(group, fresh[slot - first].context, slot, logits[slot])
        return torch.stack([logits[slot] for slot in range(first, first + len(fresh))])

    def _extend(
        self,
        todo: list[tuple[int, int]],
        fresh: list[Sequence],
        first: int,
        logits: dict[int, torch.Tensor],
    ) -> None:
        """Computes the missing context tokens in passes of bounded size."""
        self.prompts_computed += len(todo)
        pending = deque(todo)
        while pending:
            parts: list[Extension] = []
            tokens = []
            room = self._prefill_max
            while pending and room > 0:
                slot, start = pending.popleft()
                context = fresh[slot - first].context
                count = min(room, len(context) - start)
                parts.append(Extension(slot, start, count))
                tokens.append(context[start : start + count])
                room -= count
                if start + count < len(context):
                    pending.appendleft((slot, start + count))
            rows = self.runner.extend(parts, tokens)
            for part, row in zip(parts, rows, strict=True):
                logits[part.slot] = row  # of a context in several passes, the last one stays

    def _keep(
        self,
        key: tuple[str, str],
        tokens: NDArray[np.int32],
        slot: int,
        logits: torch.Tensor | None,
    ) -> None:
        size = len(tokens) * self.runner.cache.shape.token_bytes
        if not len(tokens) or not self.prefixes.has_room(size):
            return
        prefix = self.runner.cache.prefix(slot, len(tokens), copy=True)
        kept = None if logits is None else logits.clone()
        self.prefixes.put(key, Entry(tokens, prefix, kept))

    # --- decoding -------------------------------------------------------------------------------

    def decode(self, model_step: int) -> None:
        """One token for each running sequence."""
        running = self.running
        if not running:
            return
        try:
            logits = self.runner.decode(
                np.array([one.tokens[-1] for one in running], dtype=np.int64),
                np.array([one.length - 1 for one in running], dtype=np.int64),
            )
        except Exception as error:  # a forward pass: whatever it raises ends those that were in it
            for slot in range(len(running) - 1, -1, -1):
                self._fail(slot, f"the decode step failed: {error!r}")
            return
        if self._sampling is None:
            self._sampling = self._batch_sampling(running)
        self._take(logits, self._sampling, running, 0, model_step)

    def _batch_sampling(self, sequences: list[Sequence]) -> BatchSampling:
        return BatchSampling.of(
            [one.request.params for one in sequences],
            [one.seed for one in sequences],
            self.runner.device,
        )

    def _take(
        self,
        logits: torch.Tensor,
        batch: BatchSampling,
        sequences: list[Sequence],
        first: int,
        model_step: int,
    ) -> None:
        """Samples for `sequences`, which stand in the slots from `first` on; ends who is done."""
        positions = np.array([one.length for one in sequences], dtype=np.uint64)
        drawn, logp = sample(logits, batch, positions)
        ended: list[tuple[int, FinishReason]] = []
        for slot, (one, token, logprob) in enumerate(
            zip(sequences, drawn.tolist(), logp.tolist(), strict=True), start=first
        ):
            if not math.isfinite(logprob):
                ended.append((slot, FinishReason.ERROR))
                continue
            one.append(token, logprob, model_step)
            if token in one.stop_ids or self._hits_stop_string(one):
                ended.append((slot, FinishReason.STOP))
            elif one.length >= one.length_max:
                ended.append((slot, FinishReason.LENGTH))
        for slot, reason in reversed(ended):  # from behind: ending one moves the last into its slot
            if reason is FinishReason.ERROR:
                self._fail(slot, "the model's logits are not finite")
            else:
                self._finish(slot, reason)

    def _hits_stop_string(self, one: Sequence) -> bool:
        stops = one.request.params.stop
        if not stops:
            return False
        tail = max(len(stop.encode()) for stop in stops) + _STOP_TAIL_TOKENS
        text = self._decode_text(one.tokens[-tail:])
        return any(stop in text for stop in stops)

    # --- ending ---------------------------------------------------------------------------------

    def _finish(self, slot: int, reason: FinishReason) -> None:
        one = self.running[slot]
        if one.cancelled is not Cancelled.DROP:
            computed = one.computed()
            known = one.request.n_routed_known
            routed = None
            if self.runner.routing.info.layers:
                routing = self.runner.cache.routing[slot, known : len(computed)]
                # numpy's own memory: a tensor that is freed lets the GIL go, and the loop's thread
                # would stand still behind the next pass for each answer that it has stored.
                routed = narrow_array(routing).copy()
            goes_on = not one.request.is_last or reason is FinishReason.ABORT
            if goes_on and one.weights_seen == self._weights_seen:
                self._keep(one.session_key, computed, slot, None)
            self._outcomes.append((one, self._result(one, reason, routed)))
        self._remove(slot)

    def _result(
        self,
        one: Sequence,
        reason: FinishReason,
        routed: NDArray[np.uint8] | NDArray[np.uint16] | None,
    ) -> Generation | EngineError:
        try:
            text = self._decode_text(one.tokens)
        except (
            Exception
        ) as error:  # the user's tokenizer: whatever it raises fails this one rollout
            return EngineError(f"request {one.request.request_id}: decoding failed: {error!r}")
        return one.generation(text, reason, routed)

    def _fail(self, slot: int, why: str) -> None:
        one = self.running[slot]
        self._outcomes.append((one, EngineError(f"request {one.request.request_id}: {why}")))
        self.runner.cache.clear(slot)
        self._remove(slot)

    def _remove(self, slot: int) -> None:
        last = len(self.running) - 1
        if slot != last:
            self.runner.cache.move(last, slot)
            self.running[slot] = self.running[last]
        self.running.pop()
        self._sampling = None
