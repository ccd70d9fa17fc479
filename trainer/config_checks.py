"""The rules between the fields of a configuration.

Owns: every check that needs more than one field, or the outside world (files, installed packages,
number of experts in a model folder), done before any process starts. Each mistake names the field
that the user should change. Promises: no torch, no network, no side effects.
Called by `trainer.config.load` only.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.config import Config, TaskConfig
from trainer.config_load import Source

__all__ = ["check"]

_RUN_NAME_BYTES_MAX = 40
"""The run's name is part of the names of its arena and of its sockets, which have little room."""


def check(config: Config, source: Source) -> None:
    """Adds to `source.mistakes` whatever makes this configuration impossible to run."""
    rules = (_names, _batches, _intervals, _replay, _model, _routing, _schedule, _tasks, _memory)
    for rule in rules:
        for path, message in rule(config):
            source.add(path, message)


_Found = Iterator[tuple[str, str]]


def _names(config: Config) -> _Found:
    name = config.run.name
    if name is None:
        return
    allowed = all(c.isascii() and (c.isalnum() or c in "-_.") for c in name)
    if not name or not allowed or not name[0].isalnum() or len(name) > _RUN_NAME_BYTES_MAX:
        yield (
            "run.name",
            f"{name!r} must have 1 to {_RUN_NAME_BYTES_MAX} letters, digits, '-', '_', '.' "
            "and begin with a letter or a digit",
        )


def _batches(config: Config) -> _Found:
    groups, members = config.rollout.prompts_per_step, config.rollout.rollouts_per_prompt
    if not config.tasks:
        yield "tasks", "must list at least one task"
    if len(config.tasks) > groups:
        yield (
            "rollout.prompts_per_step",
            f"is {groups}, but {len(config.tasks)} tasks share a batch: each needs a group",
        )
    if members < 2 and config.learner.estimator in ("grpo", "dr_grpo", "rloo"):
        yield (
            "rollout.rollouts_per_prompt",
            f"is {members}; {config.learner.estimator} compares the rollouts of a group and needs "
            "at least 2 (or learner.estimator: mean)",
        )
    if config.learner.minibatches > groups * members:
        yield (
            "learner.minibatches",
            f"is {config.learner.minibatches}, but a batch has only {groups * members} rollouts",
        )


def _intervals(config: Config) -> _Found:
    every, steps = config.schedule.sync_every, config.schedule.steps
    if every > steps:
        yield (
            "schedule.sync_every",
            f"is {every}, but the run has only {steps} steps: weights never sync",
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
        )
    if config.replay.expiry == "drop" and config.replay.tail_batch > 0:
        yield (
            "replay.tail_batch",
            "gathers expired groups for a new attempt, but replay.expiry is drop: use retry, or 0",
        )


def _model(config: Config) -> _Found:
    path = config.model.path
    if path is not None and not (Path(path) / "config.json").is_file():
        yield "model.path", f"{path!r} is no folder with a config.json (from {Path.cwd()})"
    values = config.model.config or {}
    experts = _number(values, "num_experts", "num_local_experts")
    chosen = _number(values, "num_experts_per_tok")
    if experts is not None and chosen is not None and not 1 <= chosen <= experts:
        yield (
            "model.config.num_experts_per_tok",
            f"is {chosen}; a token can use 1 to {experts} experts (there are no more)",
        )
    heads, groups = _number(values, "num_attention_heads"), _number(values, "num_key_value_heads")
    if heads is not None and groups is not None and (groups < 1 or heads % groups):
        yield (
            "model.config.num_key_value_heads",
            f"is {groups}; it must divide num_attention_heads ({heads})",
        )


def _number(values: Mapping[str, object], *names: str) -> int | None:
    found = [values[name] for name in names if name in values]
    return found[0] if found and isinstance(found[0], int) else None


def _routing(config: Config) -> _Found:
    if not config.learner.replay:
        return
    mixture = config.model.is_mixture
    if _number(config.model.config or {}, "num_experts", "num_local_experts") in (0, 1):
        mixture = False
    if mixture is None:
        mixture = _experts_in_folder(config)
    if mixture is False:
        yield (
            "learner.replay",
            "is on, but the model has no experts whose routing could be replayed: set it to false, "
            "or give a mixture (model.upcycle makes one from a dense model)",
        )


