"""Objects that are written in place: `with store.build(shape, dtype) as draft`.

Owns the life of one draft in Python: writable until it is sealed, discarded when the block raises.
Made by `Store.build` only; one thread at a time.

While a numpy view of the draft outlives the seal (a slice that somebody kept), its bytes stay in
place, so that a late write can never hit another object; it hits the sealed one. `draft.array`
itself becomes read-only at the seal.
"""

from __future__ import annotations

import functools
import math
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from . import _core, headers, tensors
from .errors import BadValue, NotStorable, ObjectTooLarge
from .headers import Kind

if TYPE_CHECKING:
    from ._core import DraftHandle, ObjectRef


class Draft:
    """One object under construction."""

    def __init__(self, handle: DraftHandle, header: bytes, view: _ArrayPlan) -> None:
        self._handle: DraftHandle | None = handle
        self._name = handle.ref
        self._ref: ObjectRef | None = None
        buffer = memoryview(handle.view())
        n_header = len(header)
        buffer[:n_header] = header
        self._array: Any = None
        self._tensor: Any = None
        if isinstance(view.dtype, np.dtype):
            self._array = np.ndarray(view.shape, view.dtype, buffer, n_header)
        else:
            self._tensor = tensors.tensor_over(buffer[n_header:], view.dtype, view.shape)

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The numpy view: writable until the seal. BadValue for a torch draft, or when it is
        over."""
        if self._array is None:
            raise BadValue("this draft has no numpy array: it is over, or made with a torch dtype")
        array: np.ndarray[Any, Any] = self._array
        return array

    @property
    def tensor(self) -> Any:
        """The torch tensor of a draft that was made with a torch dtype."""
        if self._tensor is None:
            raise BadValue("this draft has no tensor: it is over, or made with a numpy dtype")
        return self._tensor

    @property
    def ref(self) -> ObjectRef:
        """The object's ref. Before the seal a plain name that may be handed out (a `get` on it
        waits for the seal); afterwards, unless a session holds the object, a counted one."""
        return self._name if self._ref is None else self._ref

    def seal(self) -> ObjectRef:
        """Publish the bytes, and attach them if `build` named a session. Happens on leaving the
        block. When it fails (SessionReleased, TableFull) the draft is still there, to be sealed
        later or discarded; leaving the block discards it."""
        if self._handle is None:
            raise BadValue("the draft is over: it was sealed or discarded already")
        if self._array is not None:
            self._array.flags.writeable = False
        self._array = self._tensor = None
        self._ref = self._handle.seal()
        self._handle = None
        return self._ref

    def discard(self) -> None:
        """End the object unsealed; who waits for it gets ObjectFreed. Nothing when it is over."""
        self._array = self._tensor = None
        if self._handle is not None:
            self._handle.discard()
            self._handle = None

    def __enter__(self) -> Self:
        if self._handle is None:
            raise BadValue("the draft is over: it was sealed or discarded already")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is None:
            return
        if kind is not None:
            self.discard()
            return
        try:
            self.seal()
        except BaseException:
            self.discard()
            raise


class _ArrayPlan:
    """Shape and dtype of a draft, checked: numpy's dtype, or the name of a torch dtype."""

    def __init__(self, shape: int | tuple[int, ...], dtype: Any) -> None:
        self._header: tuple[bytes, int] | None = None
        self.shape = _checked_shape(shape)
        torch = tensors.torch_if_imported()
        self.dtype: np.dtype[Any] | str
        if torch is not None and isinstance(dtype, torch.dtype):
            self.dtype = tensors.tensor_dtype_name(dtype)
            self.itemsize = dtype.itemsize
        else:
            self.dtype = _checked_dtype(dtype)
            self.itemsize = self.dtype.itemsize

    def header(self) -> tuple[bytes, int]:
        """(header, payload bytes)."""
        if self._header is None:
            self._header = self._packed()
        return self._header

    def _packed(self) -> tuple[bytes, int]:
        payload_bytes = math.prod(self.shape) * self.itemsize
        if payload_bytes > _core.CAPACITY_MAX:
            raise ObjectTooLarge(
                f"{payload_bytes} bytes fit no arena: the largest holds {_core.CAPACITY_MAX}",
                needed=payload_bytes,
            )
        if isinstance(self.dtype, str):
            packed = headers.pack(Kind.TENSOR, payload_bytes, shape=self.shape, text=self.dtype)
        else:
            code, text = tensors.dtype_text(self.dtype)
            packed = headers.pack(
                Kind.ARRAY, payload_bytes, shape=self.shape, text=text, dtype_code=code
            )
        return packed, payload_bytes


def _checked_shape(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    dims: tuple[Any, ...]
    try:
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
    except TypeError:
        dims = (None,)  # not a shape at all
    whole = all(isinstance(dim, (int, np.integer)) and not isinstance(dim, bool) for dim in dims)
    if not whole or not all(0 <= dim < 1 << 63 for dim in dims) or len(dims) > headers.NDIM_MAX:
        raise BadValue(
            f"shape must be up to {headers.NDIM_MAX} ints from 0 to 2**63 - 1, not {shape!r}"
        )
    return tuple(int(dim) for dim in dims)


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        checked: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise BadValue(f"{dtype!r} is no numpy or torch dtype") from error
    if not tensors.is_plain_dtype(checked) or checked.subdtype is not None:
        raise NotStorable(f"items of dtype {checked} cannot be written in place; use put")
    return checked


# A loop builds the same shape again and again, and a plan costs ten times what a reservation does.
_PLANS_MAX = 256
_cached_plan = functools.lru_cache(maxsize=_PLANS_MAX, typed=True)(_ArrayPlan)


def plan(shape: int | tuple[int, ...], dtype: Any) -> _ArrayPlan:
    """Check what a draft will be; BadValue and NotStorable say what is wrong with it."""
    # To the cache True equals 1, and dtypes are equal that differ in metadata: only what is plain.
    plain_shape = type(shape) is int or (
        type(shape) is tuple and all(type(dim) is int for dim in shape)
    )
    torch = tensors.torch_if_imported()
    plain_dtype = (
        isinstance(dtype, (str, type))
        or (isinstance(dtype, np.dtype) and dtype.fields is None and dtype.metadata is None)
        or (torch is not None and isinstance(dtype, torch.dtype))
    )
    if plain_shape and plain_dtype:
        return _cached_plan(shape, dtype)
    return _ArrayPlan(shape, dtype)


__all__ = ["Draft"]
