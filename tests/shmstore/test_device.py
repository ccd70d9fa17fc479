"""Copies between the arena and a device keep CUDA's rules; most of it is proved without one, on the
double of `slow_device.py`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shmstore import BadValue, DeviceError, Store, StoreFull, copies, device
from shmstore.testing import temporary_store, unique_name
from tests.shmstore.slow_device import WAIT_S, SlowDevice, settle, slow_device

CPU = torch.device("cpu")
PIECE = copies.PIECE_BYTES


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDevice]:
    with slow_device(monkeypatch) as double:
        yield double


def _fetch(store: Store, ref: Any) -> torch.Tensor:
    """`get(ref, device=...)` from where the device is known to be there."""
    whole = memoryview(store.pin(ref))
    result: torch.Tensor = device._fetch(torch, store, device._host_tensor(torch, whole), CPU)
    return result


def test_the_bytes_arrive_whatever_the_type_order_and_size(slow: SlowDevice) -> None:
    values: list[Any] = [
        torch.randn(1000),
        torch.ones(3, 4, dtype=torch.bfloat16).t().contiguous(),
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.zeros(0, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(5, dtype=np.uint16),
    ]
    with temporary_store("64MiB") as store:
        for value in values:
            copied = _fetch(store, store.put(value))
            settle()
            wanted = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
            assert copied.dtype == wanted.dtype
            assert torch.equal(copied, wanted)


def test_what_a_copy_reads_stays_pinned_until_it_has_ended_and_no_longer(slow: SlowDevice) -> None:
    """Without anybody asking again: a full arena must not wait for the next copy."""
    with temporary_store("64MiB") as store:
        value = torch.arange(10 << 20, dtype=torch.int32)
        ref = store.put(value)
        slow.goes_on.clear()
        copied = _fetch(store, ref)
        assert store.free([ref]) == 1
        assert store.stats().pinned == 1
        with pytest.raises(StoreFull):  # its bytes would be overwritten under the copy
            store.put(torch.zeros(10 << 20, dtype=torch.int32))
        slow.goes_on.set()
        settle()
        assert store.stats().pinned == 0
        assert torch.equal(copied, value)
        del ref
        store.free(store.put(torch.zeros(10 << 20, dtype=torch.int32)))


def test_a_copy_is_cut_where_a_registration_ends_and_each_piece_is_asked_for_once(
    slow: SlowDevice,
) -> None:
    slow.refuses = lambda number: number == 2
    with temporary_store("256MiB") as store:
        padding = store.put(np.zeros(60 << 20, "u1"))
        value = torch.randint(0, 255, (70 << 20,), dtype=torch.uint8)
        ref = store.put(value)
        later = store.put(np.zeros(100 << 20, "u1"))  # backs what lies behind
        for _ in range(2):
            assert torch.equal(_ended(_fetch(store, ref)), value)
        assert len(slow.asked) == len(set(slow.asked)) >= 2
        taken, refused = copies.page_locked(store)
        assert taken == sum(slow.registered.values())
        assert 0 < refused <= PIECE
        del padding, later


def _ended(copied: torch.Tensor) -> torch.Tensor:
    settle()
    return copied


def test_what_the_arena_has_is_locked_and_the_rest_when_it_has_grown(slow: SlowDevice) -> None:
    with temporary_store("48MiB") as store:
        small = store.put(torch.arange(9))
        _ended(_fetch(store, small))
        first = store.payload_mapping()[3]
        assert list(slow.registered.values()) == [first]
        value = torch.randint(0, 255, (40 << 20,), dtype=torch.uint8)
        ref = store.put(value)
        backed = store.payload_mapping()[3]
        assert backed > first
        assert torch.equal(_ended(_fetch(store, ref)), value)
        assert sum(slow.registered.values()) == backed
        assert copies.page_locked(store) == (backed, 0)
        del small


def test_what_is_put_within_a_block_into_grown_memory_is_copied_too(slow: SlowDevice) -> None:
    with temporary_store("48MiB") as store:
        value = torch.randint(0, 255, (40 << 20,), dtype=torch.uint8)
        copied = torch.empty_like(value)
        with copies.Copies(store, CPU) as batch:
            before = store.payload_mapping()[3]
            ref = store.put(value)
            assert store.payload_mapping()[3] > before
            batch.upload(store.get(ref), copied)
        assert torch.equal(_ended(copied), value)


def test_a_put_from_a_device_is_whole_before_anybody_can_read_it(
    slow: SlowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "holds", lambda value: isinstance(value, torch.Tensor))
    with temporary_store("64MiB") as store:
        value = torch.randn(1000, 3).t()  # not contiguous
        ref = store.put(value)
        assert torch.equal(store.get(ref), value)
        assert store.get(store.put(torch.zeros(0, 2))).shape == (0, 2)
        imaginary = torch.randn(5, dtype=torch.complex64)
        assert torch.equal(store.get(store.put(imaginary.conj())), imaginary.conj())


def test_types_are_converted_on_the_device_side(slow: SlowDevice) -> None:
    with temporary_store("64MiB") as store:
        ref = store.put(torch.randn(100))
        narrow = torch.empty(100, dtype=torch.bfloat16)
        with store.build((100,), torch.bfloat16) as draft, copies.Copies(store, CPU) as batch:
            batch.download(store.get(ref, copy=True), draft.tensor)
        assert torch.equal(store.get(draft.ref), store.get(ref).bfloat16())
        slow.goes_on.set()
        with copies.Copies(store, CPU) as batch:
            batch.upload(store.get(draft.ref), narrow)
        settle()
        assert torch.equal(narrow, store.get(draft.ref))


@pytest.mark.parametrize("on_device", [False, True])
def test_many_tensors_are_copied_in_one_call_and_shapes_that_differ_are_refused(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        if on_device:
            stack.enter_context(slow_device(monkeypatch)).goes_on.set()
        store = stack.enter_context(temporary_store("64MiB"))
        sources = [store.get(store.put(torch.arange(n, dtype=torch.int64))) for n in (3, 0, 7)]
        sinks = [torch.empty(source.shape, dtype=torch.int32) for source in sources]
        with copies.Copies(store, CPU) as batch:
            batch.upload_all(sources, sinks)
        settle()
        assert [sink.tolist() for sink in sinks] == [source.tolist() for source in sources]
        with store.build((7,), torch.int64) as draft, copies.Copies(store, CPU) as batch:
            batch.download_all([sinks[2]], [draft.tensor])
        assert torch.equal(store.get(draft.ref), sources[2])
        with pytest.raises(BadValue, match="equal shapes"), copies.Copies(store, CPU) as batch:
            batch.upload_all(sources, sinks[::-1])


def test_shapes_and_orders_that_differ_are_refused_and_the_next_copy_works(
    slow: SlowDevice,
) -> None:
    with temporary_store("64MiB") as store:
        host = store.get(store.put(torch.arange(6).view(2, 3)))
        for sink in (torch.empty(6), torch.empty(3, 2).t(), torch.empty(4, 3)[::2]):
            with (
                pytest.raises(BadValue, match="without gaps"),
                copies.Copies(store, CPU) as batch,
            ):
                batch.upload(host, sink)
        back = torch.empty(2, 3, dtype=torch.int64)
        with copies.Copies(store, CPU) as batch:
            batch.upload(host, back)
        settle()
        assert torch.equal(back, host)


def test_close_waits_for_copies_under_way_and_gives_the_pieces_back(slow: SlowDevice) -> None:
    with temporary_store("128MiB") as store:
        value = torch.arange(24 << 20, dtype=torch.int32)
        ref = store.put(value)
        slow.goes_on.clear()
        copied = _fetch(store, ref)
        assert slow.registered
        closing = threading.Thread(target=store.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        slow.goes_on.set()
        closing.join(WAIT_S)
        assert not slow.registered
        settle()
        assert torch.equal(copied, value)
        del ref


def test_two_threads_may_close_one_store(slow: SlowDevice) -> None:
    failures: list[BaseException] = []

    def close() -> None:
        try:
            store.close()
        except BaseException as failure:  # for the assertion below
            failures.append(failure)

    with temporary_store("64MiB") as store:
        ref = store.put(torch.arange(4))
        slow.goes_on.clear()
        copied = _fetch(store, ref)
        closing = [threading.Thread(target=close) for _ in range(2)]
        for thread in closing:
            thread.start()
        closing[1].join(0.2)
        assert [thread.is_alive() for thread in closing] == [True, True]
        slow.goes_on.set()
        for thread in closing:
            thread.join(WAIT_S)
        assert failures == []
        assert not slow.registered
        settle()
        assert torch.equal(copied, torch.arange(4))
        del ref


def test_a_device_that_failed_does_not_keep_a_store_open(slow: SlowDevice) -> None:
    with temporary_store("64MiB") as store:
        ref = store.put(torch.arange(4))
        slow.goes_on.clear()
        _fetch(store, ref)
        _fetch(store, ref)
        slow.failed = True
        slow.goes_on.set()
        with pytest.raises(RuntimeError, match="the device failed"):
            store.close()
        assert not store.is_open
        assert not slow.registered
        del ref


def test_pieces_are_given_back_with_the_last_handle_closed_or_dropped(slow: SlowDevice) -> None:
    name = unique_name("device")
    first = Store.create(name, "128MiB")
    second = Store.attach(name)
    ref = first.put(np.zeros(100 << 20, "u1"))
    _ended(_fetch(first, ref))
    _ended(_fetch(second, ref))
    asked = len(slow.asked)
    assert asked == len(slow.registered) > 0
    first.close()
    _ended(_fetch(second, ref))
    assert len(slow.asked) == asked, "the other handle goes on with what is registered"
    del ref, second  # not closed
    gc.collect()
    assert not slow.registered
    Store.unlink(name)


def test_after_a_fork_the_registrations_are_the_parents(slow: SlowDevice) -> None:
    with temporary_store("128MiB") as store:
        _ended(_fetch(store, store.put(np.zeros(100 << 20, "u1"))))
        base = store.payload_mapping()[0]
        copies._leave(base, id(store), pid=1)  # what a collected handle does in a child
        assert slow.registered


def test_at_most_so_many_copies_are_under_way(
    slow: SlowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "UNDER_WAY_MAX", 3)
    with temporary_store("64MiB") as store:
        refs = [store.put(torch.full((10,), index)) for index in range(4)]
        slow.goes_on.clear()
        copied = [_fetch(store, ref) for ref in refs[:3]]
        last = threading.Thread(target=lambda: copied.append(_fetch(store, refs[3])))
        last.start()
        last.join(0.2)
        assert last.is_alive()
        slow.goes_on.set()
        last.join(WAIT_S)
        settle()
        assert [int(one[0]) for one in copied] == [0, 1, 2, 3]


def test_an_error_of_the_device_is_a_device_error_and_lets_others_copy(
    slow: SlowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_store("64MiB") as store:
        ref = store.put(torch.arange(4))
        with monkeypatch.context() as broken:
            broken.setattr(slow, "copy", _raise)
            with pytest.raises(DeviceError, match="out of memory"):
                _fetch(store, ref)
        worker = threading.Thread(target=lambda: _fetch(store, ref))
        worker.start()
        worker.join(WAIT_S)
        assert not worker.is_alive()
        settle()
        assert store.stats().pinned == 0


def _raise(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


class _Status:
    """What torch.cuda.cudart() returns: an enumeration that only int() opens."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __int__(self) -> int:
        return self._code


