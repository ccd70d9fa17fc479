"""A version of the weights as one object of the arena, in the safetensors format.

Promises one put and no serialization: the learner writes its tensors straight into the object, and
an engine copies them from its mapping of it into its parameters. From and to a GPU the arena's
memory is page-locked (`shmstore.copies`), no second copy of the weights is made on the way, and an
engine's swap stands in the order of its stream, between two decode steps. The object describes
itself, and an engine refuses one that does not fit its model before it changes anything. The
session that `publish` names keeps the object alive; whoever owns that session releases it when the
last engine has moved on.

A writer and a reader belong to one model, whose parameters stay where they are in memory: where
they lie in an object is worked out once, and an object that begins with the same bytes as the one
before is not read again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shmstore import ObjectRef, Store
from shmstore.copies import Copies
from trainer.engine.protocol import WeightsVersion
from trainer.errors import EngineError

__all__ = ["WeightsMismatch", "WeightsReader", "WeightsWriter"]

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_LEAD_BYTES = 128
"""Where the entries of the tensors begin: before them are the header's length and the model step,
and nothing else in the header differs between the versions of a model."""
_NAME_OF = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TYPE_OF = {name: kind for kind, name in _NAME_OF.items()}


class WeightsMismatch(EngineError):
    """Published weights that are not those of this model; nothing was changed."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies, in bytes from the start of the object."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Cuts:
    """How an object comes apart into its tensors, in the order of `places`."""

    def __init__(self, places: Sequence[_Place], size: int) -> None:
        self._count = len(places)
        self._by_type: list[tuple[torch.dtype, list[int], dict[int, int]]] = []
        """For each type all pieces of the object in items of it, and which of them is a tensor."""
        for dtype in dict.fromkeys(place.dtype for place in places):
            sizes: list[int] = []
            tensors: dict[int, int] = {}
            at = 0
            for index in sorted(range(len(places)), key=lambda index: places[index].start):
                place = places[index]
                if place.dtype is dtype:
                    tensors[len(sizes) + 1] = index
                    sizes += [place.start - at, place.stop - place.start]
                    at = place.stop
            sizes.append(size - at)
            self._by_type.append((dtype, [n // dtype.itemsize for n in sizes], tensors))

    def of(self, blob: torch.Tensor) -> list[torch.Tensor]:
        """One flat view for each tensor."""
        found = [blob] * self._count
        for dtype, sizes, tensors in self._by_type:
            parts = blob.view(dtype).split_with_sizes(sizes)
            for piece, index in tensors.items():
                found[index] = parts[piece]
        return found


class _Parameters:
    """The parameters of one model, tied ones once."""

    def __init__(self, model: Any) -> None:
        self.named: dict[str, torch.Tensor] = {
            name: value.detach() for name, value in model.named_parameters()
        }
        self.device = next(iter(self.named.values())).device
        self._live = list(model.parameters())
        self._flat = [value.view(-1) for value in self.named.values()]

    def flat(self) -> list[torch.Tensor]:
        """Each as one row, over the model's own memory."""
        moved = [
            a for a, b in zip(self._live, self._flat, strict=True) if a.data_ptr() != b.data_ptr()
        ]
        assert not moved, f"{len(moved)} parameters are not where they were"
        return self._flat


class WeightsWriter:
    """Publishes the weights of `model`. `dtype`: what the engines hold, by default the learner's
    own types.
    """

    def __init__(self, model: Any, store: Store, dtype: torch.dtype | None = None) -> None:
        self._store = store
        self._parameters = _Parameters(model)
        named = self._parameters.named
        entries, places, self._size = _plan(
            named, {name: dtype or value.dtype for name, value in named.items()}
        )
        self._cuts = _Cuts(places, self._size)
        self._entries_bytes = len(entries)
        self._header = bytearray(_lead(len(entries)) + entries)
        self._head = torch.frombuffer(self._header, dtype=torch.uint8)

    def publish(
        self, model_step: int, *, session: str, timeout: float | None = None
    ) -> WeightsVersion:
        """Writes the parameters into one new object of `session`.

        `timeout`: seconds to wait for room. Raises StoreFull and SessionReleased of shmstore.
        """
        self._header[:_LEAD_BYTES] = _lead(self._entries_bytes, model_step)
        with self._store.build((self._size,), torch.uint8, session, timeout) as draft:
            draft.tensor[: len(self._header)] = self._head
            with Copies(self._store, self._parameters.device) as copies:
                copies.download_all(self._parameters.flat(), self._cuts.of(draft.tensor))
        return WeightsVersion(ref=bytes(draft.ref), model_step=model_step, nbytes=self._size)


class WeightsReader:
    """Loads published weights into `model`, converting types where they differ."""

    def __init__(self, model: Any, store: Store) -> None:
        self._store = store
        self._parameters = _Parameters(model)
        self._known: tuple[int, bytes] = 0, b""
        """Size and entries of the object that the cuts are for."""
        self._cuts: _Cuts | None = None

    def load(self, version: WeightsVersion) -> None:
        """Copies a version into the model's parameters.

        Raises WeightsMismatch, or ObjectFreed of shmstore when the version is gone.
        """
        blob = self._store.get(ObjectRef.from_bytes(version.ref))
        if not isinstance(blob, torch.Tensor) or blob.dtype is not torch.uint8:
            raise WeightsMismatch("the object does not hold published weights: they are bytes")
        cuts = self._cuts_for(blob, version)
        with torch.no_grad(), Copies(self._store, self._parameters.device) as copies:
            copies.upload_all(cuts.of(blob), self._parameters.flat())

    def _cuts_for(self, blob: torch.Tensor, version: WeightsVersion) -> _Cuts:
        """From the header; checked against the object's size and the model."""
        length = int.from_bytes(_bytes_of(blob[:_LENGTH_BYTES]), "little")
        header = _bytes_of(blob[_LENGTH_BYTES : _LENGTH_BYTES + length])
        known = blob.numel(), header[_LEAD_BYTES - _LENGTH_BYTES :]
        if self._cuts is None or known != self._known:
            places = _read_places(header, blob.numel())
            _check(self._parameters.named, places, version)
            self._cuts = _Cuts([places[name] for name in self._parameters.named], blob.numel())
            self._known = known
        return self._cuts


def _lead(entries_bytes: int, model_step: int = 0) -> bytes:
    """What stands before the entries."""
    text = f'{{"__metadata__":{{"model_step":"{model_step}"}},'.encode()
    length = _LEAD_BYTES - _LENGTH_BYTES
    assert len(text) <= length, model_step
    return (length + entries_bytes).to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def _plan(
    tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, torch.dtype]
) -> tuple[bytes, list[_Place], int]:
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
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    entries = json.dumps(record, separators=(",", ":")).encode()[1:]
    entries += b" " * (-(_LEAD_BYTES + len(entries)) % _ALIGNMENT)
    body = _LEAD_BYTES + len(entries)
    return entries, list(_places(record, body).values()), body + offset


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


def _bytes_of(blob: torch.Tensor) -> bytes:
    return blob.cpu().numpy().tobytes()


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
