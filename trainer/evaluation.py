"""Evaluation that owns what it makes (lifecycle L22).

Its sessions belong to the owner `eval`; at the end, also after an error, exactly those that this
evaluation opened are released. It has no way to reach the replay buffer. Belongs to the loop of the
engine that it asks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.errors import ConfigError
from trainer.group_context import Gate
from trainer.pending import PendingGroup, ProducerConfig, ProducerParts
from trainer.rollout import Prompt, Status
from trainer.trace import TraceStore
from trainer.work import Work

__all__ = ["EvaluationReport", "Evaluator"]


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Result of one evaluation; counts in rollouts. `reward_mean` is NaN when none was scored."""

    reward_mean: float
    reward_mean_by_task: Mapping[str, float]
    rollouts: int
    failed: int
    response_tokens_mean: float
    errors: tuple[str, ...] = ()


class Evaluator:
    """Runs `prompts`, each `config.group_size` times, at most `config.groups_max` at once."""

    def __init__(
        self,
        parts: ProducerParts,
        config: ProducerConfig,
        prompts: Sequence[Prompt],
        *,
        owner: str = "eval",
        run_name: str = "eval",
    ) -> None:
        if not prompts:
            raise ConfigError("an evaluation needs at least one prompt")
        self._parts = parts
        self._config = config
        self._prompts = tuple(prompts)
        self._owner = owner
        self._run_name = run_name

    async def run(self) -> EvaluationReport:
        """Evaluate once; may run while a producer uses the same engine, but not twice at a time."""
        slots = asyncio.Semaphore(self._config.groups_max)
        groups = [
            PendingGroup(
                Work(str(number), prompt.task, prompt),
                self._parts,
                self._config,
                owner=self._owner,
                run_name=self._run_name,
                gate=Gate(),
            )
            for number, prompt in enumerate(self._prompts)
        ]
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(_evaluate(group, slots, self._parts.traces, self._owner))
        return _report(groups)


async def _evaluate(
    group: PendingGroup, slots: asyncio.Semaphore, traces: TraceStore, owner: str
) -> None:
    """One prompt from opening its sessions to releasing them."""
    async with slots:
        try:
            group.open()
            await group.produce()
        finally:
            if group.rollouts:
                traces.release(group.group.session_ids, owner=owner)


def _report(groups: Sequence[PendingGroup]) -> EvaluationReport:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    by_task: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            by_task.setdefault(rollout.task, []).append(rollout.reward)
    failed = [r for r in rollouts if r.status is Status.FAILED]
    return EvaluationReport(
        reward_mean=sum(rewards) / len(rewards) if rewards else math.nan,
        reward_mean_by_task={task: sum(found) / len(found) for task, found in by_task.items()},
        rollouts=len(rollouts),
        failed=len(failed),
        response_tokens_mean=sum(r.n_response_tokens for r in rollouts) / len(rollouts),
        errors=tuple(dict.fromkeys(r.error_msg for r in failed if r.error_msg))[:8],
    )
