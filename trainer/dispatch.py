"""The front desk of a run: what producers may work on, and what learners may take (lifecycle L12,
L19, L23, L31).

It joins the replay buffer with the prompt sampler, and decides. A producer draws work: groups to go
on with first, then fresh prompts, never more than the staleness budget and the byte limit allow. It
is also who knows what is under way and with whom, so a producer's death loses no prompt. A learner
takes the batch of a train step. How it is split over the tasks, and how much of each may still be
drawn, `trainer.shares` says.

Lives in the driver, on the loop of the replay buffer; producers reach it as an actor, and may call
its coroutines only: the other methods must run on that loop. Waits are futures; nothing polls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmstore import StoreError
from trainer import snapshot as snapshots
from trainer.errors import BadGroup, EndOfData, PartFailed, StalenessError, TrainerError
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.replay.away import name_some
from trainer.replay.checks import check_step
from trainer.rollout import Batch, Group, Status
from trainer.shares import TaskMix, TaskShares
from trainer.work import DispatchConfig, HandedIn, Work

__all__ = ["DispatchConfig", "Dispatcher", "Work"]


class Dispatcher:
    """See the module. Steps: `train_step` is the next step to take a batch for; `model_step` that
    of the engines.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        sampler: PromptSampler,
        config: DispatchConfig,
        mix: TaskMix | None = None,
    ) -> None:
        self.buffer = buffer
        self.sampler = sampler
        self.config = config
        self.mix = mix or TaskMix(dict.fromkeys(sampler.tasks, 1.0))
        self._shares = TaskShares(buffer, sampler, config, self.mix)
        self.train_step = 1
        self.model_step = 0
        self._in_production: dict[str, tuple[Work, str]] = {}
        self._drawers: dict[asyncio.Future[None], str] = {}
        self._deaths: Counter[str] = Counter()
        self._held: set[str] = set()
        self._resting = False
        self._ahead: list[int] = []  # weights on their way for which work is handed out
        buffer.on_change(self._wake)

    # -- producers -------------------------------------------------------------------------------

    async def draw(self, owner: str, n: int = 1) -> list[Work]:
        """Up to `n` groups to produce; waits until there is at least one. `PartFailed` when the run
        is over, or when `owner` dies or gives back meanwhile: nobody would produce them.
        """
        deaths = self._deaths[owner]
        while True:
            self.buffer.waiting.raise_failure()
            if self._deaths[owner] != deaths:
                raise PartFailed(owner, "it died while it waited for work")
            works = [] if owner in self._held else self._draw_now(owner, n)
            if works:
                return works
            waiter = asyncio.get_running_loop().create_future()
            self._drawers[waiter] = owner
            try:
                await waiter
            finally:
                self._drawers.pop(waiter, None)

    async def hold(self, owner: str) -> None:
        """Give `owner` no work until `let_go`, also in a draw that waits: it is pausing.

        What it hands in is filed beyond the byte limit, too: room would come from a learner that
        waits for the pause, and the bytes are in the arena already.
        """
        self._held.add(owner)
        self.buffer.waiting.admit(owner)

    async def let_go(self, owner: str) -> None:
        """The reverse of `hold`."""
        self._held.discard(owner)
        self.buffer.waiting.limit(owner)
        self._wake()

    def rest(self) -> bool:
        """Give nobody work until `work`; -> whether nothing is in production, so that every
        producer is at rest already.
        """
        self._resting, self._ahead = True, []
        return not self._in_production

    def work(self) -> None:
        """The reverse of `rest`."""
        self._resting, self._ahead = False, []
        self._wake()

    def work_ahead(self, model_step: int) -> None:
        """Hand out, too, what is to be begun with the weights of `model_step`, which the engines
        will have soon; until they have them, or until `rest` or `work`. Only new groups: where
        others wait to be gone on with, these come first.
        """
        if check_step(model_step) not in self._ahead:
            self._ahead.append(model_step)
        self._wake()

    @property
    def works_ahead(self) -> bool:
        """Whether something is handed out for weights that are still to come."""
        return bool(self._ahead)

    async def put(self, group: Group, *, owner: str, timeout: float | None = None) -> Status:
        """Take back a drawn group; see `ReplayBuffer.put`. A member that had too many attempts
        fails it.
        """
        return await self._put_alone(group, owner, timeout, carried=False)

    async def put_all(
        self, groups: Sequence[Group], *, owner: str, carried: bool = False
    ) -> list[HandedIn]:
        """`put` for each, and each hears of its own group: what refused one keeps no other back. Of
        several, one that would have to wait for room is put alone, so that the others' producer
        hears of them at once. `carried`: they came in a message, which has checked their members.
        """
        outcomes: list[HandedIn] = []
        for group in groups:
            try:
                if len(groups) == 1:
                    outcomes.append(await self._put_alone(group, owner, None, carried))
                else:
                    outcomes.append(self._put_at_once(group, owner, carried))
            except (TrainerError, StoreError) as error:
                outcomes.append(error)
        if len(groups) > 1:
            self.buffer.changed()
        return outcomes

    async def cancel(self, group: Group, *, owner: str) -> int:
        """Give a drawn group up (L21): sessions released, rollouts booked; -> how many. Twice is no
        error.
        """
        if self._in_production.get(group.uid, (None, ""))[1] != owner:
            return 0
        self._leave_production(group.uid)
        self.sampler.settle(group.uid)
        self.buffer.discard(group, owner=owner)
        return len(group.rollouts)

    async def take_back(self, uids: Sequence[str], *, owner: str) -> None:
        """Nothing of these groups, drawn in this order, was begun, and `owner` keeps no session of
        them: they go out again as if they had never been drawn. Twice is no error.
        """
        for uid in reversed(uids):
            if self._in_production.get(uid, (None, ""))[1] == owner:
                self.sampler.undraw(uid)
                self._leave_production(uid)
        self._wake()

    async def give_back(self, owner: str) -> int:
        """Everything that `owner` still has will be handed out again, as after its death; ->
        groups.
        """
        return self.owner_died(owner)

    # -- the learner -----------------------------------------------------------------------------

    async def take(self, train_step: int, *, owner: str, timeout: float | None = None) -> Batch:
        """The batch of `train_step`.

        Raises `StalenessError` when it is not there and the engines' model is too old to produce it
        (sync first), and `EndOfData` when no task can fill it.
        """
        # Not the maximum: a step is taken again when its learner died after it had released (L07).
        self.train_step = train_step = check_step(train_step)
        self._wake()
        while True:
            need = self._shares.need(train_step)
            await self.buffer.refresh(train_step)
            self._raise_if_too_stale(train_step, need)
            try:
                batch = await self.buffer.take(
                    need, train_step=train_step, owner=owner, timeout=timeout
                )
            except EndOfData as error:
                if not error.task:
                    raise
                continue  # the task is marked as ended: split again without it
            self.train_step = train_step + 1
            self._wake()
            return batch

    def ready(self, train_step: int) -> bool:
        """Whether the batch of `train_step` could be taken without waiting."""
        return self._shares.ready(self._shares.need(train_step))

    def limit_ahead(self, batches: int) -> None:
        """Never more than so many batches ready or in production, however fresh; for schedules."""
        self._shares.limit_ahead(batches)

    async def must_sync_first(self, train_step: int) -> bool:
        """Whether `train_step` has to wait for newer weights in the engines (L23).

        What is too old for that step is expired first: a batch that looks ready may not be.
        """
        await self.buffer.refresh(train_step)
        usable = self._shares.usable(self.model_step, train_step)
        return usable == 0 and not self.ready(train_step)

    # -- the driver ------------------------------------------------------------------------------

    async def set_steps(
        self, *, train_step: int | None = None, model_step: int | None = None
    ) -> None:
        """The learner goes to `train_step`; the engines run the weights of `model_step`.

        Expires what is too old now.
        """
        if model_step is not None:
            self.model_step = max(self.model_step, check_step(model_step))
            self._ahead = [step for step in self._ahead if step > self.model_step]
        if train_step is not None:
            self.train_step = max(self.train_step, check_step(train_step))
            self.buffer.settle_all()  # what is booked as trained is not looked for as fallen
            await self.buffer.refresh(self.train_step)
        self._wake()

    def prepare(self) -> None:
        """Make the prompts of a batch ahead; for moments in which nobody waits for this loop."""
        for task, n in self.mix.split(self.train_step, self.config.batch_groups).items():
            self.sampler.prepare(task, n)

    def owner_died(self, owner: str) -> int:
        """A producer or learner is gone (L07, L12): its prompts go out again, its batch is offered
        again.

        Call it before a successor under the same name starts. -> groups that will be worked on
        again.
        """
        self._held.discard(owner)
        self._deaths[owner] += 1  # its draws, waiting or just woken, get nothing any more
        offered, lost = self.buffer.owner_died(owner)
        for group in lost:
            self.sampler.redraw(group.uid, max(r.attempt for r in group.rollouts) + 1)
        had = [work for work, holder in self._in_production.values() if holder == owner]
        ahead = [work.uid for work in had if work.waits_at(self.model_step)]
        for uid in reversed(ahead):  # nothing of these was begun
            self.sampler.undraw(uid)
        prompts = self.sampler.give_back_all(owner)
        for work in had:  # not before: a task with nothing to draw and nothing coming has ended
            self._leave_production(work.uid)
        self._wake()
        return offered + len(lost) + len(ahead) + prompts

    async def fail(self, part: str, cause: str) -> None:
        """A part is dead for good: whoever waits, or comes later, gets `PartFailed` with the
        cause.
        """
        self.buffer.waiting.fail(part, cause)
        self._wake()

    def check_books(self) -> None:
        """`LedgerError` unless the books balance (L26)."""
        self.buffer.check_books()

    def report(self) -> dict[str, Any]:
        """The ledger with what is held now."""
        self.buffer.settle_all()
        return self.buffer.accounts.ledger.report(self.buffer.held())

    def ended_tasks(self) -> dict[str, str]:
        """Tasks of which no more groups come now, and why."""
        return self._shares.ended()

    def describe(self) -> list[str]:
        """Who waits for what and why; for the watchdog and for errors that state every counter."""
        lines = [
            f"train step {self.train_step}, model step {self.model_step}, batches usable "
            f"{self._shares.usable(self.model_step, self.train_step)}, "
            f"buffer {self.buffer.nbytes} bytes",
            *self._shares.describe(),
        ]
        producing: dict[str, list[str]] = {}
        for uid, (_, owner) in self._in_production.items():
            producing.setdefault(owner, []).append(uid)
        lines += [f"{owner} is producing {name_some(uids)}" for owner, uids in producing.items()]
        for owner in self._drawers.values():
            why = "it is held by a pause" if owner in self._held else "no more may be drawn now"
            lines.append(f"{owner} waits for work: {why}")
        return lines + self.buffer.describe()

    # -- snapshot --------------------------------------------------------------------------------

    def freeze(self) -> snapshots.Frozen:
        """Buffer, ledger, sampler and steps of this moment, pinned; hand it to
        `trainer.snapshot.write`.
        """
        frozen = self.buffer.freeze()
        state = {
            **frozen.state,
            "sampler": self.sampler.to_json(),
            "steps": {"train_step": self.train_step, "model_step": self.model_step},
        }
        return snapshots.Frozen(frozen.store, frozen.groups, state, frozen.sessions, frozen.pin)

    async def snapshot(self, folder: str | Path) -> None:
        """Freeze now, write in the background; see `trainer.snapshot`."""
        await snapshots.write(self.freeze(), Path(folder))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a snapshot; the buffer was resumed from the same one. Prompts
        that were under way keep their attempt, and so the names of their sessions, unless somebody
        else's sessions live in this arena.
        """
        live, own = self.buffer.sessions_of(None), self.buffer.sessions_of(self.buffer.owner)
        self.sampler.load_json(state["sampler"], same_attempts=len(live) == len(own))
        self.train_step = int(state["steps"]["train_step"])
        self.model_step = int(state["steps"]["model_step"])

    # -- inside ----------------------------------------------------------------------------------

    def _as_drawn(self, group: Group, owner: str) -> Group:
        """With the prompt that was drawn; `BadGroup` when it is not in production with `owner`."""
        work, holder = self._in_production.get(group.uid, (None, owner))
        if work is None or holder != owner:
            raise BadGroup(f"group {group.uid!r} is not in production with {owner!r}")
        if group.prompt is None:
            group = group.evolve(prompt=work.prompt)
        if group.task != work.task:
            raise BadGroup(
                f"group {group.uid!r} is of task {group.task!r}, but was drawn of {work.task!r}"
            )
        return self._fail_stragglers(group)

    async def _put_alone(
        self, group: Group, owner: str, timeout: float | None, carried: bool
    ) -> Status:
        group = self._as_drawn(group, owner)
        status = await self.buffer.put(group, owner=owner, timeout=timeout, carried=carried)
        self._has_come_back(group, status)
        self._wake()
        return status

    def _put_at_once(self, group: Group, owner: str, carried: bool) -> Status | None:
        group = self._as_drawn(group, owner)
        status = self.buffer.put_at_once(group, owner=owner, carried=carried)
        if status is not None:
            self._has_come_back(group, status)
        return status

    def _has_come_back(self, group: Group, status: Status) -> None:
        """It is in the buffer, or has ended."""
        self._leave_production(group.uid)
        self.sampler.settle(group.uid)
        self._shares.judge(group, status)

    def _draw_now(self, owner: str, n: int) -> list[Work]:
        """For the weights that the engines run, then for those on their way, in their order."""
        self._shares.notice_ends_of_data()
        works: list[Work] = []
        for weights in [*([] if self._resting else [None]), *self._ahead]:
            self._draw_for(weights, owner, n, works)
        return works

    def _draw_for(self, weights: int | None, owner: str, n: int, works: list[Work]) -> None:
        """Adds to `works`, up to `n`. What waits for later weights than these is of no help."""
        model_step = self.model_step if weights is None else weights
        targets = self._shares.targets(model_step, self.train_step)
        later = Counter(
            work.task for work, _ in self._in_production.values() if work.waits_at(model_step)
        )
        while len(works) < n:
            try:
                work = self._draw_one(owner, weights, self._shares.behind(targets, later))
            except Exception:
                if works:
                    return  # these are in production now; the next draw raises it again
                raise
            if work is None:
                return
            self._in_production[work.uid] = (work, owner)
            self._shares.drawn(work.task)
            works.append(work)

    def _draw_one(self, owner: str, weights: int | None, tasks: Sequence[str]) -> Work | None:
        """From the first of the tasks of which something may be drawn."""
        for task in tasks:
            only_tail = self._shares.only_tail(task)
            if weights is None:
                work = self._draw_of(task, owner, only_tail)
            else:
                work = self._draw_ahead(task, owner, only_tail, weights)
            if work is not None:
                return work
        return None

    def _draw_of(self, task: str, owner: str, only_tail: bool) -> Work | None:
        group = self._lend(task, owner, only_tail)
        if group is not None:
            assert group.prompt is not None, group.uid
            attempt = max(r.attempt for r in group.rollouts) + 1
            return Work(group.uid, task, group.prompt, attempt, group)
        drawn = None if only_tail else self.sampler.draw(task, owner)
        if drawn is None:
            return None
        return Work(drawn.ticket, task, drawn.prompt, drawn.attempt)

    def _draw_ahead(self, task: str, owner: str, only_tail: bool, weights: int) -> Work | None:
        to_go_on_with = (Status.ABORTED, Status.EXPIRED)
        if only_tail or any(self.buffer.count(task, status) for status in to_go_on_with):
            return None
        drawn = self.sampler.draw(task, owner)
        if drawn is None:
            return None
        return Work(drawn.ticket, task, drawn.prompt, drawn.attempt, model_step=weights)

    def _lend(self, task: str, owner: str, only_tail: bool) -> Group | None:
        if self.buffer.expiry.tail.may_retry(only_tail):
            group = self.buffer.lend(task, Status.EXPIRED, owner=owner)
            if group is not None:
                return group
        return self.buffer.lend(task, Status.ABORTED, owner=owner)

    def _raise_if_too_stale(self, train_step: int, need: Mapping[str, int]) -> None:
        usable = self._shares.usable(self.model_step, train_step)
        if usable == 0 and not self._shares.ready(need):
            raise StalenessError(
                f"step {train_step} needs {dict(need)} groups and the engines' model is too old to "
                "produce them; "
                "sync weights first. " + "; ".join(self.describe())
            )

    def _fail_stragglers(self, group: Group) -> Group:
        if group.status is not Status.ABORTED:
            return group
        members = [
            r.evolve(status=Status.FAILED, error_msg=f"did not finish in {r.attempt + 1} attempts")
            if r.status is Status.ABORTED and r.attempt + 1 >= self.config.attempts_max
            else r
            for r in group.rollouts
        ]
        return group.with_rollouts(members)

    def _leave_production(self, uid: str) -> None:
        found = self._in_production.pop(uid, None)
        if found is not None:
            self._shares.left_production(found[0].task)

    def _wake(self) -> None:
        for waiter in list(self._drawers):
            if not waiter.done():
                waiter.set_result(None)
