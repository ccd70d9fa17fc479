"""Copies between the arena's memory and CUDA devices, page-locked where CUDA allows it.

Owns, per process, which pieces of which arenas are registered with CUDA, and the views that copies
under way still read. Used by `device` for single values and by the trainer for weights; torch is
imported when a copy is first asked for. Any thread.

Registered (page-locked) is the writable mapping of the payload, never the read-only one in which
views lie: CUDA refuses pages that the process may not write, unless the device has a property that
most do not have (docs/decisions/0204). Both mappings are the same pages, so a copy takes a view's
bytes at their other address. A piece is 64 MiB of the mapping; what the arena has of it is
registered when a copy first needs it. A refusal is said once and remembered, and copies from there
run from pageable memory: slower, never wrong. An arena's pieces are given back when its last handle
here is closed or collected, before the mapping can go.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from . import tensors
from .errors import BadValue

if TYPE_CHECKING:
    from .store import Store

__all__ = ["PIECE_BYTES", "Copies", "forget", "page_locked"]

PIECE_BYTES = 64 << 20
UNDER_WAY_MAX = 64
"""Batches of copies that have not ended; one more waits for the oldest."""
_PORTABLE = 0x01  # cudaHostRegisterPortable: locked for every device of the process

# Re-entrant: an arena that the garbage collector closes may leave while its thread copies.
_lock = threading.RLock()
_arenas: dict[int, _Arena] = {}  # by address of the read-only mapping
_under_way: deque[Any] = deque()  # marks that may not have been reached yet, oldest first
_janitor: ThreadPoolExecutor | None = None
_refusal_said = False


class _Cuda:
    """The calls of torch that need a device, and nothing else: tests put a double here."""

    def __init__(self, torch: Any, target: Any) -> None:
        self._torch, self._target = torch, target

    def register(self, address: int, n_bytes: int) -> bool:
        """Page-lock memory; whether CUDA did."""
        with self._torch.cuda.device(self._target):
            code = int(self._torch.cuda.cudart().cudaHostRegister(address, n_bytes, _PORTABLE))
            if code != 0:
                # CUDA keeps the refusal as "last error", and the next launch check would raise it
                # for somebody else's kernel: let a launch of ours find it.
                with suppress(RuntimeError):
                    self._torch.zeros(1, device=self._target)
        return code == 0

    def unregister(self, address: int) -> None:
        self._torch.cuda.cudart().cudaHostUnregister(address)

    def copy(self, sink: Any, source: Any) -> None:
        """Enqueue a copy on the device's current stream. torch keeps nothing alive for it: memory
        that its own host allocator did not make is unknown to it."""
        sink.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        """What `synchronize()` of it waits for: all that is enqueued so far. It does not spin."""
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._torch.cuda.current_stream(self._target))
        return event


@dataclass(frozen=True)
class _Run:
    """Bytes of the payload that were registered in one call, or refused in one."""

    begin: int
    end: int
    taken: bool


class _Arena:
    """What this process has registered of one arena."""

    def __init__(self, read_only: int, writable: int, n_bytes: int, cuda: _Cuda) -> None:
        self.mappings = (read_only, writable)
        self.writable, self.n_bytes, self.cuda = writable, n_bytes, cuda
        self.pieces: dict[int, list[_Run]] = {}  # by number; a piece grows with the arena
        self.users: dict[int, weakref.finalize[..., Any]] = {}  # by id of the handle

    def parts(
        self, cuda: _Cuda, address: int, n_bytes: int, backed: int
    ) -> Iterator[tuple[int, int, int]]:
        """(begin, end, writable address) of each part of the bytes at `address` that lies in one
        run: a CUDA copy must not touch two registrations. Nothing when it is no arena memory."""
        for mapping in self.mappings:
            offset = address - mapping
            if 0 <= offset < self.n_bytes:
                break
        else:
            return
        at, stop = offset, offset + n_bytes
        while at < stop:
            end = min(self._run(cuda, at, backed).end, stop)
            yield at - offset, end - offset, self.writable + at
            at = end

    def _run(self, cuda: _Cuda, at: int, backed: int) -> _Run:
        """The run that holds the byte `at`, registered now if need be."""
        assert at < backed, "an object lies where the arena has no memory"
        piece = at // PIECE_BYTES
        runs = self.pieces.setdefault(piece, [])
        for run in runs:
            if at < run.end:
                return run
        begin = runs[-1].end if runs else piece * PIECE_BYTES
        end = min((piece + 1) * PIECE_BYTES, backed)
        taken = cuda.register(self.writable + begin, end - begin)
        if not taken:
            _say_refused()
        runs.append(_Run(begin, end, taken))
        return runs[-1]

    def runs(self) -> list[_Run]:
        """All runs, those that CUDA refused too."""
        return [run for runs in self.pieces.values() for run in runs]

    def give_back(self) -> None:
        for run in self.runs():
            if run.taken:
                self.cuda.unregister(self.writable + run.begin)
        self.pieces.clear()


class Copies:
    """A batch of copies between an arena and one device, in the order of its current stream.

        with Copies(store, tensor.device) as copies:
            copies.upload(view, tensor)

    On leaving the block uploads may still be under way: later work of that stream sees their
    result, and what they read stays pinned until they have ended. Downloads have ended. For a CPU
    device these are plain copies. Of a process, one thread at a time is in such a block.
    """

    def __init__(self, store: Store, device: Any) -> None:
        self._torch = tensors.require_torch()
        self._store, self._device = store, self._torch.device(device)
        self._cuda: _Cuda | None = None
        self._read: list[Any] = []
        self._downloads = False

    def __enter__(self) -> Self:
        self._cuda = _cuda(self._torch, self._device)
        if self._cuda is None:
            return self
        _lock.acquire()
        try:
            self._arena = _arena_of(self._store, self._cuda)
        except BaseException:
            _lock.release()
            raise
        return self

    def upload(self, source: Any, sink: Any) -> None:
        """From a dense CPU tensor over the arena into one of the device, in the same order of
        items; converted there when the types differ."""
        self._check(source, sink)
        if self._cuda is None:
            sink.copy_(source)
            return
        self._read.append(source)
        if source.dtype == sink.dtype:
            self._enqueue(source, sink, down=False)
        else:
            same = self._torch.empty_like(source, device=sink.device)
            self._enqueue(source, same, down=False)
            self._cuda.copy(sink.detach(), same)

    def download(self, source: Any, sink: Any) -> None:
        """From a dense tensor of the device into a CPU tensor over a draft, converted before it
        leaves when the types differ."""
        self._check(source, sink)
        if self._cuda is None:
            sink.copy_(source)
        else:
            self._enqueue(sink, source.to(sink.dtype), down=True)
            self._downloads = True

    def upload_all(self, sources: Sequence[Any], sinks: Sequence[Any]) -> None:
        """As `upload` for each; on the CPU in one call of torch."""
        self._all(self.upload, sources, sinks)

    def download_all(self, sources: Sequence[Any], sinks: Sequence[Any]) -> None:
        """As `download` for each; on the CPU in one call of torch."""
        self._all(self.download, sources, sinks)

    def _all(
        self, copy: Callable[[Any, Any], None], sources: Sequence[Any], sinks: Sequence[Any]
    ) -> None:
        if self._cuda is None and [a.shape for a in sources] == [b.shape for b in sinks]:
            self._torch._foreach_copy_(sinks, sources)
            return
        for source, sink in zip(sources, sinks, strict=True):
            copy(source, sink)

    def _check(self, source: Any, sink: Any) -> None:
        order = _order(source)
        if source.shape != sink.shape or order is None or order != _order(sink):
            raise BadValue(
                "a copy needs equal shapes and the same order of items without gaps; asked for "
                f"{tuple(source.shape)} by {source.stride()} to {tuple(sink.shape)} by "
                f"{sink.stride()}"
            )

    def _enqueue(self, host: Any, other: Any, *, down: bool) -> None:
        assert self._cuda is not None
        n_bytes = host.numel() * host.element_size()
        if n_bytes == 0:
            return
        far = _bytes(self._torch, other)
        address = host.data_ptr()
        backed = self._store.payload_mapping()[3]  # now: the arena may have grown within the block
        parts = [
            (far[begin:end], _memory(self._torch, place, end - begin))
            for begin, end, place in self._arena.parts(self._cuda, address, n_bytes, backed)
        ]
        # No arena memory: a private copy, which is pageable.
        for theirs, ours in parts or [(far, _bytes(self._torch, host))]:
            self._cuda.copy(*((ours, theirs) if down else (theirs, ours)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._cuda is None:
            return
        try:
            mark = self._cuda.mark()
            if self._downloads:
                mark.synchronize()
            else:
                _keep(mark, self._read)
        finally:
            self._read = []
            _lock.release()


def page_locked(store: Store) -> tuple[int, int]:
    """Bytes of the arena that this process has registered with CUDA, and that CUDA refused."""
    with _lock:
        arena = _arenas.get(store.payload_mapping()[0])
        runs = [] if arena is None else arena.runs()
    taken = sum(run.end - run.begin for run in runs if run.taken)
    return taken, sum(run.end - run.begin for run in runs) - taken


def forget(store: Store) -> None:
    """Gives an arena's pieces back before its mapping goes. Called by `Store.close`."""
    for base in [base for base, arena in list(_arenas.items()) if id(store) in arena.users]:
        _leave(base, id(store), os.getpid())


