"""Actor classes for test_actors.py, in a module of their own so that child processes find them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import actors


class Trouble(Exception):
    """An exception of a user."""


class Unpicklable(Exception):
    """An exception that cannot be rebuilt from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("lost")


class Worker:
    """A bit of everything."""

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.seen: list[int] = []
        self.cancelled = 0

    async def add(self, k: int) -> int:
        self.value += k
        return self.value

    def add_in_a_thread(self, k: int) -> int:
        self.value += k
        return self.value

    async def note(self, k: int) -> None:
        self.seen.append(k)

    def notes(self) -> list[int]:
        return self.seen

    async def fail(self) -> None:
        raise Trouble("on purpose")

    async def fail_strangely(self) -> None:
        raise Unpicklable(1, 2)

    async def nap(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "rested"

    def block(self, seconds: float) -> str:
        time.sleep(seconds)
        return "blocked"

    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    def count_in_a_thread(self, n: int) -> Iterator[int]:
        yield from range(n)

    @actors.method(group="io")
    async def other_group(self) -> str:
        return "io"

    @actors.method(idempotent=True)
    async def die_once(self, marker: str) -> str:
        """Kills its process the first time."""
        if os.path.exists(marker):
            return "alive"
        open(marker, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"

    async def die(self) -> None:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    async def leave(self, code: int) -> None:
        sys.exit(code)

    async def pid(self) -> int:
        return os.getpid()

    async def visible_devices(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    async def total(self, array: Any) -> tuple[str, int, bool]:
        return type(array).__name__, int(array.sum()), bool(array.flags.writeable)

    async def kinds(self, top: Any, nested: dict[str, Any]) -> tuple[str, str]:
        return type(top).__name__, type(nested["ref"]).__name__

    async def ask(self, other: Any, me: Any) -> int:
        """Calls `other`, which calls back: a cycle."""
        answer: int = await other.ask_back(me)
        return answer

    async def ask_back(self, caller: Any) -> int:
        answer: int = await caller.add(1)
        return answer


class FailsToStart:
    """Its constructor raises."""

    def __init__(self) -> None:
        raise Trouble("no start")
