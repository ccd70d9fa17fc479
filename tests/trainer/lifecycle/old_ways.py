"""How the replaced system did it, as replay buffers: the canaries of the scenarios. Each must fail
where the trainer's own buffer does not.
"""

from __future__ import annotations

import asyncio
from typing import Any

from trainer.replay import ReplayBuffer
from trainer.replay.index import Entry
from trainer.rollout import Batch, Group, Rollout, Status

__all__ = ["BUFFERS"]


class _StatusReadLate(ReplayBuffer):
    """(d): the group is discarded first and its status read afterwards, from wiped fields."""

    async def put(self, group: Group, **options: Any) -> Status:
        await super().put(group, **options)
        wiped = [Rollout(r.session_id) for r in group.rollouts]
        return group.with_rollouts(wiped).status


class _KeepsUseless(ReplayBuffer):
    """(e): failed and filtered groups go into the buffer like all others."""

    async def put(self, group: Group, **options: Any) -> Status:
        status = group.status
        if status in (Status.FAILED, Status.FILTERED):
            kept = [r.evolve(status=Status.EXPIRED) for r in group.rollouts]
            group = group.with_rollouts(kept)
        await super().put(group, **options)
        return status


class _ReleasesUnderTheLock(ReplayBuffer):
    """(g): dropped groups are released one by one while the lock is held."""

    def _drop(self, groups: Any) -> None:
        with self._lock:
            for group in groups:
                self._store.sessions.release(group.session_ids, owner=self.owner)


class _FreesWhatTheTraceHolds(ReplayBuffer):
    """(h): a retry frees the payload of the old attempt but leaves it in the trace."""

    def _cut_back(self, group: Group, train_step: int) -> Group:
        group, stale = self.expiry.cut_stale(group, train_step)
        for rollout in stale:
            objects = self._store.sessions.objects(rollout.session_id)
            self._store.free([entry.ref for entry in objects[rollout.n_prompt_nodes :]])
        return group


class _AwaitsBetween(ReplayBuffer):
    """(j): sessions are released in one step and the group is detached in a later one."""

    async def take(self, need: Any, *, train_step: int, owner: str, timeout: Any = None) -> Batch:
        await self.waiting.for_batch(need, owner=owner)
        entries: list[Entry] = []
        for task, count in need.items():
            for _ in range(count):
                entry = self._index.pop(task, Status.COMPLETED)
                assert entry is not None
                entries.append(entry)
                await asyncio.sleep(0)  # a call to another process, in the report
        ids = [sid for entry in entries for sid in entry.group.session_ids]
        self._store.sessions.transfer(ids, src=self.owner, dst=owner)
        self._away.take(entries, owner)
        return Batch(tuple(e.group for e in entries), self.accounts.window.close({}), train_step)


#: Scenario -> the old buffer; "" is the trainer's own.
BUFFERS: dict[str, type[ReplayBuffer]] = {
    "": ReplayBuffer,
    "d": _StatusReadLate,
    "e": _KeepsUseless,
    "g": _ReleasesUnderTheLock,
    "h": _FreesWhatTheTraceHolds,
    "j": _AwaitsBetween,
}