def _experts_in_folder(config: Config) -> bool | None:
    if config.model.gguf is not None:
        return False  # the GGUF files that are read here are dense (Llama) models
    if config.model.path is None:
        return None
    file = Path(config.model.path) / "config.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(int(found.get(name) or 0) > 1 for name in names)


def _schedule(config: Config) -> _Found:
    if config.run.deterministic and config.schedule.name == "async":
        yield (
            "run.deterministic",
            "needs schedule.name: sync or colocated; two processes at once do not repeat exactly",
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
    context = int((config.model.config or {}).get("max_position_embeddings", 0) or 0)
    if context and config.rollout.max_new_tokens >= context:
        yield (
            "rollout.max_new_tokens",
            f"is {config.rollout.max_new_tokens}, but the model's context is {context} tokens and "
            "the prompt needs some of them",
        )


def _tasks(config: Config) -> _Found:
    seen: set[str] = set()
    for index, task in enumerate(config.tasks):
        at = f"tasks[{index}]"
        if task.name in seen:
            yield f"{at}.name", f"{task.name!r} is used twice"
        seen.add(task.name)
        for field, message in (*_source(task), *_targets(task)):
            yield f"{at}.{field}", message


def _source(task: TaskConfig) -> _Found:
    source = task.source
    if source.kind == "jsonl":
        if not source.path:
            yield "source.path", "is required for jsonl"
        elif not Path(source.path).is_file():
            yield "source.path", f"{source.path!r} is no file (from {Path.cwd()})"
    elif not source.dataset:
        yield "source.dataset", "is required for reasoning_gym"
    elif importlib.util.find_spec("reasoning_gym") is None:
        yield "source.kind", "reasoning_gym is not installed: pip install 'shmrl[train]'"
    if source.render != "text" and source.dataset != "number_sorting":
        yield "source.render", f"{source.render} works with dataset number_sorting only"
    if task.judge.kind == "reasoning_gym" and source.kind != "reasoning_gym":
        yield "judge.kind", "reasoning_gym scores only items of a reasoning_gym source"
    if task.judge.kind == "math_verify" and importlib.util.find_spec("math_verify") is None:
        yield "judge.kind", "math_verify is not installed: pip install 'shmrl[train]'"
    if task.format_reward and source.render == "text":
        yield "format_reward", "is defined for the compact source.render only"


def _targets(task: TaskConfig) -> _Found:
    wanted: list[tuple[str, str | None, bool]] = [
        ("environment.target", task.environment.target, task.environment.kind == "class"),
        ("judge.target", task.judge.target, task.judge.kind == "callable"),
    ]
    wanted += [(f"environment.tools[{i}]", t, True) for i, t in enumerate(task.environment.tools)]
    for field, target, needed in wanted:
        if needed and not target:
            yield field, "is required: module:name or file.py:name"
        elif target:
            yield from ((field, problem) for problem in _importable(target))
    if task.environment.kind == "tools" and not task.environment.tools:
        yield "environment.tools", "is empty: list the functions, or use single_turn"


def _importable(target: str) -> Iterator[str]:
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        yield f"{target!r} must look like module:name or file.py:name"
    elif module.endswith(".py"):
        if not Path(module).is_file():
            yield f"{module!r} is no file (from {Path.cwd()})"
        else:
            yield from _named_in(Path(module), name)
    else:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            yield f"module {module!r} cannot be found"
        elif spec.origin is not None and spec.origin.endswith(".py"):
            yield from _named_in(Path(spec.origin), name)


def _named_in(file: Path, name: str) -> Iterator[str]:
    """What is wrong with `name` as a top-level name of a Python file; nothing of it is run."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        yield f"{file} is not Python that can be read: {error}"
        return
    names: set[str] = set()
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
            return  # a star may bring any name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((a.asname or a.name).partition(".")[0] for a in node.names)
    if name.partition(".")[0] not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        yield f"{file} has no `{name}`{hint}"


def _memory(config: Config) -> _Found:
    if config.replay.max_bytes >= config.store.capacity:
        yield (
            "replay.max_bytes",
            f"is {config.replay.max_bytes}, but the arena has only {config.store.capacity} bytes "
            "(store.capacity), which also hold the weights",
        )
    rollouts = config.rollout.prompts_per_step * config.rollout.rollouts_per_prompt
    need = rollouts * (config.schedule.max_staleness + 2)
    if need > config.store.max_sessions:
        yield (
            "store.max_sessions",
            f"is {config.store.max_sessions}, but up to {need} rollouts may be alive at once",
        )
