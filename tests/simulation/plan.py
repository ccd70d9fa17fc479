"""What one simulated run is: its configuration, and how often what goes wrong, all from one
seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.engine.protocol import SyncMode
from trainer.engine.scripted import Script
from trainer.expiry import ExpiryAction

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """One random run: what is configured, and how often what goes wrong."""

    seed: int
    schedule: str
    sync_mode: SyncMode
    sync_interval: int
    max_staleness: int
    max_token_staleness: int | None
    action: ExpiryAction
    tail_batch: int | None
    order: str
    tasks: Mapping[str, float]
    sizes: Mapping[str, int | None]
    batch_groups: int
    group_size: int
    over_sampling: float
    partial_rollout: bool
    n_producers: int
    max_bytes: int | None
    environment: str
    script: Script
    steps: int
    judge_failure_rate: float
    kills: Mapping[str, float]  # mean seconds between deaths of each kind
    checkpoint_every: int
    crash_after_s: float | None
    deaf_rate: float  # cancellations of an environment that it takes for a hiccup

    @classmethod
    def from_seed(cls, seed: int) -> Plan:
        """Everything follows from the seed."""
        rng = random.Random(seed)
        s = rng.choice([1, 1, 2, 3])
        schedule = rng.choice(["async", "async", "async", "sync", "colocated"])
        action = rng.choice(list(ExpiryAction))
        tasks = rng.choice([{"math": 1.0}, {"math": 2.0, "code": 1.0}])
        tail = None if action is ExpiryAction.DROP else rng.choice([0, 0, 2, 4])
        checkpoints = rng.random() < 0.4
        tokens_max, token_s = rng.choice([2, 8, 16]), rng.choice([0.05, 0.2, 1.0])
        # Four turns one after the other: slower ones never come to an end between two deaths.
        slow = 4 * tokens_max * token_s > 15
        environments = ["one turn", "two turns", "two turns" if slow else "branches"]
        return cls(
            seed=seed,
            schedule=schedule,
            sync_mode=rng.choice(["pause", "in_flight"]) if schedule == "async" else "pause",
            sync_interval=s if schedule == "async" else 1,
            max_staleness=rng.choice([0, 1, 2]),
            max_token_staleness=rng.choice([None, None, 1, 3]),
            action=action,
            tail_batch=tail,
            order=rng.choice(["staleness", "fifo"]),
            tasks=tasks,
            sizes={task: rng.choice([None, None, None, 40]) for task in tasks},
            batch_groups=rng.randint(1, 4),
            group_size=rng.randint(1, 3),
            over_sampling=rng.choice([0.0, 0.5, 1.0]),
            partial_rollout=rng.random() < 0.7,
            n_producers=rng.choice([1, 1, 2]),
            max_bytes=rng.choice([None, None, 40_000]),
            environment=rng.choice(environments),
            script=Script(
                seed=seed,
                tokens_max=tokens_max,
                first_token_s=rng.choice([0.0, 0.1]),
                token_s=token_s,
                failure_rate=rng.choice([0.0, 0.0, 0.1]),
                stall_rate=rng.choice([0.0, 0.0, 0.05]),
            ),
            steps=rng.randint(4, 9),
            judge_failure_rate=rng.choice([0.0, 0.0, 0.1]),
            kills={
                kind: rng.choice([0.0, 0.0, 8.0, 25.0])
                for kind in ("producer", "learner", "engine")
            },
            checkpoint_every=(s if schedule == "async" else 1) if checkpoints else 0,
            crash_after_s=rng.uniform(1, 40) if checkpoints else None,
            deaf_rate=rng.choice([0.0, 0.0, 0.3]),
        )
