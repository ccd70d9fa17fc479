"""numpy arrays and torch tensors as bytes of the arena, without a copy on the way out.

Owns the dtype texts and the views. `_core` does plain C-contiguous numpy arrays by itself; here are
structured, datetime, byte-swapped, Fortran-ordered, strided and high-dimensional arrays, and torch
tensors of every dense dtype (bfloat16, float8, bool, complex). Called by `codec` only. torch is
imported by nobody here: a tensor can only come from a process that has imported it, and only a
reader that finds one needs it.

A torch tensor cannot be marked read-only. One that `get` returns lies over read-only pages: writing
to it in place ends the process with SIGSEGV. `get(ref, copy=True)` gives one that may be written.
"""

from __future__ import annotations

import ast
import importlib
import sys
from types import ModuleType
from typing import Any, Literal, cast

import numpy as np
from numpy.lib import format as npy_format

from . import _core, headers
from .encoded import Encoded
from .errors import ArenaDamaged, NotStorable
from .headers import Header, Kind

_CODE_OF = {text: code for code, text in enumerate(headers.NUMPY_CODES) if text}


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether the items are bytes that mean the same in every process (no objects, no foreign
    types)."""
    if dtype.hasobject or dtype.metadata or (dtype.names is None and dtype.isbuiltin == 2):
        return False
    if dtype.fields is not None:
        return dtype.type is np.void and all(is_plain_dtype(f[0]) for f in dtype.fields.values())
    if dtype.subdtype is not None:
        return is_plain_dtype(dtype.subdtype[0])
    return dtype.type.__module__ == "numpy"


def dtype_text(dtype: np.dtype[Any]) -> tuple[int, str]:
    """(code, text) of a plain numpy dtype: the text is a literal that `text_dtype` reads back."""
    code = _CODE_OF.get(dtype.str, 0) if dtype.names is None and dtype.subdtype is None else 0
    return (code, "") if code else (0, repr(npy_format.dtype_to_descr(dtype)))


def text_dtype(header: Header) -> np.dtype[Any]:
    """The numpy dtype that a header names."""
    if header.dtype_code:
        return np.dtype(headers.NUMPY_CODES[header.dtype_code])
    try:
        dtype: np.dtype[Any] = npy_format.descr_to_dtype(ast.literal_eval(header.text))
    except (ValueError, TypeError, SyntaxError) as error:
        raise ArenaDamaged(f"the dtype text {header.text!r} names no numpy dtype") from error
    if not is_plain_dtype(dtype):  # an object dtype would read the payload as pointers
        raise ArenaDamaged(f"items of dtype {dtype} never lie in the arena")
    return dtype


def encode_array(array: np.ndarray[Any, Any]) -> Encoded:
    """Any array of plain dtype; Fortran order is kept, other strides become C order."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    code, text = dtype_text(array.dtype)
    header = headers.pack(
        Kind.ARRAY, array.nbytes, shape=array.shape, text=text, dtype_code=code, fortran=fortran
    )

    def write(payload: memoryview) -> None:
        if array.nbytes == 0:
            return
        if array.flags.c_contiguous or fortran:
            flat = array.ravel(order="K").view(np.uint8)
            _core.copy_into(payload, memoryview(flat.data))
        else:
            target: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, buffer=payload)
            target[...] = array

    return Encoded(header, array.nbytes, write)


def decode_array(header: Header, whole: memoryview) -> np.ndarray[Any, Any]:
    """The array over the object's bytes; read-only when they are."""
    dtype = text_dtype(header)
    if dtype.itemsize == 0 and header.payload_bytes:
        raise ArenaDamaged("items without bytes have a payload")
    headers.check_extent(header, dtype.itemsize)
    order: Literal["C", "F"] = "F" if header.fortran else "C"
    try:
        return np.ndarray(header.shape, dtype, whole, header.payload_offset, order=order)
    except ValueError as error:  # no items, but other axes beyond what numpy counts
        raise ArenaDamaged(f"no array has the shape {header.shape}: {error}") from error


