"""What can be known of the tasks before any process starts: prompts, judges, tools, environments.

Owns the checks of the section `tasks` that look at the outside world: prompt files line by line,
data sets and their parameters, the split, and the names of the user's own functions, which are
looked for without running anything of theirs. Promises: no torch, no network, no side effects.
Called by `trainer.config.checks` only.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from trainer.config.model_checks import has_chat_template
from trainer.config.schema import Config, TaskConfig
from trainer.environments.sources import BadPrompts, build_source, gym_datasets, jsonl_problems

__all__ = ["check_tasks"]

_Found = Iterator[tuple[str, str]]
_PROBLEMS_SHOWN_MAX = 5
"""Bad lines of one prompt file that are told one by one."""


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
    if first.messages is None:
        return
    if warms:
        yield (
            "source.chat",
            "gives messages, but the warm-up needs plain prompt text: set source.chat to false and "
            "source.system to null, or remove warmup",
        )
    folder = config.model.path if config.model.tokenizer == "auto" else config.model.tokenizer
    if folder is not None and Path(folder).is_dir() and not has_chat_template(Path(folder)):
        yield (
            "source.chat",
            f"gives messages, but the tokenizer in {folder!r} has no chat template: give prompts "
            "as text, with source.chat: false and source.system: null",
        )


def _judge(task: TaskConfig) -> _Found:
    if task.judge.kind == "reasoning_gym" and task.source.kind != "reasoning_gym":
        yield "judge.kind", "reasoning_gym scores only items of a reasoning_gym source"
    if task.judge.kind == "math_verify" and importlib.util.find_spec("math_verify") is None:
        yield "judge.kind", "math_verify is not installed: pip install 'shmrl[train]'"
    if task.format_reward and task.source.render == "text":
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
            problems = [*_importable(target)]
            if not problems and field == "environment.target":
                problems = [*_environment(target, task.environment.params)]
            yield from ((field, problem) for problem in problems)
    if task.environment.kind == "tools" and not task.environment.tools:
        yield "environment.tools", "is empty: list the functions, or use single_turn"


def _importable(target: str) -> Iterator[str]:
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        yield f"{target!r} must look like module:name or file.py:name"
    elif module.endswith(".py") and not Path(module).is_file():
        yield f"{module!r} is no file (from {Path.cwd()})"
    elif not module.endswith(".py") and _spec(module) is None:
        yield f"module {module!r} cannot be found"
    else:
        file = _file_of(module)
        if file is not None:
            yield from _named_in(file, name)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _file_of(module: str) -> Path | None:
    """The Python source of a module or file name; None when it has none."""
    if module.endswith(".py"):
        return Path(module)
    spec = _spec(module)
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _environment(target: str, params: Mapping[str, object]) -> Iterator[str]:
    """What of a user's class does not fit, as far as it is written in the class itself."""
    module, _, name = target.partition(":")
    file = _file_of(module)
    body = [] if file is None else ast.parse(file.read_bytes()).body
    made = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if made is None or made.bases or made.keywords or made.decorator_list:
        return  # it may have what it needs from elsewhere
    defined = [n for n in made.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if len(defined) < sum(not isinstance(n, ast.Expr | ast.Pass) for n in made.body):
        return  # names that are assigned may be methods too
    methods = {method.name: method for method in defined}
    if not isinstance(methods.get("run"), ast.AsyncFunctionDef):
        yield f"{name} has no `async def run(self, session, prompt)`"
    if "__init__" not in methods:
        taken, needed, anything = set[str](), set[str](), False
    else:
        arguments = methods["__init__"].args
        plain = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
        needed = set(plain[: len(plain) - len(arguments.defaults)])
        for keyword, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            needed |= {keyword.arg} if default is None else set()
        taken = {*plain, *(a.arg for a in arguments.kwonlyargs)}
        anything = arguments.kwarg is not None
    missing, unknown = sorted(needed - params.keys()), sorted(params.keys() - taken)
    if missing:
        yield f"{name}.__init__ needs `{', '.join(missing)}` in environment.params"
    if unknown and not anything:
        yield f"{name}.__init__ takes no `{', '.join(unknown)}` (environment.params)"


def _named_in(file: Path, name: str) -> Iterator[str]:
    """What is wrong with `name` as a top-level name of a Python file; nothing of it is run."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        yield f"{file} is not Python that can be read: {error}"
        return
    for package in sorted(_missing_imports(body)):
        yield f"{file} imports {package!r}, which is not installed"
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


def _missing_imports(body: Sequence[ast.stmt]) -> set[str]:
    """Packages that a file imports first thing, outside any condition, and that are not there."""
    if any("sys.path" in ast.unparse(node) for node in body):
        return set()  # it looks elsewhere as well
    packages: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            packages.update(a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return {p for p in packages if _spec(p) is None}
