"""A rollout that says one thing, hears one answer, and is judged: as most are.

No user code but the judge's runs in it, so it needs no task, no record and no path (decision 0405):
its group gives `request` to the engine and what comes of it to `answer`; once `ended` is told,
`advance`. Whatever does not go as usual (no room in the arena, an abort, an error, a judge that has
to be awaited) goes on in an `Attempt`, which alone knows what to do about it.

Belongs to the task of its group, whose members are all new, with an engine that answers by a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shmstore import StoreFull
from trainer.attempt import Attempt, verdict_of
from trainer.engine.protocol import GenerateRequest, Generation
from trainer.environment import RolloutAborted
from trainer.errors import EngineError
from trainer.group_context import GroupContext, Tokens
from trainer.rollout import FinishReason, Rollout, Status
from trainer.segment import Segment
from trainer.stored_path import checked, said_segment

if TYPE_CHECKING:
    from trainer.pending import ProducerConfig, ProducerParts

__all__ = ["OneTurn"]

_USUAL = (FinishReason.STOP, FinishReason.LENGTH)


class OneTurn:
    """See the module. Used as an `Attempt` is."""

    __slots__ = (
        "_answer",
        "_attempt",
        "_config",
        "_context",
        "_ended",
        "_is_done",
        "_parts",
        "_rollout",
        "_started",
        "request",
    )

    def __init__(
        self,
        parts: ProducerParts,
        config: ProducerConfig,
        context: GroupContext,
        rollout: Rollout,
        ended: Callable[[OneTurn | Attempt], None],
    ) -> None:
        self._parts = parts
        self._config = config
        self._context = context
        self._rollout = rollout
        self._ended = ended
        self._started = 0.0
        self._is_done = False
        self._attempt: Attempt | None = None  # that goes on with it
        self._answer: Generation | BaseException | None = None
        #: What its group gives to the engine, as long as nobody has answered it.
        self.request: GenerateRequest | None = None
        try:
            self.request = self._ask()
        except (Exception, RolloutAborted, SystemExit) as error:
            self._answer = error

    def _ask(self) -> GenerateRequest:
        context, rollout = self._context, self._rollout
        tokens = context.opening_tokens()
        if not len(tokens):
            raise EngineError("the prompt has no token to continue from")
        if context.gate.stopping:
            raise RolloutAborted
        request_id = f"{rollout.session_id}/{rollout.attempt}.1"
        context.gate.running.add(request_id)
        return GenerateRequest(
            request_id, rollout.session_id, tokens, context.params, context.group_uid, 0, True
        )

    def begin(self) -> None:
        """From now on its time counts."""
        self._started = asyncio.get_running_loop().time()
        if self._answer is not None:
            self._ended(self)

    def answer(self, answer: Generation | BaseException) -> None:
        """What the engine said to the request, or why it was not given to it. Once: what comes
        later is of no interest.
        """
        if self.request is not None:
            self._forget_request()
            if not isinstance(answer, (Generation, BaseException)):
                answer = EngineError(f"the engine answered {answer!r:.100}, which is no Generation")
            self._answer = answer
            self._ended(self)

    def advance(self) -> Rollout | None:
        """What it has come to; -> the rollout, or None while an `Attempt` goes on with it."""
        answer, self._answer = self._answer, None
        assert answer is not None
        if not isinstance(answer, Generation) or answer.finish_reason not in _USUAL:
            return self._go_on().hear(answer, self._started)
        try:
            generation = checked(self._context, answer, len(self._context.opening_tokens()))
            if not len(generation.token_ids):
                return self._go_on().hear(answer, self._started)
            node, steps = self._store(generation)
        except StoreFull:
            return self._go_on().hear(answer, self._started)
        # Engines and sessions may raise anything: it fails this rollout and no other (L13).
        except Exception as error:
            return self._go_on().hear(error, self._started)
        return self._judge(generation, node, steps)

    def _store(self, generation: Generation) -> tuple[int, Tokens]:
        """The prompt, unless a mate has stored it, and what was sampled; -> the node of that, and
        its model steps.
        """
        context, session_id = self._context, self._rollout.session_id
        said, tokens, routed = context.opening_tokens(), generation.token_ids, None
        n_said = len(said)
        if context.prompt_tokens is None:
            if context.storing.locked():
                raise StoreFull("a mate waits for room for the prompt")
            rows = None if generation.routed_experts is None else generation.routed_experts[:n_said]
            prompt = said_segment(context, said, rows, None)
            context.traces.insert_shared(context.lack_prompt, prompt)
            context.prompt_tokens = said
        if generation.routed_experts is not None:
            routed = generation.routed_experts[n_said:]
        segment = Segment(
            tokens, tokens, generation.logprobs, generation.model_steps, generation.text, routed
        )
        return context.traces.insert(session_id, segment, 0), segment.model_steps

    def _judge(self, generation: Generation, node: int, model_steps: Tokens) -> Rollout | None:
        rollout = self._rollout
        reason = generation.finish_reason  # all that is kept of an answer while a judge takes time
        talked_s = asyncio.get_running_loop().time() - self._started
        steps = set(model_steps.tolist())
        n_said, n = len(self._context.opening_tokens()), len(generation.token_ids)

        def outcome(
            status: Status, reward: float | None, error: str | None, generation_time_s: float
        ) -> Rollout:
            return replace(
                rollout,
                status=status,
                reward=reward,
                error_msg=error,
                generation_time_s=generation_time_s,
                leaves=(node,),
                turns=(node,),
                n_prompt_nodes=1,
                n_prompt_tokens=n_said,
                n_response_tokens=n,
                n_sampled_tokens=n,
                model_step_min=min(steps),
                model_step_max=max(steps),
                finish_reason=reason,
            )

        verdict = verdict_of(self._parts, self._context, rollout.session_id, node, generation.text)
        if isinstance(verdict, float):
            self._is_done = True
            return outcome(Status.COMPLETED, verdict, None, rollout.generation_time_s + talked_s)
        return self._go_on().wait_for(verdict, outcome, talked_s)

    def _go_on(self) -> Attempt:
        self._attempt = Attempt(
            self._parts, self._config, self._context, self._rollout, self._ended
        )
        return self._attempt

    @property
    def is_open(self) -> bool:
        """Whether `give_up` has something to end."""
        return not self._is_done if self._attempt is None else self._attempt.is_open

    def _forget_request(self) -> None:
        assert self.request is not None
        self._context.gate.running.discard(self.request.request_id)
        self.request = None

    def close(self) -> list[asyncio.Future[Any]]:
        """End what it has started; -> what is still to be awaited."""
        if self._attempt is not None:
            return self._attempt.close()
        if self.request is not None:
            assert self._context.submits is not None
            self._context.submits.drop([self.request])
            self._forget_request()
        return []

    def closed(self) -> None:
        """What `close` ended is over, or left behind."""
        if self._attempt is not None:
            self._attempt.closed()