def torch_if_imported() -> ModuleType | None:
    """torch when this process has imported it already; a process that has not can hold no
    tensor."""
    return sys.modules.get("torch")


def require_torch() -> ModuleType:
    """Import torch for a value that is a tensor. NotStorable where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise NotStorable(
            "the object is a torch tensor, and torch is not installed here"
        ) from error


def is_dense_tensor(value: object) -> bool:
    """Whether it is a plain strided `torch.Tensor` (no subclass: parameters go through pickle)."""
    torch = torch_if_imported()
    if torch is None or type(value) is not torch.Tensor:
        return False
    tensor = cast(Any, value)
    strided = tensor.layout == torch.strided
    special = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return bool(strided and not special)


def is_storage(value: object) -> bool:
    """Whether it is a torch storage, which torch pickles and cannot unpickle by itself."""
    torch = torch_if_imported()
    return torch is not None and isinstance(value, (torch.UntypedStorage, torch.TypedStorage))


def tensor_dtype_name(tensor_dtype: Any) -> str:
    """'bfloat16' of torch.bfloat16."""
    return str(tensor_dtype).removeprefix("torch.")


def tensor_dtype(torch: ModuleType, name: str) -> Any:
    """torch.bfloat16 of 'bfloat16'; ArenaDamaged when this torch has none of that name."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ArenaDamaged(f"torch {torch.__version__} has no dtype called {name!r}")
    return dtype


def encode_tensor(tensor: Any) -> Encoded:
    """A dense tensor on any device; values only (no gradient history). Device memory is copied to
    the host."""
    torch = require_torch()
    source = tensor.detach()
    payload_bytes = source.numel() * source.element_size()
    shape = tuple(source.shape)
    header = headers.pack(
        Kind.TENSOR, payload_bytes, shape=shape, text=tensor_dtype_name(source.dtype)
    )

    def write(payload: memoryview) -> None:
        if payload_bytes == 0:
            return
        plain = not source.is_conj() and not source.is_neg() and source.is_contiguous()
        if source.device.type == "cpu" and plain:
            _core.copy_into(payload, memoryview(source.reshape(-1).view(torch.uint8).numpy()))
        else:
            torch.frombuffer(payload, dtype=source.dtype).view(shape).copy_(source)

    return Encoded(header, payload_bytes, write)


def decode_tensor(header: Header, whole: memoryview) -> Any:
    """The tensor over the object's bytes."""
    torch = require_torch()
    headers.check_extent(header, tensor_dtype(torch, header.text).itemsize)
    payload = whole[header.payload_offset : header.payload_offset + header.payload_bytes]
    buffer = _core.Unguarded(payload) if payload.readonly else payload
    return tensor_over(buffer, header.text, header.shape)


def tensor_over(payload: Any, dtype_name: str, shape: tuple[int, ...]) -> Any:
    """A tensor over a buffer, which it keeps alive. The buffer must claim to be writable: that is
    what keeps torch from warning, for this one tensor and no other (`_core.Unguarded`)."""
    torch = require_torch()
    dtype = tensor_dtype(torch, dtype_name)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype).view(shape)


def rebuild_tensor(payload: Any, dtype_name: str, shape: tuple[int, ...]) -> Any:
    """How a tensor inside a pickle comes back: over its out-of-band buffer, without a copy."""
    view = memoryview(payload)
    return tensor_over(_core.Unguarded(view) if view.readonly else view, dtype_name, shape)


def reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    """Pickle a dense tensor as an out-of-band buffer; anything else as torch does."""
    if not is_dense_tensor(tensor):
        return tuple(tensor.__reduce_ex__(5))
    import pickle

    torch = require_torch()
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    payload = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
    return rebuild_tensor, (payload, tensor_dtype_name(tensor.dtype), tuple(tensor.shape))
