"""Runs the tests of the bindings with a core that was built elsewhere: `python -m tests.sanitized
MODULE [pytest's arguments]`, for `make sanitize`.

Child processes of the tests have the usual core: what is sanitized is the process that runs pytest.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_NAME = "shmstore._core"


def _load(path: Path) -> None:
    """Under the package's name, before the package: that takes what is loaded."""
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


def main() -> int:
    path = Path(sys.argv[1]).resolve()
    _load(path)
    from shmstore import _core

    assert _core.__file__ == str(path), _core.__file__
    return int(pytest.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