def _cuda(torch: Any, target: Any) -> _Cuda | None:
    """None for a CPU device, whose copies need nothing of this."""
    return _Cuda(torch, target) if target.type == "cuda" else None


def _arena_of(store: Store, cuda: _Cuda) -> _Arena:
    """The arena's record. The lock is held."""
    base, writable, n_bytes, _backed = store.payload_mapping()
    arena = _arenas.get(base)
    if arena is None:
        arena = _arenas[base] = _Arena(base, writable, n_bytes, cuda)
    if id(store) not in arena.users:
        # Who drops a handle without closing it must not leave CUDA with addresses that another
        # mapping gets later: copies from there would read the old pages.
        leave = weakref.finalize(store, _leave, base, id(store), os.getpid())
        leave.atexit = False  # the driver takes everything back at the end of the process
        arena.users[id(store)] = leave
    return arena


def _leave(base: int, user: int, pid: int) -> None:
    """One handle less on the arena; the last gives its pieces back, also when a device that failed
    raises here. A thread that closes the same handle as another waits here until that is done."""
    if pid != os.getpid():
        return  # after a fork: the registrations are the parent's
    with _lock:
        arena = _arenas.get(base)
        if arena is None or user not in arena.users:
            return  # another thread was closing the same handle, and has
        try:
            if len(arena.users) == 1:
                _end_copies()  # what is unregistered must not be read any more
        finally:
            arena.users.pop(user).detach()
            if not arena.users:
                del _arenas[base]
                arena.give_back()


