"""Turns what the parts report about one step into the numbers of `metrics.jsonl`.

Pure: no clock, no files. The names are in `trainer.metrics.CATALOG`. Called by the driver once a
step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.rollout import Batch
from trainer.run.engine_actor import EngineUse
from trainer.staleness import token_staleness

if TYPE_CHECKING:
    from shmstore import Stats

__all__ = ["StepTimes", "arena_metrics", "batch_metrics", "speed_metrics"]

_LEARNER_NAMES = {"loss", "lr", "grad_norm", "kl_engine", "train_s", "learn_s", "step_s"}
"""What keeps its own name; the rest of the learner's report goes under `learner/`."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step as the driver saw them. `wait_s`: from asking for a batch to having it;
    `driver_cpu_s`: what the driver's process computed. `overlap`: engines and learner compute at
    the same time.
    """

    step_s: float
    wait_s: float
    sync_s: float
    driver_cpu_s: float
    engines: int
    overlap: bool


def batch_metrics(batch: Batch, train_step: int, tasks: int) -> dict[str, float]:
    """Rewards, staleness, lengths and the window's report. `tasks`: how many the run has."""
    rollouts = batch.rollouts
    rewards = [r.reward for r in rollouts if r.reward is not None]
    oldest = [r.model_step_min for r in rollouts if r.model_step_min is not None]
    tokens = [r.n_response_tokens for r in rollouts]
    found: dict[str, float] = {
        "reward_batch": _mean(rewards),
        "rollouts": len(rollouts),
        "staleness_mean": token_staleness(train_step, 0) - _mean(oldest),
        "staleness_max": token_staleness(train_step, min(oldest)) if oldest else 0,
        "response_tokens_mean": _mean(tokens),
    }
    window = batch.report.metrics("window/")
    if "window/raw_reward_mean" in window:
        found["reward"] = window["window/raw_reward_mean"]
    found["tokens_generated"] = window["window/produced_tokens"]
    return {**found, **window, **(_task_metrics(batch) if tasks > 1 else {})}


def _task_metrics(batch: Batch) -> dict[str, float]:
    """Per task; a run with one task has them in total already."""
    found: dict[str, float] = {}
    for task, window in batch.report.tasks.items():
        rewards = [
            r.reward
            for g in batch.groups
            if g.task == task
            for r in g.rollouts
            if r.reward is not None
        ]
        found[f"task/{task}/reward"] = _mean(rewards)
        for name in ("produced_samples", "failed_samples", "filtered_samples"):
            found[f"task/{task}/{name}"] = _vars_of(window)[name]
    return found


def _vars_of(record: Any) -> Mapping[str, Any]:
    """Fields of a slotted dataclass by name."""
    return {name: getattr(record, name) for name in record.__slots__}


def learner_metrics(report: Mapping[str, float]) -> dict[str, float]:
    """The learner's report under the names of the catalog."""
    return {
        name if name in _LEARNER_NAMES else f"learner/{name}": value
        for name, value in report.items()
    }


def speed_metrics(
    times: StepTimes, found: Mapping[str, float], use: Sequence[tuple[EngineUse, EngineUse]]
) -> dict[str, float]:
    """Rates and shares; `found` is what is known of the step so far, `use` holds each engine's
    counters before and after it.
    """
    busy_s = _spent(use, "busy_s") / max(times.engines, 1)
    learn_s = found.get("learn_s", 0.0)
    chain_s = max(busy_s, learn_s) if times.overlap else busy_s + learn_s
    step_s = max(times.step_s, 1e-9)
    return {
        "step_s": times.step_s,
        "wait_s": times.wait_s,
        "sync_s": times.sync_s,
        "learner_wait_share": times.wait_s / step_s,
        "tokens_per_s": found["tokens_generated"] / step_s,
        "trained_tokens_per_s": found["tokens_trained"] / step_s,
        "engine_busy": busy_s / step_s,
        "overhead_s": max(0.0, times.step_s - chain_s),
        **_cpu_metrics(times, found, use),
    }


def _cpu_metrics(
    times: StepTimes, found: Mapping[str, float], use: Sequence[tuple[EngineUse, EngineUse]]
) -> dict[str, float]:
    """CPU time of the step by who used it; arithmetic apart from the rest of its process."""
    learner_s = found.get("learner/learn_cpu_s", 0.0)
    engine_s = _spent(use, "cpu_s")
    return {
        "cpu/learner_arithmetic": learner_s,
        "cpu/engine_arithmetic": engine_s,
        "cpu/learner": max(0.0, found.get("learner/process_cpu_s", 0.0) - learner_s),
        "cpu/producer": max(0.0, _spent(use, "process_cpu_s") - engine_s),
        "cpu/driver": times.driver_cpu_s,
    }


def _spent(use: Sequence[tuple[EngineUse, EngineUse]], name: str) -> float:
    """Growth of a counter, over all engines; one that began anew counts as nothing."""
    return float(
        sum(max(0.0, getattr(after, name) - getattr(before, name)) for before, after in use)
    )


def arena_metrics(stats: Stats) -> dict[str, float]:
    """What the arena holds, by owner."""
    found: dict[str, float] = {
        "arena_bytes": stats.used,
        "arena_sessions": stats.sessions,
        "arena_objects": stats.objects,
    }
    for owner, (sessions, _, _) in stats.by_owner.items():
        found[f"owner/{owner}"] = sessions
    return found


def _mean(values: Sequence[float] | Sequence[int]) -> float:
    return sum(values) / len(values) if values else math.nan
