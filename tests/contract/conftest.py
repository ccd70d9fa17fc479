"""What the contract tests share: an arena of its own for each test, which must leave nothing in it;
multiprocessing's helper process starts before any is counted."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest

from shmstore import Store


@pytest.fixture(scope="session", autouse=True)
def helper_process_runs() -> None:
    """Python starts it at the first spawn and keeps it; it is no child of a test."""
    resource_tracker.ensure_running()


@pytest.fixture
def name() -> Iterator[str]:
    """The name of an arena that nobody else uses."""
    chosen = f"contract-{uuid.uuid4().hex[:12]}"
    yield chosen
    if chosen in Store.list():
        Store.unlink(chosen)


@pytest.fixture
def store(name: str) -> Iterator[Store]:
    with Store.create(name, capacity="16MiB") as made:
        yield made
        for owner in list(made.stats().by_owner):
            made.sessions.release_owned(owner)
        assert made.stats().objects == 0
