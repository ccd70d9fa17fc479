"""What a producer's process may ask of the driver: the dispatcher behind coroutines.

An actor's plain methods run in a thread; the dispatcher belongs to the driver's loop, so only
these coroutines are offered to other processes. Hosted by `trainer.fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainer.replay.away import name_some
from trainer.rollout import Group, Status
from trainer.run.display import Display

if TYPE_CHECKING:
    from trainer.dispatch import Dispatcher
    from trainer.work import HandedIn, Work

__all__ = ["FailedRollouts", "ProgressBoard", "RemoteDesk"]


class ProgressBoard:
    """Where a process of the run says how far it is."""

    def __init__(self, display: Display) -> None:
        self._display = display

    async def phase(self, name: str, done: float, total: float, detail: str) -> None:
        """See `Display.phase`."""
        self._display.phase(name, done, total, detail)


class FailedRollouts:
    """Tells a person of rollouts that failed: of the first at once, and again whenever they have
    become ten times as many. A judge that always raises is seen long before its task ends by it.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._count = 0
        self._next = 1

    def add(self, group: Group) -> None:
        """A group that was handed in and failed."""
        errors = [r.error_msg for r in group.rollouts if r.status is Status.FAILED]
        self._count += len(errors)
        if self._count < self._next or not errors:
            return
        while self._next <= self._count:
            self._next *= 10
        so_far = "a rollout" if self._count == 1 else f"{self._count} rollouts so far"
        self._note(f"failed: {so_far} of task {group.task}; the last: {errors[-1]}")


class RemoteDesk:
    """Keeps `trainer.producer.Desk`. `moved` hears whenever groups were handed in, `failed` of each
    group that had failed.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        moved: Callable[[str], None],
        failed: Callable[[Group], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._moved = moved
        self._failed = failed

    async def draw(self, owner: str, n: int = 1) -> Sequence[Work]:
        """See `Dispatcher.draw`."""
        # No sign of life: a producer that dies at each start draws as well.
        return await self._dispatcher.draw(owner, n)

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[HandedIn]:
        """See `Dispatcher.put_all`."""
        outcomes = await self._dispatcher.put_all(groups, owner=owner, carried=True)
        for group, outcome in zip(groups, outcomes, strict=True):
            if outcome is Status.FAILED:
                self._failed(group)
        if any(isinstance(outcome, Status) for outcome in outcomes):
            self._moved(f"{owner} handed in {name_some([group.uid for group in groups])}")
        return outcomes

    async def cancel(self, group: Group, *, owner: str) -> int:
        """See `Dispatcher.cancel`."""
        return await self._dispatcher.cancel(group, owner=owner)

    async def take_back(self, uids: Sequence[str], *, owner: str) -> None:
        """See `Dispatcher.take_back`."""
        await self._dispatcher.take_back(uids, owner=owner)

    async def give_back(self, owner: str) -> int:
        """See `Dispatcher.give_back`."""
        return await self._dispatcher.give_back(owner)

    async def hold(self, owner: str) -> None:
        """See `Dispatcher.hold`."""
        await self._dispatcher.hold(owner)

    async def let_go(self, owner: str) -> None:
        """See `Dispatcher.let_go`."""
        await self._dispatcher.let_go(owner)

    async def fail(self, part: str, cause: str) -> None:
        """A part cannot go on: whoever waits hears why."""
        await self._dispatcher.fail(part, cause)
