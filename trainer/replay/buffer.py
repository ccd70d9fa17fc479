"""The replay buffer: groups between producer and learner (lifecycle L06, L07, L09, L10, L14-L17,
L29).

It owns metadata only: an index of groups, the ledger, the window's counts. The tokens are in
sessions of the arena, and whoever has the group has its sessions: `put` moves them from the
producer to `replay`, `take` from `replay` to the learner, `lend` to a producer that goes on with
them, each in the same step as the change of the index. So a batch that a learner releases is
exactly what it took.

Belongs to one process and one event loop; others reach it as an actor. Between two awaits nothing
else runs, so each change is atomic for the loop; `count` and `nbytes` may be read from any thread.
No call to another process is made, and nothing is awaited, while the lock is held (L17). Waiters
are futures that are set when their batch is complete or their room is there: nothing polls
(`trainer.replay.waiting`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmstore import StoreError
from trainer import snapshot as snapshots
from trainer.errors import BadGroup, PutTimeout, ReplayError, SnapshotError, TakeTimeout
from trainer.expiry import Expiry, ExpiryAction, Refreshed
from trainer.replay import checks, contents
from trainer.replay.accounts import Accounts
from trainer.replay.away import Away, name_some
from trainer.replay.index import Entry, Order, ReplayIndex
from trainer.replay.waiting import Waiting
from trainer.rollout import Batch, Group, Status
from trainer.trace import TraceStore

if TYPE_CHECKING:
    from shmstore import Store

__all__ = ["REPLAY_OWNER", "ReplayBuffer"]

REPLAY_OWNER = "replay"
"""The owner of what is in the buffer of a run, and the heir of its learner."""

#: Statuses that are filed; the others end a group at `put`.
_FILED = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)

#: What files that are whole but do not fit together lead to.
_MISFITS = (LookupError, TypeError, ValueError, AttributeError, StoreError, ReplayError)


class ReplayBuffer:
    """See the module. `owner` is the name under which the buffer holds sessions; it is bound to
    this process.

    `order`: "staleness" or "fifo". `max_bytes` (a number, or a text such as "4GiB") limits what is
    stored ahead of need: a `put` beyond it waits, unless a taker is waiting for just such a group;
    so the limit can never stand between a taker and its batch. `expiry`: an `Expiry`, or "retry" /
    "drop" without limits; None never expires.
    """

    def __init__(
        self,
        store: Store,
        *,
        order: Order | str = Order.STALENESS,
        max_bytes: int | str | None = None,
        expiry: Expiry | str | None = None,
        owner: str = REPLAY_OWNER,
    ) -> None:
        self.owner = owner
        self.expiry = Expiry.parse(expiry)
        self.max_bytes = checks.check_max_bytes(max_bytes)
        self.accounts = Accounts()
        self.train_step = 0
        self._store = store
        self._traces = TraceStore(store)
        self._index = ReplayIndex(Order.parse(order))
        self._lock = threading.Lock()
        self._next_seq = 0
        self._closed = False
        self._away = Away(store, owner)
        self.waiting = Waiting(self._completed, self._fits, self._tell)
        self._listeners: list[Callable[[], None]] = []
        store.sessions.bind(owner, heir=None)

    # -- the producer's side ---------------------------------------------------------------------

    async def put(
        self,
        group: Group,
        *,
        task: str | None = None,
        owner: str,
        train_step: int | None = None,
        timeout: float | None = None,
        carried: bool = False,
    ) -> Status:
        """File a group whose sessions `owner` holds; -> its status, read before anything is
        changed.

        FAILED and FILTERED are counted and their sessions released at once (L09); the others move
        to the buffer with their sessions (L10). A group that is too old already is expired here.
        Waits while the byte limit is reached (`PutTimeout` after `timeout` seconds). `BadGroup` for
        what cannot be filed, or was lent as something else; `NotOwner` when a session is not
        `owner`'s; then nothing has changed. `BufferClosed` after `close`. `carried` is as in
        `checked_group`.
        """
        checks.check_timeout(timeout)
        group = self._readied(checks.checked_group(group, task, carried), train_step)
        status = self._put_at_once(group, owner)
        if status is not None:
            self.changed()
            return status
        try:
            async with asyncio.timeout(timeout):
                await self.waiting.for_room(group.task, group.nbytes, owner=owner)
        except TimeoutError:
            raise PutTimeout(
                f"no room after {timeout} s for group {group.uid!r} of {group.nbytes} bytes: "
                f"{self.nbytes} of max_bytes {self.max_bytes} are used"
            ) from None
        try:
            self._refuse_known(group.uid)  # again: another may have been filed meanwhile
            return self._file(group, owner)
        finally:
            self.changed()  # the room may be another's

    def put_at_once(self, group: Group, *, owner: str, carried: bool = False) -> Status | None:
        """As `put`, without waiting; None: no room. Nobody is told of it before `changed`, which
        is to be called after the last of several.
        """
        group = checks.checked_group(group, None, carried)
        return self._put_at_once(self._readied(group, None), owner)

    def changed(self) -> None:
        """Tell whoever waits, and the listeners."""
        self.waiting.wake()
        self._tell()

    def discard(self, group: Group, *, owner: str) -> None:
        """A producer gives a group up (L21): its sessions end, its rollouts are booked as
        cancelled. `BadGroup` for one that it has put, `NotOwner` for somebody else's.
        """
        self._refuse_known(group.uid)
        contents.refuse_foreign(self._store.sessions, group, owner)
        lent = self._away.take_back(group.uid)
        if lent is not None:
            group = lent.group  # what was counted, and no session of it stays behind
        self.accounts.cancelled(group, first=lent is None)
        self._store.sessions.release(group.session_ids, owner=owner)
        self.changed()

    def lend(self, task: str, status: Status, *, owner: str) -> Group | None:
        """Hand the next ABORTED or EXPIRED group to a producer that goes on with it, sessions
        included.

        It counts as buffered until the producer puts it again or discards it.
        """
        self._raise_if_closed()
        checks.check_taker(owner, self.owner)
        with self._lock:
            entry = self._index.pop(task, status)
            if entry is None:
                return None
            with self._or_refile([entry]):
                self._store.sessions.transfer(
                    entry.group.session_ids, src=self.owner, dst=owner, strict=True
                )
            self._away.lend(entry, owner)
        self.changed()
        return entry.group

    # -- the learner's side ----------------------------------------------------------------------

    async def take(
        self,
        need: Mapping[str, int],
        *,
        train_step: int,
        owner: str,
        timeout: float | None = None,
    ) -> Batch:
        """Wait until `need` (task -> groups) can be met, then move those groups and sessions to
        `owner`.

        All or nothing, in one step (L06); groups that are too old for `train_step` are expired
        first. Raises `TakeTimeout` after `timeout` seconds, `EndOfData` when a task has ended,
        `PartFailed` when a part died, `BufferClosed` after `close`.
        """
        self._raise_if_closed()
        need, train_step = checks.check_need(need), checks.check_step(train_step)
        checks.check_timeout(timeout)
        checks.check_taker(owner, self.owner)
        self.settle(owner)
        await self.refresh(train_step)
        try:
            async with asyncio.timeout(timeout):
                await self.waiting.for_batch(need, owner=owner)
                # What was offered again meanwhile may be too old for this step.
                while self._expire(train_step) != Refreshed() and not self.waiting.can_meet(need):
                    await self.waiting.for_batch(need, owner=owner)
        except TimeoutError:
            raise TakeTimeout(
                f"no batch after {timeout} s: need {dict(need)}, in the buffer "
                f"{self._index.counts()}, lent to producers {len(self._away.lent)} groups"
            ) from None
        return self._hand_over(need, train_step, owner)

    def settle(self, owner: str) -> int:
        """Book the groups that `owner` took and whose sessions it has released; -> rollouts
        trained.

        `take` does this for the earlier batches of the same owner.
        """
        done = self._away.pop_trained(owner)
        trained = self.accounts.trained(entry.group for entry in done)
        if done:
            self.changed()
        return trained

    def reclaim(self) -> int:
        """Offer again what a dead learner had: its sessions have fallen to this buffer as their
        heir.

        `take` does this; a driver that knows of a death calls `owner_died`. -> groups.
        """
        fallen = self._away.pop_fallen()
        offered = sum(map(self._offer_again, fallen))
        if fallen:
            self.changed()
        return offered

    def settle_all(self) -> None:
        """`settle` for everyone who took a batch."""
        for owner in self._away.takers:
            self.settle(owner)

    # -- both ------------------------------------------------------------------------------------

    async def refresh(self, train_step: int) -> Refreshed:
        """Expire what is too old at `train_step` (L16); costs what it expires."""
        train_step = checks.check_step(train_step)
        self.reclaim()
        self.train_step = max(self.train_step, train_step)
        return self._expire(train_step)

    def count(self, task: str, status: Status) -> int:
        """Groups of this task and status that can be taken or lent now; from any thread."""
        return self._index.count(task, status)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that groups in the buffer hold; from any thread."""
        return self._index.nbytes

    @property
    def group_nbytes_mean(self) -> float:
        """Mean size of the groups in the buffer; 0 while it is empty."""
        return self._index.nbytes / len(self._index) if len(self._index) else 0.0

    def __len__(self) -> int:
        return len(self._index)

    def held(self) -> dict[str, int]:
        """Rollouts per task that are in the buffer, lent out, or taken and not yet settled."""
        held = dict(self._index.n_rollouts)
        for entry in self._away:
            task = entry.group.task
            held[task] = held.get(task, 0) + len(entry.group.rollouts)
        return {task: count for task, count in held.items() if count}

    def check_books(self) -> None:
        """`LedgerError` unless every produced rollout is accounted for (L26)."""
        self.settle_all()
        self.accounts.ledger.balance(self.held())

    def sessions_of(self, owner: str | None) -> list[str]:
        """Live sessions that `owner` holds now; None: all in the arena."""
        return self._store.sessions.list(owner)

    def describe(self) -> list[str]:
        """Who waits for what here, and who has taken groups and not released them."""
        taken = [
            f"{owner} has taken and not released {name_some(uids)}"
            for owner, uids in self._away.holdings().items()
        ]
        return taken + self.waiting.describe()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` on this loop after each change of contents; it must not block or
        await.
        """
        self._listeners.append(listener)

    # -- deaths and ends -------------------------------------------------------------------------

    def owner_died(self, owner: str) -> tuple[int, list[Group]]:
        """A process that held sessions as `owner` is gone: nothing of it may be lost (L07, L12).

        Groups that it had taken are offered again in their old place; groups that were lent to it,
        whose sessions ended with it, are booked as cancelled. -> (groups offered again, groups
        cancelled).
        """
        self.waiting.owner_died(owner)
        self.settle(owner)
        sessions = self._store.sessions
        offered = 0
        for entry in self._away.pop_taken(owner):
            ids = entry.group.session_ids
            # Those that the heir rule has moved already are `replay`'s; the rest move now.
            sessions.transfer(ids, src=owner, dst=self.owner, strict=False)
            offered += self._offer_again(entry)
        lost = [entry.group for entry in self._away.pop_lent(owner)]
        for group in lost:
            self.accounts.cancelled(group)
        sessions.release_owned(owner)
        self.changed()
        return offered, lost

    def close(self) -> int:
        """Release every session of the buffer; -> how many. It is empty and stays so: whoever waits
        for it, or comes later, gets `BufferClosed`. Twice is no error.
        """
        self._store.sweep()  # the dead leave to their heir what would look trained when it is gone
        released = self._store.sessions.list(self.owner)
        self._closed = True
        self.reclaim()
        for entry in list(self._index):
            self._index.remove(entry.group.uid)
            self.accounts.cancelled(entry.group)
        self._store.sessions.release_owned(self.owner)
        self.waiting.close()
        self._tell()
        return len(released)

    # -- snapshot --------------------------------------------------------------------------------

    async def snapshot(self, folder: str | Path) -> None:
        """Write the buffer with its payloads to `folder`; an earlier snapshot there stays whole
        until the end.

        The producer goes on: what is to be written is pinned in one step, then written by a thread.
        """
        await snapshots.write(self.freeze(), Path(folder))

    def freeze(self) -> snapshots.Frozen:
        """Pin everything that a snapshot of this moment consists of. Groups taken and not settled
        are part of it.
        """
        self.settle_all()
        rows = [(entry.seq, entry.group) for entry in (*self._index, *self._away.taken)]
        # Their sessions are being written to: of members under way only the prompt is certain.
        rows += [(lent.seq, snapshots.without_unfinished(lent.group)) for lent in self._away.lent]
        rows.sort(key=lambda row: row[0])
        return snapshots.freeze(
            self._store,
            groups=[group for _, group in rows],
            state={
                "train_step": self.train_step,
                "accounts": self.accounts.to_json(),
                "buffer": {
                    "order": self._index.order.value,
                    "max_bytes": self.max_bytes,
                    "expiry": dataclasses.asdict(self.expiry),
                },
            },
        )

    @classmethod
    async def resume(
        cls, folder: str | Path, store: Store, *, owner: str = REPLAY_OWNER, **options: Any
    ) -> ReplayBuffer:
        """A buffer with the content of the snapshot in `folder`, in new sessions of `store`.

        `order`, `max_bytes` and `expiry` are those of the snapshot unless given. A snapshot that is
        damaged is a `SnapshotError`, and leaves no session behind.
        """
        given = checks.check_resume(options)
        store.sessions.bind(owner, heir=None)  # a name that cannot be is refused here
        groups, state = await snapshots.read(Path(folder), store, owner=owner)
        try:
            saved = state["buffer"]
            kept = {**saved, "expiry": Expiry(**saved["expiry"])}
            buffer = cls(store, owner=owner, **{**kept, **given})
            buffer.train_step = int(state["train_step"])
            buffer.accounts.load_json(state["accounts"])
            for group in groups:
                nbytes = store.sessions.nbytes(group.session_ids)
                buffer._add(group.evolve(nbytes=nbytes), buffer._new_seq())
        except _MISFITS as error:
            store.sessions.release([s for g in groups for s in g.session_ids], owner=owner)
            raise SnapshotError(
                f"the snapshot in {folder} is damaged: state.json or groups.json do not fit "
                f"({type(error).__name__}: {error})"
            ) from error
        return buffer

    # -- inside ----------------------------------------------------------------------------------

    def _readied(self, group: Group, train_step: int | None) -> Group:
        """With what the arena says about it; refused when it cannot be put now."""
        self._raise_if_closed()
        self._refuse_known(group.uid)
        group = self._away.as_lent(group)
        if train_step is not None:
            self.train_step = max(self.train_step, checks.check_step(train_step))
        group = contents.described(self._traces, self._store.sessions, group)
        if group.status in _FILED:
            group = group.evolve(nbytes=self._store.sessions.nbytes(group.session_ids))
        return group

    def _put_at_once(self, group: Group, owner: str) -> Status | None:
        status = group.status
        if status not in _FILED:
            self._end_at_put(group, status, owner)
            return status
        if self.waiting.may_pass(group.task, group.nbytes, owner=owner):
            return self._file(group, owner)
        return None

    def _file(self, group: Group, owner: str) -> Status:
        deadline = self.expiry.group_deadline(group)
        stale = deadline is not None and deadline <= self.train_step
        with self._lock:
            self._store.sessions.transfer(group.session_ids, src=owner, dst=self.owner, strict=True)
            lent = self._away.take_back(group.uid)
            seq = lent.seq if lent else self._new_seq()
            if not stale:
                self._index.add(group, seq, deadline)
        self._book_put(group, lent)
        if stale and self.expiry.action is ExpiryAction.DROP:
            self._drop([group])
            return Status.EXPIRED
        if stale:
            group = self._cut_back(group, self.train_step)
            self._add(group, seq)
        return group.status

    def _raise_if_closed(self) -> None:
        if self._closed:
            self.waiting.raise_failure()

    def _refuse_known(self, uid: str) -> None:
        if uid in self._index or self._away.is_taken(uid):
            raise BadGroup(f"group {uid!r} is in the buffer already, or a learner has taken it")

    def _end_at_put(self, group: Group, status: Status, owner: str) -> None:
        """FAILED and FILTERED groups: counted, then released; never filed (L09)."""
        contents.refuse_foreign(self._store.sessions, group, owner)
        self._book_put(group, self._away.take_back(group.uid))
        self.accounts.ended(group, status)
        self._store.sessions.release(group.session_ids, owner=owner)

    def _book_put(self, group: Group, lent: Entry | None) -> None:
        self.accounts.put(group, first=lent is None, before=lent.group if lent else None)

    def _expire(self, train_step: int) -> Refreshed:
        with self._lock:
            expired = self._index.pop_expired(train_step)
        if not expired:
            return Refreshed()
        if self.expiry.action is ExpiryAction.DROP:
            self._drop([entry.group for entry in expired])
            return Refreshed(dropped=len(expired))
        for entry in expired:
            self._add(self._cut_back(entry.group, train_step), entry.seq)
        self.changed()
        return Refreshed(retry=len(expired))

    def _drop(self, groups: Sequence[Group]) -> None:
        """Not in the index; one call releases all their sessions, outside the lock (L16)."""
        for group in groups:
            self.accounts.ended(group, Status.EXPIRED)
        ids = [sid for group in groups for sid in group.session_ids]
        self._store.sessions.release(ids, owner=self.owner)
        self.changed()

    def _cut_back(self, group: Group, train_step: int) -> Group:
        """Stale members lose their response, in the record and in the session (L16, retry)."""
        group, stale = self.expiry.cut_stale(group, train_step)
        for rollout in stale:
            self._store.sessions.truncate(rollout.session_id, keep=rollout.n_prompt_nodes)
        self.accounts.cut(group.task, stale)
        return group.evolve(nbytes=self._store.sessions.nbytes(group.session_ids))

    def _add(self, group: Group, seq: int) -> None:
        with self._lock:
            self._index.add(group, seq, self.expiry.group_deadline(group))

    def _offer_again(self, entry: Entry) -> bool:
        """In its old place, if it is whole; -> whether it is offered. A closed buffer ends it."""
        ids = entry.group.session_ids
        if self._closed or not self._away.is_mine(ids):
            self._store.sessions.release(ids, owner=self.owner)
            self.accounts.cancelled(entry.group)
            return False
        self._add(entry.group, entry.seq)
        return True

    def _new_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq

    def _hand_over(self, need: Mapping[str, int], train_step: int, owner: str) -> Batch:
        """Index and sessions change together: either both have moved or neither (L06)."""
        with self._lock:
            entries: list[Entry] = []
            with self._or_refile(entries):
                for task, count in need.items():
                    for _ in range(count):
                        entry = self._index.pop(task, Status.COMPLETED)
                        assert entry is not None, (task, count)
                        entries.append(entry)
                ids = [sid for entry in entries for sid in entry.group.session_ids]
                self._store.sessions.transfer(ids, src=self.owner, dst=owner, strict=True)
            self._away.take(entries, owner)
            report = self.accounts.window.close(self._index.counts())
        self.changed()
        return Batch(tuple(entry.group for entry in entries), report, train_step)

    @contextmanager
    def _or_refile(self, entries: list[Entry]) -> Iterator[None]:
        """Put `entries` back into the index when the block raises; the lock is held."""
        try:
            yield
        except BaseException:
            for entry in entries:
                self._index.add(entry.group, entry.seq, entry.deadline)
            raise

    def _completed(self, task: str) -> int:
        return self._index.count(task, Status.COMPLETED)

    def _fits(self, nbytes: int) -> bool:
        """An empty buffer takes any group: one that is larger than the limit must not wait for
        ever.
        """
        return (
            self.max_bytes is None
            or not len(self._index)
            or self._index.nbytes + nbytes <= self.max_bytes
        )

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
