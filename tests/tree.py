"""The repository as the tree-wide tests see it: files, syntax trees, names. Owns no rule.

Called by test_tidy.py, test_docs.py and test_contract.py. Walks the folder instead of asking git,
so that it also works in an unpacked source archive and sees files that are not committed yet.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shmstore", "actors", "trainer")
SKIPPED = frozenset({"build", "dist", "runs", "__pycache__", "results", "node_modules"})


@functools.cache
def all_files() -> tuple[Path, ...]:
    """Every file that belongs to the project, hidden folders and build outputs left out."""
    found: list[Path] = []
    for folder, names, files in os.walk(ROOT):
        here = Path(folder)
        names[:] = [
            n
            for n in names
            if n not in SKIPPED and (not n.startswith(".") or (here == ROOT and n == ".ci"))
        ]
        found += [here / file for file in files if not file.startswith(".")]
    return tuple(sorted(found))


def python_files(*folders: str) -> list[Path]:
    """The .py files under these top-level folders (all of them when none is given)."""
    wanted = [ROOT / folder for folder in folders] or [ROOT]
    return [
        path
        for path in all_files()
        if path.suffix == ".py" and any(path.is_relative_to(folder) for folder in wanted)
    ]


def text_files() -> list[Path]:
    """Files that people read or write: sources, documents, build files."""
    kinds = {".py", ".pyi", ".md", ".toml", ".txt", ".cc", ".cpp", ".h", ".yaml", ".yml", ".json"}
    return [
        path
        for path in all_files()
        if path.suffix in kinds or path.name in ("Makefile", "run") or path.name == "CMakeLists.txt"
    ]


def cpp_files() -> list[Path]:
    """The C++ sources and headers."""
    return [p for p in all_files() if p.suffix in (".cc", ".cpp", ".h")]


@functools.cache
def source(path: Path) -> str:
    """The text of a file."""
    return path.read_text(encoding="utf-8")


@functools.cache
def syntax(path: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse(source(path), filename=str(path))


def name(path: Path) -> str:
    """A file's name within the repository, as the rules' allow-lists spell it."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """actors/handle.py -> "actors.handle"; a package's __init__ is the package."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def imports(path: Path) -> Iterator[tuple[str, ast.stmt, bool]]:
    """(absolute dotted name, statement, whether it runs when the module is imported).

    `from a import b` yields "a" and "a.b", because b may be a module. What stands under
    `if TYPE_CHECKING:` or inside a function does not run at import time.
    """
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    yield from _imports_in(syntax(path).body, package, at_import=True)


def _imports_in(
    body: list[ast.stmt], package: list[str], at_import: bool
) -> Iterator[tuple[str, ast.stmt, bool]]:
    for statement in body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name, statement, at_import
        elif isinstance(statement, ast.ImportFrom):
            base = package[: len(package) - statement.level + 1] if statement.level else []
            origin = ".".join([*base, *([statement.module] if statement.module else [])])
            yield origin, statement, at_import
            for alias in statement.names:
                yield f"{origin}.{alias.name}", statement, at_import
        else:
            runs = at_import and not (
                isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
                or (isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test))
            )
            for part in ("body", "orelse", "finalbody"):
                yield from _imports_in(getattr(statement, part, []), package, runs)
            for handler in getattr(statement, "handlers", []):
                yield from _imports_in(handler.body, package, runs)
            for case in getattr(statement, "cases", []):
                yield from _imports_in(case.body, package, runs)


def dotted(node: ast.AST) -> str:
    """`time.sleep` as an expression -> "time.sleep"; "" for anything that is no dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


@functools.cache
def test_names() -> frozenset[str]:
    """Names of all test functions and methods under tests/."""
    return frozenset(
        node.name
        for path in python_files("tests")
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )
