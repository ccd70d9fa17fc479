"""The C++ core as Python sees it. Hand-written; `tests/shmstore/test_stub.py` compares it with the
module."""

import builtins
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, SupportsBytes, TypedDict, final

from .errors import StoreFull
from .sessions import Entry

CAPACITY_MIN: int
ROWS_MIN: int
CAPACITY_MAX: int
OBJECTS_MAX: int
SESSIONS_MAX: int
OWNERS_MAX: int
CLIENTS_MAX: int
NAME_BYTES_MAX: int
LAYOUT_VERSION: int
EXPERTS_PER_TOKEN_MAX: int
ROWS_BEFORE_MAX: int
METADATA_BYTES_MAX: int

class ArenaFacts(TypedDict):
    name: str
    path: str
    status: str
    detail: str
    arena_id: int
    capacity: int
    file_bytes: int
    live_clients: int
    creator_pid: int
    created_unix_ns: int

@final
class ObjectRef(SupportsBytes):
    """The name of an object, equal in all processes. See `shmstore.ref`."""

    @property
    def alive(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def counted(self) -> bool: ...
    def hex(self) -> str: ...
    @staticmethod
    def from_hex(text: str, /) -> ObjectRef: ...
    @staticmethod
    def from_bytes(data: bytes, /) -> ObjectRef: ...
    def __bytes__(self) -> bytes: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __lt__(self, other: ObjectRef, /) -> bool: ...
    def __le__(self, other: ObjectRef, /) -> bool: ...
    def __gt__(self, other: ObjectRef, /) -> bool: ...
    def __ge__(self, other: ObjectRef, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __copy__(self) -> ObjectRef: ...
    def __deepcopy__(self, memo: Any, /) -> ObjectRef: ...

@final
class Pin:
    """Keeps the bytes of one object in place; a read-only buffer over header and payload."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Unguarded:
    """Passes a read-only buffer as writable, for torch alone. Nobody may write to it."""

    def __new__(cls, source: Any, /) -> Unguarded: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class DraftView:
    """The writable bytes of an object under construction."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class DraftHandle:
    """An object under construction."""

    @property
    def ref(self) -> ObjectRef: ...
    def view(self) -> DraftView: ...
    def seal(self) -> ObjectRef: ...
    def discard(self) -> None: ...

class StoreCore:
    """A handle on an arena; `shmstore.Store` derives from it."""

    def __init__(self, allow_pickle: bool) -> None: ...
    def open_new(
        self, name: str, limits: dict[str, int], directory: str, spin: float, lock_limit: float
    ) -> None: ...
    def open_existing(self, name: str, directory: str, spin: float, lock_limit: float) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def allow_pickle(self) -> bool: ...
    @property
    def arena_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def client_slot(self) -> int: ...
    def put(
        self,
        value: object,
        session: str | None = None,
        timeout: float | None = None,
        *,
        parent: int | None = None,
    ) -> ObjectRef:
        """Write a value into the arena. With `session` it is attached in the same atomic step.

        Waits up to `timeout` seconds for room, then StoreFull; NotStorable, SessionReleased. The
        ref is counted unless a session holds the object.
        """
    def put_parts(
        self,
        head: bytes,
        parts: Iterable[Any],
        session: str | None = None,
        timeout: float | None = None,
        parent: int | None = None,
    ) -> ObjectRef: ...
    def reserve(
        self,
        size: int,
        session: str | None = None,
        timeout: float | None = None,
        parent: int | None = None,
        head: int = 0,
    ) -> DraftHandle: ...
    def get(
        self,
        ref: ObjectRef,
        timeout: float | None = None,
        copy: bool = False,
        device: Any = None,
    ) -> Any:
        """The value, zero-copy and read-only; its view pins the bytes until it is collected.

        Waits up to `timeout` seconds for the seal, then ObjectNotSealed. ObjectFreed when it has
        ended, BadRef for a ref of another arena or none. `copy=True`: a private, writable copy.
        `device`: an array or tensor as a torch tensor there.
        """
    def pin(self, ref: ObjectRef, timeout: float | None = None) -> Pin: ...
    def hold(self, ref: ObjectRef) -> ObjectRef:
        """A counted reference to the object; ObjectFreed when it has ended."""
    def free(self, refs: ObjectRef | Iterable[ObjectRef], strict: bool = False) -> int:
        """End objects; returns how many this call ended. Repeated and ended refs are no error. What
        a session holds is skipped; strict: NotOwner, and nothing is freed.

        One step for all processes. A kill inside it may split it after each `sessions_max`
        objects: those before have ended, those behind have not."""
    def check(self) -> list[str]:
        """Audit the whole arena; [] when sound."""
    def raw_stats(self) -> dict[str, Any]: ...
    def raw_sweep(self) -> tuple[int, int, int, int, int]: ...
    def payload_mapping(self) -> tuple[int, int, int, int]:
        """Addresses of the read-only and of the writable mapping of the payload, their size, and
        how many bytes from the start are backed so far."""
    def session_open(self, session: str, owner: str) -> None: ...
    def session_attach(self, session: str, ref: ObjectRef, parent: int) -> int: ...
    def session_attach_to_all(
        self, sessions: Iterable[str], ref: ObjectRef, parent: int | None
    ) -> builtins.list[int]: ...
    def session_objects(self, session: str) -> list[Entry]: ...
    def session_truncate(self, session: str, keep: int) -> int: ...
    def session_transfer(
        self, sessions: builtins.list[str], src: str, dst: str, strict: bool
    ) -> builtins.list[str]: ...
    def session_release(
        self, sessions: builtins.list[str], owner: str, strict: bool
    ) -> builtins.list[str]: ...
    def session_release_owned(self, owner: str) -> builtins.list[str]: ...
    def session_owner(self, session: str) -> str: ...
    def session_owners(self, sessions: builtins.list[str]) -> builtins.list[str | None]: ...
    def session_nbytes(self, sessions: builtins.list[str]) -> int: ...
    def session_list(self, owner: str | None) -> builtins.list[str]: ...
    def session_contains(self, session: str) -> bool: ...
    def session_count(self) -> int: ...
    def session_bind(self, owner: str, heir: str | None) -> None: ...
    def session_unbind(self, owner: str) -> None: ...
    def read_paths(
        self,
        places: Iterable[tuple[str, int]],
        with_routing: bool,
        foreign: Callable[[ObjectRef], bytes],
        refuse: Callable[[str, str, tuple[int, ...], Any], NoReturn],
    ) -> builtins.list[tuple[Any, ...]]:
        """The paths of trainer segments from a root to many (session, node), each copied once into
        arrays of its own: (token_ids, labels, logprobs, model_steps, routed_experts or None,
        nodes).

        `foreign`: a segment with a trailer of an object without a sound one, or an error. `refuse`:
        raises for a path that cannot be read; see `trainer.trace`.
        """

class SegmentWriter:
    """Writes segments of the trainer: frames of bytes, made once for all segments of one layout,
    with a segment's own arrays between.

    `frame_of`: a frame, or all bytes of the object; see `trainer.segment_codec`. At most
    `frames_max` frames are kept. BadValue for what is no checked segment.
    """

    def __init__(
        self, frame_of: Callable[[Any], tuple[Any, ...] | builtins.bytes], frames_max: int
    ) -> None: ...
    def append(
        self,
        store: StoreCore,
        session: str,
        segment: Any,
        parent: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Write it and attach it in one atomic step; -> its position in the session. Waits for
        room as `put` of a store."""
    def put(
        self,
        store: StoreCore,
        segment: Any,
        session: str | None = None,
        timeout: float | None = None,
        parent: int | None = None,
    ) -> ObjectRef: ...
    def bytes(self, segment: Any) -> builtins.bytes:
        """The object, header and all, without an arena."""

def arenas(directory: str, remove_debris: bool = False) -> list[ArenaFacts]: ...
def unlink(name: str, directory: str) -> None: ...
def copy_into(destination: Any, source: Any) -> None: ...
def buffer_address(source: Any) -> int: ...
def known_rows(segment: Any) -> int | None:
    """Rows of routing that a segment of the trainer knows; None when its fields are not yet what
    `trainer.segment` promises.
    """

def segment_places(whole: Any) -> tuple[int, ...] | None:
    """Where the parts of a segment of the trainer lie; None without a trailer; ArenaDamaged.

    Tokens, place of the columns, bytes from one to the next; layers, top_k, bytes of an expert's
    number (0: no routing), place of the rows, rows that are known; place and count of the rows for
    tokens before it; place and end of the text.
    """

def restore_ref(data: bytes, /) -> ObjectRef: ...
def swap_ref_collector(collector: list[ObjectRef] | None) -> list[ObjectRef] | None: ...
def swap_ref_adopter(store: StoreCore | None) -> StoreCore | None: ...
def set_leak_warnings(on: bool) -> None: ...
def register_hooks(
    encode: Callable[[Any, object, bool], Any],
    decode: Callable[[memoryview, bool], Any],
    to_device: Callable[[Any, memoryview, Any], Any],
    store_full: Callable[[str, dict[str, Any]], StoreFull],
    entry: type[Entry],
) -> None: ...