def _end_copies() -> None:
    """Waits for all that is under way, then raises what a device that failed raised first. The
    lock is held."""
    failure: RuntimeError | None = None
    while _under_way:
        try:
            _under_way.popleft().synchronize()
        except RuntimeError as error:  # torch's are kinds of it; other devices copy on
            failure = failure or error
    if failure is not None:
        raise failure


def _keep(mark: Any, views: list[Any]) -> None:
    """Lets go of the views once the mark is reached, without anybody asking. The lock is held."""
    global _janitor
    if _janitor is None:
        _janitor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shmrl-device")
    _under_way.append(mark)
    _janitor.submit(_drop_after, mark, views)  # first: a device that failed raises below
    if len(_under_way) > UNDER_WAY_MAX:
        _under_way.popleft().synchronize()


def _drop_after(mark: Any, views: list[Any]) -> None:
    # A device that failed raises here and, for its user, at their next call: the views go anyway.
    try:
        mark.synchronize()
    finally:
        views.clear()


def _say_refused() -> None:
    global _refusal_said
    if _refusal_said:
        return
    _refusal_said = True
    warnings.warn(
        "CUDA did not page-lock a piece of the arena; device copies from it are slower and "
        "synchronous. Is the limit of locked memory (ulimit -l) too low?",
        RuntimeWarning,
        stacklevel=2,
    )


def _order(tensor: Any) -> str | None:
    """C, or F for a reversed one; None when there are gaps or another order."""
    if tensor.is_contiguous():
        return "C"
    return "F" if tensor.permute(*range(tensor.dim())[::-1]).is_contiguous() else None


def _bytes(torch: Any, tensor: Any) -> Any:
    """A dense tensor's items in the order of memory, as bytes."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


def _memory(torch: Any, address: int, n_bytes: int) -> Any:
    """Bytes of a mapping as a tensor that keeps nothing alive."""
    return torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=torch.uint8)
