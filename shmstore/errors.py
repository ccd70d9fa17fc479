"""Everything the store can refuse, as one tree of exceptions.

Owns the classes and nothing else; `_core` finds them here by name and raises the one that stands
for the status of the C++ core, the Python face raises the rest. May be imported by anybody; imports
nothing.

    StoreError
    ├── StoreFull             no room for the object now (also MemoryError)
    │   ├── ObjectTooLarge    it would not fit the empty arena either: waiting cannot help
    │   └── TableFull         a table (objects, sessions, owners, clients) has no row left
    ├── OutOfMemory           the machine cannot back the arena (/dev/shm is full; also MemoryError)
    ├── ObjectFreed           the object has ended; a ref to it never yields other bytes
    ├── ObjectNotSealed       its builder has not finished, and the caller's time is up
    ├── SessionReleased       no live session of that id
    ├── SessionExists         a live session has that id already
    ├── NotOwner              somebody else owns what was to be released, moved or freed
    ├── BadValue              an argument outside what is allowed (also ValueError)
    │   ├── BadName           a name of an arena, a session or an owner
    │   └── BadRef            not a ref of this arena: forged, damaged, or of another arena
    ├── NotStorable           the value cannot be written into the arena (also TypeError)
    │   └── PickleRefused     it would need pickle, and this store does not allow pickle
    ├── StoreNotFound         no arena of that name (also FileNotFoundError)
    │   ├── StoreDenied       the arena belongs to another user (also PermissionError)
    │   └── StoreSuperseded   the name belongs to a successor of the arena that was meant
    ├── StoreExists           a live arena has that name (also FileExistsError)
    ├── LayoutMismatch        the arena was written by another version or another machine type
    ├── ArenaDamaged          the arena's bytes contradict themselves
    ├── StoreClosed           this handle was closed
    ├── StoreStuck            a stopped process holds the arena's lock (also TimeoutError)
    ├── ForkedStore           this handle was inherited over fork(); attach anew in the child
    ├── SystemRefused         the operating system refused a call (also OSError)
    ├── DeviceError           the device asked for is not there or refused the copy
    └── NotThereYet           a feature that a later version will have (also NotImplementedError)
"""

from __future__ import annotations


class StoreError(Exception):
    """Root of all errors of the store."""


class StoreFull(StoreError, MemoryError):
    """No room for the object within the caller's time.

    `needed`, `free`, `largest_free` and `capacity` are bytes. `holders` says who has the rest:
    bytes by owner of sessions, by process for what no session holds ("process 71 (references)"),
    and by process for ended objects under its live views ("process 71 (views)").
    """

    def __init__(
        self,
        message: str = "the arena is full",
        *,
        needed: int = 0,
        free: int = 0,
        largest_free: int = 0,
        capacity: int = 0,
        holders: dict[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.largest_free = largest_free
        self.capacity = capacity
        self.holders = dict(holders or {})


class ObjectTooLarge(StoreFull):
    """It would not fit the empty arena either: waiting cannot help."""


class TableFull(StoreFull):
    """A table of the arena has no row left; its size was chosen at `Store.create`."""


class OutOfMemory(StoreError, MemoryError):
    """The machine cannot back the arena: /dev/shm is smaller or fuller than the capacity asks."""


class ObjectFreed(StoreError):
    """The object has ended."""


class ObjectNotSealed(StoreError):
    """The object is still being built and the caller's time is up."""


class SessionReleased(StoreError):
    """There is no live session of that id."""


class SessionExists(StoreError):
    """A live session has that id already."""


class NotOwner(StoreError):
    """Somebody else owns it; nothing was changed. `ids` names the offending sessions, if any."""

    def __init__(self, message: str = "not the owner", ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.ids = ids


class BadValue(StoreError, ValueError):
    """An argument outside what is allowed; the message says what is allowed."""


class BadName(BadValue):
    """A name that no arena, session or owner can have."""


class BadRef(BadValue):
    """Not a ref of this arena: forged, damaged, or of another arena."""


class NotStorable(StoreError, TypeError):
    """The value cannot be written into the arena."""


class PickleRefused(NotStorable):
    """The value needs pickle, and this store was opened with `allow_pickle=False`."""


class StoreNotFound(StoreError, FileNotFoundError):
    """No arena of that name exists for this user."""


class StoreDenied(StoreNotFound, PermissionError):
    """The arena of that name belongs to another user; this one has none."""


class StoreSuperseded(StoreNotFound):
    """The name belongs to a successor of the arena that was meant; nothing was removed."""


class StoreExists(StoreError, FileExistsError):
    """A live arena has that name."""


class LayoutMismatch(StoreError):
    """The arena was written by another layout version or on another machine type."""


class ArenaDamaged(StoreError):
    """The arena's bytes contradict themselves: scribbled, truncated, or not an arena."""


class StoreClosed(StoreError):
    """This handle was closed. Views taken before stay valid."""


class StoreStuck(StoreError, TimeoutError):
    """A live process that does not run (stopped, frozen) holds the arena's lock."""


class ForkedStore(StoreError):
    """This handle was inherited over fork(); only the parent may use it. Attach anew."""


class SystemRefused(StoreError, OSError):
    """The operating system refused a call."""


class DeviceError(StoreError, RuntimeError):
    """The device asked for is not there, or the copy to it failed."""


class NotThereYet(StoreError, NotImplementedError):
    """A feature that a later version will have."""


__all__ = [
    "ArenaDamaged",
    "BadName",
    "BadRef",
    "BadValue",
    "DeviceError",
    "ForkedStore",
    "LayoutMismatch",
    "NotOwner",
    "NotStorable",
    "NotThereYet",
    "ObjectFreed",
    "ObjectNotSealed",
    "ObjectTooLarge",
    "OutOfMemory",
    "PickleRefused",
    "SessionExists",
    "SessionReleased",
    "StoreClosed",
    "StoreDenied",
    "StoreError",
    "StoreExists",
    "StoreFull",
    "StoreNotFound",
    "StoreStuck",
    "StoreSuperseded",
    "SystemRefused",
    "TableFull",
]
