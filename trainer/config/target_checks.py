"""What can be known of a user's judges, tools and environments without running anything of theirs.

Owns the look into their sources: whether a name leads to something, and whether that can be called
as the run calls it, as far as it is written there. What another module, a decorator or a base class
decides, what is built in or compiled, passes: the run will tell. Promises: nothing of the user's is
imported or run. Called by `trainer.config.task_checks` only.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType

__all__ = ["environment_problems", "judge_problems", "tool_problems"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = ast.ClassDef | _Function


def environment_problems(target: str, params: Mapping[str, object]) -> Iterator[str]:
    """What of a user's class does not fit, as far as it is written in the class itself."""
    made = yield from _found(target)
    if not isinstance(made, ast.ClassDef) or made.bases or made.keywords:
        return  # it may have what it needs from elsewhere
    defined = [n for n in made.body if isinstance(n, _Function)]
    if len(defined) < sum(not isinstance(n, ast.Expr | ast.Pass) for n in made.body):
        return  # names that are assigned may be methods too
    methods = {method.name: method for method in defined}
    run, init = methods.get("run"), methods.get("__init__")
    if run is not None and run.decorator_list:
        pass  # it is what the decorator makes of it
    elif not isinstance(run, ast.AsyncFunctionDef):
        yield f"{made.name} has no `async def run(self, session, prompt)`"
    else:
        yield from _refusal(run, "a session and a prompt", ("self", "session", "prompt"))
    if init is None and params:
        yield f"{made.name} has no __init__ that takes `{', '.join(params)}` (environment.params)"
    elif init is not None and not init.decorator_list:
        yield from _refusal(init, "environment.params", ("self",), params)


def judge_problems(target: str) -> Iterator[str]:
    """A judge is called with a prompt and a text."""
    made = yield from _found(target)
    if isinstance(made, _Function):
        yield from _refusal(made, "a prompt and a text", ("prompt", "text"))


def tool_problems(target: str) -> Iterator[str]:
    """A tool is called with the names and values that the model writes."""
    made = yield from _found(target)
    if isinstance(made, _Function):
        unnamed = [a.arg for a in made.args.posonlyargs]
        if unnamed and len(made.args.defaults) < len(unnamed) + len(made.args.args):
            yield (
                f"{made.name} takes `{', '.join(unnamed)}` by position only, but a tool is called "
                "by the names that the model writes"
            )


def _found(target: str) -> Generator[str, None, _Definition | None]:
    """Tells what is wrong with the name; → its definition, if that says how it can be called."""
    problems = [*_importable(target)]
    yield from problems
    return None if problems else _defined(target)


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
    """By hand below the first name: `find_spec` imports the packages above the one it looks for."""
    if module in sys.modules:
        return sys.modules[module].__spec__
    name, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        return None
    folders = [*(spec.submodule_search_locations or ())] if spec is not None else []
    for part in rest:
        name = f"{name}.{part}"
        found = [one for folder in folders if (one := _in_folder(folder, name)) is not None]
        spec = next((one for one in found if one.loader is not None), None)
        parts = found if spec is None else [spec]  # none: a namespace, of all its folders
        folders = [path for one in parts for path in one.submodule_search_locations or ()]
    return spec


def _in_folder(folder: str, name: str) -> ModuleSpec | None:
    finder = pkgutil.get_importer(folder)
    return None if finder is None else finder.find_spec(name, None)


def _file_of(module: str) -> Path | None:
    """The Python source of a module or file name; None when it has none."""
    if module.endswith(".py"):
        return Path(module)
    spec = _spec(module)
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _defined(target: str) -> _Definition | None:
    """What `target` names, when its file defines it once and nothing else decides what it is."""
    module, _, name = target.partition(":")
    file = _file_of(module)
    if file is None:
        return None
    tree = ast.parse(file.read_bytes())
    found = [node for node in tree.body if isinstance(node, _Definition) and node.name == name]
    names = _bound(tree)
    alone = len(found) == 1 and names.count(name) == 1 and "*" not in names
    return found[0] if alone and not found[0].decorator_list else None


def _refusal(
    function: _Function,
    what: str,
    args: Sequence[str],
    named: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[str]:
    """Why a function cannot be called like that, if it cannot."""
    try:
        _signature(function.args).bind(*args, **named)
    except TypeError as error:
        told = f"{function.name}({ast.unparse(function.args)})"
        yield f"`{told}` cannot be called with {what}: {error}"


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """The signature that is written there; every default counts as None."""
    kind, made = inspect.Parameter, list[inspect.Parameter]()
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    for index, argument in enumerate(plain):
        by_name = index >= len(arguments.posonlyargs)
        how = kind.POSITIONAL_OR_KEYWORD if by_name else kind.POSITIONAL_ONLY
        default = None if index >= first_default else kind.empty
        made.append(kind(argument.arg, how, default=default))
    if arguments.vararg is not None:
        made.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = kind.empty if given is None else None
        made.append(kind(argument.arg, kind.KEYWORD_ONLY, default=default))
    if arguments.kwarg is not None:
        made.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(made)


def _named_in(file: Path, name: str) -> Iterator[str]:
    """What is wrong with `name` as a top-level name of a Python file; nothing of it is run."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        yield f"{file} is not Python that can be read: {error}"
        return
    for package in sorted(_missing_imports(tree.body)):
        yield f"{file} imports {package!r}, which is not installed"
    names = _bound(tree)
    any_name = "*" in names or _makes_names(tree.body)
    if name.partition(".")[0] not in names and not any_name:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        yield f"{file} has no `{name}`{hint}"


def _makes_names(body: Sequence[ast.stmt]) -> bool:
    """Whether a `__getattr__` of the module itself makes names as they are asked for."""
    return any("__getattr__" in _bound(node) for node in body if not isinstance(node, ast.ClassDef))


def _bound(tree: ast.AST) -> list[str]:
    """Every name that is given to something there, as often as it is; `*` of a star import."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += ((a.asname or a.name).partition(".")[0] for a in node.names)
    return names


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
