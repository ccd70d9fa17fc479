"""What can be known of the tasks before any process starts: prompts, judges, tools, environments.

Owns the checks of the section `tasks` that look at the outside world: prompt files line by line,
data sets and their parameters and the split; the user's own functions are
`trainer.config.target_checks`'. Promises: no torch, no network, no side effects.
Called by `trainer.config.checks` only.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from trainer.config.model_checks import has_chat_template, has_tokenizer
from trainer.config.schema import Config, TaskConfig
from trainer.config.target_checks import environment_problems, judge_problems, tool_problems
from trainer.environments.sources import (
    BadPrompts,
    PromptSource,
    build_source,
    gym_datasets,
    jsonl_problems,
)

__all__ = ["check_tasks"]

_Found = Iterator[tuple[str, str]]
_PROBLEMS_SHOWN_MAX = 5
"""Bad lines of one prompt file that are told one by one."""
_PROMPTS_READ_MAX = 256
"""On each side, for characters that no tokenizer of characters would know."""


def check_tasks(config: Config) -> _Found:
    """Every mistake of the section `tasks`, as (path, message)."""
    seen: set[str] = set()
    for index, task in enumerate(config.tasks):
        at = f"tasks[{index}]"
        if task.name in seen:
            yield f"{at}.name", f"{task.name!r} is used twice"
        seen.add(task.name)
        rules = (_source(task), _prompts(config, task), _judge(task), _targets(task))
        for field, message in itertools.chain.from_iterable(rules):
            yield f"{at}.{field}", message


def _source(task: TaskConfig) -> _Found:
    source = task.source
    if source.kind == "jsonl":
        if not source.path:
            yield "source.path", "is required for jsonl"
        elif not Path(source.path).is_file():
            yield "source.path", f"{source.path!r} is no file (from {Path.cwd()})"
        else:
            problems = jsonl_problems(Path(source.path), source)
            if problems:
                yield "source.path", _some(problems)
    elif not source.dataset:
        yield "source.dataset", "is required for reasoning_gym"
    elif importlib.util.find_spec("reasoning_gym") is None:
        yield "source.kind", "reasoning_gym is not installed: pip install 'shmrl[train]'"
    elif source.dataset not in gym_datasets():
        near = difflib.get_close_matches(source.dataset, gym_datasets(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield "source.dataset", f"reasoning_gym has no data set {source.dataset!r}{hint}"
    if source.render != "text" and source.dataset != "number_sorting":
        yield "source.render", f"{source.render} works with dataset number_sorting only"


def _some(problems: Sequence[str]) -> str:
    """The first of many problems, and how many there are."""
    more = len(problems) - _PROBLEMS_SHOWN_MAX
    return "; ".join(problems[:_PROBLEMS_SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")


def _prompts(config: Config, task: TaskConfig) -> _Found:
    """Both sides of the split have a first prompt, of the form that the run needs."""
    if any(True for _ in _source(task)):
        return
    try:
        sides = [build_source(task, seed=config.run.seed, held_out=False)]
    except BadPrompts as error:
        yield ("source.holdout" if task.source.kind == "jsonl" else "source.params"), str(error)
        return
    warms = config.warmup is not None and config.warmup.steps_max > 0
    try:
        if task.source.holdout > 0 and (config.eval.prompts or warms):
            sides.append(build_source(task, seed=config.run.seed, held_out=True))
        first, *_ = [side.prompt(0) for side in sides]
    except BadPrompts as error:
        yield "source.holdout", str(error)
        return
    if config.model.tokenizer == "char" and task.environment.kind == "single_turn":
        unknown = _characters(sides) - {*config.model.alphabet}
        if unknown:
            named = _some([repr(one) for one in sorted(unknown)])
            yield (
                "source",
                f"prompts hold characters that are not in model.alphabet ({named}): add them to "
                "it, or use another tokenizer",
            )
    if first.messages is None:
        return
    if warms:
        yield (
            "source.chat",
            "gives messages, but the warm-up needs plain prompt text: set source.chat to false and "
            "source.system to null, or remove warmup",
        )
    folder = config.model.path if config.model.tokenizer == "auto" else config.model.tokenizer
    place = Path(folder) if folder is not None else None
    if place is not None and has_tokenizer(place) and not has_chat_template(place):
        yield (
            "source.chat",
            f"gives messages, but the tokenizer in {folder!r} has no chat template: give prompts "
            "as text, with source.chat: false and source.system: null",
        )


def _characters(sides: Sequence[PromptSource]) -> set[str]:
    """Of the first prompts on each side."""
    found: set[str] = set()
    for side in sides:
        for index in range(min(side.size or _PROMPTS_READ_MAX, _PROMPTS_READ_MAX)):
            prompt = side.prompt(index)
            found.update(prompt.text or "")
            for message in prompt.messages or ():
                found.update(str(message["content"]))
    return found


def _judge(task: TaskConfig) -> _Found:
    if task.judge.kind == "reasoning_gym" and task.source.kind != "reasoning_gym":
        yield "judge.kind", "reasoning_gym scores only items of a reasoning_gym source"
    if task.judge.kind == "math_verify" and importlib.util.find_spec("math_verify") is None:
        yield "judge.kind", "math_verify is not installed: pip install 'shmrl[train]'"
    if task.format_reward and task.source.render == "text":
        yield "format_reward", "is defined for the compact source.render only"


def _targets(task: TaskConfig) -> _Found:
    environment, judge = task.environment, task.judge
    fits = partial(environment_problems, params=environment.params)
    wanted: list[tuple[str, str | None, bool, Callable[[str], Iterator[str]]]] = [
        ("environment.target", environment.target, environment.kind == "class", fits),
        ("judge.target", judge.target, judge.kind == "callable", judge_problems),
    ]
    wanted += [
        (f"environment.tools[{i}]", t, True, tool_problems) for i, t in enumerate(environment.tools)
    ]
    for field, target, needed, check in wanted:
        if needed and not target:
            yield field, "is required: module:name or file.py:name"
        elif target:
            yield from ((field, problem) for problem in check(target))
    if environment.kind == "tools" and not environment.tools:
        yield "environment.tools", "is empty: list the functions, or use single_turn"
