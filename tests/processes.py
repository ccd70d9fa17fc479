"""Child processes of the tests' own process, as several tests look at them."""

from __future__ import annotations

from contextlib import suppress

import psutil


def own_children() -> list[psutil.Process]:
    """All of them but the resource tracker, which multiprocessing starts once and keeps."""
    return [child for child in psutil.Process().children() if not _is_tracker(child)]


def _is_tracker(child: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("resource_tracker" in word for word in child.cmdline())
    return False
