"""The house rules as tests: what a reviewer would have to look for in every file, found by machine.

Owns the rules' allow-lists. Each entry of an allow-list is a file (or file::name) with the reason
why the rule does not hold there; an entry that no longer excuses anything fails too, so that the
lists only shrink. A rule's message names the file, the line and what to write instead.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import tree

# What may be imported from where. Layer -> names that no module of it imports, at any time.
FORBIDDEN_IMPORTS = {
    "shmstore": ("actors", "trainer", "bench", "tests", "zmq"),
    "actors": ("trainer", "bench", "tests", "torch", "transformers"),
    "trainer": ("bench", "tests"),
}
# Layer -> names that are imported only inside functions, because the layer works without them.
LAZY_IMPORTS = {
    "shmstore": ("torch", "numba", "matplotlib"),
    "actors": ("ray", "matplotlib"),
}
# The life of a rollout needs no language model.
LIFECYCLE_MODULES = (
    *("rollout", "trace", "staleness", "prompts", "replay", "expiry", "producer", "pending"),
    *("ledger", "snapshot", "evaluation", "errors", "tail_batch", "schedule", "run.watchdog"),
    *("environment", "dispatch", "window", "engine.protocol", "engine.scripted", "testing"),
)

UPWARD_IMPORTS = {"trainer/cli.py": "`shmrl bench` in a checkout runs the benchmarks, lazily"}
ENVIRONMENT_READERS = {"actors/child.py": "sets up the environment of the process that it becomes"}
SLEEPERS: dict[str, str] = {}
BROAD_HANDLERS: dict[str, str] = {}
PRINTERS: dict[str, str] = {}
UNIMPORTED = {
    "trainer/config/docs.py": "python -m trainer.config.docs writes the documents",
    "trainer/engine/scripted.py": "an engine without a model, for tests and for users' own",
}
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
PRIVATE_IMPORTS: dict[str, str] = {}

FILE_LINES_MAX = 550
CPP_FILE_LINES_MAX = 1200
FUNCTION_LINES_MAX = 80
COMMAND_LINE_FILES = frozenset({"cli.py", "__main__.py"})
PRINTING_FILES = COMMAND_LINE_FILES | {"display.py", "top.py", "doctor.py", "plot.py"}

# Rules of the life of a rollout that have no test, with the reason.
RULES_NOT_PROVEN: dict[str, str] = {}


def verdict(problems: Mapping[str, str], allowed: Mapping[str, str]) -> None:
    """Fails with problems that no allow-list entry excuses, and with entries that excuse none."""
    left = [
        f"{where}: {text}"
        for where, text in problems.items()
        if not any(where == key or where.startswith((f"{key}:", f"{key}/")) for key in allowed)
    ]
    stale = [
        f"allow-list entry {key!r} excuses nothing: remove it"
        for key in allowed
        if not any(where == key or where.startswith((f"{key}:", f"{key}/")) for where in problems)
    ]
    assert not left + stale, "\n" + "\n".join(left + stale)


def place(path: Path, node: ast.AST) -> str:
    return f"{tree.name(path)}:{getattr(node, 'lineno', 0)}"


def starts_with_module(found: str, wanted: str) -> bool:
    return found == wanted or found.startswith(f"{wanted}.")


# -- layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", tree.PACKAGES)
def test_imports_point_down_only(layer: str) -> None:
    problems: dict[str, str] = {}
    for path in tree.python_files(layer):
        for found, statement, at_import in tree.imports(path):
            for wanted in FORBIDDEN_IMPORTS[layer]:
                if starts_with_module(found, wanted):
                    problems[place(path, statement)] = f"{layer} does not import {wanted}"
            for wanted in LAZY_IMPORTS.get(layer, ()):
                if at_import and starts_with_module(found, wanted):
                    problems[place(path, statement)] = f"import {wanted} inside the function"
    verdict(problems, {k: why for k, why in UPWARD_IMPORTS.items() if k.startswith(layer)})


def importable_without(blocked: tuple[str, ...], modules: list[str]) -> str:
    """Imports the modules in a fresh interpreter where `blocked` cannot be imported; "" if fine."""
    script = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        f"for name in {modules!r}: __import__(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tree.ROOT,
        env={**os.environ, "PYTHONPATH": str(tree.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr


def modules_of(layer: str) -> list[str]:
    return [
        tree.module_name(path) for path in tree.python_files(layer) if path.name != "__main__.py"
    ]


@pytest.mark.parametrize(
    ("layer", "blocked"),
    [
        ("shmstore", ("zmq", "torch", "actors", "trainer")),
        ("actors", ("torch", "transformers", "trainer")),
    ],
)
def test_each_layer_works_without_those_above_it(layer: str, blocked: tuple[str, ...]) -> None:
    assert importable_without(blocked, modules_of(layer)) == ""


def test_the_life_of_a_rollout_works_without_torch() -> None:
    modules = [f"trainer.{module}" for module in LIFECYCLE_MODULES]
    assert importable_without(("torch", "transformers"), modules) == ""


def test_underscore_names_stay_in_their_module() -> None:
    problems: dict[str, str] = {}
    for path in tree.python_files(*tree.PACKAGES):
        for statement in ast.walk(tree.syntax(path)):
            if not isinstance(statement, ast.ImportFrom):
                continue
            ours = statement.level > 0 or (statement.module or "").split(".")[0] in tree.PACKAGES
            for alias in statement.names:
                private = alias.name.startswith("_") and not alias.name.startswith("__")
                if ours and private and alias.name != "_core":
                    problems[place(path, statement)] = f"{alias.name} is another module's own"
    verdict(problems, PRIVATE_IMPORTS)


def test_every_package_says_what_it_exports() -> None:
    problems = {
        tree.name(path): "no __all__"
        for path in tree.python_files(*tree.PACKAGES)
        if path.name == "__init__.py" and "__all__" not in tree.source(path)
    }
    verdict(problems, {})


def test_no_module_is_dead() -> None:
    """Each module is imported by another one, named as a string (a process that is started with
    `-m`, a `module:function`), or an entry point. `testing` modules are for users."""
    used: set[str] = set()
    for path in tree.python_files(*tree.PACKAGES):
        own = tree.module_name(path)
        used |= {found for found, _, _ in tree.imports(path) if not starts_with_module(own, found)}
        used |= {
            node.value.partition(":")[0]
            for node in ast.walk(tree.syntax(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    entry_points = tree.source(tree.ROOT / "pyproject.toml")
    problems = {}
    for path in tree.python_files(*tree.PACKAGES):
        module = tree.module_name(path)
        entry = path.name in ("__init__.py", "__main__.py", "testing.py")
        if not entry and module not in used and f'"{module}:' not in entry_points:
            problems[tree.name(path)] = "nothing imports it"
    verdict(problems, UNIMPORTED)


# -- footguns -----------------------------------------------------------------------------------


def test_no_environment_variable_is_read_below_the_command_line() -> None:
    readers = {"os.environ", "os.environb", "os.getenv", "os.putenv", "environ", "getenv"}
    problems: dict[str, str] = {}
    for path in tree.python_files(*tree.PACKAGES):
        if path.name in COMMAND_LINE_FILES:
            continue
        for node in ast.walk(tree.syntax(path)):
            if isinstance(node, ast.Name | ast.Attribute) and tree.dotted(node) in readers:
                problems[place(path, node)] = "take it as an argument; cli.py reads the environment"
    verdict(problems, ENVIRONMENT_READERS)


def test_nothing_polls_or_sleeps() -> None:
    sleepers = {"time.sleep", "asyncio.sleep", "anyio.sleep", "trio.sleep", "sleep"}
    problems: dict[str, str] = {}
    for path in tree.python_files(*tree.PACKAGES):
        for node in ast.walk(tree.syntax(path)):
            if isinstance(node, ast.Call) and tree.dotted(node.func) in sleepers:
                problems[place(path, node)] = "wake by an event, a condition or a descriptor"
    verdict(problems, SLEEPERS)


def broad(handler: ast.ExceptHandler) -> bool:
    """Whether the handler catches everything."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(k is None or tree.dotted(k) in ("Exception", "BaseException") for k in kinds)


