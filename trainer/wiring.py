"""Makes the parts of a run and connects them: the one place where they meet.

Owns: the runtime, the processes, their cores and environment, and the order in which all of
it ends. Each part is a small object that knows only its own handles. Promises: on leaving
`open_parts`, also by an error or a cancellation, every process has ended.

Called by `trainer.fit` and `trainer.eval_run`, in the driver.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import actors
from trainer.config import Config
from trainer.engine_actor import EngineActor, EngineSetup
from trainer.learner_actor import WEIGHTS_OWNER, LearnerActor, LearnerSetup
from trainer.learner_link import LearnerLink
from trainer.learner_state import STATE_OWNER
from trainer.placement import plan_cores, thread_environment
from trainer.producer_actor import ProducerActor, ProducerSetup
from trainer.producer_link import ProducerLink

if TYPE_CHECKING:
    from actors import Runtime
    from shmstore import Store

__all__ = ["PRODUCER_OWNER", "Parts", "open_parts"]

PRODUCER_OWNER = "producer-0"


@dataclass
class Parts:
    """The processes of a run, as the driver sees them."""

    runtime: Runtime
    store: Store
    learner: LearnerLink
    producer: ProducerLink

    async def to_engine(self) -> None:
        """The colocated schedule: the learner lets go of what it does not need between steps."""
        await self.learner.rest()

    async def to_learner(self) -> None:
        """The same for the engine."""
        await self.producer.rest()


@asynccontextmanager
async def open_parts(
    config: Config, name: str, store: Store, logs: Path, note: Callable[[str], None]
) -> AsyncIterator[Parts]:
    """Starts the processes of run `name` on its arena; ends them all on leaving."""
    plan = _Plan(config)
    store.sessions.bind(STATE_OWNER, heir=None)
    store.sessions.bind(WEIGHTS_OWNER, heir=None)
    async with actors.Runtime(store=store, name=name, log_dir=logs, forward_logs=False) as rt:
        learner = await rt.spawn(
            LearnerActor,
            LearnerSetup(config, plan.cores["learner"]),
            name="learner",
            restart=plan.restart,
            env=thread_environment(plan.cores["learner"]),
            gpus=plan.gpus(config.learner.device),
        )
        engines = {
            engine: await rt.spawn(
                EngineActor,
                EngineSetup(config, plan.cores[engine], index),
                name=engine,
                restart=plan.restart,
                env=thread_environment(plan.cores[engine]),
                gpus=plan.gpus(config.engine.device),
            )
            for index, engine in enumerate(plan.engines)
        }
        producer = await rt.spawn(
            ProducerActor,
            ProducerSetup(config, PRODUCER_OWNER, plan.cores["producer"]),
            name="producer",
            restart=plan.restart,
            env=thread_environment(plan.cores["producer"]),
            gpus=plan.gpus(config.engine.device) if config.engine.inline else 0,
        )
        yield Parts(
            rt,
            store,
            LearnerLink(learner, store, note),
            ProducerLink(producer, engines, PRODUCER_OWNER, note),
        )


class _Plan:
    """Which process gets which cores, and how often it may be started again."""

    def __init__(self, config: Config) -> None:
        engine = config.engine
        self.engines = (
            () if engine.inline else tuple(f"engine-{index}" for index in range(engine.replicas))
        )
        wanted = [("learner", config.learner.threads)]
        wanted += [(name, engine.threads) for name in self.engines]
        # Without an engine of its own the producer computes little: it shares the other cores.
        wanted += [("producer", engine.threads)] if engine.inline else []
        available = sorted(os.sched_getaffinity(0))
        self.cores = plan_cores(wanted, available, pin=config.run.pin)
        if not engine.inline:
            self.cores |= plan_cores([("producer", 1)], available, pin=False)
        faults = config.faults
        self.restart = actors.Restart(max=faults.restarts_max, within=faults.restarts_within_s)

    @staticmethod
    def gpus(device: str) -> int:
        """Devices that the placement has to reserve; 0 on the CPU."""
        return 1 if device.startswith("cuda") else 0
