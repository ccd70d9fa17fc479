"""Several engines behind the face of one: sessions stick, load is balanced, a dead replica is
stepped over.

Owns the map from session to replica, the list of replicas that may be asked, and every request
until it is answered. Promises: a session stays with one engine while that lives (its prefix is
cached there); a new one goes to the engine with the fewest running requests, a group to one engine;
a request is answered once; one whose engine dies is started again on another, at most
`_RESTARTS_MAX` times, and waits while none is up; a replica that came back is asked only after it
has taken the current weights.

One event loop, in the producer's process; replicas are links to processes, or engines of this one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from trainer.engine.newest_weights import send_newest
from trainer.engine.protocol import (
    Answers,
    EngineInfo,
    GenerateRequest,
    Generation,
    Submits,
    SyncMode,
    WeightsVersion,
    awaited,
)
from trainer.errors import EngineError
from trainer.rollout import FinishReason

__all__ = ["EngineLost", "EngineRouter", "Replica"]

_RESTARTS_MAX = 5
"""Times that one request is begun again because its engine died."""
_HOMES_MAX = 1 << 16
"""Sessions and groups whose engine is remembered; the oldest are forgotten and placed anew."""


class EngineLost(EngineError):
    """A request lost its engine too often; it fails one rollout."""


class Replica(Submits, Protocol):
    """What is asked of a replica. One that dies answers everything with an error that says so."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> int: ...

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None: ...

    async def aclose(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that somebody waits for."""

    answered: Callable[[Answers], None]
    begun: int = 0
    aborted: bool = False


class EngineRouter:
    """An `Engine` over replicas, and `Submits`. `lost` are the errors that say that a replica is
    gone.
    """

    def __init__(
        self, engines: Mapping[str, Replica], info: EngineInfo, lost: tuple[type[Exception], ...]
    ) -> None:
        self._engines = dict(engines)
        self._info = info
        self._lost = lost
        self._asked: dict[GenerateRequest, _Asked] = {}
        self._running: dict[str, set[GenerateRequest]] = {name: set() for name in engines}
        self._unplaced: list[GenerateRequest] = []  # while no replica is up; part of `_asked`
        self._up: dict[str, int] = {}  # replica -> the model step of the weights that it runs
        self._home: OrderedDict[str, str] = OrderedDict()  # in the order of placing
        self._weights: WeightsVersion | None = None
        self.restarted_requests = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def model_step(self) -> int:
        """That of the oldest weights that a replica runs; of those to come while none is up."""
        known = -1 if self._weights is None else self._weights.model_step
        return min(self._up.values(), default=known)

    # -- requests --------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """As `Engine.generate`, on whichever replica; EngineLost when replicas keep dying."""
        return await awaited(self, request)

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        """See `Submits`; EngineLost is the answer when replicas keep dying."""
        self._asked.update((request, _Asked(answered)) for request in requests)
        self._place(requests)

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        """See `Submits`."""
        dropped = {request for request in requests if self._asked.pop(request, None) is not None}
        self._unplaced = [request for request in self._unplaced if request not in dropped]
        for name, running in self._running.items():
            here = running & dropped
            if here:
                running -= here
                self._engines[name].drop(list(here))

    def _place(self, requests: Sequence[GenerateRequest]) -> None:
        """Give them to replicas; what cannot be given waits for one."""
        if not self._up:
            self._unplaced += requests
            return
        chosen: dict[str, list[GenerateRequest]] = {}
        for request in requests:
            name = self._choose(request)
            self._running[name].add(request)
            chosen.setdefault(name, []).append(request)
        for name, theirs in chosen.items():
            heard = partial(self._heard, name)
            try:
                self._engines[name].submit(theirs, heard)
            except Exception as error:  # whatever an engine raises, it fails these (L13)
                refused = [(request, error) for request in theirs]
                asyncio.get_running_loop().call_soon(heard, refused)

    def _choose(self, request: GenerateRequest) -> str:
        # Mates of a group share their prompt: the first of them decides for all.
        keys = {request.session_id, request.group_id or request.session_id}
        if request.is_last and request.group_id is not None:
            keys.remove(request.session_id)  # nobody will ask for it again
        homes = (self._home.get(key) for key in (request.session_id, request.group_id or ""))
        name = next((home for home in homes if home in self._up), None)
        if name is None:
            name = min(sorted(self._up), key=lambda n: len(self._running[n]))
        self._home.update(dict.fromkeys(keys, name))
        while len(self._home) > _HOMES_MAX:
            self._home.popitem(last=False)
        return name

    def _heard(self, name: str, answers: Answers) -> None:
        """Answers of a replica: to whom they belong; what it lost by its death is placed anew."""
        told: dict[Callable[[Answers], None], list[tuple[GenerateRequest, Any]]] = {}
        again: list[GenerateRequest] = []
        for request, answer in answers:
            self._running[name].discard(request)
            asked = self._asked.get(request)
            if asked is None:  # dropped
                continue
            if isinstance(answer, self._lost):
                self.down(name)
                found = self._after_loss(request, asked)
                if found is None:
                    again.append(request)
                    continue
                answer = found
            del self._asked[request]
            told.setdefault(asked.answered, []).append((request, answer))
        self._place(again)
        for answered, theirs in told.items():
            answered(theirs)

    def _after_loss(
        self, request: GenerateRequest, asked: _Asked
    ) -> Generation | EngineError | None:
        """What a request is answered whose engine died; None: it is begun again."""
        if asked.aborted:  # what it had is gone
            return _nothing()
        self.restarted_requests += 1
        asked.begun += 1
        if asked.begun <= _RESTARTS_MAX:
            return None
        return EngineLost(
            f"request {request.request_id} was begun {asked.begun} times and its engine died each "
            "time"
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """As `Engine.abort`, on every replica that has one of them. What waits for a replica, and
        what loses its own before it has ended, ends with nothing.
        """
        wanted = None if request_ids is None else frozenset(request_ids)
        ending = {r for r in self._asked if wanted is None or r.request_id in wanted}
        for request in ending:
            self._asked[request].aborted = True
        waiting = [request for request in self._unplaced if request in ending]
        self._unplaced = [request for request in self._unplaced if request not in ending]
        for request in waiting:
            self._asked.pop(request).answered([(request, _nothing())])
        jobs = []
        for name, running in self._running.items():
            here = [request.request_id for request in running & ending]
            if here:
                jobs.append(self._abort_on(name, here))
        return len(waiting) + sum(await asyncio.gather(*jobs))

    async def _abort_on(self, name: str, request_ids: list[str]) -> int:
        try:
            return await self._engines[name].abort(request_ids)
        except self._lost:
            self.down(name)
            return 0

    # -- replicas --------------------------------------------------------------------------------

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        """All replicas that are up take the weights; one that dies meanwhile is stepped over."""
        self._weights = weights
        await asyncio.gather(*(self._load(name, mode) for name in list(self._up)))

    async def _load(self, name: str, mode: SyncMode) -> None:
        try:
            weights = self._weights
            assert weights is not None
            await self._engines[name].load_weights(weights, mode)
        except self._lost:
            self.down(name)
        else:
            if name in self._up:
                self._up[name] = weights.model_step

    def down(self, name: str) -> None:
        """Replica `name` is gone: nobody is sent there any more."""
        if self._up.pop(name, None) is None:
            return
        self._home = OrderedDict((key, home) for key, home in self._home.items() if home != name)

    async def up(self, name: str, weights: WeightsVersion) -> None:
        """Replica `name` runs: give it the current weights, then let requests in."""
        if self._weights is None or self._weights.model_step < weights.model_step:
            self._weights = weights
        engine = self._engines[name]
        try:
            await send_newest(
                lambda: self._weights, lambda sent: engine.load_weights(sent, "pause")
            )
        except self._lost:
            return
        self._up[name] = self._weights.model_step
        waiting, self._unplaced = self._unplaced, []
        self._place(waiting)

    @property
    def replicas_up(self) -> int:
        """How many replicas take requests."""
        return len(self._up)

    async def aclose(self) -> None:
        """Nobody is asked any more, and nobody answered."""
        self._up.clear()
        self._asked.clear()
        for running in self._running.values():
            running.clear()
        await asyncio.gather(*(engine.aclose() for engine in self._engines.values()))


def _nothing() -> Generation:
    """Of a request that was aborted before its first decode step."""
    none = np.zeros(0, np.int32)
    return Generation(none, none.astype(np.float32), none, "", FinishReason.ABORT)
