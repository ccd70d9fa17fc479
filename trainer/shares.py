"""Whose turn it is: how a batch is split between the tasks, and how much of each may be drawn
(lifecycle L19, L23, L31).

`TaskMix` splits a batch by weight: deterministic in the train step, exact over time. `TaskShares`
turns that into what a task still lacks, given what is ready, in production and allowed ahead, and
knows which tasks have ended and why; what an ended task cannot give falls to the others.

For the dispatcher only, on the loop of the replay buffer. No waits, no arena, no clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from trainer.errors import ConfigError, EndOfData
from trainer.expiry import Expiry
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.rollout import Group, Status
from trainer.staleness import StalenessBudget
from trainer.work import DispatchConfig

__all__ = ["TaskMix", "TaskShares"]

PERIOD_MAX = 10_000
"""Weights are brought to integers that sum to at most this; the length of the repeating pattern."""


class TaskMix:
    """Splits batches over weighted tasks.

    Each slot of the endless row of batch slots belongs to one task, in a pattern that repeats; a
    task with share w has after n slots always between n*w - 1 and n*w + 1 of them, and exactly its
    share after every period. (Earliest deadline first over the windows of each task's slots.)
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights:
            raise ConfigError("no tasks were given; at least one is needed")
        for task, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(f"the weight of task {task!r} is {weight}; it must be above 0")
        self.tasks = tuple(weights)
        self.weights = dict(weights)
        shares = _integer_shares(weights)
        self._period = sum(shares.values())
        self._prefix = _prefix_counts(shares, self._period)

    def split(self, train_step: int, batch_groups: int) -> dict[str, int]:
        """Groups of each task in the batch of `train_step` (1-based); sums to `batch_groups`."""
        if train_step < 1 or batch_groups < 1:
            raise ConfigError(f"train_step {train_step} and batch_groups {batch_groups}: from 1")
        first = (train_step - 1) * batch_groups
        counts = {
            task: self._count(task, first + batch_groups) - self._count(task, first)
            for task in self.tasks
        }
        return {task: count for task, count in counts.items() if count}

    def without(self, tasks: Iterable[str]) -> TaskMix:
        """The mix of the other tasks; `ConfigError` when none is left."""
        gone = set(tasks)
        return TaskMix({t: w for t, w in self.weights.items() if t not in gone}) if gone else self

    def _count(self, task: str, slots: int) -> int:
        periods, rest = divmod(slots, self._period)
        prefix = self._prefix[task]
        return periods * prefix[self._period] + prefix[rest]


@dataclass(slots=True, eq=False)
class _Task:
    """Running state of one task."""

    in_production: int = 0
    useless_in_row: int = 0
    tail_active: bool = False
    ended: str | None = None


class TaskShares:
    """What each task may give. `model_step` and `train_step` are the dispatcher's."""

    def __init__(
        self, buffer: ReplayBuffer, sampler: PromptSampler, config: DispatchConfig, mix: TaskMix
    ) -> None:
        if set(mix.tasks) != set(sampler.tasks):
            raise ConfigError(
                f"the mix has the tasks {sorted(mix.tasks)}, the sources {sorted(sampler.tasks)}"
            )
        self._buffer = buffer
        self._sampler = sampler
        self._config = config
        self._mix = mix
        self._budget = _agreed_budget(config.budget, buffer.expiry)
        self._tasks = {task: _Task() for task in mix.tasks}

    # -- the split of a batch --------------------------------------------------------------------

    def need(self, train_step: int) -> dict[str, int]:
        """The groups of the batch of `train_step`; `EndOfData` when no task is left to fill it."""
        need, missing = self._split(train_step)
        if missing:
            reasons = "; ".join(f"{task}: {state.ended}" for task, state in self._tasks.items())
            raise EndOfData(f"no task can fill the batch of step {train_step} ({reasons})")
        return need

    def ready(self, need: Mapping[str, int]) -> bool:
        """Whether the buffer holds all of it."""
        return all(self._buffer.count(task, Status.COMPLETED) >= n for task, n in need.items())

    def _split(self, train_step: int) -> tuple[dict[str, int], int]:
        """By weight; what an ended task cannot give falls to the others. -> (split, groups
        missing).
        """
        total = self._config.batch_groups
        need = self._mix.split(train_step, total)
        ended = self.ended()
        for task in ended:
            give = min(need.pop(task, 0), self._buffer.count(task, Status.COMPLETED))
            if give:
                need[task] = give
        missing = total - sum(need.values())
        if missing == 0 or len(ended) == len(self._tasks):
            return need, missing
        for task, count in self._mix.without(ended).split(train_step, missing).items():
            need[task] = need.get(task, 0) + count
        return need, 0

    # -- what may be drawn -----------------------------------------------------------------------

    def usable(self, model_step: int, train_step: int) -> int:
        """How many batches from `train_step` on can use what `model_step` samples now."""
        return self._budget.batches_usable(model_step, train_step)

    def limit_ahead(self, batches: int) -> None:
        """Never more than so many batches ready or in production, however fresh."""
        self._budget = dataclasses.replace(self._budget, batches_ahead_max=batches)

    def targets(self, model_step: int, train_step: int) -> dict[str, int]:
        """How many groups of each task may be ahead: ready or in production. Draws change nothing
        of it.
        """
        usable = self.usable(model_step, train_step)
        targets = dict.fromkeys(self._tasks, 0)
        for step in range(train_step, train_step + usable):
            for task, count in self._split(step)[0].items():
                targets[task] += count
        # The batch that is waited for was split when its taker came. Tasks have ended or come back
        # since, and the split of today may have no need of what the taker lacks.
        for task in targets:
            lacking = self._buffer.waiting.lacking(task) if usable else 0
            if lacking:
                need = self._buffer.count(task, Status.COMPLETED) + lacking
                targets[task] = max(targets[task], need)
        return targets

    def behind(self, targets: Mapping[str, int], later: Mapping[str, int]) -> list[str]:
        """The tasks of which more may be drawn, the one furthest behind its target first. `later`:
        how many of those in production are not begun in time to count.
        """
        shortfalls = {
            task: self._shortfall(
                task, target, self._tasks[task].in_production - later.get(task, 0)
            )
            for task, target in targets.items()
        }
        return sorted((t for t in shortfalls if shortfalls[t] > 0), key=lambda t: -shortfalls[t])

    def only_tail(self, task: str) -> bool:
        """Whether only expired groups of it are produced now (L19)."""
        state = self._tasks[task]
        state.tail_active = self._buffer.expiry.tail.active(
            self._buffer.count(task, Status.EXPIRED),
            state.tail_active,
            fresh_exhausted=self._sampler.remaining(task) == 0,
        )
        return state.tail_active

    def _shortfall(self, task: str, target: int, coming: int) -> float:
        """What of the target is still missing, as a fraction of it; 0 or less: do not draw."""
        state = self._tasks[task]
        if state.ended is not None or target == 0:
            return 0.0
        over_sampling = 0.0 if state.tail_active else self._config.over_sampling
        completed = self._buffer.count(task, Status.COMPLETED)
        if completed >= target or not self._has_room(task, coming):
            return 0.0
        limit = math.ceil(target * (1 + over_sampling))
        return (limit - completed - coming) / target

    def _has_room(self, task: str, coming: int) -> bool:
        """The byte limit, with what is in production counted at the mean size of a group."""
        if self._buffer.max_bytes is None:
            return True
        if self._buffer.waiting.lacking(task) > coming:
            return True
        all_coming = sum(state.in_production for state in self._tasks.values()) + 1
        return self._buffer.waiting.has_room(task, int(all_coming * self._buffer.group_nbytes_mean))

    # -- what becomes of a task ------------------------------------------------------------------

    def drawn(self, task: str) -> None:
        """A group of it goes into production."""
        self._tasks[task].in_production += 1

    def left_production(self, task: str) -> None:
        """One has come back, or nobody has it any more."""
        self._tasks[task].in_production -= 1
        self.notice_ends_of_data()

    def judge(self, group: Group, status: Status) -> None:
        """Ends the task of a finished group when too many in a row were of no use."""
        state = self._tasks[group.task]
        if status in (Status.FAILED, Status.FILTERED):
            state.useless_in_row += 1
            if state.useless_in_row >= self._config.useless_in_row_max and state.ended is None:
                errors = [r.error_msg for r in group.rollouts if r.error_msg]
                why = errors[0] if errors else "all rewards of the group were equal"
                self._end(
                    group.task,
                    f"{state.useless_in_row} groups in a row were failed or filtered; the last: "
                    f"{why}",
                )
        elif status is Status.COMPLETED:
            state.useless_in_row = 0

    def notice_ends_of_data(self) -> None:
        """A task has ended while nothing of it can be produced; expiry or a death may begin it
        again.
        """
        for task, state in self._tasks.items():
            exhausted = self._sampler.remaining(task) == 0 and not (
                state.in_production
                or self._buffer.count(task, Status.ABORTED)
                or self._buffer.count(task, Status.EXPIRED)
            )
            if exhausted and state.ended is None:
                self._end(task, _OUT_OF_DATA)
            elif state.ended == _OUT_OF_DATA and not exhausted:
                state.ended = None
                self._buffer.waiting.reopen_task(task)

    def ended(self) -> dict[str, str]:
        """Tasks of which no more groups come now, and why."""
        return {t: state.ended for t, state in self._tasks.items() if state.ended is not None}

    def describe(self) -> list[str]:
        """A line a task."""
        lines = []
        for task, state in self._tasks.items():
            counts = {s.value: self._buffer.count(task, s) for s in _COUNTED}
            ended = f", ended: {state.ended}" if state.ended else ""
            lines.append(f"task {task}: {counts}, in production {state.in_production}{ended}")
        return lines

    def _end(self, task: str, reason: str) -> None:
        self._tasks[task].ended = reason
        self._buffer.waiting.end_task(task, reason)


def _integer_shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers in the ratio of the weights: exact for small fractions, else to 1 in 10,000."""
    parts = {task: Fraction(weight).limit_denominator(1000) for task, weight in weights.items()}
    if min(parts.values()) > 0:
        scale = lcm(*(part.denominator for part in parts.values()))
        shares = {task: int(part * scale) for task, part in parts.items()}
        divisor = gcd(*shares.values())
        if sum(shares.values()) // divisor <= PERIOD_MAX:
            return {task: share // divisor for task, share in shares.items()}
    total = sum(weights.values())
    shares = {task: max(1, round(PERIOD_MAX * w / total)) for task, w in weights.items()}
    divisor = gcd(*shares.values())
    return {task: share // divisor for task, share in shares.items()}


def _prefix_counts(shares: Mapping[str, int], period: int) -> dict[str, list[int]]:
    """For each task: how many of the first n slots are its own, n = 0 .. period."""
    given = dict.fromkeys(shares, 0)
    prefix = {task: [0] for task in shares}
    for slot in range(period):
        # Unit job j of a task with share a/D has the window [floor(jD/a), ceil((j+1)D/a)); such
        # windows always fit together, and the earliest deadline first finds the fit.
        released = [t for t in shares if given[t] * period // shares[t] <= slot]
        chosen = min(released, key=lambda t: -(-(given[t] + 1) * period // shares[t]))
        given[chosen] += 1
        for task in shares:
            prefix[task].append(given[task])
    return prefix


def _agreed_budget(budget: StalenessBudget, expiry: Expiry) -> StalenessBudget:
    """The budget with the buffer's token limit; one that outruns expiry would produce for
    nothing.
    """
    if budget.max_token_staleness is None:
        budget = dataclasses.replace(budget, max_token_staleness=expiry.max_token_staleness)
    if expiry.max_staleness is not None:
        expires_at = (expiry.max_staleness + 1) * expiry.sync_interval
        if budget.limit is None or budget.limit > expires_at:
            raise ConfigError(
                f"the staleness budget allows {budget.limit} train steps, but the buffer expires "
                f"groups at {expires_at}; what is produced beyond that is thrown away"
            )
    return budget


#: Why a task ended; unlike the other reasons this one can pass.
_OUT_OF_DATA = "its prompts ran out"

_COUNTED = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
