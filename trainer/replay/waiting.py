"""Who waits at the replay buffer: takers for a batch, putters for room (lifecycle L14).

Each waiter is a future that is set when its wish can be met or can never be; nothing polls and
nobody is woken in vain more than once per change. A part that died for good, or a task that ended,
reaches every waiter at once, with the cause. Belongs to the loop of the buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.errors import EndOfData, PartFailed

__all__ = ["Waiting"]


@dataclass(slots=True, eq=False)
class _Taker:
    need: Mapping[str, int]
    ready: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Putter:
    task: str
    nbytes: int
    ready: asyncio.Future[None]


class Waiting:
    """The two lines, each first come first served.

    `completed(task)`: groups that can be taken now. `fits(nbytes)`: whether so much is below the
    byte limit. `taker_waits`: called when a taker has begun to wait.
    """

    def __init__(
        self,
        completed: Callable[[str], int],
        fits: Callable[[int], bool],
        taker_waits: Callable[[], None],
    ) -> None:
        self._completed = completed
        self._fits = fits
        self._taker_waits = taker_waits
        self._takers: list[_Taker] = []
        self._putters: list[_Putter] = []
        self._ended: dict[str, str] = {}
        self._failure: tuple[str, str] | None = None

    async def for_batch(self, need: Mapping[str, int]) -> None:
        """Return when `need` can be met and it is this caller's turn; on return nothing has run
        since.
        """
        if not self._takers and self._can_meet(need):
            return
        loop = asyncio.get_running_loop()
        taker = _Taker(need, loop.create_future())
        self._takers.append(taker)
        try:
            self.wake()  # what a taker lacks may pass the byte limit,
            self._taker_waits()  # and may be produced beyond it
            while True:
                await taker.ready
                if self._can_meet(need):  # false when it expired after the wake-up
                    return
                taker.ready = loop.create_future()
                self.wake()
        finally:
            self._takers.remove(taker)
            self.wake()

    async def for_room(self, task: str, nbytes: int) -> None:
        """Return when a group of this size may be filed; on return nothing has run since.

        Who then does not file it has to `wake` the next one.
        """
        self.raise_failure()
        if not self._putters and self.has_room(task, nbytes):
            return
        putter = _Putter(task, nbytes, asyncio.get_running_loop().create_future())
        self._putters.append(putter)
        try:
            self.wake()
            await putter.ready
        except BaseException:
            self._putters.remove(putter)
            self.wake()  # it may have been this one's turn
            raise
        self._putters.remove(putter)

    def has_room(self, task: str, nbytes: int) -> bool:
        """Below the limit, or wanted by a taker: the limit never stands between a taker and its
        batch.
        """
        return self._fits(nbytes) or any(
            self._completed(task) < taker.need.get(task, 0) for taker in self._takers
        )

    def lacking(self, task: str) -> int:
        """Groups of `task` that the first taker in line still lacks."""
        if not self._takers:
            return 0
        return max(0, self._takers[0].need.get(task, 0) - self._completed(task))

    def end_task(self, task: str, reason: str) -> None:
        """No more of `task` will come: takers that need more get `EndOfData`."""
        self._ended[task] = reason
        self.wake()

    def reopen_task(self, task: str) -> None:
        """Groups of `task` may come again."""
        self._ended.pop(task, None)

    def fail(self, part: str, cause: str) -> None:
        """Everybody, now or later, gets `PartFailed`."""
        self._failure = (part, cause)
        self.wake()

    def raise_failure(self) -> None:
        """`PartFailed` once `fail` was called."""
        if self._failure is not None:
            raise PartFailed(*self._failure)

    def wake(self) -> None:
        """After a change: let go on whoever can."""
        for taker in self._takers:
            if taker.ready.done():
                continue
            error = self._why_never(taker.need)
            if error is not None:
                taker.ready.set_exception(error)
            elif self._can_meet(taker.need):
                taker.ready.set_result(None)
                break  # the next in line is looked at when this one has taken its batch
        for putter in self._putters:
            if putter.ready.done():
                continue
            if self._failure is not None:
                putter.ready.set_exception(PartFailed(*self._failure))
            elif self.has_room(putter.task, putter.nbytes):
                putter.ready.set_result(None)
                break  # likewise, after this one has filed its group

    def describe(self) -> list[str]:
        """One line for each waiter, for the watchdog."""
        takers = [
            f"take waits for {dict(taker.need)}, completed now "
            f"{ {task: self._completed(task) for task in taker.need} }"
            for taker in self._takers
        ]
        putters = [f"put of {p.task} waits for {p.nbytes} bytes of room" for p in self._putters]
        return takers + putters

    def _can_meet(self, need: Mapping[str, int]) -> bool:
        return all(self._completed(task) >= count for task, count in need.items())

    def _why_never(self, need: Mapping[str, int]) -> Exception | None:
        if self._failure is not None:
            return PartFailed(*self._failure)
        for task, count in need.items():
            if task in self._ended and self._completed(task) < count:
                return EndOfData(
                    f"task {task!r} has ended ({self._ended[task]}): {count} groups asked, "
                    f"{self._completed(task)} left",
                    task,
                )
        return None
