"""The header that stands before every value in the arena: 64 bytes that say what the payload is.

Owns the byte format (little-endian, the same in `csrc/bindings_values.h`, compared by a test) and
nothing else: no arena, no numpy, no torch. `_core` writes and reads the headers of plain numpy
arrays and of `bytes` itself; everything else comes through here. May be called by the value codecs
only.

    0   u32  magic "SHV1"         8   u32  header_bytes: where the payload begins, a multiple of 64
    4   u8   kind (Kind)          12  u32  text_bytes: length of the text below
    5   u8   flags (FORTRAN)      16  u64  payload_bytes
    6   u8   ndim                 24  u64  shape[5]; what does not fit goes on at 64
    7   u8   dtype code           64  u64  shape[5:ndim], then the text (UTF-8), then zeros

The dtype code counts the entries of `NUMPY_CODES`; 0 means that the text says what it is: a numpy
descr, a torch dtype name, or the sort of Arrow value.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import NamedTuple

from .errors import ArenaDamaged

MAGIC = 0x31564853
ALIGNMENT_BYTES = 64
NDIM_MAX = 64
TEXT_BYTES_MAX = 1 << 20
FORTRAN = 1
_FIXED = struct.Struct("<IBBBBIIQ5Q")
_INLINE_DIMS = 5
_LENGTH_AT = 16

NUMPY_CODES = (
    "",
    "|b1",
    "|i1",
    "|u1",
    "<i2",
    "<u2",
    "<i4",
    "<u4",
    "<i8",
    "<u8",
    "<f2",
    "<f4",
    "<f8",
    "<c8",
    "<c16",
)


class Kind(enum.IntEnum):
    """What a payload is."""

    ARRAY = 1
    TENSOR = 2
    BYTES = 3
    BYTEARRAY = 4
    MEMORYVIEW = 5
    ARROW = 6
    PICKLE = 7


class Header(NamedTuple):
    """One parsed header. `payload_offset` counts from the object's first byte."""

    kind: Kind
    payload_offset: int
    payload_bytes: int
    shape: tuple[int, ...] = ()
    text: str = ""
    dtype_code: int = 0
    fortran: bool = False


def round_up(n_bytes: int, multiple: int = ALIGNMENT_BYTES) -> int:
    """The next multiple."""
    return -(-n_bytes // multiple) * multiple


def pack(
    kind: Kind,
    payload_bytes: int,
    *,
    shape: tuple[int, ...] = (),
    text: str = "",
    dtype_code: int = 0,
    fortran: bool = False,
) -> bytes:
    """The header's bytes; their length is where the payload begins."""
    extra_dims, tail = shape[_INLINE_DIMS:], text.encode()
    header_bytes = round_up(_FIXED.size + 8 * len(extra_dims) + len(tail))
    inline = (shape + (0,) * _INLINE_DIMS)[:_INLINE_DIMS]
    fixed = _FIXED.pack(
        MAGIC,
        kind,
        FORTRAN if fortran else 0,
        len(shape),
        dtype_code,
        header_bytes,
        len(tail),
        payload_bytes,
        *inline,
    )
    packed = fixed + struct.pack(f"<{len(extra_dims)}Q", *extra_dims) + tail
    return packed.ljust(header_bytes, b"\0")


def left_open(head: bytes) -> bytes:
    """The same header without its length, as `put_parts` takes it and fills it in."""
    return head[:_LENGTH_AT] + bytes(8) + head[_LENGTH_AT + 8 :]


def unpack(view: memoryview) -> Header:
    """Parse the header at the start of an object's bytes; ArenaDamaged when it cannot be one."""
    if len(view) < _FIXED.size:
        raise ArenaDamaged(f"an object of {len(view)} bytes is too short for a value header")
    magic, kind, flags, ndim, code, header_bytes, text_bytes, payload_bytes, *dims = (
        _FIXED.unpack_from(view)
    )
    extra = max(0, ndim - _INLINE_DIMS)
    text_start = _FIXED.size + 8 * extra
    sound = (
        magic == MAGIC
        and ndim <= NDIM_MAX
        and code < len(NUMPY_CODES)
        and text_bytes <= TEXT_BYTES_MAX
        and header_bytes % ALIGNMENT_BYTES == 0
        and text_start + text_bytes <= header_bytes
        and header_bytes + payload_bytes <= len(view)
        and kind in Kind._value2member_map_
    )
    if not sound:
        raise ArenaDamaged(
            f"the object's {len(view)} bytes do not begin with a value header "
            f"(magic {magic:#x}, kind {kind}, header {header_bytes}, payload {payload_bytes})"
        )
    shape = (*dims[:ndim], *struct.unpack_from(f"<{extra}Q", view, _FIXED.size))
    try:
        text = str(view[text_start : text_start + text_bytes], "utf-8")
    except UnicodeDecodeError as error:
        raise ArenaDamaged(f"the text of a value header is not UTF-8: {error}") from error
    return Header(Kind(kind), header_bytes, payload_bytes, shape, text, code, bool(flags & FORTRAN))


def check_extent(header: Header, itemsize: int) -> None:
    """The shape must cover exactly the payload: a scribbled shape may not read beyond it."""
    if math.prod(header.shape) * itemsize != header.payload_bytes:
        raise ArenaDamaged(
            f"shape {header.shape} of {itemsize}-byte items is not the payload's "
            f"{header.payload_bytes} bytes"
        )
