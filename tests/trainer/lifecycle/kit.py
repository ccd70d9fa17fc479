"""Parts for the lifecycle tests: a source, environments, judges, and a whole desk with its
producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shmstore import Store
from trainer.dispatch import Dispatcher
from trainer.engine.protocol import Answers, GenerateRequest, Generation
from trainer.engine.scripted import ByteTokenizer, Script, ScriptedEngine, routing_of
from trainer.environment import Environment, Judge, Session
from trainer.expiry import Expiry
from trainer.pending import ProducerConfig, ProducerParts
from trainer.producer import Producer
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.rollout import Batch, Group, Prompt, Rollout, Status
from trainer.segment import IGNORE_LABEL, Trace
from trainer.shares import TaskMix
from trainer.staleness import StalenessBudget
from trainer.testing import store_group
from trainer.trace import TraceStore
from trainer.work import DispatchConfig

SLOW = Script(token_s=1.0, tokens_min=6, tokens_max=6)
#: Far ahead of the learner.
WIDE = {"batch_groups": 2, "budget": StalenessBudget(max_staleness=5)}


@dataclass(frozen=True)
class Questions:
    """Numbered prompts; `size` None: without end."""

    task: str = "math"
    size: int | None = None

    def prompt(self, index: int) -> Prompt:
        return Prompt(f"{self.task}/{index}", self.task, text=f"question {index}", answer=index)


class SubmittedEngine(ScriptedEngine):
    """A scripted engine that keeps `trainer.engine.protocol.Submits` as well."""

    def __init__(self, script: Script | None = None, model_step: int = 0) -> None:
        super().__init__(script, model_step)
        self._tasks: dict[str, asyncio.Task[Generation]] = {}

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        for request in requests:
            task = asyncio.get_running_loop().create_task(super().generate(request))
            self._tasks[request.request_id] = task
            task.add_done_callback(partial(self._ended, request, answered))

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            task = self._tasks.pop(request.request_id, None)
            if task is not None:
                task.cancel()

    def _ended(
        self,
        request: GenerateRequest,
        answered: Callable[[Answers], None],
        task: asyncio.Task[Generation],
    ) -> None:
        if self._tasks.pop(request.request_id, None) is None:
            if not task.cancelled():
                task.exception()
            return
        error = task.exception()
        assert error is None or isinstance(error, Exception)
        answered([(request, task.result() if error is None else error)])


class OneTurn:
    async def run(self, session: Session, prompt: Prompt) -> None:
        await session.generate(prompt.text)


class TwoTurns:
    """A turn, a tool's answer that depends on it, another turn."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        turn = await session.generate(prompt.text)
        await session.generate(f"tool heard {turn.text}; ")


