"""The rules between the fields of a configuration.

Owns: every check that needs more than one field. Those that look at the outside world (files,
installed packages) are in `model_checks` and `task_checks`; all are done before any
process starts. Each mistake names the field that the user should change. Promises: no torch, no
network, no side effects.
Called by `trainer.config.load` only.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.model_checks import check_model, context_of, experts_of
from trainer.config.parsing import Source
from trainer.config.schema import Config
from trainer.config.task_checks import check_tasks
from trainer.errors import ConfigError
from trainer.model.config import EngineConfig, LearnerConfig
from trainer.placement import cuda_number

__all__ = ["check", "run_name_problem"]

_RUN_NAME_BYTES_MAX = 40
"""The run's name is part of the names of its arena and of its sockets, which have little room."""


def check(config: Config, source: Source) -> None:
    """Adds to `source.mistakes` whatever makes this configuration impossible to run."""
    rules = (
        _names,
        _batches,
        _waiting,
        _intervals,
        _replay,
        check_model,
        _routing,
        _schedule,
        check_tasks,
        _devices,
        _memory,
    )
    wrong = {m.path.rpartition(".")[0] + "." for m in source.mistakes}
    broken = tuple(wrong & _task_sections(config))
    for rule in rules:
        for path, message, *read in rule(config):
            # A field that is wrong was left out: what is said of its default would be no help.
            if not path.startswith(broken) and not any(map(source.is_wrong, read)):
                source.add(path, message)


def _task_sections(config: Config) -> set[str]:
    """Prefixes of the parts of a task, of which a mistake in one field says all there is to say."""
    parts = ("source", "judge", "environment")
    return {f"tasks[{index}].{part}." for index in range(len(config.tasks)) for part in parts}


_Found = Iterator[tuple[str, ...]]
"""(path, message, paths of the other fields that the message speaks of)."""


def _names(config: Config) -> _Found:
    name = config.run.name
    problem = run_name_problem(name) if name is not None else None
    if problem is not None:
        yield "run.name", problem


def run_name_problem(name: str) -> str | None:
    """What is wrong with the name of a run, if anything."""
    allowed = all(c.isascii() and (c.isalnum() or c in "-_.") for c in name)
    if name and allowed and name[0].isalnum() and len(name) <= _RUN_NAME_BYTES_MAX:
        return None
    return (
        f"{name!r} must have 1 to {_RUN_NAME_BYTES_MAX} letters, digits, '-', '_', '.' "
        "and begin with a letter or a digit"
    )


def _batches(config: Config) -> _Found:
    groups, members = config.rollout.prompts_per_step, config.rollout.rollouts_per_prompt
    if not config.tasks:
        yield "tasks", "must list at least one task"
    if len(config.tasks) > groups:
        yield (
            "rollout.prompts_per_step",
            f"is {groups}, but {len(config.tasks)} tasks share a batch: each needs a group",
            "tasks",
        )
    if members < 2 and config.learner.estimator in ("grpo", "dr_grpo", "rloo"):
        yield (
            "rollout.rollouts_per_prompt",
            f"is {members}; {config.learner.estimator} compares the rollouts of a group and needs "
            "at least 2 (or learner.estimator: mean)",
            "learner.estimator",
        )
    if config.learner.minibatches > groups * members:
        yield (
            "learner.minibatches",
            f"is {config.learner.minibatches}, but a batch has only {groups * members} rollouts",
            "rollout.prompts_per_step",
            "rollout.rollouts_per_prompt",
        )


def _waiting(config: Config) -> _Found:
    """A group goes to one engine as a whole, which fails what it cannot let wait."""
    engine = config.engine
    sizes = {"rollout.rollouts_per_prompt": config.rollout.rollouts_per_prompt}
    shared = ""
    accepted = engine.max_batch + engine.waiting_max
    if config.eval.prompts:
        sizes["eval.rollouts_per_prompt"] = config.eval.rollouts_per_prompt
        if config.schedule.name == "async":  # both at once
            accepted //= 2
            shared = ", half of them of an evaluation"
    largest = max(sizes, key=lambda path: sizes[path])
    if sizes[largest] > accepted:
        need = (2 if shared else 1) * sizes[largest] - engine.max_batch
        yield (
            "engine.waiting_max",
            f"is {engine.waiting_max}, and engine.max_batch is {engine.max_batch}: an engine takes "
            f"{engine.max_batch + engine.waiting_max} requests at once{shared}, but a group has "
            f"{sizes[largest]} ({largest}), and the rest of them would fail: use at least {need}",
            "engine.max_batch",
            *sizes,
        )


