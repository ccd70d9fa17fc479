"""The folder `model.cache_dir`, made when something is to be written into it.

Owns the message when that cannot be done, before minutes are spent on what was to be kept there.
What is there already is read from a folder that cannot be written as from any other. Called by
`trainer.model.models` and `trainer.model.warmup`, in the processes that build a model.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from trainer.errors import ConfigError

__all__ = ["writable_cache"]


def writable_cache(folder: Path) -> Path:
    """The folder, made if it is not there. Raises ConfigError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tried-"):
            return folder
    except OSError as error:
        raise ConfigError(
            f"model.cache_dir: {folder} cannot be written: {error.strerror}; choose another place "
            "(--set model.cache_dir=...)"
        ) from error
