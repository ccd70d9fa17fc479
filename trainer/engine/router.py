"""Several engines behind the face of one: sessions stick, load is balanced, a dead replica is
stepped over.

Owns the map from session to replica and the list of replicas that may be asked. Promises: a
session stays with one engine while that lives (its prefix is cached there); a new one goes to the
engine with the fewest running requests, a group to one engine; a request whose engine dies is
started again on another, at most `_RESTARTS_MAX` times, and waits while none is up; a replica
that came back is asked only after it has taken the current weights.

One event loop, in the producer's process; `engines` are handles, or engines of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from trainer.engine.newest_weights import send_newest
from trainer.engine.protocol import (
    Engine,
    EngineInfo,
    GenerateRequest,
    Generation,
    SyncMode,
    WeightsVersion,
)
from trainer.errors import EngineError

__all__ = ["EngineLost", "EngineRouter"]

_RESTARTS_MAX = 5
"""Times that one request is begun again because its engine died."""
_HOMES_MAX = 1 << 16
"""Sessions and groups whose engine is remembered; the oldest are forgotten and placed anew."""


class EngineLost(EngineError):
    """A request lost its engine too often; it fails one rollout."""


class EngineRouter:
    """An `Engine` over replicas. `lost` are the errors that say that a replica is gone."""

    def __init__(
        self, engines: Mapping[str, Engine], info: EngineInfo, lost: tuple[type[Exception], ...]
    ) -> None:
        self._engines = dict(engines)
        self._info = info
        self._lost = lost
        self._running: dict[str, dict[str, GenerateRequest]] = {name: {} for name in engines}
        self._up: dict[str, int] = {}  # replica -> the model step of the weights that it runs
        self._home: dict[str, str] = {}  # in the order of placing
        self._changed = asyncio.Condition()
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

    async def generate(self, request: GenerateRequest) -> Generation:
        """As `Engine.generate`, on whichever replica; EngineLost when replicas keep dying."""
        for _ in range(_RESTARTS_MAX + 1):
            name = await self._choose(request)
            running = self._running[name]
            running[request.request_id] = request
            try:
                return await self._engines[name].generate(request)
            except self._lost:
                self.down(name)
                self.restarted_requests += 1
            finally:
                running.pop(request.request_id, None)
        raise EngineLost(
            f"request {request.request_id} was begun {_RESTARTS_MAX + 1} times and its engine died "
            "each time"
        )

    async def _choose(self, request: GenerateRequest) -> str:
        # Mates of a group share their prompt: the first of them decides for all.
        key = request.group_id or request.session_id
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._up))
            for known in (self._home.get(request.session_id), self._home.get(key)):
                if known is not None and known in self._up:
                    return self._settle(request.session_id, key, known)
            name = min(sorted(self._up), key=lambda n: len(self._running[n]))
            return self._settle(request.session_id, key, name)

    def _settle(self, session_id: str, key: str, name: str) -> str:
        self._home[session_id] = self._home[key] = name
        while len(self._home) > _HOMES_MAX:
            del self._home[next(iter(self._home))]
        return name

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """As `Engine.abort`, on every replica that has one of them."""
        wanted = None if request_ids is None else set(request_ids)
        jobs = []
        for name, running in self._running.items():
            here = [r for r in running if wanted is None or r in wanted]
            if here:
                jobs.append(self._abort_on(name, here))
        return sum(await asyncio.gather(*jobs))

    async def _abort_on(self, name: str, request_ids: list[str]) -> int:
        try:
            return await self._engines[name].abort(request_ids)
        except self._lost:
            self.down(name)
            return 0

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
        self._up.pop(name, None)
        self._home = {key: home for key, home in self._home.items() if home != name}

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
        async with self._changed:
            self._changed.notify_all()

    @property
    def replicas_up(self) -> int:
        """How many replicas take requests."""
        return len(self._up)

    async def aclose(self) -> None:
        """Nothing of its own to end; the replicas end with the run."""
        self._up.clear()
