"""multiprocessing's helper process starts before any test counts its children."""

from __future__ import annotations

from multiprocessing import resource_tracker

import pytest


@pytest.fixture(scope="session", autouse=True)
def helper_process_runs() -> None:
    """Python starts it at the first spawn and keeps it; it is no child of a test."""
    resource_tracker.ensure_running()
