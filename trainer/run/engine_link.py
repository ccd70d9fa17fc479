"""An engine in another process: how requests go there, and how answers come back.

`EngineLink` is the producer's side, the face that `trainer.engine.router` asks of a replica;
`ServedEngine` is the engine's, what its actor is made of. Requests made in one turn of the
producer's loop go in one message, and the call stays open for their answers: a stream, in which
those that end together come together, with their routing in one buffer. So a message, its task and
its pickling are paid for many rollouts (docs/decisions/0604).

Promises: each request is answered once, by its own outcome, or by what its process died of; the
engine ends what a link that is gone had asked. Belong to one loop each.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shmstore import StoreFull
from trainer.engine.protocol import (
    Answers,
    Engine,
    EngineInfo,
    GenerateRequest,
    Generation,
    Submits,
    SyncMode,
    WeightsVersion,
)
from trainer.error_text import error_text
from trainer.errors import EngineError, TrainerError
from trainer.rollout import FinishReason

if TYPE_CHECKING:
    from actors import Handle

__all__ = ["EngineLink", "Parcel", "ServedEngine"]

_ROUTING_BYTES_MAX = 8 << 20
"""Of one parcel, beyond its first answer: it is one object of the arena."""
_log = logging.getLogger("trainer")

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_Routing = NDArray[Any]
_Shape = tuple[str, tuple[int, ...]]  # numpy's letter for the type; [rows, layers, top_k]
_Plain = tuple[bytes, bytes, bytes, str, FinishReason, str | None, _Shape | None]
Parcel = tuple[list[tuple[int, _Plain | Exception]], Any]
"""Answers that ended together: each the place of its request among those asked in one message, and
what came of it; and the routing of all, one after the other (None: nothing is routed). Arrays of a
few numbers travel as bytes, for as arrays they take longer than all the rest.
"""


class EngineLink:
    """See the module. Keeps `trainer.engine.router.Replica`."""

    def __init__(self, handle: Handle) -> None:
        self._engine: Any = handle
        self._asked: dict[GenerateRequest, Callable[[Answers], None]] = {}
        self._unsent: list[GenerateRequest] = []
        self._readers: set[asyncio.Task[None]] = set()

    def submit(
        self, requests: Sequence[GenerateRequest], answered: Callable[[Answers], None]
    ) -> None:
        """See `Submits`. Those of a process that dies are answered with its `ActorDied`."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._asked.update(dict.fromkeys(requests, answered))
        self._unsent += requests

    def drop(self, requests: Sequence[GenerateRequest]) -> None:
        """See `Submits`."""
        dropped = {request for request in requests if self._asked.pop(request, None) is not None}
        unsent = dropped.intersection(self._unsent)
        if dropped != unsent:  # they end, and nobody hears of it, also when a deadline has passed
            ids = [request.request_id for request in dropped - unsent]
            Context().run(self._engine.abort, ids).add_done_callback(_forget)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """As `Engine.abort`, also of what is about to be sent."""
        self._send()
        count: int = await self._engine.abort(request_ids)
        return count

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        """As `Engine.load_weights`."""
        await self._engine.load_weights(weights, mode)

    async def aclose(self) -> None:
        """Ends what was asked; nobody hears of it. The engine goes on until its run ends."""
        self._asked.clear()
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            await asyncio.wait(self._readers)

    def _send(self) -> None:
        """What was asked in this turn of the loop, and not dropped meanwhile."""
        unsent, self._unsent = self._unsent, []
        requests = [request for request in unsent if request in self._asked]
        if requests:
            self._send_together(requests)

    def _send_together(self, requests: list[GenerateRequest]) -> None:
        # Several may have asked: one's deadline and chain of callers are not the others'.
        context = Context()
        try:
            stream = context.run(self._engine.answers.stream, requests)
        except Exception as error:  # cannot be carried, no room: whose fault it is, is to be found
            if len(requests) == 1:
                self._fail(requests, error)
            else:
                for request in requests:
                    self._send_together([request])
        else:
            reading = self._read(requests, stream)
            reader = asyncio.get_running_loop().create_task(reading, context=context)
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)

    async def _read(self, requests: list[GenerateRequest], stream: AsyncIterator[Parcel]) -> None:
        try:
            async for parcel in stream:
                self._tell([(requests[place], answer) for place, answer in _unpacked(parcel)])
                del parcel  # its routing is an object of the arena, and the next may take long
        except StoreFull as error:  # for some of the answers; what the others are is not known
            if len(requests) == 1:
                self._fail(requests, error)
            else:
                for request in [one for one in requests if one in self._asked]:
                    self._send_together([request])
        except Exception as error:  # death, or whatever the engine refuses them all for
            self._fail(requests, error)

    def _fail(self, requests: Sequence[GenerateRequest], error: Exception) -> None:
        """Of a message, those that were not answered."""
        self._tell([(request, error) for request in requests])

    def _tell(self, answers: Answers) -> None:
        """Each listener once of all that is its own; nobody of what was answered or dropped."""
        told: dict[Callable[[Answers], None], list[tuple[GenerateRequest, Any]]] = {}
        for request, answer in answers:
            answered = self._asked.pop(request, None)
            if answered is not None:
                told.setdefault(answered, []).append((request, answer))
        for answered, theirs in told.items():
            answered(theirs)


