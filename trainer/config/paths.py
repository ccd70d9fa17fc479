"""The files and folders that a configuration names, made absolute.

Owns which fields those are. A run's own `config.yaml` keeps them so, that `shmrl resume` and `shmrl
eval` work from any directory. Called by `trainer.run.folder`; pure but for the working directory.
"""

from __future__ import annotations

import os
from dataclasses import replace

from trainer.config.schema import Config, TaskConfig
from trainer.model.config import ModelConfig

__all__ = ["with_absolute_paths"]


def with_absolute_paths(config: Config) -> Config:
    """The same configuration, read from any directory."""
    return replace(
        config,
        run=replace(config.run, folder=os.path.abspath(config.run.folder)),
        model=_model(config.model),
        tasks=tuple(_task(task) for task in config.tasks),
    )


def _model(model: ModelConfig) -> ModelConfig:
    file = model.gguf is not None and model.gguf.endswith(".gguf")  # else an installed package
    return replace(
        model,
        path=_absolute(model.path),
        gguf=_absolute(model.gguf) if file else model.gguf,
        tokenizer=model.tokenizer
        if model.tokenizer in ("auto", "char")
        else os.path.abspath(model.tokenizer),
        cache_dir=_absolute(model.cache_dir),
    )


def _task(task: TaskConfig) -> TaskConfig:
    environment = task.environment
    return replace(
        task,
        source=replace(task.source, path=_absolute(task.source.path)),
        environment=replace(
            environment,
            target=_target(environment.target),
            tools=tuple(_target(tool) or tool for tool in environment.tools),
        ),
        judge=replace(task.judge, target=_target(task.judge.target)),
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _target(target: str | None) -> str | None:
    """`file.py:name` with the file's whole path; `module:name` as it is."""
    where, colon, name = (target or "").partition(":")
    return f"{os.path.abspath(where)}:{name}" if colon and where.endswith(".py") else target
