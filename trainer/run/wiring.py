"""Makes the parts of a run and connects them: the one place where they meet.

Owns: the runtime, the processes, their cores, devices and environment, and the order in which all
of it ends. Each part is a small object that knows only its own handles. Promises: on leaving
`open_parts`, also by an error or a cancellation, every process has ended.

Called by `trainer.fit` and `trainer.run.eval_run`, in the driver.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import actors
from actors.placement import detect_gpus
from trainer.config import Config
from trainer.placement import (
    plan_cores,
    plan_devices,
    replica_devices,
    shared_environment,
    thread_environment,
)
from trainer.run.engine_actor import EngineActor, EngineSetup
from trainer.run.learner_actor import WEIGHTS_OWNER, LearnerActor, LearnerSetup
from trainer.run.learner_link import LearnerLink
from trainer.run.learner_state import STATE_OWNER
from trainer.run.producer_actor import ProducerActor, ProducerSetup
from trainer.run.producer_link import ProducerLink

if TYPE_CHECKING:
    from actors import Handle, Runtime
    from shmstore import Store

__all__ = ["PRODUCER_OWNER", "Parts", "check_devices", "open_parts"]

PRODUCER_OWNER = "producer-0"
_PRELOAD = (
    "torch",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "trainer.learner",
    "trainer.model.models",
    "trainer.engine.torch_engine",
)
"""What takes seconds to import: once a run, not once a process and again after each death. None of
it starts a thread when it is imported, so that a fork of the process that has it is safe.
"""


@dataclass
class Parts:
    """The processes of a run, as the driver sees them."""

    runtime: Runtime
    store: Store
    learner: LearnerLink
    producer: ProducerLink
    deaths: Counter[str]

    async def kill(self) -> None:
        """Ends every process now, whatever it is doing; the arena forgets what they had."""
        await asyncio.gather(self.learner.kill(), self.producer.kill())

    async def to_engine(self) -> None:
        """The colocated schedule: the learner lets go of what it does not need between steps."""
        await self.learner.rest()

    async def to_learner(self) -> None:
        """The same for the engine."""
        await self.producer.rest()


@asynccontextmanager
async def open_parts(
    config: Config,
    name: str,
    store: Store,
    logs: Path,
    note: Callable[[str], None],
    gpus: Sequence[str] | None = None,
    deaths: Counter[str] | None = None,
) -> AsyncIterator[Parts]:
    """Starts the processes of run `name` on its arena; ends them all on leaving, a cancelled one in
    the middle of its work.

    gpus: as in `check_devices`; deaths: counts them, by process, as long as the run lasts. Raises
    ConfigError before any process starts.
    """
    plan = _Plan(config, gpus)
    store.sessions.bind(STATE_OWNER, heir=None)
    store.sessions.bind(WEIGHTS_OWNER, heir=None)
    async with (
        actors.Runtime(
            store=store,
            name=name,
            log_dir=logs,
            forward_logs=False,
            preload=plan.preload,
            env=plan.shared_environment,
        ) as rt,
        _counted(rt, Counter() if deaths is None else deaths, note) as counted,
    ):
        start = partial(_start, rt, plan, note, counted)
        learner = await start("learner", LearnerActor, LearnerSetup(config, plan.cores["learner"]))
        engines = {
            name: await start(name, EngineActor, EngineSetup(config, plan.cores[name], index))
            for index, name in enumerate(plan.engines)
        }
        producer = await start(
            "producer",
            ProducerActor,
            ProducerSetup(config, PRODUCER_OWNER, plan.cores["producer"]),
        )
        parts = Parts(
            rt,
            store,
            LearnerLink(learner, store, note),
            ProducerLink(producer, engines, PRODUCER_OWNER, note),
            counted,
        )
        try:
            yield parts
        except asyncio.CancelledError:
            await parts.kill()
            raise


@asynccontextmanager
async def _counted(
    rt: Runtime, deaths: Counter[str], note: Callable[[str], None]
) -> AsyncIterator[Counter[str]]:
    """Every death of a process of the run is counted and told, whoever called it or did not."""

    async def count() -> None:
        async for event in rt.watch():
            if event.kind == "died" and event.more:  # not by our own hand
                deaths[event.name] += 1
                note(f"{event.name} died ({event.reason})")
            elif event.kind == "restarted":
                note(f"{event.name} was started again")

    task = asyncio.create_task(count())
    try:
        yield deaths
    finally:
        task.cancel()
        await asyncio.wait((task,))  # and not `await task`: a cancellation of ours passes
        if not task.cancelled():
            task.result()


async def _start(
    rt: Runtime,
    plan: _Plan,
    note: Callable[[str], None],
    deaths: Counter[str],
    name: str,
    cls: type[Any],
    setup: object,
) -> Handle:
    """One process. Once it stands, the supervisor restarts it; until then, this does."""
    for _ in range(plan.restart.max):
        try:
            return await rt.spawn(
                cls, setup, name=name, restart=plan.restart, env=plan.environment(name)
            )
        except actors.SpawnDied as death:
            deaths[name] += 1  # it had not started, so its end is no event
            note(f"{name} died while it was started ({death}); once more")
    return await rt.spawn(cls, setup, name=name, restart=plan.restart, env=plan.environment(name))


def check_devices(config: Config, gpus: Sequence[str] | None = None) -> None:
    """Raises ConfigError when the run needs a device that is not there.

    gpus: what CUDA calls the devices that the run may use; None: those of the machine.
    """
    _Plan(config, gpus)


class _Plan:
    """Which process gets which cores and which device, and how often it may be started again."""

    def __init__(self, config: Config, gpus: Sequence[str] | None) -> None:
        engine, learner = config.engine, config.learner
        self.engines = (
            () if engine.inline else tuple(f"engine-{index}" for index in range(engine.replicas))
        )
        generating = ("producer",) if engine.inline else self.engines
        wanted = [("learner", learner.threads)]
        # Without an engine of its own the producer computes little: it shares the other cores.
        wanted += [(name, engine.threads) for name in generating]
        available = sorted(os.sched_getaffinity(0))
        self.cores = plan_cores(wanted, available, pin=config.run.pin)
        if not engine.inline:
            self.cores |= plan_cores([("producer", 1)], available, pin=False)
        devices = [("learner", learner.device)]
        devices += zip(generating, replica_devices(engine.device, len(generating)), strict=True)
        self._visible = plan_devices(devices, detect_gpus() if gpus is None else gpus)
        # Whoever asks for a device in front of a fork spoils CUDA for the child, and an import may.
        self.preload = () if any(self._visible.values()) else _PRELOAD
        threads = max(cores.threads for cores in self.cores.values())
        self.shared_environment = shared_environment(threads)
        self._deterministic = learner.deterministic or config.run.deterministic
        faults = config.faults
        self.restart = actors.Restart(max=faults.restarts_max, within=faults.restarts_within_s)

    def environment(self, process: str) -> dict[str, str]:
        """Variables for libraries that the process loads itself, and for what it starts.

        The placement of `actors` hands devices out whole; here the configuration says who sees
        which, because a learner and an engine may share one.
        """
        visible = self._visible.get(process, "")
        found = thread_environment(self.cores[process]) | {"CUDA_VISIBLE_DEVICES": visible}
        if visible and self._deterministic:
            found["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it torch refuses to multiply
        return found
