"""The driver's side of the producer and of the engine processes: deaths, restarts, weights,
evaluation.

Owns the handles and the rule of lifecycle L12: a producer that dies is first settled with the
dispatcher (its sessions are gone already, its prompts go out again), then its successor is told
to start with the current weights. An engine that dies costs its requests a restart elsewhere; it
is asked again once it has the current weights.

`supervise` runs as long as the run does. One event loop, the driver's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actors import ActorDied
from trainer.engine.newest_weights import send_newest
from trainer.engine.protocol import SyncMode, WeightsVersion
from trainer.errors import NotStarted, PartFailed
from trainer.producer import PauseReport
from trainer.rollout import Prompt
from trainer.run.engine_actor import EngineUse, to_bytes, uses_of

if TYPE_CHECKING:
    from actors import Handle
    from trainer.dispatch import Dispatcher

__all__ = ["ProducerLink"]


class ProducerLink:
    """See the module."""

    def __init__(
        self,
        handle: Handle,
        engines: Mapping[str, Handle],
        owner: str,
        note: Callable[[str], None],
    ) -> None:
        self._handle = handle
        self._engines = dict(engines)
        self._owner = owner
        self._note = note
        self._weights: WeightsVersion | None = None
        self._dispatcher: Dispatcher | None = None
        self._desk: Handle | None = None
        self._incarnation = 0
        self._moved = asyncio.Condition()  # a new incarnation works, or none ever will
        self._gone = ""
        self._paused: float | None = None
        self._ended = False

    @property
    def n_engines(self) -> int:
        """Engines that compute at the same time."""
        return max(1, len(self._engines))

    # -- life ------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Lets the process build what needs no weights while the learner gets ready.

        Only to save time: `begin` builds what is not there.
        """
        await self._call("prepare", self._engines)

    async def begin(
        self, weights: WeightsVersion, dispatcher: Dispatcher | None, desk: Handle | None
    ) -> None:
        """Starts producing for `dispatcher`, which the process reaches as `desk`.

        Without them it only gets ready to evaluate.
        """
        self._weights, self._dispatcher, self._desk = weights, dispatcher, desk
        while not self._incarnation:
            try:
                await self._start()
            except ActorDied:  # its own death, or that of an engine that it asked
                if self._given_up():
                    raise

    async def _start(self) -> None:
        """Starts the process with the newest weights, also when they change meanwhile. What takes
        seconds comes first: it would begin with the weights of before.
        """
        await self._handle.prepare.using(when_down="wait")(self._engines)
        start = self._handle.start.using(when_down="wait")
        self._incarnation = await send_newest(
            lambda: self._weights, lambda sent: start(self._desk, self._engines, sent)
        )
        if self._paused is not None:
            await self._call("pause", self._paused)
        async with self._moved:
            self._moved.notify_all()

    async def supervise(self) -> None:
        """Answers deaths until the run ends. A part that is given up fails the dispatcher."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_producer())
            for name, handle in self._engines.items():
                tasks.create_task(self._watch_engine(name, handle))

    async def _watch_producer(self) -> None:
        async for event in self._handle.watch():
            if event.kind == "died":
                self._settle()
            if event.final and not self._ended:
                await self._fail("producer", event.reason or event.kind)
            if event.kind in ("started", "restarted") and event.incarnation > self._incarnation:
                self._settle()  # a death before this watch began was not seen
                await self._start_again()

    def _settle(self) -> None:
        """What the dead producer had goes out again; twice is no error."""
        if self._dispatcher is not None:
            self._dispatcher.owner_died(self._owner)

    async def _start_again(self) -> None:
        while True:
            try:
                await self._start()
                return
            except ActorDied:
                if self._handle.state != "up" or self._given_up():
                    return  # the next event says so
                # It lives: an engine that it asked has died, and is started again.

    def _given_up(self) -> bool:
        engines = self._engines.values()
        return self._handle.state == "dead" or (
            bool(engines) and all(engine.state == "dead" for engine in engines)
        )

    async def _watch_engine(self, name: str, handle: Handle) -> None:
        async for event in handle.watch():
            if event.final and not self._ended:
                self._note(f"{name} is gone for good: {event.reason or event.kind}")
                if await self._engines_left(name) == 0:
                    await self._fail(name, event.reason or event.kind)
            elif event.kind == "restarted":
                await self._call("engine_up", name, self._weights)

    async def _engines_left(self, gone: str) -> int:
        return sum(h.state != "dead" for n, h in self._engines.items() if n != gone)

    async def _fail(self, name: str, cause: str) -> None:
        self._gone = f"{name}: {cause}"
        async with self._moved:
            self._moved.notify_all()
        if self._dispatcher is not None:
            await self._dispatcher.fail(name, cause)

    async def end(self) -> None:
        """Stops production in order: what is under way is cancelled and booked."""
        self._ended = True
        if self._incarnation and not self._gone:
            await self._call("stop")

    async def kill(self) -> None:
        """Ends the process and those of the engines now."""
        self._ended = True
        await asyncio.gather(*(h.kill() for h in (self._handle, *self._engines.values())))

    # -- calls -----------------------------------------------------------------------------------

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode) -> dict[str, EngineUse]:
        """Every engine takes the weights; a producer that dies meanwhile starts with them. ->
        `use`.
        """
        self._weights = weights
        used: bytes | None = await self._call("load_weights", to_bytes(weights), mode)
        return {} if used is None else uses_of(used)

    async def rest(self) -> None:
        """Engines give cached memory of their devices back (colocated schedule)."""
        await self._call("rest")

    async def pause(self, timeout_s: float) -> PauseReport:
        """No new work; what is under way ends, or is aborted into the buffer.

        A producer that is down has nothing under way; its successor is paused once it is up.
        """
        self._paused = timeout_s
        found: PauseReport | None = await self._call("pause", timeout_s)
        return found or PauseReport(0, 0, 0.0)

    async def resume(self) -> None:
        """Work again."""
        self._paused = None
        await self._call("resume")

    async def use(self) -> dict[str, EngineUse]:
        """Counters of each engine; empty while the producer is down."""
        return dict(await self._call("use") or {})

    async def evaluate(
        self, prompts: Sequence[Prompt], rollouts_each: int, temperature: float, timeout_s: float
    ) -> dict[str, float]:
        """Held-out rewards; tried again when the producer dies meanwhile."""
        while True:
            asked = self._incarnation
            evaluate = self._handle.evaluate.using(timeout=timeout_s, when_down="wait")
            try:
                return dict(await evaluate(prompts, rollouts_each, temperature))
            except (ActorDied, NotStarted) as death:
                async with self._moved:
                    while not self._gone and self._incarnation <= asked:
                        await self._moved.wait()
                if self._gone:
                    raise PartFailed("producer", self._gone) from death

    async def _call(self, method: str, *args: Any) -> Any:
        """A call that a dead producer need not answer: its successor starts with all it says."""
        try:
            return await self._handle.method(method)(*args)
        except (ActorDied, NotStarted):
            return None