def _intervals(config: Config) -> _Found:
    every, steps = config.schedule.sync_every, config.schedule.steps
    if every > steps:
        yield (
            "schedule.sync_every",
            f"is {every}, but the run has only {steps} steps: weights never sync",
            "schedule.steps",
        )
    for path, interval in (
        ("checkpoint.every", config.checkpoint.every),
        ("checkpoint.hf_every", config.checkpoint.hf_every),
        ("eval.every", config.eval.every),
    ):
        if interval and interval % every:
            yield (
                path,
                f"is {interval}, which does not meet a weight sync every time (schedule.sync_every "
                f"is {every}): use a multiple of {every}",
                "schedule.sync_every",
            )


def _replay(config: Config) -> _Found:
    schedule = config.schedule
    tokens = schedule.max_token_staleness
    limit = (schedule.max_staleness + 1) * schedule.sync_every
    if tokens is not None and tokens >= limit:
        yield (
            "schedule.max_token_staleness",
            f"is {tokens}, but a rollout already expires at staleness {limit} "
            "((max_staleness + 1) × sync_every): no token would ever be masked",
            "schedule.max_staleness",
            "schedule.sync_every",
        )
    if config.replay.expiry == "drop" and config.replay.tail_batch > 0:
        yield (
            "replay.tail_batch",
            "gathers expired groups for a new attempt, but replay.expiry is drop: use retry, or 0",
            "replay.expiry",
        )


def _routing(config: Config) -> _Found:
    if not config.learner.replay:
        return
    experts = experts_of(config.model)
    if experts is not None and experts < 2:
        yield (
            "learner.replay",
            "is on, but the model has no experts whose routing could be replayed: set it to false, "
            "or give a mixture (model.upcycle makes one from a dense model)",
        )


def _schedule(config: Config) -> _Found:
    if config.run.deterministic and config.schedule.name == "async":
        yield (
            "run.deterministic",
            "needs schedule.name: sync or colocated; two processes at once do not repeat exactly",
        )
    elif config.run.deterministic and config.schedule.oversample > 1:
        yield (
            "run.deterministic",
            f"needs schedule.oversample: 1, not {config.schedule.oversample}; which rollouts are "
            "beyond a batch, and how far they are then, does not repeat exactly",
        )
    if config.engine.replicas > 1 and config.engine.inline:
        yield "engine.inline", f"must be false for engine.replicas: {config.engine.replicas}"
    if config.learner.temperature != config.rollout.temperature:
        yield (
            "learner.temperature",
            f"is {config.learner.temperature}, but rollouts are sampled at "
            f"{config.rollout.temperature}: the loss would use other probabilities than the "
            "sampling",
        )
    context = context_of(config.model)
    if context and config.rollout.max_new_tokens >= context:
        yield (
            "rollout.max_new_tokens",
            f"is {config.rollout.max_new_tokens}, but the model's context is {context} tokens and "
            "the prompt needs some of them",
        )


def _devices(config: Config) -> _Found:
    numbers: dict[str, int | None] = {}
    shares: list[float | None] = []
    sections: tuple[tuple[str, LearnerConfig | EngineConfig], ...] = (
        ("learner", config.learner),
        ("engine", config.engine),
    )
    for name, section in sections:
        shares.append(section.memory_fraction)
        try:
            numbers[name] = cuda_number(section.device)
        except ConfigError as error:
            yield f"{name}.device", str(error).removeprefix("device ")
            continue
        if numbers[name] is None and section.memory_fraction is not None:
            yield f"{name}.memory_fraction", "is a share of a GPU's memory, but the device is cpu"
    learner, engine = numbers.get("learner"), numbers.get("engine")
    if learner is None or engine is None or config.schedule.name == "colocated":
        return
    shared = engine <= learner < engine + config.engine.replicas
    if shared and (None in shares or sum(share or 0.0 for share in shares) > 1.0):
        yield (
            "learner.memory_fraction",
            f"learner and engine share cuda:{learner}: give both learner.memory_fraction and "
            "engine.memory_fraction, together at most 1 (or take turns: schedule.name: colocated)",
        )


def _memory(config: Config) -> _Found:
    limit, capacity = config.replay.max_bytes, config.store.capacity
    if limit is not None and limit >= capacity:
        yield (
            "replay.max_bytes",
            f"is {limit}, but the arena has only {capacity} bytes (store.capacity), which also "
            "hold the weights",
            "store.capacity",
        )
    rollouts = config.rollout.prompts_per_step * config.rollout.rollouts_per_prompt
    need = rollouts * (config.schedule.max_staleness + 2)
    if need > config.store.max_sessions:
        yield (
            "store.max_sessions",
            f"is {config.store.max_sessions}, but up to {need} rollouts may be alive at once",
            "rollout.prompts_per_step",
            "rollout.rollouts_per_prompt",
            "schedule.max_staleness",
        )