@pytest.mark.parametrize("code", [0, 801])
def test_a_refusal_of_cuda_is_cleared_and_does_not_become_somebody_elses_error(code: int) -> None:
    """The calls as torch declares them: cudaHostRegister(address, size, flags) -> status, and the
    last error is raised by the next launch."""
    calls: list[Any] = []

    def zeros(n: int, device: str) -> None:
        calls.append(("launch", n, device))
        raise torch.AcceleratorError("operation not supported")

    double = SimpleNamespace(
        zeros=zeros,
        cuda=SimpleNamespace(
            device=lambda target: calls.append(("on", target)) or nullcontext(),
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=lambda *arguments: calls.append(arguments) or _Status(code),
                cudaHostUnregister=lambda address: calls.append(("unregister", address)),
            ),
        ),
    )
    cuda = copies._Cuda(double, "cuda:1")
    assert cuda.register(4096, 8192) is (code == 0)
    cuda.unregister(4096)
    launch = [] if code == 0 else [("launch", 1, "cuda:1")]
    assert calls == [("on", "cuda:1"), (4096, 8192, 1), *launch, ("unregister", 4096)]


def test_a_refusal_is_said_once(slow: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_refusal_said", False)
    slow.refuses = lambda number: True
    with temporary_store("256MiB") as store:
        ref = store.put(np.zeros(150 << 20, "u1"))
        with pytest.warns(RuntimeWarning, match="page-lock") as said:
            assert not _ended(_fetch(store, ref)).any()
        assert len(said) == 1
        assert copies.page_locked(store)[0] == 0


def test_a_device_that_is_not_there_is_a_device_error(store: Store) -> None:
    ref = store.put(torch.arange(4))
    assert torch.equal(store.get(ref, device="cpu"), torch.arange(4))
    assert torch.equal(store.get(store.put(np.arange(3)), device="cpu"), torch.arange(3))
    order = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert torch.equal(store.get(store.put(order), device="cpu"), torch.from_numpy(order))
    with pytest.raises(BadValue):
        store.get(ref, device="no such thing")
    with pytest.raises(BadValue, match="PICKLE"):
        store.get(store.put({}), device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="cuda:0"):
            store.get(ref, device="cuda:0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_copies_equal_the_host_bytes(store: Store) -> None:
    for value in (
        torch.randn(1000),
        torch.randn(3 << 20),
        torch.ones(3, 4, dtype=torch.bfloat16).t(),
    ):
        on_device = store.put(value.cuda())
        copied = store.get(on_device, device="cuda:0")
        assert copied.is_cuda
        assert torch.equal(copied.cpu(), value)
