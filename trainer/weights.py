"""A version of the weights as one object of the arena, in the safetensors format.

Promises one put and no serialization: the learner writes its tensors straight into the object, and
an engine copies them from its mapping of it into its parameters. From and to a GPU the arena's
memory is page-locked (`shmstore.copies`), no second copy of the weights is made on the way, and an
engine's swap stands in the order of its stream, between two decode steps. The object describes
itself, and an engine refuses one that does not fit its model before it changes anything. The
session that `publish` names keeps the object alive; whoever owns that session releases it when the
last engine has moved on.

On the CPU a writer and a reader put the parameters of their model side by side, in one piece of
memory for each type, in which they lie as in the object: weights are then copied in one go, like
any other bytes. The parameters stay there; those of a type in which some share memory stay where
they were. Where they lie in an object is worked out once, and an object that begins with the same
bytes as the one before is not read again. Who changes a model after that (replaces, moves, ties or
adds parameters) makes a new writer or reader; the old one is `ParametersChanged`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmstore import ObjectRef, Store, headers
from shmstore.copies import Copies
from trainer.engine.protocol import WeightsVersion
from trainer.errors import EngineError, TrainerError

__all__ = ["ParametersChanged", "WeightsMismatch", "WeightsReader", "WeightsWriter"]

_ALIGNED_ITEMS = 16
"""Each parameter begins at a multiple of so many items, in the object and in memory."""
_HEADER_ALIGNMENT = 64
_LENGTH_BYTES = 8
_LEAD_BYTES = 128
"""Where the entries of the tensors begin: before them are the header's length and the model step,
and nothing else in the header differs between the versions of a model."""
_NAME_OF = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TYPE_OF = {name: kind for kind, name in _NAME_OF.items()}


class WeightsMismatch(EngineError):
    """Published weights that are not those of this model; nothing was changed."""


class ParametersChanged(TrainerError):
    """A model that was changed after its writer or reader was made; nothing was written."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies, in bytes from the start of the object."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Run:
    """A stretch of a row, from item `first`, and where it lies in an object: its bytes, and the
    type of its items there.
    """

    row: torch.Tensor
    first: int
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def memory(self) -> torch.Tensor:
        return self.row[self.first : self.first + (self.stop - self.start) // self.dtype.itemsize]

    def of(self, blob: torch.Tensor) -> torch.Tensor:
        """The stretch of the object."""
        return blob[self.start : self.stop].view(self.dtype)


class _Parameters:
    """The parameters of one model, tied ones once, as rows of memory: on the CPU one for each type,
    on a device, which could not hold a large row twice, one for each parameter.
    """

    def __init__(self, model: Any, user: str) -> None:
        self._model, self._user = model, user
        self.named: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.device = next(iter(self.named.values())).device
        self.at: dict[str, tuple[torch.Tensor, int]] = {}
        """The row of each, and its first item there; neighbours follow each other."""
        for named in _by_type(self.named):
            if self.device.type == "cpu" and not _overlap(named.values()):
                self.at.update(_side_by_side(named))
            else:
                self.at.update((name, (_alone(value), 0)) for name, value in named.items())
        self._live = list(self.named.values())
        self._looks = _looks(self._live)
        self._all_names = _all_names(model)
        self._remember_parts()

    def _remember_parts(self) -> None:
        # Live views of the tables in which each module keeps its modules and its parameters.
        tables = [t for m in self._model.modules() for t in (m._modules, m._parameters)]
        self._parts_now = [table.values() for table in tables]
        self._parts = list(itertools.chain.from_iterable(self._parts_now))

    def runs(self, places: Mapping[str, _Place]) -> list[_Run]:
        """Which stretches of the rows are stretches of an object with these places."""
        runs: list[_Run] = []
        for name, (row, first) in self.at.items():
            place = places[name]
            run = _Run(row, first, place.start, place.stop, place.dtype)
            if runs and _follows(run, runs[-1]):
                run = dataclasses.replace(runs.pop(), stop=run.stop)
            runs.append(run)
        return runs

    def check(self) -> None:
        """`ParametersChanged` unless they are the model's own, and as when they became rows."""
        parts = list(itertools.chain.from_iterable(self._parts_now))
        same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        if same and _looks(self._live) == self._looks:
            return
        if changes := self._changes():
            more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
            raise ParametersChanged(
                f"parameters of the model were changed after its {self._user} was made: "
                f"{'; '.join(changes[:3])}{more}. Nothing was written; make a new {self._user} "
                "after each such change"
            )
        self._remember_parts()  # modules are others, and the parameters as they were

    def _changes(self) -> list[str]:
        """What became of each parameter that is not as it was."""
        before, now = self._all_names, _all_names(self._model)
        names = {id(value): name for name, value in before.items()}
        looks = dict(zip(map(id, self._live), zip(*self._looks, strict=True), strict=True))
        found = []
        for name in before | now:
            old, new = before.get(name), now.get(name)
            if new is None:
                found.append(f"{name} was removed")
            elif old is None:
                found.append(f"{name} was added")
            elif new is not old:
                tied = names.get(id(new))
                found.append(f"{name} was {f'tied to {tied}' if tied else 'replaced'}")
            else:
                address, shape, _ = looks[id(old)]
                if new.shape != shape:
                    found.append(f"{name} has the shape {[*new.shape]}, and had {[*shape]}")
                elif not new.is_contiguous():
                    found.append(f"{name} lies in memory with gaps or in another order")
                elif new.data_ptr() != address:
                    found.append(f"{name} lies elsewhere in memory (its .data was assigned)")
        return found


def _looks(values: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Of each: where it lies, its shape, and whether it lies there without gaps and in order."""
    looks: tuple[Any, ...] = (
        torch.Tensor.data_ptr,
        torch.Tensor.size,
        torch.Tensor.is_contiguous,
    )
    return [list(map(look, values)) for look in looks]


def _all_names(model: Any) -> dict[str, torch.Tensor]:
    """Every name of every parameter: a tied one has several."""
    return dict(model.named_parameters(remove_duplicate=False))


def _follows(run: _Run, last: _Run) -> bool:
    """Whether `run` is as far behind `last` in the object as it is in memory."""
    return (
        run.row is last.row
        and run.dtype is last.dtype
        and run.start - last.start == (run.first - last.first) * run.dtype.itemsize
    )


def _by_type(named: Mapping[str, torch.Tensor]) -> Iterable[dict[str, torch.Tensor]]:
    found: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    for name, value in named.items():
        found.setdefault(value.dtype, {})[name] = value
    return found.values()


def _overlap(values: Iterable[torch.Tensor]) -> bool:
    """Whether some share memory, which must stay so: tied by `.data`, or views of one tensor."""
    spans = sorted(_span(value) for value in values if value.numel())
    return any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans))


def _span(value: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the one behind its last."""
    reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (reach + 1) * value.itemsize


def _alone(value: torch.Tensor) -> torch.Tensor:
    """A parameter as a row of its own; one with gaps, or in another order, loses them."""
    if not value.is_contiguous():
        value.data = value.detach().contiguous()
    return value.detach().view(-1)


def _side_by_side(named: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    """Moves parameters of one type into one row of memory, unless they lie in one already; -> the
    row and the first item of each, which is a multiple of `_ALIGNED_ITEMS`.
    """
    values = list(named.values())
    ends = list(itertools.accumulate(_aligned(value.numel()) for value in values))
    firsts = [0, *ends[:-1]]
    row = values[0].detach().as_strided((ends[-1],), (1,), 0) if _lie_so(values, ends) else None
    if row is None:
        # Empty: the system gives pages as they are written, while what was there before goes back.
        row = values[0].detach().new_empty(ends[-1])
        for value, first, end in zip(values, firsts, ends, strict=True):
            place = row[first : first + value.numel()].view(value.shape)
            place.copy_(value.detach())
            value.data = place
            row[first + value.numel() : end].zero_()
    return {name: (row, first) for name, first in zip(named, firsts, strict=True)}


def _lie_so(values: Sequence[torch.Tensor], ends: Sequence[int]) -> bool:
    """Whether they are one row already, because this model has a writer or reader."""
    storage = values[0].untyped_storage()
    return storage.nbytes() == ends[-1] * values[0].itemsize and all(
        value.is_contiguous() and value.data_ptr() == storage.data_ptr() + first * value.itemsize
        for value, first in zip(values, [0, *ends[:-1]], strict=True)
        if value.numel()  # an empty one is nowhere
    )


def _aligned(n_items: int) -> int:
    return -(-n_items // _ALIGNED_ITEMS) * _ALIGNED_ITEMS


class WeightsWriter:
    """Publishes the weights of `model`. `dtype`: what the engines hold, by default the learner's
    own types.
    """

    def __init__(self, model: Any, store: Store, dtype: torch.dtype | None = None) -> None:
        self._store = store
        self._parameters = _Parameters(model, "WeightsWriter")
        tensors = {name: self._parameters.named[name] for name in self._parameters.at}
        entries, places, self._size = _plan(
            tensors, {name: dtype or value.dtype for name, value in tensors.items()}
        )
        self._runs = self._parameters.runs(places)
        self._memory = [run.memory for run in self._runs]
        self._entries_bytes = len(entries)
        self._header = bytearray(_lead(len(entries)) + entries)
        self._head = torch.frombuffer(self._header, dtype=torch.uint8)

    def publish(
        self, model_step: int, *, session: str, timeout: float | None = None
    ) -> WeightsVersion:
        """Writes the parameters into one new object of `session`.

        `timeout`: seconds to wait for room. Raises ParametersChanged, and StoreFull and
        SessionReleased of shmstore.
        """
        self._parameters.check()
        self._header[:_LEAD_BYTES] = _lead(self._entries_bytes, model_step)
        with self._store.build((self._size,), torch.uint8, session, timeout) as draft:
            draft.tensor[: len(self._header)] = self._head
            with Copies(self._store, self._parameters.device) as copies:
                copies.download_all(self._memory, [run.of(draft.tensor) for run in self._runs])
        return WeightsVersion(ref=bytes(draft.ref), model_step=model_step, nbytes=self._size)


class WeightsReader:
    """Loads published weights into `model`, converting types where they differ.

    `check` False: nobody changes the model but through this reader, so where its parameters are is
    not looked at again for each version, which takes a fifth as long as copying 4 MB.
    """

    def __init__(self, model: Any, store: Store, *, check: bool = True) -> None:
        self._store = store
        self._parameters = _Parameters(model, "WeightsReader")
        self._check = check
        self._known: _Known | None = None

    def load(self, version: WeightsVersion) -> None:
        """Copies a version into the model's parameters.

        Raises WeightsMismatch, ParametersChanged, or ObjectFreed of shmstore when the version is
        gone.
        """
        ref = ObjectRef.from_bytes(version.ref)
        whole = memoryview(self._store.pin(ref))
        if self._check:
            self._parameters.check()
        known = self._known
        if known is None or not known.fits(whole):
            known = self._known = self._read(ref, whole, version)
        if known.copies is not None:
            for sink, start in known.copies:
                sink[:] = np.frombuffer(whole, np.uint8, len(sink), start)
            return
        blob = self._store.get(ref)
        with torch.no_grad(), Copies(self._store, self._parameters.device) as copies:
            copies.upload_all([run.of(blob) for run in known.runs], known.memory)

    def _read(self, ref: ObjectRef, whole: memoryview, version: WeightsVersion) -> _Known:
        """What lies where; checked against the object's size and the model."""
        blob = self._store.get(ref)
        if not isinstance(blob, torch.Tensor) or blob.dtype is not torch.uint8:
            raise WeightsMismatch("the object does not hold published weights: they are bytes")
        raw = blob.numpy()
        length = int.from_bytes(raw[:_LENGTH_BYTES].tobytes(), "little")
        places = _read_places(raw[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes(), len(raw))
        _check(self._parameters.named, places, version)
        return _Known(whole, length, self._parameters.runs(places))


class _Known:
    """An object of which is known what lies where, for those that begin with the same bytes.

    `copies`: bytes of the parameters, and where those of the object begin that go there; None where
    a copy is more than that.
    """

    def __init__(self, whole: memoryview, length: int, runs: list[_Run]) -> None:
        payload = headers.unpack(whole).payload_offset
        self.runs = runs
        self.memory = [run.memory for run in runs]
        self.copies: list[tuple[NDArray[np.uint8], int]] | None = None
        if all(run.row.device.type == "cpu" and run.row.dtype is run.dtype for run in runs):
            self.copies = [
                (memory.view(torch.uint8).numpy(), payload + run.start)
                for run, memory in zip(runs, self.memory, strict=True)
            ]
        self._size = len(whole)
        self._same = [
            slice(0, payload),
            slice(payload + _LEAD_BYTES, payload + _LENGTH_BYTES + length),
        ]
        self._bytes = [bytes(whole[at]) for at in self._same]

    def fits(self, whole: memoryview) -> bool:
        """Whether another object has its parts in the same places."""
        return len(whole) == self._size and [bytes(whole[at]) for at in self._same] == self._bytes


def _lead(entries_bytes: int, model_step: int = 0) -> bytes:
    """What stands before the entries."""
    text = f'{{"__metadata__":{{"model_step":"{model_step}"}},'.encode()
    length = _LEAD_BYTES - _LENGTH_BYTES
    assert len(text) <= length, model_step
    return (length + entries_bytes).to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def _plan(
    tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, torch.dtype]
) -> tuple[bytes, dict[str, _Place], int]:
    """The header's entries, the place of each tensor, and the size of the whole."""
    record: dict[str, Any] = {}
    offset = 0
    for name, value in tensors.items():
        size = value.numel() * kinds[name].itemsize
        record[name] = {
            "dtype": _NAME_OF[kinds[name]],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += _aligned(value.numel()) * kinds[name].itemsize
    entries = json.dumps(record, separators=(",", ":")).encode()[1:]
    entries += b" " * (-(_LEAD_BYTES + len(entries)) % _HEADER_ALIGNMENT)
    body = _LEAD_BYTES + len(entries)
    return entries, _places(record, body), body + offset


def _places(record: Mapping[str, Any], body: int) -> dict[str, _Place]:
    """Of the entries of a header; the data begin at `body`."""
    return {
        name: _Place(
            start=body + entry["data_offsets"][0],
            stop=body + entry["data_offsets"][1],
            shape=tuple(entry["shape"]),
            dtype=_TYPE_OF[entry["dtype"]],
        )
        for name, entry in record.items()
    }


def _read_places(header: bytes, size: int) -> dict[str, _Place]:
    """The places that the object itself states, checked against its size."""
    body = _LENGTH_BYTES + len(header)
    try:
        record = json.loads(header)
        record.pop("__metadata__", None)
        places = _places(record, body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsMismatch(f"the object does not hold published weights: {error!r}") from error
    end = body
    for name, place in sorted(places.items(), key=lambda item: item[1].start):
        itemsize = place.dtype.itemsize
        fits = place.stop - place.start == math.prod(place.shape) * itemsize
        if not fits or not end <= place.start <= place.stop <= size:
            raise WeightsMismatch(f"{name} does not lie within the published object")
        if place.start % itemsize or size % itemsize:
            raise WeightsMismatch(f"{name} and the object's end are not at whole items")
        end = place.stop
    return places


def _check(
    targets: Mapping[str, torch.Tensor], places: Mapping[str, _Place], version: WeightsVersion
) -> None:
    missing, unknown = sorted(targets.keys() - places), sorted(places.keys() - targets)
    misshapen = sorted(
        name for name in targets.keys() & places if tuple(targets[name].shape) != places[name].shape
    )
    if missing or unknown or misshapen:
        raise WeightsMismatch(
            f"weights of step {version.model_step} are of another model: missing {missing[:3]}, "
            f"unknown {unknown[:3]}, of another shape {misshapen[:3]}; learner and engine must be "
            "built from the same model config"
        )
