"""The learner as a process: reads its batch from the arena, trains, lets go of exactly that batch.

Owns the learner's process: model, optimizer, its cores, and the sessions named `learner` for the length of a
step. Promises (lifecycle L06, L07): after a step the sessions of the batch are released and no others; the
state of every finished step is whole in the arena (`trainer.learner_state`) before the batch is released, so
a death at any point leaves either the batch untrained and alive, or trained and known as such.

Spawned by `trainer.wiring`; its methods are called by the driver, one at a time, on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config import Config
from trainer.engine.protocol import WeightsVersion
from trainer.errors import TrainerError
from trainer.learner_state import LearnerStates
from trainer.placement import Cores
from trainer.rollout import Group, Trace

if TYPE_CHECKING:
    from shmstore import Store
    from trainer.learner import Learner

__all__ = ["LEARNER_OWNER", "LearnerActor", "LearnerReady", "LearnerSetup", "StepDone"]

LEARNER_OWNER = "learner"


@dataclass(frozen=True)
class LearnerSetup:
    """All that the process needs to build itself, again after a death."""

    config: Config
    run: str
    cores: Cores
    warmup_cache: str


@dataclass(frozen=True)
class LearnerReady:
    """The learner has a model. `train_step` is the last finished step of its state."""

    train_step: int
    parameters: int
    warmup: dict[str, float]
    source: str


@dataclass(frozen=True)
class StepDone:
    """What a step came to. `busy_s` is arithmetic, `read_s` export of traces, `keep_s` the copy."""

    train_step: int
    metrics: dict[str, float]
    released: int


class LearnerActor:
    """See the module."""

    def __init__(self, setup: LearnerSetup) -> None:
        setup.cores.pin()
        self._setup = setup
        self._config = setup.config
        self._learner: Learner | None = None
        self._tokenizer: Any = None

    # -- life ------------------------------------------------------------------------------------

    def start(self, checkpoint: str | None) -> LearnerReady:
        """Builds the model and takes its state: from the arena, a checkpoint, or the warm-up.

        The arena comes first: it is there only when a learner of this run died.
        """
        import torch

        from actors import current
        from trainer.learner import Learner
        from trainer.models import build_model
        from trainer.trace import TraceStore

        torch.set_num_threads(self._setup.cores.threads)
        store = current().runtime.store
        if store is None:
            raise TrainerError("the learner was spawned in a runtime without a store")
        self._store: Store = store
        store.sessions.bind(LEARNER_OWNER, heir="replay")
        self._traces = TraceStore(store)
        self._states = LearnerStates(store, self._setup.run)
        config = self._config
        model, self._tokenizer = build_model(config.model, config.learner.device)
        self._learner = Learner(model, config.learner)
        parameters = sum(p.numel() for p in model.parameters())
        kept = self._states.find() if config.checkpoint.recovery == "arena" else None
        if kept is not None:
            self._learner.load_state_arrays(kept.arrays)
            return LearnerReady(kept.train_step, parameters, {}, "arena")
        if checkpoint is not None:
            self._learner.load(Path(checkpoint))
            step = int(Path(checkpoint, "train_step").read_text(encoding="utf-8"))
            return LearnerReady(step, parameters, {}, "checkpoint")
        return LearnerReady(0, parameters, self._warm_up(model), "start")

    def _warm_up(self, model: Any) -> dict[str, float]:
        if self._config.warmup is None:
            return {}
        from trainer.warmup import warm_up

        found = warm_up(model, self._tokenizer, self._config.warmup, Path(self._setup.warmup_cache))
        return {k: float(v) for k, v in found.items() if isinstance(v, int | float)}

    @property
    def _ready(self) -> Learner:
        if self._learner is None:
            raise TrainerError("the learner was asked to work before start()")
        return self._learner

    # -- training --------------------------------------------------------------------------------

    def train(self, groups: Sequence[Group], train_step: int) -> StepDone:
        """One train step on groups whose sessions `learner` holds; afterwards they are released."""
        began = time.perf_counter()
        traces, advantages, rewards, owners = self._read(groups)
        read_s = time.perf_counter() - began
        metrics = self._ready.train_step(
            traces,
            advantages,
            rewards=rewards,
            rollout_ids=owners,
            train_step=train_step,
            max_token_staleness=self._config.schedule.max_token_staleness,
        )
        del traces  # they pin the batch's bytes
        done = time.perf_counter()
        ids = [sid for group in groups for sid in group.session_ids]
        record = {"train_step": train_step, "metrics": metrics}
        if self._config.checkpoint.recovery == "arena":
            self._states.keep(train_step, self._ready.state_arrays(), record)
        keep_s = time.perf_counter() - done
        released = self._store.sessions.release(ids, owner=LEARNER_OWNER)
        metrics = {
            **metrics,
            "read_s": read_s,
            "learn_s": done - began - read_s,
            "keep_s": keep_s,
            "train_s": time.perf_counter() - began,
        }
        return StepDone(train_step, metrics, len(released))

    def _read(
        self, groups: Sequence[Group]
    ) -> tuple[list[Trace], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Every trainable path of the batch with its rollout's advantage and reward."""
        from trainer.advantage import compute_advantages

        traces: list[Trace] = []
        advantages: list[float] = []
        rewards: list[float] = []
        owners: list[int] = []
        number = 0
        for group in groups:
            scores = np.array([r.reward for r in group.rollouts], dtype=np.float32)
            shares = compute_advantages(scores, self._config.learner.estimator)
            for rollout, share, score in zip(group.rollouts, shares, scores, strict=True):
                for leaf in rollout.leaves:
                    traces.append(self._traces.export(rollout.session_id, node=leaf))
                    advantages.append(float(share))
                    rewards.append(float(score))
                    owners.append(number)
                number += 1
        return (
            traces,
            np.array(advantages, dtype=np.float32),
            np.array(rewards, dtype=np.float32),
            np.array(owners, dtype=np.int64),
        )

    # -- weights and files -----------------------------------------------------------------------

    def publish(self, model_step: int) -> WeightsVersion:
        """Puts the weights into the arena as one object, in a session of the owner `weights`."""
        from trainer.weights import publish

        return publish(self._ready.model, self._store, model_step)

    def save(self, folder: str, train_step: int) -> None:
        """Model, optimizer and counters for a resume, as safetensors and JSON."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self._ready.save(place)
        (place / "train_step").write_text(str(train_step), encoding="utf-8")

    def export(self, folder: str) -> None:
        """A folder for transformers' from_pretrained."""
        from trainer.models import export_hf

        export_hf(self._ready.model, self._tokenizer, Path(folder))
