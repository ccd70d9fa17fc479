"""What is put comes back: every kind of value, its type, its bytes, and nobody can write to it."""

from __future__ import annotations

import dataclasses
import gc
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from shmstore import (
    BadValue,
    NotStorable,
    ObjectFreed,
    ObjectRef,
    PickleRefused,
    Store,
    _core,
    headers,
)
from shmstore.testing import temporary_store

ARRAYS = {
    "bool": np.array([True, False, True]),
    **{
        code: np.arange(12).astype(code).reshape(3, 4)
        for code in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
    },
    "longlong": np.arange(3, dtype=np.longlong),
    "long double": np.arange(3, dtype=np.longdouble),
    "big-endian": np.arange(5, dtype=">i4"),
    "datetime": np.array(["2026-11-29", "NaT"], dtype="M8[ns]"),
    "timedelta": np.arange(4).astype("m8[us]"),
    "bytes text": np.array([b"a", b"longer"]),
    "unicode text": np.array(["ä", "日本語"]),
    "void": np.frombuffer(b"abcdef", dtype="V3"),
    "structured": np.array([(1, 2.5, b"x")], dtype=[("a", "i4"), ("b", "<f8"), ("c", "S3")]),
    "nested structured": np.zeros(
        3, dtype=[("p", [("x", "f4"), ("y", "f4", (2, 2))]), ("n", "u1")]
    ),
    "aligned structured": np.zeros(3, dtype=np.dtype([("a", "u1"), ("b", "f8")], align=True)),
    "0-d": np.array(7.25),
    "0-d structured": np.array((1, 2), dtype="i4,i4"),
    "empty": np.empty((0,), "f4"),
    "empty 3-d": np.empty((3, 0, 2), "i2"),
    "six dimensions": np.arange(64).reshape((2,) * 6),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(40).reshape(5, 8)[::2, 1::3],
    "negative stride": np.arange(10)[::-1],
    "broadcast": np.broadcast_to(np.arange(4), (3, 4)),
    "transposed 3-d": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    "2 MiB": np.arange(1 << 18, dtype="i8"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays_come_back_equal_read_only_and_aligned(store: Store, name: str) -> None:
    array = ARRAYS[name]
    ref = store.put(array)
    back = store.get(ref)
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert not back.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        back.flags.writeable = True
    assert back.flags.f_contiguous == (array.flags.f_contiguous or array.flags.c_contiguous) or (
        not array.flags.f_contiguous
    )
    assert ref.nbytes == array.nbytes
    if back.size:
        assert back.ctypes.data % 64 == 0


def test_a_fortran_array_keeps_its_order(store: Store) -> None:
    back = store.get(store.put(ARRAYS["fortran"]))
    assert back.flags.f_contiguous
    assert not back.flags.c_contiguous


def test_a_copy_is_private_and_writable(store: Store) -> None:
    for array in (np.arange(8), ARRAYS["structured"], ARRAYS["fortran"]):
        ref = store.put(array)
        mine = store.get(ref, copy=True)
        mine[...] = np.zeros((), array.dtype)
        np.testing.assert_array_equal(store.get(ref), array)
    assert store.stats().pinned == 0


def test_object_arrays_subclasses_and_records_keep_their_class(store: Store) -> None:
    mixed = np.array([1, "two", None], dtype=object)
    assert store.get(store.put(mixed)).tolist() == [1, "two", None]
    masked = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])
    back = store.get(store.put(masked))
    assert type(back) is np.ma.MaskedArray
    assert back.tolist() == [1, None, 3]
    records = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    assert store.get(store.put(records)).a[0] == 1
    strings = np.array(["a", "bc"], dtype=np.dtypes.StringDType())
    assert store.get(store.put(strings)).tolist() == ["a", "bc"]


