"""Python objects as pickle protocol 5 with their buffers beside it, and refs inside messages.

Owns two things. (1) The arena's format for "any picklable value": arrays and tensors inside it lie
64-byte aligned next to the pickle and come back as read-only views. (2) `collecting_refs` and
`adopting_refs`: how a layer that sends messages keeps the objects alive whose refs it sends. (1) is
called by `codec`, (2) by the actors layer, from any thread, around one synchronous dump or load.

Unpickling runs code that the writer chose. A store opened with `allow_pickle=False` refuses both
ways.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import _core, headers, tensors
from .encoded import Encoded
from .errors import ArenaDamaged, NotStorable
from .headers import Header, Kind

if TYPE_CHECKING:
    from ._core import ObjectRef
    from .store import Store

BUFFERS_MAX = 1 << 20
_COUNTS = struct.Struct("<QQ")  # number of buffers, length of the pickle; then one u64 a buffer


@contextmanager
def collecting_refs() -> Iterator[list[ObjectRef]]:
    """Inside, every `ObjectRef` that this thread pickles is added to the list, at any depth.

    The sender keeps the list until the receiver has adopted the refs: counted refs in it hold their
    objects meanwhile. Nests; the innermost collector wins.
    """
    refs: list[ObjectRef] = []
    outer = _core.swap_ref_collector(refs)
    try:
        yield refs
    finally:
        _core.swap_ref_collector(outer)


@contextmanager
def adopting_refs(store: Store) -> Iterator[None]:
    """Inside, every `ObjectRef` of `store` that this thread unpickles becomes a counted one.

    A ref whose object is gone by then, or that is of another arena, becomes a plain name, which
    raises `ObjectFreed` (or `BadRef`) when it is resolved.
    """
    outer = _core.swap_ref_adopter(store)
    try:
        yield
    finally:
        _core.swap_ref_adopter(outer)


def dumps(
    value: object, buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None
) -> bytes:
    """Pickle 5 in which dense torch tensors travel as buffers too. NotStorable says why it cannot
    be."""
    sink = io.BytesIO()
    pickler = pickle.Pickler(sink, protocol=5, buffer_callback=buffer_callback)
    torch = tensors.torch_if_imported()
    if torch is not None:
        pickler.dispatch_table = {
            **copyreg.dispatch_table,
            torch.Tensor: tensors.reduce_tensor,
        }
    try:
        pickler.dump(value)
    except MemoryError:
        raise
    except Exception as error:  # the value's own code runs here and may raise anything
        raise NotStorable(f"a {type(value).__qualname__} cannot be pickled: {error}") from error
    return sink.getvalue()


def encode(value: object) -> Encoded:
    """Plan `[counts, lengths, pickle, buffers...]`, each buffer on a multiple of 64 bytes."""
    buffers: list[memoryview] = []
    pickled = dumps(value, lambda buffer: buffers.append(_flat(buffer)))
    if len(buffers) > BUFFERS_MAX:
        raise NotStorable(
            f"the value has {len(buffers)} buffers; at most {BUFFERS_MAX} fit an object"
        )
    parts = [memoryview(_table(len(pickled), buffers)), memoryview(pickled), *buffers]
    offsets, end = _offsets([len(part) for part in parts])

    def write(payload: memoryview) -> None:
        for offset, part in zip(offsets, parts, strict=True):
            _core.copy_into(payload[offset : offset + len(part)], part)

    return Encoded(headers.pack(Kind.PICKLE, end), end, write)


def decode(header: Header, whole: memoryview) -> Any:
    """Unpickle over the object's bytes. Errors of the unpickling itself pass through with a
    note."""
    start = header.payload_offset
    payload = whole[start : start + header.payload_bytes]
    pickled, buffers = _split(payload)
    try:
        return pickle.loads(pickled, buffers=buffers)
    except Exception as error:  # raised by the value's own code; the note says where it was
        error.add_note("raised while unpickling an object of the store")
        raise


def _flat(buffer: pickle.PickleBuffer) -> memoryview:
    raw = buffer.raw()
    return raw if raw.readonly else raw.toreadonly()


def _table(pickle_bytes: int, buffers: Sequence[memoryview]) -> bytes:
    lengths = struct.pack(f"<{len(buffers)}Q", *(len(buffer) for buffer in buffers))
    return _COUNTS.pack(len(buffers), pickle_bytes) + lengths


def _offsets(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each part begins and where the last ends. The pickle follows its table at once."""
    offsets, end = [], 0
    for index, length in enumerate(lengths):
        begin = end if index < 2 else headers.round_up(end)
        offsets.append(begin)
        end = begin + length
    return offsets, end


def _split(payload: memoryview) -> tuple[memoryview, list[memoryview]]:
    if len(payload) < _COUNTS.size:
        raise ArenaDamaged("a pickled object is too short for its table")
    n_buffers, pickle_bytes = _COUNTS.unpack_from(payload)
    table_bytes = _COUNTS.size + 8 * n_buffers
    if n_buffers > BUFFERS_MAX or table_bytes + pickle_bytes > len(payload):
        raise ArenaDamaged(f"a pickled object names {n_buffers} buffers that it cannot hold")
    lengths = struct.unpack_from(f"<{n_buffers}Q", payload, _COUNTS.size)
    offsets, end = _offsets([table_bytes, pickle_bytes, *lengths])
    if end != len(payload):
        raise ArenaDamaged("a pickled object's parts do not add up to its length")
    parts = [
        payload[offset : offset + length]
        for offset, length in zip(offsets[2:], lengths, strict=True)
    ]
    return payload[table_bytes : table_bytes + pickle_bytes], parts


__all__ = ["adopting_refs", "collecting_refs", "dumps"]
