"""Says what everybody is waiting for when nothing moved for a set time: no run waits for ever.

`moved()` is called at every sign of life and costs one clock read. One timer sleeps until the limit
could have been reached; no timer ticks in between. Belongs to the driver's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from trainer.errors import ConfigError, NoProgress

__all__ = ["Alarm", "Watchdog"]


class Watchdog:
    """Calls `on_stuck(NoProgress)` once nothing moved for `limit_s` seconds, and again after each
    further limit.

    `describe`: lines that say what each part waits for.
    """

    def __init__(
        self,
        limit_s: float,
        describe: Callable[[], Sequence[str]],
        on_stuck: Callable[[NoProgress], None],
    ) -> None:
        if not limit_s > 0:
            raise ConfigError(f"the watchdog's limit is {limit_s} s; it must be above 0")
        self._limit_s = limit_s
        self._describe = describe
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._what = "start"
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(limit_s, self._look)

    def moved(self, what: str) -> None:
        """Something happened; `what` names it in the report."""
        self._last = self._loop.time()
        self._what = what

    def stop(self) -> None:
        """No more reports. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        idle_s = self._loop.time() - self._last
        if idle_s < self._limit_s:
            self._timer = self._loop.call_later(self._limit_s - idle_s, self._look)
            return
        self._timer = self._loop.call_later(self._limit_s, self._look)
        lines = "\n".join(f"  {line}" for line in self._describe())
        self._on_stuck(
            NoProgress(
                f"nothing moved for {idle_s:.0f} s; the last sign of life was {self._what!r}. "
                f"Waiting now:\n{lines}"
            )
        )


class Alarm:
    """The watchdog as an error that ends the run, whatever everybody waits for.

    Armed once the models are built: how long that takes is nobody's fault.
    """

    def __init__(self, limit_s: float, describe: Callable[[], Sequence[str]]) -> None:
        self._limit_s = limit_s
        self._describe = describe
        self._watchdog: Watchdog | None = None
        self._stuck: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def moved(self, what: str) -> None:
        """A sign of life."""
        if self._watchdog is not None:
            self._watchdog.moved(what)

    async def ring(self) -> None:
        """Raises NoProgress when nothing moved for too long; otherwise waits for ever."""
        self._watchdog = Watchdog(self._limit_s, self._describe, self._say)
        await self._stuck

    def _say(self, report: NoProgress) -> None:
        if not self._stuck.done():
            self._stuck.set_exception(report)

    def disarm(self) -> None:
        """No more alarms."""
        if self._watchdog is not None:
            self._watchdog.stop()
        self._stuck.cancel()