TORCH_DTYPES = (
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, for dtypes without an equality of their own."""
    return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)


def raw(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_tensors_of_every_dtype_come_back_zero_copy_without_a_warning(
    store: Store, name: str
) -> None:
    dtype = getattr(torch, name)
    bits = torch.randint(0, 2, (6, 16), dtype=torch.uint8)
    tensor = bits.view(dtype) if name != "bool" else bits.bool()
    ref = store.put(tensor)
    back = store.get(ref)  # warnings are errors in this suite
    assert type(back) is torch.Tensor
    assert same_bytes(back, tensor)
    assert back.data_ptr() == store.get(ref).data_ptr(), "two views of the same bytes"
    assert ref.nbytes == tensor.numel() * tensor.element_size()


def test_torch_tensors_of_every_layout_come_back_equal(store: Store) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    complex_ = torch.randn(3, 3, dtype=torch.complex64)
    for tensor in (
        base.t(),
        base[::2, 1::2],
        base[1:1],
        torch.tensor(3.5),
        complex_.conj(),
        complex_.conj().imag,
        base.expand(2, 4, 6),
        torch.randn(2, 2, requires_grad=True),
    ):
        back = store.get(store.put(tensor))
        torch.testing.assert_close(back, tensor.detach(), rtol=0, atol=0)
        assert not back.requires_grad


def test_a_tensor_copy_may_be_written_and_the_arena_does_not_change(store: Store) -> None:
    ref = store.put(torch.ones(8, dtype=torch.bfloat16))
    mine = store.get(ref, copy=True)
    mine.zero_()
    assert store.get(ref).sum() == 8


def test_sparse_tensors_and_parameters_go_through_pickle(store: Store) -> None:
    sparse = torch.eye(3).to_sparse()
    # torch keeps sparse tensors that it unpickled in a list of its own: a view would stay pinned
    back = store.get(store.put(sparse), copy=True)
    assert torch.equal(back.to_dense(), torch.eye(3))
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(store.get(store.put(parameter))) is torch.nn.Parameter


def arrow_values() -> dict[str, Any]:
    tensor_type = pa.fixed_shape_tensor(pa.uint8(), (48, 8))
    routed = pa.ExtensionArray.from_storage(
        tensor_type,
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4 * 384) % 251, pa.uint8()), 384),
    )
    dictionary = pa.array(["a", "b", None, "a"]).dictionary_encode()
    nested = pa.array([[{"x": 1, "y": ["p"]}], None, []])
    batch = pa.record_batch({"id": pa.array([1, 2, None, 4], pa.int32()), "routed": routed})
    return {
        "int array": pa.array([1, None, 3]),
        "sliced": pa.array(list(range(100)))[13:57],
        "null": pa.nulls(5),
        "text": pa.array(["a", None, "日本語"]),
        "view text": pa.array(["a" * 40, "b"], pa.string_view()),
        "nested": nested,
        "dictionary": dictionary,
        "tensor": routed,
        "decimal": pa.array([1, 2]).cast(pa.decimal128(25, 2)),
        "chunked": pa.chunked_array([[1, 2], [], [3]]),
        "chunked without chunks": pa.chunked_array([], pa.float32()),
        "chunked dictionaries": pa.chunked_array(
            [pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]).dictionary_encode()]
        ),
        "batch": batch,
        "empty batch": batch.slice(0, 0),
        "batch with metadata": batch.replace_schema_metadata({"k": "v"}),
        "table": pa.table({"n": nested, "d": pa.array(["x", "y", "x"]).dictionary_encode()}),
        "table without columns": pa.table({}),
        "free-standing tensor": pa.Tensor.from_numpy(np.arange(6.0).reshape(2, 3)),
        "table of two batches": pa.Table.from_batches([batch, batch.slice(1, 2)]),
    }


@pytest.mark.parametrize("name", arrow_values())
def test_arrow_values_come_back_equal(store: Store, name: str) -> None:
    value = arrow_values()[name]
    back = store.get(store.put(value))
    assert type(back) is type(value)
    assert back.equals(value)
    schema = getattr(value, "schema", None)
    if schema is not None:
        assert back.schema.equals(schema, check_metadata=True)
    if isinstance(value, pa.ChunkedArray):
        assert [len(chunk) for chunk in back.chunks] == [len(chunk) for chunk in value.chunks]
    if not isinstance(value, pa.Tensor):
        back.validate(full=True)


def test_arrow_buffers_point_into_the_arena_and_pin_it(store: Store) -> None:
    routed = arrow_values()["tensor"]
    ref = store.put(routed)
    back = store.get(ref)
    base, _, mapped_bytes, _ = store.payload_mapping()
    assert base <= back.storage.flatten().buffers()[1].address < base + mapped_bytes
    assert store.stats().pinned == 1
    matrix = back.to_numpy_ndarray()
    del back
    assert store.stats().pinned == 1, "numpy's view of the column keeps the pin"
    assert matrix.shape == (4, 48, 8)
    del matrix
    gc.collect()
    assert store.stats().pinned == 0


@pytest.mark.parametrize("value", [b"", b"abc", b"x" * 300_000], ids=["none", "few", "many"])
def test_bytes_bytearray_and_memoryview_keep_type_and_content(store: Store, value: bytes) -> None:
    back = store.get(store.put(value))
    assert type(back) is bytes
    assert back == value
    back = store.get(store.put(bytearray(value)))
    assert type(back) is bytearray
    assert back == value
    view = store.get(store.put(memoryview(value)))
    assert type(view) is memoryview
    assert view.readonly
    assert view == value


def test_a_memoryview_keeps_format_and_shape_and_is_zero_copy(store: Store) -> None:
    source = memoryview(np.arange(6, dtype="f8").reshape(2, 3))
    ref = store.put(source)
    view = store.get(ref)
    assert (view.format, view.shape, view.tolist()) == ("d", (2, 3), source.tolist())
    assert store.stats().pinned == 1
    del view
    strided = memoryview(bytes(range(10)))[::3]
    assert store.get(store.put(strided)) == bytes(range(10))[::3]
    with pytest.raises(NotStorable, match="asarray"):
        store.put(memoryview(np.zeros(2, dtype="i4,i4")))


def test_buffer_gives_any_values_bytes_without_a_copy(store: Store) -> None:
    view = store.buffer(store.put(b"routed"))
    assert view == b"routed"
    assert view.readonly
    array = np.arange(4, dtype="i4")
    assert bytes(store.buffer(store.put(array))) == array.tobytes()


@dataclasses.dataclass
class Sample:
    """A user's class with a buffer inside."""

    name: str
    tokens: Any
    nested: dict[str, Any]


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        2.5,
        "text",
        (1, [2, {3}]),
        {"k": frozenset({1})},
        1 << 200,
        np.float32(1.5),
        slice(3),
    ],
    ids=repr,
)
def test_picklable_values_come_back_equal(store: Store, value: Any) -> None:
    back = store.get(store.put(value))
    assert back == value
    assert type(back) is type(value)


