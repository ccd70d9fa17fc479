"""`Store`: one handle on one arena, in any process of the same user.

Owns nothing but the handle: all state is in the arena, behind `_core`. Any number of processes and
threads may use an arena at once; no call needs another process to be alive. A process that dies at
any instruction is repaired by whoever comes next.

    with Store.create("run-42", "4GiB") as store:
        ref = store.put(np.arange(10))
        array = store.get(ref)            # zero-copy, read-only
        store.free(ref)

Time-outs are seconds: None does not wait, `math.inf` waits for ever, and waits end at Ctrl-C. After
fork() an inherited handle raises ForkedStore in the child, which attaches anew; views that it
inherited stay readable. `close` leaves the arena; views taken before stay valid until they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from . import _core, arrow, codec, copies, device, draft, headers, sessions, usage
from ._core import ObjectRef
from .errors import BadValue, NotThereYet

DIRECTORY = "/dev/shm"
OBJECTS_DEFAULT = 1 << 20
SESSIONS_DEFAULT = 1 << 16
SPIN_S_DEFAULT = 20e-6
SPIN_S_MAX = 1.0
LOCK_LIMIT_S_DEFAULT = 30.0
LOCK_LIMIT_S_MAX = 3600.0


class Store(_core.StoreCore):
    """A handle; made by `Store.create` and `Store.attach`. A context manager that closes."""

    def __init__(self, *, allow_pickle: bool = True) -> None:
        # Not bool(): allow_pickle="no" must not mean yes.
        if not isinstance(allow_pickle, bool):
            raise BadValue(f"allow_pickle must be True or False, not {allow_pickle!r}")
        super().__init__(allow_pickle)

    @property
    def sessions(self) -> sessions.Sessions:
        """The session table: who owns what, and which objects each session holds."""
        return sessions.Sessions(self)

    # -- arenas by name

    @classmethod
    def create(
        cls,
        name: str,
        capacity: int | str = "1GiB",
        max_objects: int = OBJECTS_DEFAULT,
        max_sessions: int = SESSIONS_DEFAULT,
        spill_dir: str | None = None,
        *,
        max_attachments: int | None = None,
        max_owners: int = _core.OWNERS_MAX,
        allow_pickle: bool = True,
        spin_s: float = SPIN_S_DEFAULT,
        lock_limit_s: float = LOCK_LIMIT_S_DEFAULT,
        directory: str = DIRECTORY,
    ) -> Self:
        """Make an arena of `capacity` bytes (or "4GiB") and attach to it.

        Memory is taken as it is used. StoreExists while a live process has an arena of that name (a
        dead one is removed first); BadName, BadValue for arguments out of range; OutOfMemory when
        the machine cannot back it. `spin_s`: how long a wait for a seal spins before it sleeps.
        `lock_limit_s`: how long any call waits for a process that is alive and stopped inside the
        arena's lock, or in the making of an arena of this name, before it raises StoreStuck.
        """
        if spill_dir is not None:
            raise NotThereYet("spilling to disk is not there yet; leave spill_dir out")
        limits = {
            "capacity": _capacity(usage.parse_size(capacity)),
            "max_objects": _rows("max_objects", max_objects, _core.OBJECTS_MAX),
            "max_sessions": _rows("max_sessions", max_sessions, _core.SESSIONS_MAX),
            "max_attachments": 0  # as many as objects and sessions together
            if max_attachments is None
            else _rows(
                "max_attachments", max_attachments, 2 * (_core.OBJECTS_MAX + _core.SESSIONS_MAX)
            ),
            "max_owners": _rows("max_owners", max_owners, _core.OWNERS_MAX),
        }
        store = cls(allow_pickle=allow_pickle)
        store.open_new(name, limits, *_opening(directory, spin_s, lock_limit_s))
        return store

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        allow_pickle: bool = True,
        spin_s: float = SPIN_S_DEFAULT,
        lock_limit_s: float = LOCK_LIMIT_S_DEFAULT,
        directory: str = DIRECTORY,
    ) -> Self:
        """Attach to a living arena of this user. StoreNotFound, StoreDenied, LayoutMismatch
        (another version), ArenaDamaged (not an arena, truncated, scribbled), TableFull (255
        processes have it)."""
        store = cls(allow_pickle=allow_pickle)
        store.open_existing(name, *_opening(directory, spin_s, lock_limit_s))
        return store

    @staticmethod
    def unlink(name: str, *, directory: str = DIRECTORY) -> None:
        """Remove the name, as POSIX unlink does: who is attached goes on, nobody can attach any
        more, and the memory returns when the last has left. StoreNotFound; StoreSuperseded when
        this process used an arena of that name and the name belongs by now to a successor that
        somebody uses."""
        _core.unlink(name, _folder(directory))

    @staticmethod
    def list(*, directory: str = DIRECTORY) -> list[str]:
        """Names of this user's arenas, those that nobody uses any more included (see `doctor`,
        which also sees what a killed create left without a name)."""
        return [info["name"] for info in _core.arenas(_folder(directory)) if info["name"]]

    def close(self) -> None:
        """Leave the arena. Idempotent. References that this process counted are dropped; views
        taken before stay valid until they are collected. A device that failed under copies from
        here raises, and the handle is closed all the same."""
        try:
            if self.is_open:
                copies.forget(self)
        finally:
            super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- objects: put, get, free, hold are _core's; see _core.pyi

    def build(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = "uint8",
        session: str | None = None,
        timeout: float | None = None,
        *,
        parent: int | None = None,
    ) -> draft.Draft:
        """An object to be written in place: `with store.build((4, 8), "f4") as draft:
        draft.array[:] = x`.

        Sealed on leaving the block (and attached to `session` in the same step), discarded if the
        block raises. A torch dtype gives `draft.tensor`. `draft.ref` may be handed out before the
        seal.
        """
        plan = draft.plan(shape, dtype)
        header, payload_bytes = plan.header()
        handle = self.reserve(payload_bytes, session, timeout, parent, len(header))
        return draft.Draft(handle, header, plan)

    def put_stream(
        self,
        parts: Sequence[Any],
        sort: str = "batch",
        session: str | None = None,
        timeout: float | None = None,
        *,
        parent: int | None = None,
    ) -> ObjectRef:
        """Put an Arrow value whose IPC stream the caller has in parts (buffers, and texts, in
        order), without pyarrow's writer. `sort`: "batch", "table", "array" or "chunked" (the last
        two: one column)."""
        try:
            head = arrow.STREAM_HEADS[sort]
        except (KeyError, TypeError):
            raise BadValue(
                f"sort must be one of {list(arrow.STREAM_HEADS)}, not {sort!r}"
            ) from None
        return self.put_parts(head, parts, session, timeout, parent)

    def buffer(self, ref: ObjectRef, timeout: float | None = None) -> memoryview:
        """The value's bytes as they lie in the arena: zero-copy, read-only, whatever the value
        is."""
        whole = memoryview(self.pin(ref, timeout))
        return codec.payload_of(headers.unpack(whole), whole)

    # -- state of the arena

    def stats(self) -> usage.Stats:
        """What the arena holds, who holds it, and what was done to it."""
        return usage.stats_from(self.name, self.raw_stats())

    def sweep(self) -> usage.SweepReport:
        """Repair after the dead now, rather than when the next operation needs it."""
        return usage.SweepReport(*self.raw_sweep())

    def __repr__(self) -> str:
        return f"<Store {self.name!r}>" if self.is_open else "<Store, not open>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Store cannot be pickled; send its name and attach there")


def _capacity(n_bytes: int) -> int:
    if not _core.CAPACITY_MIN <= n_bytes <= _core.CAPACITY_MAX:
        raise BadValue(
            f"capacity must be {_core.CAPACITY_MIN} to {_core.CAPACITY_MAX} bytes, not {n_bytes}"
        )
    return n_bytes


def _rows(what: str, value: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValue(f"{what} must be an int, not {type(value).__name__} {value!r}")
    if not _core.ROWS_MIN <= value <= most:
        raise BadValue(f"{what} must be {_core.ROWS_MIN} to {most}, not {value}")
    return value


def _seconds(what: str, value: float, most: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= most:
        raise BadValue(f"{what} must be 0 to {most} seconds, not {value!r}")
    return float(value)


def _folder(directory: str) -> str:
    if not isinstance(directory, str) or not directory or "\0" in directory:
        raise BadValue(f"directory must be the path of a folder, a str, not {directory!r}")
    return directory


def _opening(directory: str, spin_s: float, lock_limit_s: float) -> tuple[str, float, float]:
    """What create and attach have in common, checked."""
    return (
        _folder(directory),
        _seconds("spin_s", spin_s, SPIN_S_MAX),
        _seconds("lock_limit_s", lock_limit_s, LOCK_LIMIT_S_MAX),
    )


def _encode(store: Store, value: object, allow_pickle: bool) -> Any:
    if device.holds(value):
        return device.encode(store, value)
    return codec.encode(value, allow_pickle=allow_pickle)


def _decode(whole: memoryview, allow_pickle: bool) -> Any:
    return codec.decode(whole, allow_pickle=allow_pickle)


_core.register_hooks(
    encode=_encode,
    decode=_decode,
    to_device=device.to_device,
    store_full=usage.store_full,
    entry=sessions.Entry,
)

__all__ = ["Store"]
