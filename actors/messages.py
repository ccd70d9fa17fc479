"""The frame: one message on the wire, readable without unpickling anything.

Owns the binary layout (`docs/wire_protocol.md` has every byte) and the limits of the protocol.
Pure: no sockets, no pickle. Called by `codec` and `node` on both sides of a link.

A frame is a fixed header of 64 bytes, then method and group (UTF-8), the chain of actors that wait
for this call (u32 each), the buffer table (40 bytes a buffer), the body (pickle protocol 5), and
the inline buffers, each on a 16-byte boundary of the frame.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from .errors import MessageTooLarge, ProtocolError

__all__ = [
    "BUFFER_ALIGNMENT",
    "BUFFER_COUNT_MAX",
    "CHAIN_LENGTH_MAX",
    "FRAME_BYTES_MAX",
    "HEADER",
    "HEADER_BYTES",
    "NAME_BYTES_MAX",
    "PROTOCOL_VERSION",
    "Buffer",
    "Flag",
    "Head",
    "Kind",
    "pack",
    "parse",
]

PROTOCOL_VERSION = 1
# A frame longer than this is refused by the sender and closes the link at the receiver. Larger
# values belong in the store, where they are not copied through a socket.
FRAME_BYTES_MAX = (1 << 31) - 1
NAME_BYTES_MAX = 1024
CHAIN_LENGTH_MAX = 256
BUFFER_COUNT_MAX = 4096
BUFFER_ALIGNMENT = 16

# size, kind, flags, n_buffers, call_id, target, method_bytes, group_bytes, chain_length,
# body_bytes, timeout_ns, trace_high, trace_low, span
HEADER = struct.Struct("<IBBHQIHHHxxIqQQQ")
HEADER_BYTES = HEADER.size
_BUFFER = struct.Struct("<IIQ24s")
_PADDING = bytes(BUFFER_ALIGNMENT)


class Kind(enum.IntEnum):
    """What a frame asks of its receiver."""

    HELLO = 1  # first on a link: who is there, with which protocol version and run token
    CALL = 2  # run a method, answer with RESULT or ERROR
    TELL = 3  # run a method, answer with DONE when it has ended
    STREAM = 4  # run a generator method, answer with ITEMs, then RESULT or ERROR
    RESULT = 5
    ERROR = 6
    ITEM = 7
    CANCEL = 8  # stop that call; a RESULT that crosses it is dropped
    CREDIT = 9  # the stream may send as many more items as the field `timeout_ns` says
    ACK = 10  # the refs in that message are held by the receiver now
    DONE = 11  # a TELL has ended


class Flag(enum.IntFlag):
    """Bits of the header's `flags`."""

    NONE = 0
    REFS = 1  # the message holds objects in the store until an ACK comes
    REPLY = 2  # ACK: it answers a reply (the receiver of the ACK looks among replies it sent)
    BODY_STORED = 4  # the pickle itself is an object in the store (buffer 0)


class Buffer(NamedTuple):
    """One out-of-band buffer: inline bytes, or the name of an object in the store."""

    size_bytes: int
    ref: bytes | None  # 24 bytes of the ref; None when inline


class Head(NamedTuple):
    """The fixed header, field by field."""

    size: int
    kind: int
    flags: int
    n_buffers: int
    call_id: int
    target: int
    method_bytes: int
    group_bytes: int
    chain_length: int
    body_bytes: int
    timeout_ns: int
    trace_high: int
    trace_low: int
    span: int


class Parts(NamedTuple):
    """What follows the header, cut out of the frame; views die with the receive buffer."""

    method: bytes
    group: bytes
    chain: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    body: memoryview
    inline: tuple[memoryview, ...]


def pack(
    kind: int,
    call_id: int,
    target: int = 0,
    *,
    flags: int = 0,
    method: bytes = b"",
    group: bytes = b"",
    chain: tuple[int, ...] = (),
    body: bytes = b"",
    buffers: tuple[Buffer, ...] = (),
    inline: tuple[memoryview, ...] = (),
    timeout_ns: int = 0,
    trace: tuple[int, int, int] = (0, 0, 0),
) -> bytes:
    """One frame as bytes. Raises MessageTooLarge when a named limit is exceeded."""
    tail = method + group
    if chain or buffers:
        tail += _pack_tables(chain, buffers)
    size = HEADER_BYTES + len(tail) + len(body)
    if inline:
        return _pack_inline(
            kind, call_id, target, flags, len(method), len(group), chain, buffers, tail, body,
            inline, timeout_ns, trace,
        )  # fmt: skip
    if size > FRAME_BYTES_MAX or len(tail) > 0xFFFF:
        _refuse(size, len(method), len(group), len(chain), len(buffers))
    return (
        HEADER.pack(
            size, kind, flags, len(buffers), call_id, target, len(method), len(group),
            len(chain), len(body), timeout_ns, trace[0], trace[1], trace[2],
        )
        + tail
        + body
    )  # fmt: skip


