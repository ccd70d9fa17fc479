"""What the contract tests of the store share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
MIB = 1 << 20


def in_child(target: Callable[..., Any], *args: Any) -> Any:
    """Runs `target(connection, *args)` in a process of its own; what it sent."""
    near, far = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(far, *args))
    process.start()
    far.close()
    try:
        assert near.poll(30), "the child said nothing"
        return near.recv()
    finally:
        near.close()
        process.join(30)
        assert process.exitcode is not None
        process.close()
