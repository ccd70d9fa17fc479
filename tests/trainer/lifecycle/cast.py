"""The processes of `test_processes.py` and `test_failure_channel.py`: a producer, an engine, a
judge, a learner.

Each is an actor in a process of its own. All tokens go through the arena; messages carry groups,
batches, counters.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import actors
from actors import ActorDied
from shmstore import Store
from tests.trainer.lifecycle.kit import CountingJudge, SubmittedEngine, TwoTurns
from trainer.engine.protocol import WeightsVersion
from trainer.engine.router import EngineRouter
from trainer.engine.scripted import ByteTokenizer, Script, ScriptedEngine, routing_of
from trainer.pending import ProducerConfig, ProducerParts
from trainer.producer import PauseReport, Producer
from trainer.rollout import Batch, Prompt
from trainer.run.engine_link import EngineLink, ServedEngine
from trainer.segment import Trace
from trainer.trace import TraceStore

__all__ = ["EngineProcess", "LearnerProcess", "ProducerProcess", "SilentJudge"]


def _store() -> Store:
    store = actors.current().runtime.store
    assert isinstance(store, Store)
    return store


class EngineProcess(ServedEngine):
    """A scripted engine."""

    def __init__(self, script: Script) -> None:
        super().__init__(SubmittedEngine(script))


class ProducerProcess:
    """Runs `Producer` against a desk in the driver and an engine in another process."""

    def __init__(
        self, desk: Any, engine: Any, script: Script, owner: str, judge: Any = None
    ) -> None:
        store = _store()
        store.sessions.bind(owner, heir=None)
        info = ScriptedEngine(script).info
        self.router = EngineRouter({"engine": EngineLink(engine)}, info, (ActorDied,))
        parts = ProducerParts(
            self.router, TraceStore(store), ByteTokenizer(), TwoTurns(), judge or CountingJudge()
        )
        config = ProducerConfig(group_size=2, groups_max=4)
        self.producer = Producer(desk, parts, config, owner=owner, run_name="real")
        self.running: asyncio.Task[None] | None = None

    async def start(self, model_step: int, paused: bool) -> None:
        """Take the weights and begin."""
        await self.router.up("engine", WeightsVersion(b"", model_step))
        if paused:
            await self.producer.pause(10)
        self.running = asyncio.get_running_loop().create_task(self.producer.run())

    async def load_weights(self, model_step: int) -> None:
        await self.router.load_weights(WeightsVersion(b"", model_step), "in_flight")

    async def pause(self, timeout_s: float) -> PauseReport:
        return await self.producer.pause(timeout_s)

    async def resume(self) -> None:
        await self.producer.resume()

    async def stop_producing(self) -> None:
        await self.producer.stop(10)
        if self.running is not None:
            await self.running


class SilentJudge:
    """Is asked, and never answers."""

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the future of nobody has a result")


class LearnerProcess:
    """Reads every trace of a batch from the arena, checks it, releases the batch."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.store = _store()
        self.store.sessions.bind("learner", heir="replay")
        self.traces = TraceStore(self.store)

    def train(self, batch: Batch, train_step: int) -> dict[str, float]:
        tokens = 0
        for rollout in batch.rollouts:
            trace = self.traces.export(rollout.session_id, node=rollout.leaves[0])
            assert trace.routed_experts is not None
            wanted = routing_of(self.script, trace.token_ids)
            np.testing.assert_array_equal(trace.routed_experts[:-1], wanted[:-1])
            tokens += trace.n_trainable
        released = self.traces.release(batch.session_ids, owner="learner")
        assert released == list(batch.session_ids)
        return {"tokens": float(tokens)}
