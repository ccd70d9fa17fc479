"""A cache folder that cannot be written is told before anything is spent on what it was to keep."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.model.cache import writable_cache


def test_a_cache_folder_is_made_and_one_that_is_there_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    assert writable_cache(folder) == folder
    assert list(writable_cache(folder).iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^model.cache_dir: .*file/x cannot .*: Not a directory"):
        writable_cache(tmp_path / "file/x")


def test_a_cache_folder_on_a_read_only_disk_names_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Read-only file system; choose"):
        writable_cache(tmp_path)
