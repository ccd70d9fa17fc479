"""The learner as a process: reads its batch from the arena, trains, lets go of exactly that batch.

Owns the learner's process: model, optimizer, its cores, and the sessions named `learner` for the
length of a step. Promises (lifecycle L06, L07): after a step the sessions of the batch are
released and no others; the state of every finished step is whole in the arena
(`trainer.run.learner_state`) before the batch is released, so a death at any point leaves either
the batch untrained and alive, or trained and known as such.

Spawned by `trainer.run.wiring`; its methods are called by the driver, one at a time, on one thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trainer.config import Config, resolved_section
from trainer.engine.protocol import WeightsVersion
from trainer.environments.warmup_pairs import WarmupPairs
from trainer.errors import NotStarted, TrainerError
from trainer.placement import Cores, keep_for_good, own_device, rest_device
from trainer.replay import REPLAY_OWNER
from trainer.rollout import Group
from trainer.run.learner_state import LearnerStates
from trainer.segment import Trace
from trainer.staleness import mask_stale_labels

if TYPE_CHECKING:
    from actors import Handle
    from shmstore import Store
    from trainer.learner import Learner
    from trainer.weights import WeightsWriter

__all__ = [
    "LEARNER_OWNER",
    "WEIGHTS_OWNER",
    "BatchRows",
    "LearnerActor",
    "LearnerReady",
    "LearnerSetup",
    "StepDone",
    "done_of",
    "rows_of",
    "step_of_weights",
    "to_bytes",
    "weights_session",
]

LEARNER_OWNER = "learner"
WEIGHTS_OWNER = "weights"
_WEIGHTS_PREFIX = "weights-"


def weights_session(model_step: int) -> str:
    """The session that holds one version of the weights."""
    return f"{_WEIGHTS_PREFIX}{model_step}"


def step_of_weights(session: str) -> int:
    """The model step of the version that a session of the owner `weights` holds."""
    return int(session.removeprefix(_WEIGHTS_PREFIX))


@dataclass(frozen=True)
class LearnerSetup:
    """All that the process needs to build itself, again after a death."""

    config: Config
    cores: Cores


@dataclass(frozen=True)
class LearnerReady:
    """The learner has a model. `train_step` is the last finished step of its state."""

    train_step: int
    parameters: int
    warmup: dict[str, float]
    source: str


class BatchRows(msgspec.Struct, frozen=True, array_like=True):
    """What the learner is told of a batch, rollout by rollout and group after group: the session,
    the ends of its trainable paths, the judge's reward, the tokens of its response. `sizes`:
    rollouts of each group.
    """

    sessions: list[str]
    leaves: list[tuple[int, ...]]
    rewards: list[float]
    lengths: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> BatchRows:
        """Of groups that are COMPLETED, so that each member has a reward."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        assert len(rewards) == len(rollouts), "a COMPLETED rollout has no reward"
        return cls(
            [rollout.session_id for rollout in rollouts],
            [rollout.leaves for rollout in rollouts],
            rewards,
            [rollout.n_response_tokens for rollout in rollouts],
            [len(group.rollouts) for group in groups],
        )


class StepDone(msgspec.Struct, frozen=True, array_like=True):
    """What a step came to. Of the seconds in `metrics`, `learn_s` is arithmetic (of which
    `learn_cpu_s` on a CPU), `read_s` export of traces, `keep_s` the copy of the state;
    `process_cpu_s` is all that the process has computed since the step before. `weights`: where
    they were published, if they were.
    """

    train_step: int
    metrics: dict[str, int | float]
    released: int
    weights: WeightsVersion | None = None


#: The two messages of a step travel as bytes: pickling their parts one by one takes longer.
to_bytes = msgspec.msgpack.Encoder().encode
rows_of = msgspec.msgpack.Decoder(BatchRows).decode
done_of = msgspec.msgpack.Decoder(StepDone).decode


