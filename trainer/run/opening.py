"""What a run stands on before it has a process: arena, prompts, buffer, books.

Owns how these are made from the configuration, anew or as the checkpoint left them, what is said
while the models are built, whether the arena can hold them, and that it is gone when the run is.
Called by `trainer.fit` and `trainer.run.eval_run`, in the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shmstore import Store
from trainer import snapshot
from trainer.checkpoint import Checkpoint
from trainer.config import Config
from trainer.dispatch import DispatchConfig, Dispatcher
from trainer.environments import PromptSource, build_source
from trainer.errors import ConfigError
from trainer.expiry import Expiry, ExpiryAction
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.run.learner_actor import LearnerReady
from trainer.run.summary import ArenaLeft, Summary
from trainer.shares import TaskMix
from trainer.staleness import StalenessBudget

__all__ = [
    "check_capacity",
    "open_arena",
    "open_dispatcher",
    "open_sources",
    "words_after",
    "words_before",
]

_BATCHES_AHEAD_MAX = 8
"""Batches that may be ready or in production, however fresh; bounds buffer and prompts under
way.
"""
_STATE_BYTES = 12
"""A parameter in the learner's state: itself and AdamW's two moments, in float32."""


@contextmanager
def open_arena(config: Config, name: str, summary: Summary) -> Iterator[Store]:
    """The arena of the run; on leaving it is measured, told and removed."""
    limits = config.store
    store = Store.create(
        name,
        capacity=limits.capacity,
        max_objects=limits.max_objects,
        max_sessions=limits.max_sessions,
    )
    try:
        yield store
    finally:
        store.sweep()
        stats = store.stats()
        summary.arena = ArenaLeft(stats.sessions, stats.objects, stats.used if stats.objects else 0)
        summary.left_by_owner = {} if summary.arena.empty else dict(stats.by_owner)
        store.close()
        Store.unlink(name)


def check_capacity(config: Config, ready: LearnerReady) -> None:
    """Raises ConfigError when the arena cannot hold this model, however few the rollouts: known as
    soon as the model is there, and otherwise met when the first batch has been trained.
    """
    steps = config.schedule.steps - ready.train_step
    weights = ready.parameters * (4 if config.model.dtype == "float32" else 2)
    kept = min(steps, 2) if config.checkpoint.recovery == "arena" else 0  # the next, then the last
    state = ready.parameters * _STATE_BYTES
    # A state is written beside the one before it, then new weights beside those that engines have.
    need = max(kept * state + weights, min(kept, 1) * state + 2 * weights)
    if steps <= 0 or need < config.store.capacity:
        return
    text = (
        f"store.capacity is {_gib(config.store.capacity)}, but a model of {ready.parameters:,} "
        f"parameters needs more than {_gib(need)} of the arena, besides the rollouts: for its "
        f"weights (of {_gib(weights)}, the old beside the new)"
    )
    if kept:
        text += f" and the learner's state (of {_gib(state)}, likewise)"
    text += "; raise store.capacity (--set)"
    if kept:
        text += (
            ", or let a learner that dies go back to the last checkpoint "
            f"(checkpoint.recovery: checkpoint), which needs {_gib(2 * weights)}"
        )
    raise ConfigError(text)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 27 else f"{size / (1 << 20):.1f} MiB"


def open_sources(config: Config, *, held_out: bool) -> list[PromptSource]:
    """One source a task; a task that holds nothing out is not evaluated."""
    tasks = [task for task in config.tasks if not held_out or task.source.holdout > 0]
    return [build_source(task, seed=config.run.seed, held_out=held_out) for task in tasks]


async def open_dispatcher(
    config: Config, store: Store, checkpoint: Checkpoint | None
) -> Dispatcher:
    """Buffer, prompts and books: new ones, or those of the checkpoint. An error leaves no
    session.
    """
    buffer = await _open_buffer(config, store, checkpoint)
    try:
        return _dispatcher(config, buffer, checkpoint)
    except BaseException:
        buffer.close()
        raise


def _dispatcher(config: Config, buffer: ReplayBuffer, checkpoint: Checkpoint | None) -> Dispatcher:
    dispatcher = Dispatcher(
        buffer,
        PromptSampler(
            {s.name: s for s in open_sources(config, held_out=False)},
            seed=config.run.seed,
            epochs={task.name: None if task.source.repeat else 1 for task in config.tasks},
        ),
        _dispatch_config(config),
        TaskMix({task.name: task.weight for task in config.tasks}),
    )
    if checkpoint is not None:
        dispatcher.restore(snapshot.read_state(checkpoint.buffer))
    return dispatcher


async def _open_buffer(config: Config, store: Store, checkpoint: Checkpoint | None) -> ReplayBuffer:
    schedule, replay = config.schedule, config.replay
    retries = replay.expiry == "retry" and replay.tail_batch >= 0
    expiry = Expiry(
        action=ExpiryAction.RETRY if retries else ExpiryAction.DROP,
        max_staleness=schedule.max_staleness,
        sync_interval=schedule.sync_every,
        max_token_staleness=schedule.max_token_staleness,
        tail_batch=replay.tail_batch if retries else None,
    )
    order, limit = replay.order, replay.max_bytes or config.store.capacity // 2
    if checkpoint is None:
        return ReplayBuffer(store, order=order, max_bytes=limit, expiry=expiry)
    return await ReplayBuffer.resume(
        checkpoint.buffer, store, order=order, max_bytes=limit, expiry=expiry
    )


def _dispatch_config(config: Config) -> DispatchConfig:
    schedule = config.schedule
    turns = schedule.name != "async"
    return DispatchConfig(
        batch_groups=config.rollout.prompts_per_step,
        group_size=config.rollout.rollouts_per_prompt,
        budget=StalenessBudget(
            max_staleness=0 if turns else schedule.max_staleness,
            sync_interval=schedule.sync_every,
            batches_ahead_max=_BATCHES_AHEAD_MAX,
        ),
        over_sampling=schedule.oversample - 1.0,
        useless_in_row_max=config.faults.useless_groups_max,
    )


def words_before(config: Config, checkpoint: Checkpoint | None) -> str:
    """What is being built now."""
    text, reference = "building the model", config.learner.kl_coef > 0
    if checkpoint is not None:
        text += f" of step {checkpoint.train_step}"
        text += ", and that of step 0 as its reference" if reference else ""
    if config.warmup and (checkpoint is None or reference):
        text += ", with a warm-up"
        text += ", from the cache if it is there" if config.model.cache_dir else ""
    return text


def words_after(ready: LearnerReady) -> str:
    """What was built."""
    text = f"{ready.parameters:,} parameters, at step {ready.train_step}"
    warmup = ready.warmup
    if warmup:
        text += (
            f", warmed up{' (from the cache)' if warmup['cached'] else ''}: "
            f"{warmup['steps']:.0f} steps, loss {warmup['loss']:.3f}, "
            f"accuracy {warmup['accuracy']:.3f}"
        )
    return text
