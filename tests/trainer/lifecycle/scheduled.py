"""The parts of a schedule over a desk, for tests: they note what happened when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tests.trainer.lifecycle.kit import Desk
from trainer.engine.protocol import SyncMode, WeightsVersion
from trainer.errors import LearnerLost
from trainer.producer import PauseReport
from trainer.rollout import Batch
from trainer.schedule import ScheduleConfig, ScheduleParts, StepReport, run_schedule


class Parts:
    """A learner that takes 3 s a step, devices that note who has them, and what happened when."""

    def __init__(self, made: Desk, dies_at: int | None = None, forgets: bool = False) -> None:
        self.made = made
        self.log: list[str] = []
        self.reports: list[StepReport] = []
        self.dies_at = dies_at
        self.forgets = forgets

    async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
        self.log.append(f"train {train_step}")
        before = self.made.producer.report().response_tokens
        await asyncio.sleep(3)
        if train_step == self.dies_at:
            self.dies_at = None
            self.log.append("death")
            raise LearnerLost("killed by signal 9")
        if not self.forgets:
            self.made.traces.release(batch.session_ids, owner="learner")
        return {"overlap": float(self.made.producer.report().response_tokens - before)}

    async def pause(self, timeout_s: float) -> PauseReport:
        self.log.append("pause")
        return await self.made.producer.pause(timeout_s)

    async def resume(self) -> None:
        self.log.append("resume")
        await self.made.producer.resume()

    async def sync(self, model_step: int, mode: SyncMode) -> None:
        self.log.append(f"sync {model_step} {mode}")
        await self.made.engine.load_weights(WeightsVersion(b"", model_step), mode)
        self.made.producer.weights_taken()

    async def evaluate(self, train_step: int) -> None:
        self.log.append(f"evaluate {train_step}")

    async def checkpoint(self, train_step: int) -> None:
        self.log.append(f"checkpoint {train_step}")

    async def on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        self.log.append(f"told {report.train_step}")

    async def to_engine(self) -> None:
        self.log.append("engine has the devices")

    async def to_learner(self) -> None:
        assert self.made.producer.report().in_production == 0
        self.log.append("learner has the devices")


async def run_parts(
    made: Desk,
    name: str,
    parts: Parts,
    *,
    stop: asyncio.Event | None = None,
    prepares: bool = True,
    **config: Any,
) -> None:
    await run_schedule(
        name,
        ScheduleParts(
            made.dispatcher,
            parts,
            parts,
            parts.sync,
            parts.evaluate,
            parts.checkpoint,
            parts.on_step,
            parts if name == "colocated" else None,
            stop or asyncio.Event(),
            prepares=prepares,
        ),
        ScheduleConfig(**{"steps": 4, "take_timeout_s": 1e4, **config}),
    )
