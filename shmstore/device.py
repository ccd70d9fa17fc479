"""Arrays and tensors from the arena to a device, and tensors of a CUDA device into the arena.

Owns what `Store.get(ref, device=...)` and `Store.put` of a CUDA tensor do with one value; the
copies themselves are those of `copies`. torch is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core, codec, headers, tensors
from .copies import Copies
from .encoded import Encoded
from .errors import BadValue, DeviceError
from .headers import Kind

if TYPE_CHECKING:
    from .store import Store

__all__ = ["encode", "holds", "to_device"]


def to_device(store: Store, whole: memoryview, device: Any) -> Any:
    """The object's array or tensor as a torch tensor on `device`, ordered after the current
    stream's work.

    BadValue for values that are neither, DeviceError where there is no such device or the copy
    fails.
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
    return _fetch(torch, store, host, target)


def _fetch(torch: Any, store: Store, host: Any, target: Any) -> Any:
    try:
        result = torch.empty_like(host, device=target)
        with Copies(store, target) as copies:
            copies.upload(host, result)
    except RuntimeError as error:  # torch's own classes are kinds of it, "out of memory" too
        raise DeviceError(f"the copy to {target} failed: {error}") from error
    return result


def holds(value: object) -> bool:
    """Whether it is a dense tensor that lies on a CUDA device."""
    return tensors.is_dense_tensor(value) and bool(getattr(value, "is_cuda", False))


def encode(store: Store, tensor: Any) -> Encoded:
    """Plan how a tensor of a CUDA device is written: straight into the object, in one copy."""
    torch = tensors.require_torch()
    source = tensor.detach().resolve_conj().resolve_neg().contiguous()

    def write(payload: memoryview) -> None:
        if source.numel() == 0:
            return
        sink = torch.frombuffer(payload, dtype=source.dtype).view(source.shape)
        try:
            with Copies(store, source.device) as copies:
                copies.download(source, sink)
        except RuntimeError as error:
            raise DeviceError(f"the copy from {source.device} failed: {error}") from error

    return tensors.encode_tensor(source)._replace(write=write)


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
