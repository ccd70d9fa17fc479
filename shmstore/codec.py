"""Which format a value takes, and the way back: the one place that knows all kinds.

Owns the dispatch. `Store` calls `encode` for values that `_core` does not write itself, and
`decode` for headers that it does not read itself. What comes back equals what was put:

    numpy array        read-only view (Fortran order kept, other strides become C order); of a
                       memmap its values, as an ndarray
    torch tensor       tensor over read-only pages (see `tensors`), values only: no requires_grad
    Arrow value        the same class over the arena's buffers
    bytes, bytearray   bytes, bytearray: a copy, as their types promise. For zero-copy put a
                       memoryview, or read any object with `Store.buffer`
    memoryview         read-only memoryview of the same format and shape
    anything else      unpickled; arrays and tensors inside it are views like the above
"""

from __future__ import annotations

import struct
from typing import Any, cast

import numpy as np

from . import _core, arrow, headers, pickling, tensors
from .encoded import Encoded
from .errors import ArenaDamaged, NotStorable, PickleRefused
from .headers import Header, Kind

_CASTABLE_FORMATS = frozenset("bBhHiIlLqQnNfdc?")


def encode(value: object, *, allow_pickle: bool) -> Encoded:
    """Plan how `value` is written. NotStorable (PickleRefused) says why it cannot be."""
    if isinstance(value, (bytes, bytearray)) and type(value) in (bytes, bytearray):
        kind = Kind.BYTES if isinstance(value, bytes) else Kind.BYTEARRAY
        return _encode_flat(kind, memoryview(value))
    if isinstance(value, memoryview):
        return _encode_memoryview(value)
    if type(value) in (np.ndarray, np.memmap):
        array: np.ndarray[Any, Any] = np.asarray(value)
        if tensors.is_plain_dtype(array.dtype):
            return tensors.encode_array(array)
    elif tensors.is_dense_tensor(value):
        return tensors.encode_tensor(value)
    elif (sort := arrow.sort_of(value)) is not None:
        return arrow.encode(value, sort)
    if tensors.is_storage(value):
        raise NotStorable("a torch storage cannot be rebuilt; put a tensor over it instead")
    if not allow_pickle:
        raise PickleRefused(
            f"a {type(value).__qualname__} needs pickle, and this store has allow_pickle=False; "
            "put arrays, tensors, Arrow values or bytes"
        )
    return pickling.encode(value)


def decode(whole: memoryview, *, allow_pickle: bool) -> Any:
    """The value over an object's bytes; it keeps them alive through the view's base."""
    header = headers.unpack(whole)
    if header.kind is Kind.ARRAY:
        return tensors.decode_array(header, whole)
    if header.kind is Kind.ARROW:
        return arrow.decode(header, whole)
    if header.kind is Kind.PICKLE:
        if not allow_pickle:
            raise PickleRefused("the object is a pickle, and this store has allow_pickle=False")
        return pickling.decode(header, whole)
    if header.kind is Kind.TENSOR:
        return tensors.decode_tensor(header, whole)
    payload = payload_of(header, whole)
    if header.kind is Kind.BYTES:
        return bytes(payload)
    if header.kind is Kind.BYTEARRAY:
        return bytearray(payload)
    return _decode_memoryview(header, payload)


def payload_of(header: Header, whole: memoryview) -> memoryview:
    """The value's own bytes, without the header."""
    return whole[header.payload_offset : header.payload_offset + header.payload_bytes]


def _encode_flat(kind: Kind, view: memoryview) -> Encoded:
    def write(payload: memoryview) -> None:
        _core.copy_into(payload, view)

    return Encoded(headers.pack(kind, view.nbytes), view.nbytes, write)


def _encode_memoryview(value: memoryview) -> Encoded:
    if value.format not in _CASTABLE_FORMATS or value.ndim == 0:
        raise NotStorable(
            f"a memoryview of format {value.format!r} and shape {value.shape} cannot be rebuilt; "
            "put numpy.asarray(view) instead"
        )
    flat = value.cast("B") if value.c_contiguous and value.nbytes else memoryview(value.tobytes())
    shape = tuple(value.shape or ())
    plain = value.format == "B" and value.ndim == 1
    header = headers.pack(
        Kind.MEMORYVIEW,
        value.nbytes,
        shape=() if plain or 0 in shape else shape,
        text=value.format,
    )

    def write(payload: memoryview) -> None:
        _core.copy_into(payload, flat)

    return Encoded(header, value.nbytes, write)


def _decode_memoryview(header: Header, payload: memoryview) -> memoryview:
    if not header.shape:
        return payload
    if header.text not in _CASTABLE_FORMATS:
        raise ArenaDamaged(f"no memoryview has the format {header.text!r}")
    headers.check_extent(header, struct.calcsize(header.text))
    return payload.cast(cast(Any, header.text), list(header.shape))
