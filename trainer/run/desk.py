"""What a producer's process may ask of the driver: the dispatcher behind coroutines.

An actor's plain methods run in a thread; the dispatcher belongs to the driver's loop, so only
these coroutines are offered to other processes. Hosted by `trainer.fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainer.rollout import Group, Status
from trainer.run.display import Display

if TYPE_CHECKING:
    from trainer.dispatch import Dispatcher
    from trainer.work import HandedIn, Work

__all__ = ["ProgressBoard", "RemoteDesk"]


class ProgressBoard:
    """Where a process of the run says how far it is."""

    def __init__(self, display: Display) -> None:
        self._display = display

    async def phase(self, name: str, done: float, total: float, detail: str) -> None:
        """See `Display.phase`."""
        self._display.phase(name, done, total, detail)


class RemoteDesk:
    """Keeps `trainer.producer.Desk`. `moved` hears of every group that was handed in."""

    def __init__(self, dispatcher: Dispatcher, moved: Callable[[str], None]) -> None:
        self._dispatcher = dispatcher
        self._moved = moved

    async def draw(self, owner: str, n: int = 1) -> Sequence[Work]:
        """See `Dispatcher.draw`."""
        # No sign of life: a producer that dies at each start draws as well.
        return await self._dispatcher.draw(owner, n)

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[HandedIn]:
        """See `Dispatcher.put_all`."""
        outcomes = await self._dispatcher.put_all(groups, owner=owner, carried=True)
        for outcome in outcomes:
            if isinstance(outcome, Status):
                self._moved(f"{owner} handed in a group, {outcome.value}")
        return outcomes

    async def cancel(self, group: Group, *, owner: str) -> int:
        """See `Dispatcher.cancel`."""
        return await self._dispatcher.cancel(group, owner=owner)

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
