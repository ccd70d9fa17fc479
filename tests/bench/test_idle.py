"""Both ways of counting wake-ups see a thread that wakes: else "none" would prove nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator

import pytest

from bench.idle import context_switches, system_calls


@pytest.fixture
def restless() -> Iterator[int]:
    """The id of a thread that wakes every few milliseconds."""
    started, stop = threading.Event(), threading.Event()
    ids: list[int] = []

    def run() -> None:
        ids.append(threading.get_native_id())
        started.set()
        while not stop.wait(0.005):
            pass

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    yield ids[0]
    stop.set()
    thread.join()


@pytest.mark.parametrize("count", [context_switches, system_calls])
def test_a_thread_that_wakes_is_counted(restless: int, count: Callable[[int, float], int]) -> None:
    if count is system_calls and shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    assert count(restless, 0.5) > 3
