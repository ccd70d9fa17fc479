"""Fixtures of the lifecycle tests: a trace store and a replay buffer on a fresh arena that must be
empty at the end.
"""

from __future__ import annotations

import pytest

from shmstore import Store
from trainer.replay import ReplayBuffer
from trainer.trace import TraceStore


@pytest.fixture
def traces(store: Store) -> TraceStore:
    return TraceStore(store)


@pytest.fixture
def buffer(store: Store) -> ReplayBuffer:
    """As it is without options."""
    return ReplayBuffer(store)