def test_arrays_and_tensors_inside_objects_are_views_of_the_arena(store: Store) -> None:
    value = Sample(
        "s", np.arange(1000), {"w": torch.ones(64, dtype=torch.bfloat16), "e": np.empty(0)}
    )
    ref = store.put(value)
    back = store.get(ref)
    np.testing.assert_array_equal(back.tokens, value.tokens)
    assert same_bytes(back.nested["w"], value.nested["w"])
    assert not back.tokens.flags.writeable
    base, _, mapped_bytes, _ = store.payload_mapping()
    for address in (back.tokens.ctypes.data, back.nested["w"].data_ptr()):
        assert base <= address < base + mapped_bytes
        assert address % 64 == 0
    mine = store.get(ref, copy=True)
    mine.tokens[:] = 0
    mine.nested["w"].zero_()
    assert back.tokens[5] == 5
    assert back.nested["w"].sum() == 64


def test_what_cannot_be_pickled_is_refused_by_name_and_the_store_goes_on(store: Store) -> None:
    for value in (lambda: 1, (i for i in ()), store):
        with pytest.raises(NotStorable, match="cannot be pickled") as caught:
            store.put(value)
        assert isinstance(caught.value, TypeError)
    assert store.stats().used == 0, "nothing was reserved for them"
    assert store.get(store.put(1)) == 1


class FailsHalfWay:
    """Its buffer raises when the store asks for it."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ArithmeticError("no state today")


def test_an_exception_in_a_users_pickling_is_the_cause_and_leaves_nothing(store: Store) -> None:
    with pytest.raises(NotStorable, match="no state today") as caught:
        store.put({"x": FailsHalfWay()})
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert store.stats().used == 0


def test_without_allow_pickle_neither_side_unpickles(store: Store) -> None:
    with Store.attach(store.name, allow_pickle=False) as careful:
        with pytest.raises(PickleRefused, match="allow_pickle"):
            careful.put({"a": 1})
        pickled = store.put({"a": 1})
        with pytest.raises(PickleRefused):
            careful.get(pickled)
        for value in (np.arange(3), b"x", pa.array([1]), torch.ones(2), bytearray(b"y")):
            careful.get(careful.put(value))


def test_the_header_written_by_the_core_is_the_documented_one(store: Store) -> None:
    array = np.arange(6, dtype="i2").reshape(2, 3)
    whole = memoryview(store.pin(store.put(array)))
    assert bytes(whole[:64]) == headers.pack(
        headers.Kind.ARRAY, 12, shape=(2, 3), dtype_code=headers.NUMPY_CODES.index("<i2")
    )
    whole = memoryview(store.pin(store.put(b"abc")))
    assert bytes(whole[:64]) == headers.pack(headers.Kind.BYTES, 3)


def test_every_dtype_code_means_the_same_in_the_core_and_in_python(store: Store) -> None:
    for code, text in enumerate(headers.NUMPY_CODES[1:], start=1):
        ref = store.put(np.zeros(2, np.dtype(text)))
        assert headers.unpack(memoryview(store.pin(ref))).dtype_code == code
        assert store.get(ref).dtype == np.dtype(text)


def test_concurrent_ways_to_the_same_object_agree(store: Store) -> None:
    ref = store.put(np.arange(100))
    name = ObjectRef.from_hex(ref.hex())
    assert store.get(name)[99] == 99
    assert pickle.loads(pickle.dumps(ref)) == ref
    del ref
    with pytest.raises(ObjectFreed):
        store.get(name)


def test_unpickling_errors_pass_with_a_note(store: Store) -> None:
    ref = store.put(Exploding())
    with pytest.raises(ZeroDivisionError) as caught:
        store.get(ref)
    assert any("unpickling" in note for note in caught.value.__notes__)
    assert store.get(store.put(1)) == 1


class Exploding:
    """Raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError("at load")


def test_an_object_of_the_whole_arena_fits_and_one_more_byte_does_not() -> None:
    with temporary_store("4MiB") as small:
        ref = small.put(np.ones(4 << 20, "u1"))
        assert small.get(ref).sum() == 4 << 20
        assert small.stats().free == 0
        del ref


def test_copy_into_checks_lengths() -> None:
    with pytest.raises(BadValue, match="one length"):
        _core.copy_into(bytearray(3), b"ab")
