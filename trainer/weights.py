"""A version of the weights as one object of the arena, in the safetensors format.

Promises one put and no serialization: the learner writes its tensors straight into the object, and
an engine copies them from its mapping of it into its parameters. From and to a GPU the arena's
memory is page-locked (`shmstore.copies`), no second copy of the weights is made on the way, and an
engine's swap stands in the order of its stream, between two decode steps. The object describes
itself, and an engine refuses one that does not fit its model before it changes anything. The
session that `publish` names keeps the object alive; whoever owns that session releases it when the
last engine has moved on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shmstore import ObjectRef, Store
from shmstore.copies import Copies
from trainer.engine.protocol import WeightsVersion
from trainer.errors import EngineError

__all__ = ["WeightsMismatch", "load_into", "publish"]

_ALIGNMENT = 64
_LENGTH_BYTES = 8
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


def publish(
    model: torch.nn.Module,
    store: Store,
    model_step: int,
    *,
    session: str,
    dtype: torch.dtype | None = None,
    timeout: float | None = None,
) -> WeightsVersion:
    """Writes the parameters, tied ones once, into one new object of `session`.

    `dtype`: what the engines hold, by default the learner's own types. `timeout`: seconds to wait
    for room. Raises StoreFull and SessionReleased of shmstore.
    """
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    kinds = {name: dtype or value.dtype for name, value in tensors.items()}
    header, places, size = _plan(tensors, kinds, model_step)
    with store.build((size,), torch.uint8, session, timeout) as draft:
        blob = draft.tensor
        blob[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        with Copies(store, _device_of(tensors)) as copies:
            for name, place in places.items():
                sink = blob[place.start : place.stop].view(place.dtype)
                copies.download(tensors[name].reshape(-1), sink)
    return WeightsVersion(ref=bytes(draft.ref), model_step=model_step, nbytes=size)


def load_into(model: Any, store: Store, version: WeightsVersion) -> None:
    """Copies a published version into the model's parameters, converting types where they differ.

    Raises WeightsMismatch, or ObjectFreed of shmstore when the version is gone.
    """
    blob: torch.Tensor = store.get(ObjectRef.from_bytes(version.ref))
    places = _read_layout(blob)
    targets = dict(model.named_parameters())
    _check(targets, places, version)
    with torch.no_grad(), Copies(store, _device_of(targets)) as copies:
        for name, target in targets.items():
            place = places[name]
            source = blob[place.start : place.stop].view(place.dtype).view(place.shape)
            copies.upload(source, target)


def _device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """The one device that a model is on."""
    return next(iter(tensors.values())).device


def _plan(
    tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, torch.dtype], model_step: int
) -> tuple[bytes, dict[str, _Place], int]:
    """The header, the place of each tensor, and the size of the whole."""
    relative: dict[str, _Place] = {}
    offset = 0
    for name, value in tensors.items():
        size = value.numel() * kinds[name].itemsize
        relative[name] = _Place(offset, offset + size, tuple(value.shape), kinds[name])
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    record: dict[str, Any] = {"__metadata__": {"model_step": str(model_step)}}
    for name, place in relative.items():
        record[name] = {
            "dtype": _NAME_OF[place.dtype],
            "shape": list(place.shape),
            "data_offsets": [place.start, place.stop],
        }
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header, _shifted(relative, len(header)), len(header) + offset


def _shifted(places: Mapping[str, _Place], by: int) -> dict[str, _Place]:
    return {
        name: _Place(place.start + by, place.stop + by, place.shape, place.dtype)
        for name, place in places.items()
    }


def _read_layout(blob: torch.Tensor) -> dict[str, _Place]:
    """The places that the object itself states, checked against its size."""
    try:
        length = int.from_bytes(_bytes_of(blob[:_LENGTH_BYTES]), "little")
        record = json.loads(_bytes_of(blob[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        record.pop("__metadata__", None)
        relative = {
            name: _Place(
                start=entry["data_offsets"][0],
                stop=entry["data_offsets"][1],
                shape=tuple(entry["shape"]),
                dtype=_TYPE_OF[entry["dtype"]],
            )
            for name, entry in record.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsMismatch(f"the object does not hold published weights: {error!r}") from error
    places = _shifted(relative, _LENGTH_BYTES + length)
    for name, place in places.items():
        wanted = math.prod(place.shape) * place.dtype.itemsize
        if place.stop - place.start != wanted or place.stop > blob.numel():
            raise WeightsMismatch(f"{name} does not lie within the published object")
    return places


def _bytes_of(blob: torch.Tensor) -> bytes:
    return blob.cpu().numpy().tobytes()


def _check(
    targets: Mapping[str, torch.nn.Parameter],
    places: Mapping[str, _Place],
    version: WeightsVersion,
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
