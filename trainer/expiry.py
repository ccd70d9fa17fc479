"""When a group is too old, and what becomes of it (lifecycle L16, L18).

*Retry* cuts the stale members back to their prompt and keeps the fresh ones; *drop* gives the group
up. This file only decides: the replay buffer changes its index and the sessions. Pure; no arena, no
clock.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from trainer.errors import ConfigError
from trainer.rollout import Group, Rollout, Status
from trainer.tail_batch import NEVER, TailBatch

__all__ = ["Expiry", "ExpiryAction", "Refreshed"]


class ExpiryAction(enum.Enum):
    """What happens to a group that goes stale."""

    RETRY = "retry"
    DROP = "drop"

    @classmethod
    def parse(cls, value: ExpiryAction | str) -> ExpiryAction:
        """From its name in a config; ConfigError names what is allowed."""
        try:
            return cls(value)
        except ValueError:
            allowed = ", ".join(repr(action.value) for action in cls)
            raise ConfigError(
                f"expiry action {value!r} is unknown; allowed are {allowed}"
            ) from None


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What `ReplayBuffer.refresh` did, in groups."""

    retry: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Expiry:
    """The rule of one run. `None` limits never expire anything.

    `max_staleness` counts sync periods of `sync_interval` train steps; `max_token_staleness` counts
    train steps. `tail_batch` (L19): -1 never retries, 0 retries at once, N waits for N expired
    groups; left out it is what `action` implies.
    """

    action: ExpiryAction = ExpiryAction.RETRY
    max_staleness: int | None = None
    sync_interval: int = 1
    max_token_staleness: int | None = None
    tail_batch: int | None = None

    @classmethod
    def parse(cls, value: Expiry | str | None) -> Expiry:
        """From the name of its action, without limits; None never expires."""
        if isinstance(value, Expiry):
            return value
        return cls() if value is None else cls(action=ExpiryAction.parse(value))

    def __post_init__(self) -> None:
        object.__setattr__(self, "action", ExpiryAction.parse(self.action))
        for name in ("max_staleness", "sync_interval", "max_token_staleness", "tail_batch"):
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        for name in ("max_staleness", "max_token_staleness"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}; it must be at least 0, or None for no limit")
        if self.sync_interval < 1:
            raise ConfigError(f"sync_interval is {self.sync_interval}; it must be at least 1")
        retries = self.action is ExpiryAction.RETRY
        if self.tail_batch is None:
            object.__setattr__(self, "tail_batch", 0 if retries else NEVER)
        elif self.tail_batch < NEVER:
            raise ConfigError(
                f"tail_batch is {self.tail_batch}; allowed are -1 (never), 0 (at once) and above"
            )
        elif (self.tail_batch != NEVER) != retries:
            raise ConfigError(
                f"tail_batch is {self.tail_batch} with action {self.action.value!r}; -1 (never) "
                "goes with 'drop', 0 and above with 'retry'"
            )

    @property
    def tail(self) -> TailBatch:
        """When expired groups are produced again."""
        assert self.tail_batch is not None
        return TailBatch(self.tail_batch)

    def rollout_deadline(self, rollout: Rollout) -> int | None:
        """The first train step at which the rollout is expired; None: never, or it has no tokens.

        It expires when its oldest token has staleness `>= (m + 1) * s`, and when its newest
        trainable token is older than `max_token_staleness`, because then none is left.
        """
        return self._deadline((rollout,), rollout.model_step_min)

    def group_deadline(self, group: Group) -> int | None:
        """The first train step at which some member is expired."""
        return self._deadline(group.rollouts, group.model_step_min)

    def _deadline(self, rollouts: Sequence[Rollout], oldest: int | None) -> int | None:
        """Of the first of them; `oldest`: the step of their oldest token."""
        deadlines = []
        if self.max_staleness is not None and oldest is not None:
            deadlines.append(oldest + 1 + (self.max_staleness + 1) * self.sync_interval)
        if self.max_token_staleness is not None:
            newest = [r.model_step_max for r in rollouts if r.model_step_max is not None]
            if newest:
                deadlines.append(min(newest) + 2 + self.max_token_staleness)
        return min(deadlines, default=None)

    def cut_stale(self, group: Group, train_step: int) -> tuple[Group, tuple[Rollout, ...]]:
        """The group with its stale members cut back to the prompt, and those members as they
        were.
        """
        members: list[Rollout] = []
        stale: list[Rollout] = []
        for rollout in group.rollouts:
            deadline = self.rollout_deadline(rollout)
            if deadline is not None and deadline <= train_step:
                stale.append(rollout)
                members.append(rollout.cut_to_prompt(Status.EXPIRED))
            else:
                members.append(rollout)
        return (group.with_rollouts(members), tuple(stale)) if stale else (group, ())


def _plain(name: str, value: SupportsIndex | None) -> int | None:
    """As a snapshot keeps it."""
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}; a whole number is needed") from None
