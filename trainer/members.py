"""How the members of a group are carried: as one block, in messages and in snapshots alike.

What a user's loop puts into a record comes back as plain Python on the other side: numpy's numbers
as Python's, lists as tuples. A value that cannot be carried, or that is none that its field may
hold, is a `BadGroup` that names rollout and field.

Knows of a record only its class, and that it has a `session_id` and a `uid`. Used by
`trainer.rollout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec.structs import asdict

from trainer.errors import BadGroup
from trainer.json_values import json_problem

__all__ = ["Members"]

M = TypeVar("M", bound=msgspec.Struct)


class Members(Generic[M]):
    """Encodes and decodes the members of one class; stateless, so any thread may."""

    __slots__ = ("_decoder",)

    def __init__(self, kind: type[M]) -> None:
        self._decoder: msgspec.msgpack.Decoder[tuple[M, ...]] = msgspec.msgpack.Decoder(
            tuple[kind, ...]  # type: ignore[valid-type]  # of whatever class it is made for
        )

    def encode(self, group_uid: str, members: tuple[M, ...]) -> bytes:
        """As one block."""
        try:
            return _ENCODER.encode(members)
        except _CANNOT_BE_CARRIED as error:
            found = self._misfit(map(asdict, members))
            raise BadGroup(f"group {group_uid!r}: {found or error}") from None

    def decode(self, group_uid: str, block: bytes) -> tuple[M, ...]:
        """What `encode` wrote."""
        try:
            return self._decoder.decode(block)
        except msgspec.ValidationError as error:
            found = self._misfit(msgspec.msgpack.decode(block))
            raise BadGroup(f"group {group_uid!r}: {found or error}") from None

    def _misfit(self, members: Iterable[Mapping[str, Any]]) -> str | None:
        """The first field that cannot be carried, and why."""
        for fields in members:
            for name, value in fields.items():
                try:
                    raw = _ENCODER.encode([{"session_id": "", name: value}])
                    value = msgspec.msgpack.decode(raw)[0][name]  # as a plain one
                    self._decoder.decode(raw)
                except (*_CANNOT_BE_CARRIED, msgspec.ValidationError) as error:
                    why = str(error).partition(" - at ")[0]
                    problem = json_problem(value, name) or f"{name} is {value!r:.100}: {why}"
                    return f"rollout {fields['uid']!r}: {problem}"
        return None


def _as_python(value: object) -> object:
    """What an encoder does not know by itself."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it is a {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_python)
#: What the encoder raises for values that it cannot write.
_CANNOT_BE_CARRIED = (TypeError, ValueError, OverflowError, RecursionError)
