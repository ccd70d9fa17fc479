"""One arithmetic thread for all tests of the model half; no thread pool may outlive a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_engine_thread_survives() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("engine")]
    assert not left, f"engine threads outlive the test: {left}"
