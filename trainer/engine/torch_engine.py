"""The built-in engine: any causal language model of transformers, in this process.

Owns one worker thread, in which everything that touches the model runs, so that the event loop
stays free while tokens are computed. It rests until it is rung for; requests go in through an inbox
that it empties between two decode steps; results come back as they end. Promises: an engine error
fails one rollout; an abort keeps what there is; new weights are taken between two decode steps, and
each token records the model step that sampled it. All coroutines belong to one event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmstore import ObjectFreed
from trainer.engine.batching import Batcher, Outcome
from trainer.engine.model_runner import ModelRunner
from trainer.engine.protocol import (
    Answers,
    EngineInfo,
    GenerateRequest,
    Generation,
    SamplingParams,
    SyncMode,
    Tokenizer,
    WeightsVersion,
    awaited,
)
from trainer.engine.sampling import seed_of
from trainer.engine.sequence import Cancelled
from trainer.engine.sequence import Sequence as _Sequence
from trainer.errors import EngineError
from trainer.model.config import EngineConfig
from trainer.model.models import context_max

__all__ = ["EngineClosed", "EngineCounters", "PromptTooLong", "TorchEngine", "WeightsLoader"]

_PASSES_A_HAND_OVER = 4
_PASSES_A_HAND_OVER_MAX = 16
_SHARE_A_HAND_OVER = 8
"""While the engine computes, results are handed to the loop after so few passes at least and so
many at most, in between once they are an eighth of what runs: a turn ends as if it had been a few
tokens longer. Waking the loop between two passes costs more than what it then does, because a pass
empties the core's caches.
"""
WeightsLoader = Callable[[Any, WeightsVersion], None]
"""Copies a published version into the model; called in the worker thread."""


class PromptTooLong(EngineError):
    """The context leaves no room for a single new token."""


class EngineClosed(EngineError):
    """The engine was closed before it could answer."""


@dataclass(frozen=True)
class EngineCounters:
    """What the engine has done so far."""

    tokens_generated: int
    decode_steps: int
    contexts_computed: int
    contexts_reused: int
    waiting: int
    running: int
    kv_bytes: int
    prefix_bytes: int
    busy_s: float
    """Seconds in which the worker thread computed tokens; taking new weights is not among them."""
    cpu_s: float
    """Of these, CPU time."""


@dataclass(eq=False)
class _Swap:
    """New weights on their way to the worker."""

    weights: WeightsVersion
    mode: SyncMode
    done: asyncio.Future[None]


class TorchEngine:
    """`Engine` over a model that lives in this process."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        load_weights: WeightsLoader | None = None,
        model_step: int = 0,
    ) -> None:
        """`load_weights` is needed for `TorchEngine.load_weights` only."""
        self._config = config or EngineConfig()
        self._tokenizer = tokenizer
        self._loader = load_weights
        self._runner = ModelRunner(model, self._config)
        self._batcher = Batcher(self._runner, self._config, tokenizer.decode)
        self._model_step = model_step
        self._inbox: deque[_Sequence | _Swap] = deque()
        self._swaps: deque[_Swap] = deque()  # the worker's; the first may wait for a pause
        self._asked: set[_Sequence] = set()  # those that somebody waits for
        self._asked_max = self._config.waiting_max + self._config.max_batch
        self._worker: threading.Thread | None = None
        self._bell: SimpleQueue[bool] = SimpleQueue()  # rung for a worker that rests; False: go
        self._at_rest = asyncio.Event()  # the worker's bell was not rung since it came to rest
        self._at_rest.set()
        self._some_cancelled = False  # set by the loop, cleared by the worker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._halted = False  # the interpreter is about to end
        self._broken: BaseException | None = None
        self._tokens = self._steps = 0
        self._busy_s = self._cpu_s = 0.0
        self._checked_context: NDArray[np.int32] | None = None
        self._stop_ids: tuple[SamplingParams, frozenset[int]] | None = None
        routing = self._runner.routing.info
        self._info = EngineInfo(
            vocab_size=int(model.config.vocab_size),
            context_max=context_max(model),
            n_layers_moe=routing.layers,
            top_k=routing.top_k,
            n_experts=routing.experts,
            routes=routing.layers > 0,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def model_step(self) -> int:
        return self._model_step

    @property
    def counters(self) -> EngineCounters:
        batcher = self._batcher
        return EngineCounters(
            tokens_generated=self._tokens,
            decode_steps=self._steps,
            contexts_computed=batcher.prompts_computed,
            contexts_reused=batcher.prompts_reused,
            waiting=len(batcher.waiting) + len(self._inbox),
            running=len(batcher.running),
            kv_bytes=self._runner.cache.nbytes,
            prefix_bytes=batcher.prefixes.nbytes,
            busy_s=self._busy_s,
            cpu_s=self._cpu_s,
        )

    # --- the loop's side ------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """One continuation. Raises EngineError (PromptTooLong, EngineClosed), for this one only."""
        return await awaited(self, request)

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        """See `trainer.engine.protocol.Submits`."""
        loop = self._start()
        refused: list[tuple[GenerateRequest, Exception]] = []
        for request in requests:
            try:
                sequence = self._accept(request, answered)
            except Exception as error:  # whatever is wrong with one is for that one to hear
                refused.append((request, error))
            else:
                self._asked.add(sequence)
                self._inbox.append(sequence)
        if refused:
            loop.call_soon(answered, refused)
        if self._inbox and self._at_rest.is_set():
            self._ring(loop)

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        """See `trainer.engine.protocol.Submits`."""
        for sequence in [one for one in self._asked if one.request in requests]:
            self._asked.discard(sequence)
            sequence.cancelled = Cancelled.DROP
            self._some_cancelled = True

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Ends requests (None: all), which then return with `FinishReason.ABORT`."""
        wanted = None if request_ids is None else frozenset(request_ids)
        count = 0
        for sequence in self._asked:
            if wanted is None or sequence.request.request_id in wanted:
                if sequence.cancelled is Cancelled.NO:
                    sequence.cancelled = Cancelled.ABORT
                count += 1
        self._some_cancelled = True
        return count

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        """Takes a published version. `in_flight`: between two decode steps. `pause`: running
        sequences end first, and none is admitted until then.

        Raises what the loader says of a version that is gone (ObjectFreed: ask with a newer one),
        and EngineError when it cannot be loaded. Either way the engine goes on with what its model
        holds, which are the old weights if the loader checks before it copies.
        """
        if self._loader is None:
            raise EngineError("this engine was made without load_weights=; it keeps its weights")
        loop = self._start()
        swap = _Swap(weights, mode, loop.create_future())
        self._inbox.append(swap)
        if self._at_rest.is_set():
            self._ring(loop)
        await swap.done

    async def aclose(self) -> None:
        """Ends all requests with what they have, and gives back thread, hooks and memory."""
        await self.abort()
        self._closing = True
        if self._loop is None or not self._loop.is_closed():  # on a closed one nobody waits
            await self._at_rest.wait()
            self._end_all(EngineClosed("the engine was closed"))
        if self._halted:  # by another call, or this one again after it was cancelled
            return
        atexit.unregister(self._halt)
        self._halt()
        self._runner.close()
        self._batcher.prefixes.clear()

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._closing:
            raise EngineClosed("the engine is closed")
        if self._broken is not None:
            raise EngineError(f"the engine broke and takes no more: {self._broken!r}")
        if self._loop is None:
            self._loop = loop
            # A daemon, so that an engine that nobody closed keeps no process alive.
            self._worker = threading.Thread(target=self._serve, name="engine", daemon=True)
            self._worker.start()
            atexit.register(self._halt)
        if loop is not self._loop:
            raise EngineError("an engine serves one event loop; this is another one")
        return loop

    def _halt(self) -> None:
        """End the worker, after the pass that it is in."""
        self._halted = True
        self._bell.put(False)
        if self._worker is not None:
            self._worker.join()

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """There is work: wakes the worker, which rests. A busy one looks by itself."""
        self._at_rest.clear()
        loop.call_soon(self._ring_in_a_turn)

    def _ring_in_a_turn(self) -> None:
        """Everything that was woken in this turn of the loop asks first, so that requests made
        together are admitted together.
        """
        assert self._loop is not None
        self._loop.call_soon(lambda: self._bell.put(True))

    def _rested(self, outcomes: list[Outcome]) -> None:
        """The worker had nothing left to do; it may not have seen what came meanwhile."""
        self._deliver(outcomes)
        if self._inbox:
            self._ring_in_a_turn()
        else:
            self._at_rest.set()

    def _broke(self, error: BaseException) -> None:
        """Our own mistake: nobody may wait for an engine that is gone."""
        self._broken = error
        self._end_all(EngineError(f"the engine broke: {error!r}"))
        self._at_rest.set()

    def _accept(self, request: GenerateRequest, answered: Callable[[Answers], None]) -> _Sequence:
        """The request as a sequence, or EngineError saying what is wrong with it."""
        context, params = request.token_ids, request.params
        if context is not self._checked_context:  # group mates share theirs
            context = self._checked(request)
        n = len(context)
        if not 0 <= request.n_routed_known <= n:
            raise EngineError(
                f"request {request.request_id} knows the routing of {request.n_routed_known} of "
                f"{n} tokens"
            )
        if len(self._asked) >= self._asked_max:
            raise EngineError(
                f"request {request.request_id}: {self._config.waiting_max} requests are waiting "
                "already"
            )
        length_max = min(self._info.context_max, n + params.max_new_tokens)
        if length_max > self._batcher.length_max:
            raise EngineError(
                f"request {request.request_id} may grow to {length_max} tokens, which do not fit "
                f"engine.kv_bytes = {self._config.kv_bytes}"
            )
        if self._stop_ids is None or self._stop_ids[0] is not params:
            stop_ids = frozenset((*params.stop_token_ids, self._tokenizer.eos_token_id))
            self._stop_ids = params, stop_ids
        seed = params.seed
        if seed is None:
            seed = seed_of(self._config.seed, request.session_id)
        return _Sequence(request, context, length_max, seed, self._stop_ids[1], answered)

    def _checked(self, request: GenerateRequest) -> NDArray[np.int32]:
        """The context as the model takes it; what cannot be changed any more is kept in mind."""
        context = np.ascontiguousarray(request.token_ids, dtype=np.int32)
        name, limit = f"request {request.request_id}", self._info.context_max
        if context.ndim != 1 or not len(context):
            raise EngineError(f"{name} has no context; give at least one token")
        if len(context) >= limit:
            raise PromptTooLong(
                f"{name} has {len(context)} tokens; the model's context holds {limit}, and one "
                "must be left to generate"
            )
        if context.view(np.uint32).max() >= self._info.vocab_size:  # a negative one is a huge one
            raise EngineError(f"{name} has token ids outside 0 … {self._info.vocab_size - 1}")
        if not context.flags.writeable:
            self._checked_context = context
        return context

    def _end_all(self, error: EngineError) -> None:
        """Nobody waits any more: requests and new weights that are still open fail with `error`."""
        self._deliver([(sequence, error) for sequence in self._asked])
        for item in (*self._inbox, *self._swaps):
            if isinstance(item, _Swap):
                _fail(item.done, error)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """Tells those who wait, each once of all that is theirs."""
        told: dict[Callable[[Answers], None], list[tuple[GenerateRequest, Any]]] = {}
        for sequence, outcome in outcomes:
            if sequence in self._asked:
                self._asked.discard(sequence)
                told.setdefault(sequence.answered, []).append((sequence.request, outcome))
        for answered, answers in told.items():
            try:
                answered(answers)
            except Exception as error:  # theirs: the others hear of what they wait for
                about = {"message": f"{answered!r} raised", "exception": error}
                asyncio.get_running_loop().call_exception_handler(about)

    # --- the worker's side ----------------------------------------------------------------------

    @torch.inference_mode()
    def _serve(self) -> None:
        """The life of the worker: works when it is rung for, until it is sent away."""
        while self._bell.get():
            try:
                self._tell(self._rested, self._work())
            except BaseException as error:  # whatever ends the worker, nobody may wait for it
                self._tell(self._broke, error)
                return

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        """Calls back on the loop; on one that was closed under us nobody listens."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _work(self) -> list[Outcome]:
        """Runs until nothing is left to do; → what ended last, the rest was delivered before."""
        batcher, passes = self._batcher, 0  # passes since the last hand-over
        outcomes: list[Outcome] = []
        while True:
            cancelled = self._some_cancelled
            if cancelled:  # cleared before the inbox is read: what is cancelled later is seen later
                self._some_cancelled = False
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, _Swap):
                    self._swaps.append(item)
                else:
                    batcher.waiting.append(item)
            if cancelled:
                batcher.end_cancelled()
            self._swap_weights()
            began, cpu_began = time.perf_counter(), time.thread_time()
            if not self._swaps:
                before = len(batcher.running)
                batcher.admit(self._model_step)
                self._tokens += max(0, len(batcher.running) - before)
            self._steps += 1 if batcher.running else 0
            self._tokens += len(batcher.running)
            batcher.decode(self._model_step)
            outcomes += batcher.take_outcomes()
            # After each pass: a busy engine may not return for hours.
            self._busy_s += time.perf_counter() - began
            self._cpu_s += time.thread_time() - cpu_began
            idle = not batcher.busy and not self._inbox and not self._swaps
            if idle or self._halted:
                return outcomes
            passes += 1
            if passes < _PASSES_A_HAND_OVER or not outcomes:
                continue
            n_due = len(batcher.running) // _SHARE_A_HAND_OVER
            if len(outcomes) >= n_due or passes >= _PASSES_A_HAND_OVER_MAX:
                self._tell(self._deliver, outcomes)
                outcomes, passes = [], 0

    def _swap_weights(self) -> None:
        """Takes the new weights that may be taken now, oldest first."""
        while self._swaps:
            swap = self._swaps[0]
            if swap.mode == "pause" and self._batcher.running:
                return
            assert self._loader is not None
            try:
                self._loader(self._runner.model, swap.weights)
            except ObjectFreed as error:  # retired: as itself, whoever asked knows a newer one
                self._tell(_fail, swap.done, error)
            except Exception as error:  # whatever the loader raises belongs to who asked for it
                failure = EngineError(f"weights of step {swap.weights.model_step}: {error}")
                failure.__cause__ = error
                self._tell(_fail, swap.done, failure)
            else:
                self._model_step = swap.weights.model_step
                self._batcher.weights_changed()
                self._tell(_succeed, swap.done)
            self._swaps.popleft()  # not before: whatever ends the worker fails those in line


def _succeed(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
