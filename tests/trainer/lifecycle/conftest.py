"""Fixtures of the lifecycle tests: a trace store on a fresh arena that must be empty at the end."""

from __future__ import annotations

import pytest

from shmstore import Store
from trainer.trace import TraceStore


@pytest.fixture
def traces(store: Store) -> TraceStore:
    return TraceStore(store)
