"""`ObjectRef`, the name of an object: 24 bytes, equal in all processes.

The class is made by `_core` for speed; this file is its documentation and its home for imports.

    ref.hex(), bytes(ref)      48 hex digits, 24 bytes; `from_hex` and `from_bytes` read them
    ref == other, ref < other  by arena, age and place; refs are hashable, equal across processes
    ref.nbytes                 bytes of the value
    ref.alive                  False once the object has ended
    ref.counted                whether this very reference keeps a never-attached object alive

A ref that `put`, `build` or `hold` returned is *counted*: while it lives in this process, an object
that was never attached to a session lives too. A ref that was unpickled, or read from bytes or
hex, or that `sessions.objects` returned is a plain *name*: resolving it gives the object or
`ObjectFreed`. `store.hold(ref)` makes a counted one of any.
"""

from ._core import ObjectRef

__all__ = ["ObjectRef"]