def silent(handler: ast.ExceptHandler) -> bool:
    """Whether nothing is done with what was caught."""
    return all(
        isinstance(statement, ast.Pass | ast.Continue)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (isinstance(statement, ast.Return) and statement.value is None)
        for statement in handler.body
    )


def handlers() -> Iterator[tuple[Path, ast.ExceptHandler]]:
    for path in tree.python_files(*tree.PACKAGES):
        for node in ast.walk(tree.syntax(path)):
            if isinstance(node, ast.ExceptHandler) and broad(node):
                yield path, node


def reasoned(path: Path, handler: ast.ExceptHandler) -> bool:
    """Whether a comment stands on the handler's line, the one above, or those before its body."""
    lines = tree.source(path).splitlines()
    return any("#" in line for line in lines[max(0, handler.lineno - 2) : handler.body[0].lineno])


def test_no_error_is_swallowed() -> None:
    problems = {
        place(path, handler): "catches everything and does nothing: name the error, or say why"
        for path, handler in handlers()
        if silent(handler) and not reasoned(path, handler)
    }
    for path in tree.python_files(*tree.PACKAGES):
        for node in ast.walk(tree.syntax(path)):
            suppresses = isinstance(node, ast.Call) and tree.dotted(node.func).endswith("suppress")
            if suppresses and {tree.dotted(a) for a in node.args} & {"Exception", "BaseException"}:
                problems[place(path, node)] = "suppresses everything: name the error"
    verdict(problems, {})


def passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the error goes on: it is raised again, or given to somebody by its name."""
    return any(
        (isinstance(node, ast.Raise) and node.exc is None)
        or (isinstance(node, ast.Name) and node.id == handler.name)
        for statement in handler.body
        for node in ast.walk(statement)
    )


def test_a_handler_of_everything_gives_its_reason() -> None:
    """`except Exception` hands the error on, or a comment says why it ends there."""
    problems = {
        place(path, handler): "say in a comment why everything is caught here"
        for path, handler in handlers()
        if not passes_on(handler) and not reasoned(path, handler)
    }
    verdict(problems, BROAD_HANDLERS)


def test_only_the_command_line_prints() -> None:
    """stdout belongs to the command line's answer (one line of JSON); everything else logs."""
    problems: dict[str, str] = {}
    for path in tree.python_files(*tree.PACKAGES):
        if path.name in PRINTING_FILES:
            continue
        for node in ast.walk(tree.syntax(path)):
            if isinstance(node, ast.Call) and tree.dotted(node.func) == "print":
                to_stderr = any(k.arg == "file" for k in node.keywords)
                if not to_stderr:
                    problems[place(path, node)] = "use the logger"
    verdict(problems, PRINTERS)


def test_no_mutable_default_and_no_global_statement() -> None:
    problems: dict[str, str] = {}
    for path in tree.python_files(*tree.PACKAGES):
        for node in ast.walk(tree.syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for default in [*node.args.defaults, *node.args.kw_defaults]:
                    if isinstance(default, ast.List | ast.Dict | ast.Set):
                        problems[place(path, node)] = "a mutable default is shared by all calls"
    verdict(problems, {})


def test_every_atomic_names_its_memory_order() -> None:
    pattern = re.compile(
        r"\.(load\(\)|(store|exchange|fetch_\w+|test_and_set|clear)\(\s*[^(),]+\))(?=\s*[;)&|=!])"
    )
    containers = re.compile(r"\.clear\(")  # a vector's or a string's
    problems = {
        f"{tree.name(path)}:{number}": f"{found.group(0)} has no memory order"
        for path in tree.cpp_files()
        for number, line in enumerate(tree.source(path).splitlines(), 1)
        for found in [pattern.search(line.split("//")[0])]
        if found and not containers.search(found.group(0))
    }
    verdict(problems, {})


# -- text ---------------------------------------------------------------------------------------

# Spelled apart so that this file does not contain them.
MARKS = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")
PRIVATE_PATHS = ("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/opt/" + "pypi")


def test_nothing_is_left_to_do() -> None:
    pattern = re.compile(rf"\b({'|'.join(MARKS)})\b")
    problems = {
        f"{tree.name(path)}:{number}": "do it, or say in the documents that it is not done"
        for path in tree.text_files()
        for number, line in enumerate(tree.source(path).splitlines(), 1)
        if pattern.search(line)
    }
    verdict(problems, {})


def test_no_path_of_one_machine_is_in_the_tree() -> None:
    problems = {
        f"{tree.name(path)}:{number}": "a path that exists on one machine only"
        for path in tree.text_files()
        for number, line in enumerate(tree.source(path).splitlines(), 1)
        if any(private in line for private in PRIVATE_PATHS)
    }
    verdict(problems, {})


def test_one_human_language() -> None:
    pattern = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0400-\u04ff]")
    allowed_folders = (
        "tests/",
        "csrc/tests/",
    )  # tests may check that text of any language passes through
    problems = {
        f"{tree.name(path)}:{number}": "comments and messages are English"
        for path in tree.text_files()
        if not tree.name(path).startswith(allowed_folders)
        for number, line in enumerate(tree.source(path).splitlines(), 1)
        if pattern.search(line)
    }
    verdict(problems, {})


