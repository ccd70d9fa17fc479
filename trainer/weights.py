"""A version of the weights as one object of the arena, in the safetensors format.

Promises one put and no serialization: the learner writes its tensors straight into the object, and
an engine copies them from its mapping of it into its parameters (through a pinned buffer to a GPU).
The object describes itself; the engine refuses one that does not fit its model before it changes
anything. Old versions go when the last engine has moved on: whoever published frees them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shmstore import Store
from trainer.engine.protocol import WeightsVersion
from trainer.errors import EngineError

__all__ = ["WeightsMismatch", "load_into", "publish", "read_layout"]

_ALIGNMENT = 64
_NAME_OF = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TYPE_OF = {name: kind for kind, name in _NAME_OF.items()}


class WeightsMismatch(EngineError):
    """Published weights that are not those of this model; nothing was changed."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies, from the start of the object."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def publish(
    model: torch.nn.Module, store: Store, model_step: int, *, dtype: torch.dtype | None = None
) -> WeightsVersion:
    """Writes the parameters (once each, tied ones too) into one new object.

    `dtype`: what the engines hold, by default the learner's own type. The object lives as long as
    someone holds its reference: keep `reference(version)` until the engines have moved on.
    """
    tensors = _parameters(model)
    kinds = {name: dtype or value.dtype for name, value in tensors.items()}
    header, places, size = _plan(tensors, kinds)
    with store.build((size,), np.uint8) as draft:
        target = draft.array
        target[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        for name, value in tensors.items():
            place = places[name]
            _write(target[place.start : place.stop], value, place.dtype)
    assert draft.ref is not None, "a sealed draft without a reference"
    version = WeightsVersion(
        ref_hex=draft.ref.hex(), model_step=model_step, layout={"format": "safetensors"}
    )
    _held[version.ref_hex] = draft.ref
    return version
