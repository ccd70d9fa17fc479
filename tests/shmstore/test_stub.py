"""The hand-written stub of `_core` names exactly what the built module has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import shmstore
from shmstore import _core

STUB = Path(shmstore.__file__).with_name("_core.pyi")
TYPING_ONLY = {"ArenaFacts"}
IMPLICIT = {"__new__", "__init__", "__buffer__", "__hash__", "__eq__", "__lt__", "__le__"} | {
    "__gt__",
    "__ge__",
}


def stub_names() -> dict[str, set[str]]:
    """Top-level names of the stub; for classes, the names that their bodies declare."""
    names: dict[str, set[str]] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = {
                item.name for item in node.body if isinstance(item, ast.FunctionDef)
            }
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = set()
    return {name: members for name, members in names.items() if name not in TYPING_ONLY}


def test_the_stub_names_what_the_module_has() -> None:
    built = {name for name in vars(_core) if not name.startswith("_")}
    assert set(stub_names()) == built


def test_the_stub_names_the_members_of_every_class() -> None:
    for name, members in stub_names().items():
        thing = getattr(_core, name)
        if not inspect.isclass(thing):
            continue
        built = {
            member
            for member in vars(thing)
            if not member.startswith("__") or member in ("__reduce__", "__copy__", "__deepcopy__")
        }
        if "__bytes__" in vars(thing):
            built.add("__bytes__")
        assert members - IMPLICIT == built - IMPLICIT, name
