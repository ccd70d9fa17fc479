"""Groups of the replay buffer that are away from its index: lent to a producer that goes on with
them, or taken by a learner (lifecycle L06, L07, L12).

They still count as buffered until they come back or come to an end; this file knows with whom they
are. Whose their sessions are says the arena alone, so what became of a taken group is read there:
its sessions are gone when it was trained, and the buffer's again when the learner died. Owned by
the replay buffer, on its loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from trainer.errors import BadGroup
from trainer.replay.index import Entry
from trainer.rollout import Group, Prompt

if TYPE_CHECKING:
    from shmstore import Store

__all__ = ["Away", "name_some"]

#: So many groups are named where all of them would be too many to read.
_NAMED_MAX = 4


def name_some(uids: Sequence[str]) -> str:
    """As "2 groups: a, b"; of many only the first."""
    more = ", ..." if len(uids) > _NAMED_MAX else ""
    return f"{len(uids)} groups: {', '.join(uids[:_NAMED_MAX])}{more}"


class Away:
    """Entries by uid, with their holders. `owner`: the buffer's own name."""

    def __init__(self, store: Store, owner: str) -> None:
        self._sessions = store.sessions
        self._owner = owner
        self._lent: dict[str, tuple[Entry, str]] = {}
        self._taken: dict[str, dict[str, Entry]] = {}
        #: Session -> group: in whose name a producer has it.
        self._lent_sessions: dict[str, str] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._lent or self.is_taken(uid)

    def __iter__(self) -> Iterator[Entry]:
        yield from self.lent
        yield from self.taken

    @property
    def lent(self) -> list[Entry]:
        """Entries that producers have."""
        return [entry for entry, _ in self._lent.values()]

    @property
    def taken(self) -> list[Entry]:
        """Entries that learners have."""
        return [entry for entries in self._taken.values() for entry in entries.values()]

    @property
    def takers(self) -> list[str]:
        """Who has taken anything."""
        return [owner for owner, entries in self._taken.items() if entries]

    def holdings(self) -> dict[str, list[str]]:
        """Who has taken which groups."""
        return {owner: list(self._taken[owner]) for owner in self.takers}

    def is_taken(self, uid: str) -> bool:
        """Whether a learner has the group."""
        return any(uid in entries for entries in self._taken.values())

    def lend(self, entry: Entry, owner: str) -> None:
        """A producer goes on with the group."""
        uid = entry.group.uid
        self._lent[uid] = entry, owner
        self._lent_sessions.update(dict.fromkeys(entry.group.session_ids, uid))

    def as_lent(self, group: Group) -> Group:
        """The group, with the prompt that it was lent with. `BadGroup` when it, or something of
        it, was lent as another; it stays lent.
        """
        if not self._lent:
            return group
        for session_id in group.session_ids:
            uid = self._lent_sessions.get(session_id, group.uid)
            if uid != group.uid:
                raise BadGroup(
                    f"group {group.uid!r} has session {session_id!r}, which was lent in group "
                    f"{uid!r}; put that one again"
                )
        if group.uid not in self._lent:
            return group
        lent = self._lent[group.uid][0].group
        if group.prompt is None:
            group = group.evolve(prompt=lent.prompt)
        for what, given, needed in (
            ("its task", group.task, lent.task),
            ("its prompt", _uid(group.prompt), _uid(lent.prompt)),
            ("the sessions of its rollouts", _sessions(group), _sessions(lent)),
        ):
            if given != needed:
                raise BadGroup(
                    f"group {group.uid!r} was lent and is put again, but {what} changed from "
                    f"{needed!r} to {given!r}; put it again as it was lent, or discard it"
                )
        return group

    def take_back(self, uid: str) -> Entry | None:
        """The group was put again or given up; None when it was not lent."""
        found = self._lent.pop(uid, None)
        if found is None:
            return None
        for session_id in found[0].group.session_ids:
            del self._lent_sessions[session_id]
        return found[0]

    def pop_lent(self, owner: str) -> list[Entry]:
        """What a dead producer had been lent."""
        uids = [uid for uid, (_, holder) in self._lent.items() if holder == owner]
        return [entry for uid in uids if (entry := self.take_back(uid)) is not None]

    def take(self, entries: Iterable[Entry], owner: str) -> None:
        """A learner has them now."""
        self._taken.setdefault(owner, {}).update((entry.group.uid, entry) for entry in entries)

    def pop_trained(self, owner: str) -> list[Entry]:
        """Groups of `owner` whose sessions have all been released."""
        return self._pop_held(owner, None)

    def pop_fallen(self) -> list[Entry]:
        """Groups whose sessions are all the buffer's again: its heirs' rule has moved them."""
        return [entry for owner in self.takers for entry in self._pop_held(owner, self._owner)]

    def pop_taken(self, owner: str) -> list[Entry]:
        """Everything that `owner` had taken."""
        return list(self._taken.pop(owner, {}).values())

    def is_mine(self, session_ids: Iterable[str]) -> bool:
        """Whether the buffer owns all of these sessions."""
        return all(holder == self._owner for holder in self._sessions.owners(session_ids))

    def _pop_held(self, owner: str, holder: str | None) -> list[Entry]:
        """Those of a taker's groups whose sessions are all with `holder` now; None: gone."""
        entries = list(self._taken.get(owner, {}).values())
        if not entries:
            return []
        # The first session of each says of most groups that they are not among them.
        firsts = self._sessions.owners([entry.group.session_ids[0] for entry in entries])
        likely = [entry for entry, by in zip(entries, firsts, strict=True) if by == holder]
        ids = [entry.group.session_ids for entry in likely]
        holders = iter(self._sessions.owners(itertools.chain.from_iterable(ids)) if ids else ())
        found = [
            entry
            for entry, own in zip(likely, ids, strict=True)
            if set(itertools.islice(holders, len(own))) <= {holder}
        ]
        for entry in found:
            del self._taken[owner][entry.group.uid]
        return found


def _sessions(group: Group) -> list[str]:
    return sorted(rollout.session_id for rollout in group.rollouts)


def _uid(prompt: Prompt | None) -> str | None:
    """A prompt stays the same when an environment fills in its tokens."""
    return None if prompt is None else prompt.uid
