"""The producer: draws work, runs it, hands it in; pauses and stops without losing a rollout
(lifecycle L09-L13, L20, L21).

It owns what is in production and nothing else. What may be produced is decided by the dispatcher;
what a group comes to, in `trainer.pending`. Runs on one loop, in a process of its own or inline;
`dispatcher` is the object itself or a handle to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from trainer.group_context import Gate
from trainer.pending import PendingGroup, ProducerConfig, ProducerParts
from trainer.rollout import Group, Status
from trainer.work import HandedIn, Work

__all__ = ["Desk", "PauseReport", "Producer", "ProducerReport"]

T = TypeVar("T")
_log = logging.getLogger("trainer")


class Desk(Protocol):
    """What the producer needs of `trainer.dispatch.Dispatcher`."""

    async def draw(self, owner: str, n: int = 1) -> Sequence[Work]: ...

    async def hold(self, owner: str) -> None: ...

    async def let_go(self, owner: str) -> None: ...

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[HandedIn]: ...

    async def cancel(self, group: Group, *, owner: str) -> int: ...

    async def take_back(self, uids: Sequence[str], *, owner: str) -> None: ...

    async def give_back(self, owner: str) -> int: ...


@dataclass(frozen=True, slots=True)
class PauseReport:
    """What a pause came to: groups that were handed in, rollouts that were cancelled, seconds
    taken.
    """

    finished_groups: int
    cancelled_rollouts: int
    seconds: float


@dataclass(slots=True)
class _GivenUp:
    groups: int = 0
    rollouts: int = 0


@dataclass(slots=True)
class ProducerReport:
    """Counters since the start; groups unless the name says otherwise."""

    put: dict[str, int] = field(default_factory=dict)
    rollouts: int = 0
    response_tokens: int = 0
    cancelled_rollouts: int = 0
    in_production: int = 0
    #: Asked of the engine, or ready to be, and not answered yet.
    requests_running: int = 0
    errors: dict[str, int] = field(default_factory=dict)


#: Different error texts that are counted; later ones are counted together.
ERRORS_MAX = 64


class Producer:
    """See the module. `run` until cancelled or `stop`; the other methods from the same loop."""

    def __init__(
        self,
        dispatcher: Desk,
        parts: ProducerParts,
        config: ProducerConfig,
        *,
        owner: str = "producer-0",
        run_name: str = "run",
    ) -> None:
        self.owner = owner
        self._dispatcher = dispatcher
        self._parts = parts
        self._config = config
        self._run_name = run_name
        self._gate = Gate()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._changed = asyncio.Event()
        self._groups: dict[asyncio.Task[None], PendingGroup] = {}
        self._finished: list[tuple[Group, asyncio.Future[HandedIn]]] = []  # not sent yet
        self._senders: set[asyncio.Task[None]] = set()
        self._report = ProducerReport()
        self._failure: BaseException | None = None
        self._stopped = False
        self._drawing: asyncio.Task[Sequence[Work]] | None = None
        self._ending: asyncio.Task[Any] | None = None  # of groups that are given up or back

    async def run(self) -> None:
        """Produce until `stop`, or until cancelled: then what is under way is cancelled and booked,
        and what was drawn and not begun goes out again. Raises what made going on impossible (the
        desk or the sessions are gone).
        """
        cancelled = False
        try:
            while not self._stopped:
                free = await self._wait_for_slots()
                if self._stopped:  # while it waited; what is drawn now nobody would give back
                    return
                for work in await self._draw(free):
                    self._start(work)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            await self._cancel_groups()
            if cancelled:
                await self._give_back()

    async def pause(self, timeout_s: float, drain: bool = False) -> PauseReport:
        """Stop new work and end what is pending; never loses a rollout, never hangs (L21).

        Pending requests are aborted, keeping their tokens (`drain`: left to finish); what is not
        handed in after `timeout_s` is cancelled, its sessions released, and counted. What was not
        begun, because it waits for weights, goes out again. Until `resume` nothing new starts.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._resumed.clear()
        self._gate.stopping = not drain
        pending: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._dispatcher.hold(self.owner)
                await self._take_back_prepared()
                pending = set(self._groups)
                if not drain:
                    await self._abort_running()
                if pending:
                    await asyncio.wait(pending)
        except TimeoutError:
            pass  # what is left is cancelled below, and counted
        given_up = await self._cancel_groups()
        return PauseReport(len(pending) - given_up.groups, given_up.rollouts, loop.time() - started)

    async def _give_back(self) -> None:
        """What was drawn and not begun goes out again, unless the run has ended with its desk."""
        try:
            await self._dispatcher.give_back(self.owner)
        except Exception as error:
            _log.info("nothing was given back: %s: %s", type(error).__name__, error)

    async def _abort_running(self) -> None:
        """An engine that fails at this costs the rollouts that run until the deadline, and not the
        run (L13).
        """
        try:
            await self._parts.engine.abort(list(self._gate.running))
        except Exception as error:
            _log.warning("the engine did not abort at a pause: %s: %s", type(error).__name__, error)

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._gate.stopping = False
        self._resumed.set()
        self._changed.set()
        await self._dispatcher.let_go(self.owner)

    def weights_taken(self) -> None:
        """The engine runs new weights: what was drawn ahead, for them, is begun."""
        self._gate.weights_taken()

    async def stop(self, timeout_s: float) -> PauseReport:
        """Pause for good and give everything back; `run` returns."""
        self._stopped = True
        report = await self.pause(timeout_s)
        self._changed.set()
        self._resumed.set()
        # The waiting draw must come back empty-handed before what was drawn is given back.
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.wait([self._drawing])
        await self._dispatcher.give_back(self.owner)
        return report

    def report(self) -> ProducerReport:
        """Counters so far; cheap."""
        self._report.in_production = len(self._groups)
        self._report.requests_running = len(self._gate.running)
        return self._report

    # -- inside ----------------------------------------------------------------------------------

    async def _wait_for_slots(self) -> int:
        """Wait until a group may start; -> how many may. Raises the failure of a group task."""
        while True:
            if self._failure is not None:
                raise self._failure
            free = self._config.groups_max - len(self._groups)
            if free > 0 or self._stopped:
                return max(free, 1)
            self._changed.clear()
            await self._changed.wait()

    async def _draw(self, n: int) -> Sequence[Work]:
        """Up to `n` works; none when the producer was stopped meanwhile."""
        loop = asyncio.get_running_loop()
        self._drawing = loop.create_task(self._ask_for_work(n))
        try:
            await asyncio.wait([self._drawing])
            if self._drawing.cancelled():
                return ()
            works = self._drawing.result()
        finally:
            self._drawing.cancel()
            self._drawing = None
        # Drawn just before a pause: kept until it is over, and until no other has begun since.
        while not self._resumed.is_set():
            await self._resumed.wait()
            works = () if self._stopped else await self._without_ahead(works)
        return () if self._stopped else works

    async def _without_ahead(self, works: Sequence[Work]) -> Sequence[Work]:
        """What was drawn ahead of weights before a pause goes out again: behind it another batch
        may want it, with the weights there are.
        """
        now = self._parts.engine.model_step
        ahead = [work.uid for work in works if work.waits_at(now)]
        if not ahead:
            return works
        await self._dispatcher.take_back(ahead, owner=self.owner)
        return [work for work in works if work.uid not in ahead]

    async def _ask_for_work(self, n: int) -> Sequence[Work]:
        return await self._dispatcher.draw(self.owner, n)

    def _start(self, work: Work) -> None:
        pending = PendingGroup(
            work,
            self._parts,
            self._config,
            owner=self.owner,
            run_name=self._run_name,
            gate=self._gate,
        )
        pending.open()
        task = asyncio.get_running_loop().create_task(self._produce(pending), name=work.uid)
        self._groups[task] = pending
        task.add_done_callback(self._ended)

    async def _produce(self, pending: PendingGroup) -> None:
        group = await pending.produce()
        # The desk knows the prompt: it need not travel back.
        self._count(group, await self._hand_in(group.evolve(prompt=None)))

    async def _hand_in(self, group: Group) -> Status:
        """Groups that end in the same turn of the loop go to the desk in one call; one that has to
        wait for room then goes alone.
        """
        outcome = await self._hand_in_with_others(group)
        while outcome is None:
            (outcome,) = await self._dispatcher.put_all([group], owner=self.owner)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _hand_in_with_others(self, group: Group) -> HandedIn:
        loop = asyncio.get_running_loop()
        handed_in: asyncio.Future[HandedIn] = loop.create_future()
        self._finished.append((group, handed_in))
        if len(self._finished) == 1:
            sender = loop.create_task(self._send_finished())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await handed_in

    async def _send_finished(self) -> None:
        finished, self._finished = self._finished, []
        try:
            groups = [group for group, _ in finished]
            outcomes = await self._dispatcher.put_all(groups, owner=self.owner)
        except Exception as error:  # the desk is gone: each group's task says so
            for _, handed_in in finished:
                if not handed_in.done():
                    handed_in.set_exception(error)
            return
        for (_, handed_in), outcome in zip(finished, outcomes, strict=True):
            if not handed_in.done():
                handed_in.set_result(outcome)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._groups[task]
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            if self._drawing is not None:  # `run` must hear of it, also where it waits for work
                self._drawing.cancel()
        self._changed.set()

    async def _cancel_groups(self) -> _GivenUp:
        """Cancel all group tasks and give their groups up."""
        return await self._to_its_end(self._give_up)

    async def _take_back_prepared(self) -> None:
        """Of groups that wait for weights nothing was asked: they are not counted, and go out again
        as they were.
        """
        if any(group.is_prepared for group in self._groups.values()):
            await self._to_its_end(self._take_back)

    async def _to_its_end(self, ending: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One after the other, and also when its caller is cancelled: nobody else would give the
        groups up.
        """
        while self._ending is not None and not self._ending.done():
            await asyncio.wait([self._ending])
        task = self._ending = asyncio.get_running_loop().create_task(ending())
        return await asyncio.shield(task)

    async def _take_back(self) -> None:
        groups = {task: group for task, group in self._groups.items() if group.is_prepared}
        for task in groups:
            task.cancel()
        if groups:
            await asyncio.wait(groups)
        sessions = [r.session_id for group in groups.values() for r in group.rollouts]
        self._parts.traces.release(sessions, self.owner)
        uids = [group.work.uid for group in groups.values()]
        await self._dispatcher.take_back(uids, owner=self.owner)

    async def _give_up(self) -> _GivenUp:
        groups = dict(self._groups)
        ending = {*groups, *self._senders}
        for task in ending:
            task.cancel()
        self._finished.clear()  # of a sender that was cancelled before it began
        if ending:
            await asyncio.wait(ending)
        given_up = _GivenUp()
        for task, pending in groups.items():
            if not task.cancelled():
                continue  # it has handed its group in, in spite of the cancellation, and is counted
            n_rollouts = await self._dispatcher.cancel(pending.group, owner=self.owner)
            if n_rollouts:
                given_up.groups += 1
                given_up.rollouts += n_rollouts
                self._report.cancelled_rollouts += n_rollouts
            else:  # the desk has it: only its answer came too late
                self._count(pending.group, pending.group.status)
        return given_up

    def _count(self, group: Group, status: Status) -> None:
        report = self._report
        report.put[status.value] = report.put.get(status.value, 0) + 1
        report.rollouts += len(group.rollouts)
        report.response_tokens += sum(r.n_response_tokens for r in group.rollouts)
        for rollout in group.rollouts:
            if rollout.error_msg is not None:
                known = rollout.error_msg in report.errors or len(report.errors) < ERRORS_MAX
                text = rollout.error_msg if known else "(other errors)"
                if text not in report.errors:
                    _log.warning("a rollout of %s failed: %s", rollout.task, text)
                report.errors[text] = report.errors.get(text, 0) + 1
