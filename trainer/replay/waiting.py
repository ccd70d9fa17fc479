"""Who waits at the replay buffer: takers for a batch, putters for room (lifecycle L14).

Each waiter is a future that is set when its wish can be met or can never be; nothing polls and
nobody is woken in vain more than once per change. Much may happen between a wake-up and the moment
at which the waiter runs, so it looks again: at its wish, at failures, at its own death. A part that
died for good, a task that ended, the death of the owner for whom one waits or the end of the buffer
reaches every waiter concerned at once, with the cause. Belongs to the loop of the buffer.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trainer.errors import BufferClosed, EndOfData, PartFailed, ReplayError

__all__ = ["Waiting"]


@dataclass(slots=True, eq=False)
class _Waiter:
    owner: str
    ready: asyncio.Future[None] = field(init=False)
    dead: bool = False

    def __post_init__(self) -> None:
        self.sleep()

    def sleep(self) -> None:
        """Wait (again)."""
        self.ready = asyncio.get_running_loop().create_future()

    async def woken(self) -> None:
        """Returns after a wake-up, whatever it was for; `PartFailed` once its owner is dead."""
        try:
            await self.ready
        except Exception:
            if not self.dead:  # its death is what counts, whatever else it was woken for
                raise
        if self.dead:
            raise PartFailed(self.owner, "it died while it waited at the replay buffer") from None

    def let_go(self, error: Exception | None = None) -> None:
        """Wake it, if it has not been woken."""
        if self.ready.done():
            return
        if error is None:
            self.ready.set_result(None)
        else:
            self.ready.set_exception(error)


@dataclass(slots=True, eq=False)
class _Taker(_Waiter):
    need: Mapping[str, int] = field(kw_only=True)


@dataclass(slots=True, eq=False)
class _Putter(_Waiter):
    task: str = field(kw_only=True)
    nbytes: int = field(kw_only=True)


class Waiting:
    """The two lines, first come first served: nobody passes who wants what somebody ahead waits
    for.

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
        self._admitted: set[str] = set()
        self._ended: dict[str, str] = {}
        self._over: Callable[[], ReplayError] | None = None

    async def for_batch(self, need: Mapping[str, int], *, owner: str) -> None:
        """Return when `need` can be met and it is this caller's turn; on return nothing has run
        since.
        """
        self.raise_failure()
        if not self._takers and self.can_meet(need):
            return
        taker = _Taker(owner, need=need)
        self._takers.append(taker)
        try:
            self.wake()  # what a taker lacks may pass the byte limit,
            self._taker_waits()  # and may be produced beyond it
            while True:
                await taker.woken()
                self.raise_failure()
                if self.can_meet(need):  # false when it expired after the wake-up
                    return
                taker.sleep()
                self.wake()
        finally:
            self._takers.remove(taker)
            self.wake()

    async def for_room(self, task: str, nbytes: int, *, owner: str) -> None:
        """Return when a group of this size may be filed; on return nothing has run since.

        Who then does not file it has to `wake` the next one.
        """
        if self.may_pass(task, nbytes, owner=owner):
            return
        putter = _Putter(owner, task=task, nbytes=nbytes)
        self._putters.append(putter)
        try:
            self.wake()
            while True:
                await putter.woken()
                self.raise_failure()
                if self._may_file(putter):  # false when the room went to another
                    break
                putter.sleep()
                self.wake()
        except BaseException:
            self._putters.remove(putter)
            self.wake()  # it may have been this one's turn
            raise
        self._putters.remove(putter)

    def may_pass(self, task: str, nbytes: int, *, owner: str) -> bool:
        """Whether a group of this size may be filed now, without waiting in line."""
        self.raise_failure()
        return owner in self._admitted or (not self._putters and self.has_room(task, nbytes))

    def can_meet(self, need: Mapping[str, int]) -> bool:
        """Whether so many groups of each task can be taken now."""
        return all(self._completed(task) >= count for task, count in need.items())

    def has_room(self, task: str, nbytes: int) -> bool:
        """Below the limit, or wanted by a taker: the limit never stands between a taker and its
        batch.
        """
        return self._fits(nbytes) or self._is_wanted(task)

    def admit(self, owner: str) -> None:
        """Until `limit` the byte limit does not hold `owner` up: it is pausing, and whoever could
        make room waits for the end of that.
        """
        self._admitted.add(owner)
        self.wake()

    def limit(self, owner: str) -> None:
        """The reverse of `admit`."""
        self._admitted.discard(owner)

    def owner_died(self, owner: str) -> None:
        """Nobody waits for `owner` any more: its takes and puts, also those just woken, get
        `PartFailed`.
        """
        self.limit(owner)
        for waiter in (*self._takers, *self._putters):
            if waiter.owner == owner:
                waiter.dead = True
                waiter.let_go()

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
        self._over = functools.partial(PartFailed, part, cause)
        self.wake()

    def close(self) -> None:
        """Everybody, now or later, gets `BufferClosed`, unless a part had failed before."""
        self._over = self._over or functools.partial(BufferClosed, "the replay buffer is closed")
        self.wake()

    def raise_failure(self) -> None:
        """`PartFailed` once `fail` was called, `BufferClosed` after `close`."""
        if self._over is not None:
            raise self._over()

    def wake(self) -> None:
        """After a change: let go on whoever can."""
        claimed: set[str] = set()  # tasks for which somebody ahead waits
        for taker in self._takers:
            error = self._why_never(taker.need)
            if error is not None:
                taker.let_go(error)
            elif claimed.isdisjoint(taker.need) and self.can_meet(taker.need):
                taker.let_go()
            claimed.update(taker.need)
        for putter in self._putters:
            if putter.ready.done():
                break  # the next in line is looked at when this one has filed its group
            if self._over is not None:
                putter.let_go(self._over())
            elif self._may_file(putter):
                putter.let_go()
                break

    def describe(self) -> list[str]:
        """One line for each waiter, for the watchdog."""
        takers = [
            f"take waits for {dict(taker.need)}, completed now "
            f"{ {task: self._completed(task) for task in taker.need} }"
            for taker in self._takers
        ]
        putters = [f"put of {p.task} waits for {p.nbytes} bytes of room" for p in self._putters]
        return takers + putters

    def _may_file(self, putter: _Putter) -> bool:
        """What room there is belongs to the first in line; what a taker lacks passes the others."""
        first = putter is self._putters[0]
        return (
            putter.owner in self._admitted
            or self._is_wanted(putter.task)
            or (first and self._fits(putter.nbytes))
        )

    def _is_wanted(self, task: str) -> bool:
        return any(self._completed(task) < taker.need.get(task, 0) for taker in self._takers)

    def _why_never(self, need: Mapping[str, int]) -> Exception | None:
        if self._over is not None:
            return self._over()
        for task, count in need.items():
            if task in self._ended and self._completed(task) < count:
                return EndOfData(
                    f"task {task!r} has ended ({self._ended[task]}): {count} groups asked, "
                    f"{self._completed(task)} left",
                    task,
                )
        return None