WORDS = {
    "episode": "rollout",
    "memory segment": "arena",
    "shm segment": "arena",
    "arena segment": "arena",
}


def test_one_word_has_one_meaning() -> None:
    problems = {
        f"{tree.name(path)}:{number}": f"say {good!r}, not {bad!r}"
        for path in tree.text_files()
        if path.suffix in (".py", ".pyi", ".h", ".cc", ".md") and path != Path(__file__)
        for number, line in enumerate(tree.source(path).splitlines(), 1)
        for bad, good in WORDS.items()
        if bad in line.lower()
    }
    verdict(problems, {})


def test_every_file_opens_with_what_it_is() -> None:
    problems = {
        tree.name(path): "no module docstring"
        for path in tree.python_files()
        if tree.source(path).strip() and not ast.get_docstring(tree.syntax(path))
    }
    problems |= {
        tree.name(path): "no opening comment"
        for path in tree.cpp_files()
        if not tree.source(path).lstrip().startswith(("//", "/*"))
        and not path.with_suffix(".h").exists()  # its header opens for both
    }
    verdict(problems, {})


def test_files_can_be_read_in_one_sitting() -> None:
    problems = {
        tree.name(path): f"{lines} lines, at most {bound}: split it by role"
        for paths, bound in (
            (tree.python_files(*tree.PACKAGES), FILE_LINES_MAX),
            (tree.cpp_files(), CPP_FILE_LINES_MAX),
        )
        for path in paths
        if (lines := tree.source(path).count("\n")) > bound
    }
    verdict(problems, LONG_FILES)


def test_functions_can_be_read_at_a_glance() -> None:
    problems = {
        f"{tree.name(path)}:{node.name}": f"{lines} lines, at most {FUNCTION_LINES_MAX}"
        for path in tree.python_files(*tree.PACKAGES)
        for node in ast.walk(tree.syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    verdict(problems, LONG_FUNCTIONS)


# -- rules and their proofs -----------------------------------------------------------------------


def test_every_rule_of_the_lifecycle_has_a_test() -> None:
    """L01..L31: at least one test bears each number, or the rule stands in RULES_NOT_PROVEN."""
    proven = {found.group(1) for name in tree.test_names() if (found := _RULE.match(name))}
    missing = {
        f"L{number:02}": "no test bears this number"
        for number in range(1, 32)
        if f"L{number:02}" not in proven
    }
    verdict(missing, RULES_NOT_PROVEN)


_RULE = re.compile(r"test_(L\d\d)_")


def test_the_documents_name_tests_that_exist() -> None:
    problems = {
        f"{tree.name(path)}:{number}": f"there is no test {name}"
        for path in tree.text_files()
        if path.suffix == ".md"
        for number, line in enumerate(tree.source(path).splitlines(), 1)
        for name in re.findall(r"`(?:[\w/.]+::)?(test_\w+)(?:\[[^`]*\])?`", line)
        if name not in tree.test_names() and not (tree.ROOT / "tests" / f"{name}.py").exists()
    }
    verdict(problems, {})
