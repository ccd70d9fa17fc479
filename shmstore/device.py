"""Copies from the arena to a CUDA device, asynchronous where the arena can be registered.

Owns, per process, which pieces of which arena were registered with CUDA and the host views that
copies still read. Called by `Store.get(ref, device=...)` only; torch is imported when it is first
asked for.

A piece is 64 MiB of the arena's mapping. It is registered (page-locked) when a copy first needs it;
a refusal is remembered and the copy runs from pageable memory: slower, never wrong.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core, codec, headers, tensors
from .errors import BadValue, DeviceError
from .headers import Kind

if TYPE_CHECKING:
    from .store import Store

PIECE_BYTES = 64 << 20
IN_FLIGHT_MAX = 64
_REGISTER_READ_ONLY = 0x08  # cudaHostRegisterReadOnly: the readers' mapping is not writable

_lock = threading.Lock()
_registered: dict[int, bool] = {}  # address of a piece -> whether CUDA took it
_in_flight: deque[tuple[Any, Any]] = deque()  # (event, host tensor that must outlive the copy)


def to_device(store: Store, whole: memoryview, device: Any) -> Any:
    """The object's array or tensor as a torch tensor on `device`, ordered after the current
    stream's work.

    BadValue for values that are neither, DeviceError where there is no such device.
    """
    torch = tensors.require_torch()
    host = _host_tensor(torch, whole)
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadValue(f"{device!r} is no torch device") from error
    if target.type == "cpu":
        return host
    if target.type != "cuda":
        raise BadValue(f"get copies to cpu and cuda devices, not to {target}")
    if not torch.cuda.is_available() or (target.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"there is no device {target}: {torch.cuda.device_count()} CUDA devices")
    return _copy(torch, store, host, target)


def _host_tensor(torch: Any, whole: memoryview) -> Any:
    header = headers.unpack(whole)
    if header.kind is Kind.ARRAY:
        array = tensors.decode_array(header, whole)
        try:
            dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        except (TypeError, ValueError) as error:
            raise BadValue(f"torch has no dtype for numpy's {array.dtype}") from error
        shape = array.shape[::-1] if header.fortran else array.shape
        payload = _core.Unguarded(codec.payload_of(header, whole))
        tensor = tensors.tensor_over(payload, tensors.tensor_dtype_name(dtype), shape)
        return tensor.permute(*range(array.ndim)[::-1]) if header.fortran else tensor
    if header.kind is Kind.TENSOR:
        return tensors.decode_tensor(header, whole)
    raise BadValue(f"device= is for arrays and tensors; the object is of kind {header.kind.name}")


def _copy(torch: Any, store: Store, host: Any, target: Any) -> Any:
    with torch.cuda.device(target):
        result = torch.empty_like(host, device=target)
        pieces = _pieces(torch, store, host, target)
        if len(pieces) == 1:
            result.copy_(host, non_blocking=True)
        else:
            # One CUDA copy must not span two registrations, so each piece is a copy of its own.
            source, sink = _flat_bytes(torch, host), _flat_bytes(torch, result)
            for begin, end in pieces:
                sink[begin:end].copy_(source[begin:end], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    with _lock:
        _in_flight.append((event, host))
        while _in_flight and (len(_in_flight) > IN_FLIGHT_MAX or _in_flight[0][0].query()):
            done, _ = _in_flight.popleft()
            done.synchronize()
    return result


def _flat_bytes(torch: Any, tensor: Any) -> Any:
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)


def _pieces(torch: Any, store: Store, host: Any, target: Any) -> list[tuple[int, int]]:
    """Byte ranges of the tensor that lie in one piece each, every piece registered if CUDA
    allows."""
    base, mapped_bytes, committed_bytes = store.payload_mapping()
    begin, n_bytes = host.data_ptr() - base, host.numel() * host.element_size()
    if not 0 <= begin <= mapped_bytes:
        return [(0, n_bytes)]  # a private copy, not arena memory
    ranges = []
    for piece in range(begin // PIECE_BYTES, max(begin + n_bytes - 1, begin) // PIECE_BYTES + 1):
        first, last = piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES
        if last <= committed_bytes:
            _register(torch, base + first, target)
        ranges.append((max(first - begin, 0), min(last - begin, n_bytes)))
    return ranges


def _register(torch: Any, address: int, target: Any) -> None:
    with _lock:
        if address in _registered:
            return
        code = torch.cuda.cudart().cudaHostRegister(address, PIECE_BYTES, _REGISTER_READ_ONLY)
        _registered[address] = int(code) == 0
    if int(code) != 0:
        # CUDA keeps the refusal as "last error" and the next launch check would raise it for
        # somebody else's kernel: let a launch of ours find it.
        with suppress(RuntimeError):
            torch.zeros(1, device=target)


def forget(store: Store) -> None:
    """Unregister an arena's pieces before its mapping goes away. Called by `Store.close`."""
    if not _registered:
        return
    torch = tensors.require_torch()
    base, mapped_bytes, _ = store.payload_mapping()
    with _lock:
        while _in_flight:
            event, _host = _in_flight.popleft()
            event.synchronize()
        for address in [piece for piece in _registered if base <= piece < base + mapped_bytes]:
            if _registered.pop(address):
                torch.cuda.cudart().cudaHostUnregister(address)
