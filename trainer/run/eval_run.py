"""`shmrl eval RUN`: the rewards of a checkpoint on held-out prompts, without training.

Owns a small run of its own: an arena, the learner's process (which reads the checkpoint and
publishes its weights), the engine. Promises to add a line to the run's `evals.jsonl`, to touch
nothing else of it, and to leave nothing in the arena.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import actors
from trainer.config import Config, EvalConfig
from trainer.errors import ConfigError, TrainerError
from trainer.rollout import Prompt
from trainer.run.beside import beside, first_error
from trainer.run.driver import held_out_prompts
from trainer.run.folder import BadRunFolder, RunFolder
from trainer.run.learner_actor import WEIGHTS_OWNER
from trainer.run.opening import open_arena, open_sources
from trainer.run.signals import cancelled_by_signals, handlers_put_back
from trainer.run.summary import Summary
from trainer.run.wiring import open_parts

__all__ = ["evaluate_run"]


def _silent(_: str) -> None:
    return None


def evaluate_run(
    folder: RunFolder,
    *,
    step: int | None,
    prompts: int | None,
    temperature: float | None,
    gpus: Sequence[str] | None = None,
    say: Callable[[str], None] = _silent,
) -> dict[str, Any]:
    """Evaluates the newest checkpoint, or that of `step`. Raises BadRunFolder when it is absent,
    ConfigError when no task holds prompts out.

    gpus: what CUDA calls the devices that may be used; None: those of the machine. `say` is told
    how far it is. → what `evals.jsonl` keeps; `reward` is None when every rollout failed;
    `left_by_owner` is there when something was left in the arena. Interrupted, it leaves nothing
    and raises KeyboardInterrupt; killed processes are started again as in training.
    """
    config = folder.config()
    chosen, checkpoint = _checkpoint(folder, step)
    count = prompts or config.eval.prompts or EvalConfig().prompts
    wanted = held_out_prompts(open_sources(config, held_out=True), count, say)
    if not wanted:
        raise ConfigError(
            f"{folder.path}: source.holdout is 0 in every task, so nothing can be "
            "evaluated; train with a share of the prompts held out"
        )
    heat = config.eval.temperature if temperature is None else temperature
    summary = Summary(f"{folder.name[:30]}-eval-{os.getpid()}")
    say(f"the model of step {chosen} is built twice, for learner and engine")
    try:
        with handlers_put_back():
            found = actors.run(
                _evaluate(config, folder.logs, checkpoint, wanted, heat, gpus, say, summary)
            )
    except asyncio.CancelledError:
        say("the evaluation was interrupted; nothing is kept of it")
        raise KeyboardInterrupt from None
    except (OSError, ExceptionGroup) as error:
        first = first_error(error)
        if isinstance(first, OSError) and first.errno is not None:  # of the system, and not ours
            raise TrainerError(f"{folder.path} could not be evaluated: {first}") from error
        raise first from None
    result: dict[str, Any] = {
        "run": folder.name,
        "step": chosen,
        "prompts": len(wanted),
        "temperature": heat,
        **{name: _plain(value) for name, value in found.items()},
    }
    try:
        folder.add_eval(result)
    except OSError as error:
        say(f"{folder.evals_file} could not be written: {error}")
    if summary.left_by_owner:
        result["left_by_owner"] = dict(summary.left_by_owner)
    return result


async def _evaluate(
    config: Config,
    logs: Path,
    checkpoint: Path,
    wanted: Sequence[Prompt],
    temperature: float,
    gpus: Sequence[str] | None,
    say: Callable[[str], None],
    summary: Summary,
) -> dict[str, float]:
    name = summary.run
    with cancelled_by_signals(say), open_arena(config, name, summary) as store:
        try:
            async with open_parts(config, name, store, logs / "eval", say, gpus) as parts:
                async with asyncio.TaskGroup() as tasks:
                    starting = tasks.create_task(parts.learner.start(str(checkpoint / "learner")))
                    tasks.create_task(parts.producer.prepare())
                weights = await parts.learner.publish(starting.result().train_step)
                await parts.producer.begin(weights, None, None)
                each = config.eval.rollouts_per_prompt
                say(f"evaluating {len(wanted)} held-out prompts, {each} rollout(s) each")
                found = await beside(
                    [parts.producer.supervise()],
                    parts.producer.evaluate(wanted, each, temperature, config.eval.timeout_s),
                )
                await parts.producer.end()
        finally:
            store.sessions.release_owned(WEIGHTS_OWNER)
    return found


def _plain(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else round(value, 6)


def _checkpoint(folder: RunFolder, step: int | None) -> tuple[int, Path]:
    if step is not None:
        path = folder.checkpoints / f"step-{step}"
        if not (path / "driver.json").is_file():
            there = ", ".join(sorted(p.name for p in folder.checkpoints.glob("step-*"))) or "none"
            raise BadRunFolder(f"{path} is no checkpoint; there are: {there}")
        return step, path
    latest = folder.latest_checkpoint()
    if latest is None:
        raise BadRunFolder(f"{folder.path} has no checkpoint yet; train it first")
    return latest