def _pack_tables(chain: tuple[int, ...], buffers: tuple[Buffer, ...]) -> bytes:
    """The chain and the buffer table."""
    if len(chain) > CHAIN_LENGTH_MAX or len(buffers) > BUFFER_COUNT_MAX:
        _refuse(0, 0, 0, len(chain), len(buffers))
    table = b"".join(
        _BUFFER.pack(0 if b.ref is None else 1, 0, b.size_bytes, b.ref or b"") for b in buffers
    )
    return struct.pack(f"<{len(chain)}I", *chain) + table


def _pack_inline(
    kind: int,
    call_id: int,
    target: int,
    flags: int,
    method_bytes: int,
    group_bytes: int,
    chain: tuple[int, ...],
    buffers: tuple[Buffer, ...],
    tail: bytes,
    body: bytes,
    inline: tuple[memoryview, ...],
    timeout_ns: int,
    trace: tuple[int, int, int],
) -> bytes:
    """A frame that carries buffers in itself, each aligned."""
    chunks: list[bytes | memoryview] = [tail, body]
    size = HEADER_BYTES + len(tail) + len(body)
    for view in inline:
        gap = -size % BUFFER_ALIGNMENT
        chunks.append(_PADDING[:gap])
        chunks.append(view)
        size += gap + view.nbytes
    if size > FRAME_BYTES_MAX:
        _refuse(size, method_bytes, group_bytes, len(chain), len(buffers))
    head = HEADER.pack(
        size, kind, flags, len(buffers), call_id, target, method_bytes, group_bytes,
        len(chain), len(body), timeout_ns, trace[0], trace[1], trace[2],
    )  # fmt: skip
    return head + b"".join(chunks)


def _refuse(size: int, method: int, group: int, chain: int, buffers: int) -> None:
    raise MessageTooLarge(
        f"the message has {size} bytes (at most {FRAME_BYTES_MAX}), a method name of {method} and a"
        f" group name of {group} bytes (at most {NAME_BYTES_MAX}), {chain} actors that wait for it"
        f" (at most {CHAIN_LENGTH_MAX}) and {buffers} buffers (at most {BUFFER_COUNT_MAX}); put"
        " large values into the store and pass the ref"
    )


def parse(head: tuple[int, ...], frame: memoryview) -> Parts:
    """Cut a whole frame (header included) into its parts.

    `head` is `HEADER.unpack_from(frame)`. Raises ProtocolError when the lengths do not add up, so
    that a corrupt or hostile frame is an error and never a read outside of it.
    """
    (size, _, _, n_buffers, _, _, n_method, n_group, n_chain, n_body, _, _, _, _) = head
    at = HEADER_BYTES
    need = at + n_method + n_group + 4 * n_chain + _BUFFER.size * n_buffers + n_body
    if need > size or size > len(frame) or n_buffers > BUFFER_COUNT_MAX:
        raise ProtocolError(f"a frame of {size} bytes claims {need} bytes of content")
    method = bytes(frame[at : at + n_method])
    at += n_method
    group = bytes(frame[at : at + n_group])
    at += n_group
    chain: tuple[int, ...] = struct.unpack_from(f"<{n_chain}I", frame, at) if n_chain else ()
    at += 4 * n_chain
    if not n_buffers:
        return Parts(method, group, chain, (), frame[at : at + n_body], ())
    buffers = []
    for _ in range(n_buffers):
        stored, _, size_bytes, ref = _BUFFER.unpack_from(frame, at)
        buffers.append(Buffer(size_bytes, ref if stored else None))
        at += _BUFFER.size
    body = frame[at : at + n_body]
    at += n_body
    inline = []
    for buffer in buffers:
        if buffer.ref is not None:
            continue
        at += -at % BUFFER_ALIGNMENT
        if at + buffer.size_bytes > size:
            raise ProtocolError(f"a buffer of {buffer.size_bytes} bytes leaves its frame")
        inline.append(frame[at : at + buffer.size_bytes])
        at += buffer.size_bytes
    return Parts(method, group, chain, tuple(buffers), body, tuple(inline))