class _Served(Submits, Engine, Protocol):
    """An engine that answers by a call."""


class ServedEngine:
    """An engine as links call it; the base of its actor."""

    def __init__(self, engine: _Served) -> None:
        self._served = engine

    async def describe(self) -> EngineInfo:
        """Constants of the model."""
        return self._served.info

    async def answers(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Parcel]:
        """Asks the engine; its answers, as they end. Closing it drops what has not ended."""
        waiting = {request: place for place, request in enumerate(requests)}
        ended: list[tuple[int, Generation | Exception]] = []
        some_ended = asyncio.Event()

        def answered(answers: Answers) -> None:
            for request, answer in answers:
                place = waiting.pop(request, None)
                if place is not None:
                    ended.append((place, answer))
            some_ended.set()

        self._served.submit(requests, answered)
        try:
            while waiting or ended:
                await some_ended.wait()
                some_ended.clear()
                found, ended[:] = ended[:], ()
                for parcel in _packed(found):
                    yield parcel
        finally:
            if waiting:
                self._served.drop(list(waiting))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """As `Engine.abort`."""
        return await self._served.abort(request_ids)

    async def load_weights(self, weights: WeightsVersion, mode: SyncMode = "pause") -> None:
        """As `Engine.load_weights`."""
        await self._served.load_weights(weights, mode)


def _packed(answers: Sequence[tuple[int, Generation | Exception]]) -> Iterator[Parcel]:
    """As few parcels as the limit allows."""
    plain: list[tuple[int, _Plain | Exception]] = []
    routing: list[_Routing] = []
    nbytes = 0
    for place, answer in answers:
        try:
            found, routed = _as_plain(answer)
        except Exception as error:  # an engine may say anything: it is this one's to hear (L13)
            found, routed = _carried(error), None
        if routed is not None:
            if routing and nbytes + routed.nbytes > _ROUTING_BYTES_MAX:
                yield plain, _joined(routing)
                plain, routing, nbytes = [], [], 0
            routing.append(routed)
            nbytes += routed.nbytes
        plain.append((place, found))
    if plain:
        yield plain, _joined(routing)


def _as_plain(answer: Generation | Exception) -> tuple[_Plain | Exception, _Routing | None]:
    """An answer without its routing, and that in one piece."""
    if isinstance(answer, Exception):
        return _carried(answer), None
    shape: _Shape | None = None
    routed: _Routing | None = answer.routed_experts
    if routed is not None:
        routed = np.ascontiguousarray(routed)
        shape = str(routed.dtype.char), routed.shape
    plain = (
        _as_bytes(answer.token_ids, _INT32),
        _as_bytes(answer.logprobs, _FLOAT32),
        _as_bytes(answer.model_steps, _INT32),
        answer.text,
        answer.finish_reason,
        answer.error,
        shape,
    )
    return plain, routed


def _as_bytes(numbers: NDArray[Any], kind: np.dtype[Any]) -> bytes:
    return (numbers if numbers.dtype is kind else numbers.astype(kind)).tobytes()


def _joined(routing: list[_Routing]) -> pickle.PickleBuffer | None:
    """Out of band: a large one goes through the arena and is read in place."""
    return pickle.PickleBuffer(b"".join([one.data for one in routing])) if routing else None


def _unpacked(parcel: Parcel) -> Iterator[tuple[int, Generation | Exception]]:
    """What was packed. Arrays are read-only; the routing is views of one buffer."""
    plain, routing = parcel
    at = 0
    for place, answer in plain:
        if isinstance(answer, Exception):
            yield place, answer
            continue
        token_ids, logprobs, model_steps, text, reason, error, shape = answer
        routed = None
        if shape is not None:
            routed = np.frombuffer(routing, shape[0], math.prod(shape[1]), at).reshape(shape[1])
            at += routed.nbytes
        yield (
            place,
            Generation(
                np.frombuffer(token_ids, _INT32),
                np.frombuffer(logprobs, _FLOAT32),
                np.frombuffer(model_steps, _INT32),
                text,
                reason,
                routed,
                error,
            ),
        )


def _carried(error: Exception) -> Exception:
    """The error itself, or an EngineError that says the same: it may be of any class."""
    if not isinstance(error, TrainerError):  # one of ours says it all
        _log.warning("a request failed", exc_info=error)
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # what its class does when it is pickled or made is its own affair
        again = None
    return error if type(again) is type(error) else EngineError(error_text(error))


def _forget(call: asyncio.Future[int]) -> None:
    """A process that cannot be told has ended, or ends them with the link."""
    if not call.cancelled():
        call.exception()
