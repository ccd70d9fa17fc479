"""A run in real processes with real deaths: driver, producer, engine, learner (L06, L07, L08, L12,
L26, L27).

The model is scripted, so what is proven is the life of the rollouts: every group is trained once,
the books balance after every step, and the arena is empty, while each of the processes is killed in
the middle of its work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

import actors
from actors import ActorDied
from shmstore import Store
from shmstore.testing import unique_name
from tests.trainer.lifecycle.cast import EngineProcess, LearnerProcess, ProducerProcess
from tests.trainer.lifecycle.kit import Questions
from trainer.dispatch import Dispatcher
from trainer.engine.protocol import SyncMode
from trainer.engine.scripted import Script
from trainer.errors import LearnerLost
from trainer.expiry import Expiry
from trainer.producer import PauseReport
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.rollout import Batch
from trainer.schedule import ScheduleConfig, ScheduleParts, StepReport, run_schedule
from trainer.staleness import StalenessBudget
from trainer.work import DispatchConfig

OWNER = "producer-0"
SCRIPT = Script(token_s=0.005, first_token_s=0.005)


class _Driver:
    """Starts what died, and is the parts of the schedule."""

    def __init__(
        self, runtime: actors.Runtime, dispatcher: Dispatcher, kills: dict[int, str]
    ) -> None:
        self.runtime = runtime
        self.dispatcher = dispatcher
        self.kills = kills
        self.trained: list[str] = []
        self.deaths: list[str] = []
        self.paused = False
        self.model_step = 0
        self.desk: Any = None
        self.engine: Any = None
        self.producer: Any = None
        self.learner: Any = None
        self.watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.desk = await self.runtime.host(self.dispatcher, name="desk")
        self.learner = await self.runtime.spawn(LearnerProcess, SCRIPT, name="learner")
        await self.start_producer()

    async def start_producer(self) -> None:
        """An engine and its producer; when one dies both are replaced."""
        if self.engine is None:
            self.engine = await self.runtime.spawn(EngineProcess, SCRIPT, name="engine")
        self.producer = await self.runtime.spawn(
            ProducerProcess, self.desk, self.engine, SCRIPT, OWNER, name=OWNER
        )
        await self.producer.start(self.model_step, self.paused)

    async def kill(self, part: str) -> None:
        """SIGKILL, then what a supervisor does."""
        self.deaths.append(part)
        if part == "learner":
            await self.learner.kill()
            return  # noticed by the call that is under way
        if part == "engine":
            await self.engine.kill()
            self.engine = None
        await self.producer.kill()
        self.dispatcher.owner_died(OWNER)
        await self.start_producer()

    # -- the parts of the schedule ---------------------------------------------------------------

    async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
        victim = self.kills.pop(train_step, None)
        training = asyncio.ensure_future(self.learner.train(batch, train_step))
        if victim is not None:
            await self.kill(victim)
        try:
            metrics: Mapping[str, float] = await training
        except ActorDied as death:
            self.dispatcher.owner_died("learner")  # before its successor is there
            self.learner = await self.runtime.spawn(LearnerProcess, SCRIPT, name="learner")
            raise LearnerLost(str(death)) from death
        self.trained += [group.uid for group in batch.groups]
        return metrics

    async def pause(self, timeout_s: float) -> PauseReport:
        self.paused = True
        report: PauseReport = await self.producer.pause(timeout_s)
        return report

    async def resume(self) -> None:
        self.paused = False
        await self.producer.resume()

    async def sync(self, model_step: int, mode: SyncMode) -> None:
        self.model_step = model_step
        with contextlib.suppress(ActorDied):  # its successor starts with them
            await self.producer.load_weights(model_step)

    async def on_step(self, report: StepReport) -> None:
        store = self.runtime.store
        assert isinstance(store, Store)
        assert store.check() == []
        assert report.metrics["tokens"] > 0


@pytest.mark.parametrize("mode", ["pause", "in_flight"])
async def test_L27_a_run_survives_the_death_of_each_of_its_processes(mode: SyncMode) -> None:
    kills = {2: "producer", 3: "learner", 5: "engine", 6: "learner", 7: "producer"}
    name = unique_name("real")
    async with actors.Runtime(store="64MiB", name=name) as runtime:
        store = runtime.store
        assert isinstance(store, Store)
        buffer = ReplayBuffer(store, expiry=Expiry(max_staleness=2))
        dispatcher = Dispatcher(
            buffer,
            PromptSampler({"math": Questions()}, seed=None),
            DispatchConfig(batch_groups=3, group_size=2, budget=StalenessBudget(max_staleness=2)),
        )
        driver = _Driver(runtime, dispatcher, dict(kills))
        await driver.start()
        parts = ScheduleParts(dispatcher, driver, driver, driver.sync, on_step=driver.on_step)
        config = ScheduleConfig(steps=8, sync_mode=mode, take_timeout_s=60, pause_timeout_s=30)
        await run_schedule("async", parts, config)
        assert driver.deaths == list(kills.values())
        assert len(driver.trained) == len(set(driver.trained)) == 24
        await driver.producer.stop_producing()
        dispatcher.check_books()
        report = dispatcher.report()
        assert report["trained"] >= 48
        buffer.close()
        dispatcher.check_books()
        assert store.sessions.list() == []
        assert store.stats().objects == 0
    assert name not in Store.list()
