"""Sessions and their owners: who decides when attached objects end (lifecycle L01 to L05).

Owns no state: the table is in the arena, and every call here is one atomic step there, ordered the
same for all processes. Reached as `store.sessions`, from any process and thread. Ids and owners are
texts of 1 to 63 bytes of UTF-8. Methods raise BadName for others, BadValue for what is no list of
texts, SessionReleased for sessions that are gone; whatever is raised, nothing has changed.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

from . import _core
from .errors import BadValue

if TYPE_CHECKING:
    from ._core import ObjectRef

ANYBODY = "*"
POSITION_MAX = 2**31 - 1


class Entry(NamedTuple):
    """One attachment: the object's name, and the position of the entry that it continues (None: a
    root)."""

    ref: ObjectRef
    parent: int | None


class Sessions:
    """The session table of one arena, as seen through one `Store`."""

    __slots__ = ("_core",)

    def __init__(self, core: _core.StoreCore) -> None:
        self._core = core

    def open(self, session: str, owner: str) -> None:
        """Begin a session that `owner` holds. SessionExists while one of that id lives."""
        self._core.session_open(session, owner)

    def attach(self, session: str, ref: ObjectRef, parent: int | None = None) -> int:
        """Let the session hold the object; returns its position, counted from 0.

        An object may be attached to several sessions and lives until the last lets go.
        SessionReleased when the session is gone: it is never resurrected. ObjectFreed when the
        object is.
        """
        return self._core.session_attach(session, ref, -1 if parent is None else _position(parent))

    def objects(self, session: str) -> builtins.list[Entry]:
        """All entries in order of position, as one consistent snapshot. The refs are names."""
        return self._core.session_objects(session)

    def truncate(self, session: str, keep: int) -> int:
        """Let go of every entry but the first `keep`; returns how many were let go."""
        return self._core.session_truncate(session, _position(keep))

    def transfer(
        self, sessions: Iterable[str], src: str, dst: str, strict: bool = True
    ) -> builtins.list[str]:
        """Move sessions from owner to owner in one atomic step; returns the moved ids in the order
        asked.

        strict: one that `src` does not hold, or that is gone, raises NotOwner and nothing moves.
        Not strict: those are left out of the result.
        """
        return self._core.session_transfer(_ids(sessions), src, dst, strict)

    def release(
        self, sessions: Iterable[str], owner: str, strict: bool = False
    ) -> builtins.list[str]:
        """End the sessions that exist and that `owner` holds, in one atomic step (L03, L04).

        Returns the ids that this call released, in the order asked, each once. Unknown, repeated
        and released ids are no error. Sessions of somebody else are left alone; strict: NotOwner,
        and nothing is released. `owner="*"` releases whoever holds them, for administrators.
        """
        return self._core.session_release(_ids(sessions), owner, strict)

    def release_owned(self, owner: str) -> builtins.list[str]:
        """End every session that `owner` holds, in one atomic step; returns their ids."""
        return self._core.session_release_owned(owner)

    def owner(self, session: str) -> str:
        """Who holds it. SessionReleased when it is gone."""
        return self._core.session_owner(session)

    def owners(self, sessions: Iterable[str]) -> builtins.list[str | None]:
        """Who holds each of them at one moment; None for one that is gone."""
        return self._core.session_owners(_ids(sessions))

    def nbytes(self, sessions: Iterable[str]) -> int:
        """Bytes of the values in them, each once. SessionReleased when one is gone."""
        return self._core.session_nbytes(_ids(sessions))

    def list(self, owner: str | None = None) -> builtins.list[str]:
        """Ids of the live sessions, all or one owner's, oldest first."""
        return self._core.session_list(owner)

    def bind(self, owner: str, heir: str | None = None) -> None:
        """This process acts as `owner` from now on; several processes may.

        When the last of them dies or closes its store, the owner's sessions fall to `heir`, or are
        released when there is none. An owner has one heir: the last `bind` of any process says who.
        """
        self._core.session_bind(owner, heir)

    def __contains__(self, session: object) -> bool:
        return isinstance(session, str) and self._core.session_contains(session)

    def __len__(self) -> int:
        return self._core.session_count()

    def __repr__(self) -> str:
        return f"<Sessions of {self._core!r}>"


def _position(value: SupportsIndex) -> int:
    try:
        position = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        position = -1
    if not 0 <= position <= POSITION_MAX:
        raise BadValue(
            f"a position or count in a session is an int from 0 to {POSITION_MAX}, not {value!r}"
        )
    return position


def _ids(sessions: Iterable[str]) -> builtins.list[str]:
    if isinstance(sessions, (str, bytes, bytearray)):
        raise BadValue(f"expected a list of session ids, not the single text {sessions!r}")
    if not isinstance(sessions, Iterable):
        raise BadValue(f"expected a list of session ids, not {sessions!r}")
    return list(sessions)


__all__ = ["ANYBODY", "POSITION_MAX", "Entry", "Sessions"]