class LearnerActor:
    """See the module."""

    def __init__(self, setup: LearnerSetup) -> None:
        setup.cores.pin()
        self._setup = setup
        self._config = setup.config
        self._learner: Learner | None = None
        self._weights: WeightsWriter | None = None
        self._tokenizer: Any = None
        self._cpu_s = 0.0
        """CPU time of this process when its last step ended."""

    # -- life ------------------------------------------------------------------------------------

    def start(self, checkpoint: str | None, board: Handle | None = None) -> LearnerReady:
        """Builds the model and takes its state: from the arena, a checkpoint, or the warm-up, whose
        progress it writes on the board.

        The arena comes first: it is there only when a learner of this run died.
        """
        import torch

        from actors import current
        from trainer.devices import prepare_device
        from trainer.learner import Learner
        from trainer.model.models import build_model, torch_dtype
        from trainer.trace import TraceStore
        from trainer.weights import WeightsWriter

        torch.set_num_threads(self._setup.cores.threads)
        device = own_device(self._config.learner.device)
        prepare_device(device, self._config.learner.memory_fraction)
        store = current().runtime.store
        if store is None:
            raise TrainerError("the learner was spawned in a runtime without a store")
        self._store: Store = store
        store.sessions.bind(LEARNER_OWNER, heir=REPLAY_OWNER)
        self._traces = TraceStore(store)
        self._states = LearnerStates(store)
        config = self._config
        model, self._tokenizer = build_model(config.model, device, torch.float32)
        kept = self._states.find() if config.checkpoint.recovery == "arena" else None
        warmed: dict[str, float] = {}
        if (kept is None and checkpoint is None) or config.learner.kl_coef > 0:
            # Before the learner exists: its frozen reference is the warmed-up model, also when
            # its own weights come from elsewhere.
            warmed = self._warm_up(model, board)
        exact = config.learner.deterministic or config.run.deterministic
        self._learner = Learner(model, dataclasses.replace(config.learner, deterministic=exact))
        # In the type in which the engines hold them.
        self._weights = WeightsWriter(model, store, torch_dtype(config.model.dtype))
        keep_for_good()
        parameters = sum(p.numel() for p in model.parameters())
        if kept is not None:
            self._learner.load_state_arrays(kept.arrays)
            return LearnerReady(kept.train_step, parameters, warmed, "arena")
        if checkpoint is not None:
            self._learner.load(Path(checkpoint))
            step = int(Path(checkpoint, "train_step").read_text(encoding="utf-8"))
            return LearnerReady(step, parameters, warmed, "checkpoint")
        return LearnerReady(0, parameters, warmed, "start")

    def _warm_up(self, model: Any, board: Handle | None) -> dict[str, float]:
        config = self._config
        if config.warmup is None:
            return {}
        most = config.warmup.steps_max

        def tell(step: int, loss: float, accuracy: float | None) -> None:
            if board is not None:
                found = "" if accuracy is None else f", accuracy {accuracy:.2f}"
                board.phase.tell("warm-up", step, most, f"loss {loss:.2f}{found}")

        from trainer.model.warmup import warm_up

        cache = Path(config.model.cache_dir) if config.model.cache_dir else None
        key = json.dumps([config.run.seed, [resolved_section(t.source) for t in config.tasks]])
        return warm_up(
            model,
            self._tokenizer,
            config.warmup,
            WarmupPairs(config),
            cache,
            key=key,
            progress=tell,
        )

    @property
    def _ready(self) -> Learner:
        if self._learner is None:
            raise NotStarted("the learner was asked to work before start()")
        return self._learner

    # -- training --------------------------------------------------------------------------------

    def train(self, rows: bytes, train_step: int, publish: bool = False) -> bytes:
        """One train step on a batch whose sessions `learner` holds; afterwards they are released,
        and with `publish` the new weights are in the arena. `rows`: its `BatchRows`; -> `StepDone`,
        both as `to_bytes` writes them.
        """
        learner, began = self._ready, time.perf_counter()
        self._cpu_s = self._cpu_s or time.process_time()  # not what building the model took
        batch = rows_of(rows)
        traces, advantages, rewards, rollout_ids = self._read(batch, train_step)
        read_s, cpu_before_s = time.perf_counter() - began, time.thread_time()
        metrics = learner.train_step(
            traces,
            advantages,
            rollout_ids=rollout_ids,
            rewards=rewards,
            train_step=train_step,
        )
        del traces  # they pin the batch's bytes
        done, learn_cpu_s = time.perf_counter(), time.thread_time() - cpu_before_s
        record = {"train_step": train_step, "metrics": metrics}
        if self._config.checkpoint.recovery == "arena":
            self._states.keep(train_step, learner.state_arrays(), record)
        keep_s = time.perf_counter() - done
        released = self._store.sessions.release(batch.sessions, owner=LEARNER_OWNER)
        weights = self.publish(train_step) if publish else None
        cpu_before_s, self._cpu_s = self._cpu_s, time.process_time()
        metrics = {
            **metrics,
            "read_s": read_s,
            "learn_s": done - began - read_s,
            "learn_cpu_s": learn_cpu_s,
            "keep_s": keep_s,
            "train_s": time.perf_counter() - began,
            "process_cpu_s": self._cpu_s - cpu_before_s,
        }
        return to_bytes(StepDone(train_step, metrics, len(released), weights))

    def _read(
        self, batch: BatchRows, train_step: int
    ) -> tuple[list[Trace], list[float], list[float], list[int]]:
        """Every trainable path of the batch with its rollout's advantage, reward and number.

        Tokens that are too stale lose their label (lifecycle L18).
        """
        from trainer.advantage import batch_advantages

        scores = self._shaped(batch)
        ends = itertools.accumulate(batch.sizes)
        groups = [scores[end - size : end] for end, size in zip(ends, batch.sizes, strict=True)]
        shares = batch_advantages(groups, self._config.learner.estimator)
        shared = list(itertools.chain.from_iterable(shares))
        rollout_ids = [number for number, leaves in enumerate(batch.leaves) for _ in leaves]
        ends_of_paths = itertools.chain.from_iterable(batch.leaves)
        places = [
            (batch.sessions[n], node) for n, node in zip(rollout_ids, ends_of_paths, strict=True)
        ]
        traces = [self._fresh(trace, train_step) for trace in self._traces.export_nodes(places)]
        advantages = [shared[number] for number in rollout_ids]
        return traces, advantages, [scores[number] for number in rollout_ids], rollout_ids

    def _shaped(self, batch: BatchRows) -> list[float]:
        """The judge's rewards and DAPO's penalty for answers near the length limit."""
        from trainer.advantage import overlong_penalty

        longest = self._config.rollout.max_new_tokens
        buffer = self._config.learner.overlong_buffer
        if not buffer:
            return batch.rewards
        return [
            reward + overlong_penalty(length, longest, buffer)
            for reward, length in zip(batch.rewards, batch.lengths, strict=True)
        ]

    def _fresh(self, trace: Trace, train_step: int) -> Trace:
        limit = self._config.schedule.max_token_staleness
        labels = mask_stale_labels(trace.labels, trace.model_steps, train_step, limit)
        return trace if labels is trace.labels else dataclasses.replace(trace, labels=labels)

    def rest(self) -> None:
        """Gives cached memory of the device back, so that an engine on it can have it."""
        rest_device(self._config.learner.device)

    # -- weights and files -----------------------------------------------------------------------

    def publish(self, model_step: int) -> WeightsVersion:
        """Puts the weights into the arena as one object, in a session of the owner `weights`."""
        writer, session = self._weights, weights_session(model_step)
        if writer is None:
            raise NotStarted("the learner was asked to publish before start()")
        self._store.sessions.release([session], owner=WEIGHTS_OWNER)  # of a death in the middle
        self._store.sessions.open(session, owner=WEIGHTS_OWNER)
        return writer.publish(model_step, session=session)

    def save(self, folder: str, train_step: int) -> None:
        """Model, optimizer and counters for a resume, as safetensors and JSON."""
        from safetensors import SafetensorError

        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        try:
            self._ready.save(place)
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(str(error)) from error
        (place / "train_step").write_text(str(train_step), encoding="utf-8")

    def export(self, folder: str) -> None:
        """A folder for transformers' from_pretrained."""
        from safetensors import SafetensorError

        from trainer.model.models import export_hf, sweep_exports

        sweep_exports(Path(folder).parent)  # of a learner that died in the middle of one

        try:
            export_hf(self._ready.model, self._tokenizer, Path(folder))
        except SafetensorError as error:  # as in `save`
            raise OSError(str(error)) from error
