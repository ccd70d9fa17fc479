"""A run of tokens with one origin, and the path that such runs make up.

Both are values: frozen, changed only by making a new one. What an engine or a user gives is checked
here, once: behind it everything relies on arrays of the lifecycle's types, without gaps and of one
length. `trainer.trace` stores segments in a session and reads traces from it.

Imports numpy, msgspec and the core, which checks what needs no conversion. Used in every process of
the trainer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr, replace
from numpy.typing import NDArray

from shmstore.arrow import (
    EXPERTS_PER_TOKEN_MAX,
    METADATA_BYTES_MAX,
    ROWS_BEFORE_MAX,
    known_rows,
)
from trainer.errors import BadSegment

__all__ = ["IGNORE_LABEL", "NO_MODEL_STEP", "Segment", "Trace", "narrowest_unsigned"]

#: Label of a token that is not trained on (prompt, tool output, masked).
IGNORE_LABEL = -100

#: `model_step` of a token that no model sampled.
NO_MODEL_STEP = -1


class Segment(msgspec.Struct, frozen=True, eq=False):
    """A run of tokens with one origin; `n` tokens, unshifted (the learner shifts).

    token_ids int32 [n]; labels int32 [n], equal to the token where the policy sampled it and it is
    trained on, else `IGNORE_LABEL`; logprobs float32 [n], 0.0 where not sampled; model_steps int32
    [n], -1 where not sampled; routed_experts uint8 or uint16 [n, layers, top_k] or None (wider
    integers are narrowed to what holds the largest index). `n_routed` rows of it are known: an
    engine does not know the row of the last token that it sampled until the next turn feeds it
    back.

    Arrays of another dtype or with gaps are converted once, here; `BadSegment` says what does not
    fit.
    """

    token_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    model_steps: NDArray[np.int32]
    text: str = ""
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    n_routed: int = -1
    #: Rows for the tokens just before this segment that became known only with it: [r, layers,
    #: top_k].
    routed_before: NDArray[np.uint8] | NDArray[np.uint16] | None = None

    def __post_init__(self) -> None:
        known = known_rows(self)
        if known is None:
            self._convert()
        elif known != self.n_routed:
            force_setattr(self, "n_routed", known)

    def _convert(self) -> None:
        """What an engine's own arrays do not need; or `BadSegment`."""
        if not isinstance(self.text, str):
            raise BadSegment(f"text is {self.text!r}; a str is needed")
        _check_utf8(self.text)
        columns = [(name, _converted(name, getattr(self, name), form)) for name, form in _COLUMNS]
        n = len(columns[0][1])
        for name, given in columns:
            if len(given) != n:
                raise BadSegment(
                    f"{name} has shape {given.shape}, but there are {n} token_ids: need ({n},)"
                )
            force_setattr(self, name, given)
        self._convert_routing(n)

    def _convert_routing(self, n: int) -> None:
        routed = self.routed_experts
        stated = _whole("n_routed", self.n_routed)
        if routed is None:
            if stated > 0 or self.routed_before is not None:
                raise BadSegment("n_routed or routed_before is given, but routed_experts is None")
            force_setattr(self, "n_routed", 0)
            return
        routed = _narrowed("routed_experts", routed)
        before = self.routed_before
        if before is not None:
            before = _narrowed("routed_before", before)
            if before.dtype is not routed.dtype:
                routed, before = (part.astype(_UINT16, copy=False) for part in (routed, before))
        if not n - 1 <= len(routed) <= n:
            raise BadSegment(
                f"routed_experts has {len(routed)} rows for {n} tokens; "
                "allowed are all rows, or all but the last"
            )
        if before is not None:
            _check_before(before, routed)
        known = len(routed) if stated < 0 else stated
        if not 0 <= known <= len(routed):
            raise BadSegment(f"n_routed is {known}, but routed_experts has {len(routed)} rows")
        force_setattr(self, "n_routed", known)
        if routed is not self.routed_experts:
            force_setattr(self, "routed_experts", routed)
        if before is not self.routed_before:
            force_setattr(self, "routed_before", before)

    def __len__(self) -> int:
        return len(self.token_ids)

    def evolve(self, **changes: Any) -> Segment:
        """A copy with `changes`; the only way to alter a segment."""
        return replace(self, **changes)

    @property
    def n_trainable(self) -> int:
        """Tokens that carry a label."""
        return int(np.count_nonzero(self.labels != IGNORE_LABEL))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One trainable path, root to leaf, as contiguous arrays of T tokens; fields as in `Segment`.

    routed_experts has T rows; rows that no engine reported (the last token's) are zero and are
    never used for a loss, because the loss of a token reads the position before it.
    """

    token_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    model_steps: NDArray[np.int32]
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    #: Positions in the session of the segments that make up the path.
    nodes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_trainable(self) -> int:
        """Tokens that carry a label."""
        return int(np.count_nonzero(self.labels != IGNORE_LABEL))


def _check_utf8(text: str) -> None:
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadSegment(f"text cannot be stored as UTF-8: {error}") from error
    if nbytes > METADATA_BYTES_MAX:
        raise BadSegment(f"text has {nbytes} bytes; a segment holds up to {METADATA_BYTES_MAX}")


def _whole(name: str, given: object) -> int:
    try:
        return int(operator.index(given))  # type: ignore[arg-type]
    except TypeError as error:
        raise BadSegment(f"{name} is {given!r}; a whole number is needed") from error


def _check_before(before: NDArray[Any], routed: NDArray[Any]) -> None:
    if before.shape[1:] != routed.shape[1:]:
        raise BadSegment(
            f"routed_before has shape {before.shape}, but routed_experts {routed.shape}: "
            "layers and top_k must be the same"
        )
    if len(before) > ROWS_BEFORE_MAX or before.nbytes > METADATA_BYTES_MAX:
        raise BadSegment(
            f"routed_before has {len(before)} rows of {before.nbytes} bytes; a segment brings up "
            f"to {ROWS_BEFORE_MAX} rows of {METADATA_BYTES_MAX} bytes"
        )


def _narrowed(name: str, given: object) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Routing without gaps in uint8 or uint16; what an engine gives in a wider type is narrowed."""
    array = given if type(given) is np.ndarray else _as_array(name, given)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise BadSegment(
            f"{name} has shape {array.shape} and type {array.dtype}; need [tokens, layers, top_k] "
            "of whole numbers"
        )
    layers, top_k = array.shape[1:]
    if not 0 < layers * top_k <= EXPERTS_PER_TOKEN_MAX:
        raise BadSegment(
            f"{name} has shape {array.shape}: {layers * top_k} experts a token; between 1 and "
            f"{EXPERTS_PER_TOKEN_MAX} are allowed"
        )
    dtype: np.dtype[Any] = array.dtype
    if dtype is _UINT8 or dtype is _UINT16:
        if array.flags.c_contiguous:
            return array
    else:
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < 0 or high >= 1 << 16:
            raise BadSegment(f"{name} go from {low} to {high}; experts are numbered 0 to 65535")
        dtype = narrowest_unsigned(high + 1)
    return np.ascontiguousarray(array, dtype=dtype)


def _as_array(name: str, given: object) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except (ValueError, TypeError) as error:
        raise BadSegment(f"{name} is no array: {error}") from error


def _converted(name: str, given: object, dtype: np.dtype[Any]) -> NDArray[Any]:
    """`given` in the column's type; whole numbers stay what they are or are refused."""
    try:
        array = np.asarray(given)
        if array.ndim != 1:
            raise TypeError(f"it has {array.ndim} dimensions, and one is needed")
        if dtype.kind == "i" and array.size:
            if array.dtype.kind not in "iu":
                raise TypeError(f"they are {array.dtype}")
            limits = np.iinfo(dtype)
            if array.min() < limits.min or array.max() > limits.max:
                raise ValueError(f"they go from {array.min()} to {array.max()}")
        if dtype.kind == "f" and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"they are {array.dtype}")
        return np.ascontiguousarray(array, dtype=dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadSegment(f"{name} cannot be taken as {dtype}: {error}") from error


def narrowest_unsigned(n_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """The type in which expert indices travel: uint8 up to 256 experts, else uint16 (lifecycle,
    "segment").
    """
    if not 1 <= n_experts <= 1 << 16:
        raise BadSegment(f"{n_experts} experts; between 1 and 65536 fit the routing record")
    return _UINT8 if n_experts <= 256 else _UINT16


_UINT8 = np.dtype(np.uint8)
_UINT16 = np.dtype(np.uint16)
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)
_COLUMNS = (
    ("token_ids", _INT32),
    ("labels", _INT32),
    ("logprobs", _FLOAT32),
    ("model_steps", _INT32),
)
