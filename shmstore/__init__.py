"""shmstore: a crash-safe, serverless shared-memory object store with one table of ownership.

Every process maps one arena and works on it itself: no daemon, no socket. Start with `Store.create`
and `Store.attach`; sessions and owners are `store.sessions`; errors are one tree in
`shmstore.errors`; refs in messages are `shmstore.pickling`; helpers for tests are
`shmstore.testing`. Importing it imports numpy, and neither torch nor pyarrow.
"""

try:
    from . import _core  # noqa: F401 (first, so that a missing build is told as such)
except ImportError as error:
    raise ImportError(
        f"the C++ core of shmstore cannot be loaded ({error}); build it with `make install`, or "
        "with `make core` for a checkout that is used through PYTHONPATH"
    ) from error

from .draft import Draft
from .errors import (
    ArenaDamaged,
    BadName,
    BadRef,
    BadValue,
    DeviceError,
    ForkedStore,
    LayoutMismatch,
    NotOwner,
    NotStorable,
    NotThereYet,
    ObjectFreed,
    ObjectNotSealed,
    ObjectTooLarge,
    OutOfMemory,
    PickleRefused,
    SessionExists,
    SessionReleased,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreExists,
    StoreFull,
    StoreNotFound,
    StoreStuck,
    StoreSuperseded,
    SystemRefused,
    TableFull,
)
from .ref import ObjectRef
from .sessions import Entry, Sessions
from .store import Store
from .usage import ClientUsage, Counters, OwnerUsage, Stats, SweepReport

__all__ = [
    "ArenaDamaged",
    "BadName",
    "BadRef",
    "BadValue",
    "ClientUsage",
    "Counters",
    "DeviceError",
    "Draft",
    "Entry",
    "ForkedStore",
    "LayoutMismatch",
    "NotOwner",
    "NotStorable",
    "NotThereYet",
    "ObjectFreed",
    "ObjectNotSealed",
    "ObjectRef",
    "ObjectTooLarge",
    "OutOfMemory",
    "OwnerUsage",
    "PickleRefused",
    "SessionExists",
    "SessionReleased",
    "Sessions",
    "Stats",
    "Store",
    "StoreClosed",
    "StoreDenied",
    "StoreError",
    "StoreExists",
    "StoreFull",
    "StoreNotFound",
    "StoreStuck",
    "StoreSuperseded",
    "SweepReport",
    "SystemRefused",
    "TableFull",
]
