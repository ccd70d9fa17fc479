"""Resolves what a configuration names: `package.module:name` or `folder/file.py:name`.

Owns the one place where user code is imported by name. Raises `TargetError` with what was looked
for and what was found. Called by environments, judges and the call worker; imports nothing of
ours but errors.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.errors import TrainerError

__all__ = ["TargetError", "resolve"]


_THEIRS = (Exception, SystemExit)
"""What user code may raise where it is imported: told as theirs, with its place."""


class TargetError(TrainerError):
    """A name in the configuration leads to nothing that can be imported."""


def resolve(target: str) -> Any:
    """The object that `module:name` (or `file.py:name`, relative to the working directory)
    names.
    """
    where, _, name = target.partition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found: Any = module
    for part in name.split("."):
        try:  # also what a `__getattr__` of the module makes, or a class inherits
            found = getattr(found, part)
        except AttributeError as error:
            near = difflib.get_close_matches(part, dir(found), n=3)
            hint = f"; near: {', '.join(near)}" if near else ""
            raise TargetError(f"{target!r}: {where} has no `{part}`{hint}") from error
        except _THEIRS as error:
            raise TargetError(f"{target!r}: {type(error).__name__}: {error}") from error
    return found


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"{str(path)!r} is no file (looked from {Path.cwd()})")
    name = f"shmrl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except _THEIRS as error:
        del sys.modules[name]
        raise TargetError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _from_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TargetError(f"module {name!r} cannot be imported: {error}") from error
    except _THEIRS as error:
        raise TargetError(
            f"module {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