class Branches:
    """An opening, two continuations of it, then a question that shares nothing with them."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        opening = await session.generate(prompt.text)
        await session.generate("go on; ")
        session.rewind(opening)
        await session.generate("or rather; ")
        session.rewind()
        await session.generate("something else; ")


class LengthJudge:
    """Rewards differ within a group, so nothing is filtered unless all answers are equally long."""

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        return float(len(text))


class CountingJudge:
    """A new reward each time: never filtered."""

    def __init__(self) -> None:
        self.calls = 0

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        self.calls += 1
        return float(self.calls)


@dataclass
class Desk:
    """Everything of a run but the learner, on one loop."""

    store: Store
    traces: TraceStore
    buffer: ReplayBuffer
    dispatcher: Dispatcher
    engine: ScriptedEngine
    producer: Producer

    async def train(self, step: int, **options: Any) -> Batch:
        """Take the batch of `step` and release it, as a learner does."""
        options = {"timeout": 1e4, **options}
        batch = await self.dispatcher.take(step, owner="learner", **options)
        assert self.traces.release(batch.session_ids, owner="learner") == list(batch.session_ids)
        return batch


@asynccontextmanager
async def desk(
    store: Store,
    *,
    script: Script | None = None,
    engine: ScriptedEngine | None = None,
    environment: Environment | None = None,
    one_turn: bool | None = None,
    judge: Judge | None = None,
    sources: dict[str, Questions] | None = None,
    weights: dict[str, float] | None = None,
    expiry: Expiry | None = None,
    max_bytes: int | None = None,
    dispatch: dict[str, Any] | None = None,
    produce: dict[str, Any] | None = None,
    budget: StalenessBudget | None = None,
    epochs: int | None = None,
    run: bool = True,
) -> AsyncIterator[Desk]:
    """A desk whose producer runs inside the block; at its end everything is given back and
    balanced. `one_turn`: conversations say the prompt and no environment runs, as long as none is
    given.
    """
    one_turn = environment is None if one_turn is None else one_turn
    sources = sources or {"math": Questions()}
    sampler = PromptSampler(sources, seed=None, epochs=epochs)
    buffer = ReplayBuffer(store, expiry=expiry, max_bytes=max_bytes)
    budget = budget or StalenessBudget(max_staleness=1, sync_interval=1)
    dispatch = {"batch_groups": 2, "group_size": 2, "budget": budget, **(dispatch or {})}
    dispatcher = Dispatcher(
        buffer, sampler, DispatchConfig(**dispatch), TaskMix(weights or dict.fromkeys(sources, 1))
    )
    engine = engine or SubmittedEngine(script or Script(token_s=0.1))
    traces = TraceStore(store)
    parts = ProducerParts(
        engine,
        traces,
        ByteTokenizer(),
        environment or OneTurn(),
        judge or CountingJudge(),
        one_turn=(lambda prompt: prompt.text) if one_turn else None,
    )
    config = ProducerConfig(
        group_size=dispatch["group_size"], **{"groups_max": 8, **(produce or {})}
    )
    producer = Producer(dispatcher, parts, config)
    made = Desk(store, traces, buffer, dispatcher, engine, producer)
    running = asyncio.create_task(producer.run()) if run else None
    try:
        yield made
    finally:
        await producer.stop(30)
        if running is not None:
            await running
        dispatcher.check_books()
        buffer.close()


async def filled_buffer(store: Store, traces: TraceStore, n: int = 4) -> ReplayBuffer:
    """With `n` groups g0, g1, ...; of every three the last is ABORTED."""
    buffer = ReplayBuffer(store)
    for i in range(n):
        status = Status.ABORTED if i % 3 == 2 else Status.COMPLETED
        group = store_group(traces, f"g{i}", model_step=3 - i % 2, status=status)
        await buffer.put(group, owner="producer-0", train_step=4)
    return buffer


async def put(buffer: ReplayBuffer, traces: TraceStore, uid: str, **options: Any) -> Status:
    """A stored group of that uid, by `producer-0` at step 1; `options` as of `store_group`."""
    group = store_group(traces, uid, **options)
    return await buffer.put(group, owner="producer-0", train_step=1)


async def begins(waiting: Any) -> asyncio.Task[Any]:
    """A task that has come to its first wait."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def waits_for_room(
    buffer: ReplayBuffer, traces: TraceStore
) -> tuple[Group, asyncio.Task[Status]]:
    """A group that a full buffer keeps waiting, and its put."""
    await put(buffer, traces, "first")
    buffer.max_bytes = 1
    group = store_group(traces, "late")
    return group, await begins(buffer.put(group, owner="producer-0"))


def check_trace(made: Desk, rollout: Rollout) -> Trace:
    """Every row of routing is that of its token at its place, whatever stops and goes produced
    it.
    """
    (leaf,) = rollout.leaves
    trace = made.traces.export(rollout.session_id, node=leaf)
    assert trace.routed_experts is not None
    wanted = routing_of(made.engine.script, trace.token_ids)
    np.testing.assert_array_equal(trace.routed_experts[:-1], wanted[:-1])
    sampled = trace.labels != IGNORE_LABEL
    assert (trace.labels[sampled] == trace.token_ids[sampled]).all()
    assert (trace.model_steps >= 0).tolist() == sampled.tolist()
    assert (trace.logprobs != 0).tolist() == sampled.tolist()
    assert (trace.model_steps[sampled].min(), trace.model_steps[sampled].max()) == (
        rollout.model_step_min,
        rollout.model_step_max,
    )
    assert len(trace) == rollout.n_tokens
    assert trace.n_trainable == rollout.n_sampled_tokens
    return trace
