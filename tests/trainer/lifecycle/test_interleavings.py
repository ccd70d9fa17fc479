"""Producer and learner in every order of their steps, and with a death at every point (L06, L07,
L09, L12, L22).

The learner takes, trains, releases, pauses, syncs, evaluates, resumes; the producer draws, opens,
inserts, puts. All 330 orders of the two rows are run on a real arena; after each step the books
must balance, the arena must be sound, and every session must belong to who should have it. Then all
of them again with one of the two dying after each step.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import Questions
from trainer.dispatch import Dispatcher
from trainer.expiry import Expiry
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.rollout import Batch, Group, Rollout, Status
from trainer.staleness import StalenessBudget
from trainer.testing import make_segment, store_group
from trainer.trace import TraceStore
from trainer.work import DispatchConfig, Work

P, L = "producer-0", "learner"
LEARNER = ("take", "train", "release", "pause", "sync", "evaluate", "resume")
PRODUCER = ("draw", "open", "insert", "put")
#: Positions of the producer's steps among all.
ORDERS = list(itertools.combinations(range(len(LEARNER) + len(PRODUCER)), len(PRODUCER)))


def _row(order: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    learner, producer = iter(LEARNER), iter(PRODUCER)
    for place in range(len(LEARNER) + len(PRODUCER)):
        yield ("producer", next(producer)) if place in order else ("learner", next(learner))


@dataclass
class _World:
    """One desk, with a group in the buffer and one prompt for the producer."""

    store: Store
    traces: TraceStore = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    batch: Batch | None = None
    work: Work | None = None
    model_step: int = 0
    paused: bool = False
    inserted: bool = False
    opened: bool = False
    put: bool = False
    trained: int = 0

    async def prepare(self) -> None:
        self.traces = TraceStore(self.store)
        buffer = ReplayBuffer(self.store, expiry=Expiry(max_staleness=2))
        budget = StalenessBudget(max_staleness=2)
        self.dispatcher = Dispatcher(
            buffer,
            PromptSampler({"math": Questions()}, seed=None),
            DispatchConfig(batch_groups=1, group_size=2, budget=budget),
        )
        (work,) = await self.dispatcher.draw(P)
        await self.dispatcher.put(store_group(self.traces, work.uid), owner=P)

    async def step(self, who: str, what: str) -> None:
        await getattr(self, f"{who}_{what}")()
        self.check()

    # -- the learner -----------------------------------------------------------------------------

    async def learner_take(self) -> None:
        self.batch = await self.dispatcher.take(1, owner=L, timeout=1)

    async def learner_train(self) -> None:
        if self.batch is not None:
            for rollout in self.batch.rollouts:
                trace = self.traces.export(rollout.session_id, node=rollout.leaves[0])
                assert len(trace) == rollout.n_tokens

    async def learner_release(self) -> None:
        if self.batch is not None:
            released = self.traces.release(self.batch.session_ids, owner=L)
            assert released == list(self.batch.session_ids)
            self.trained += len(self.batch.rollouts)
            self.batch = None

    async def learner_pause(self) -> None:
        self.paused = True
        await self.dispatcher.hold(P)

    async def learner_sync(self) -> None:
        self.model_step = 1
        await self.dispatcher.set_steps(train_step=2, model_step=1)

    async def learner_evaluate(self) -> None:
        before = set(self.store.sessions.list())
        store_group(self.traces, "evaluation", owner="eval")
        self.traces.release(["evaluation-0", "evaluation-1"], owner="eval")
        assert set(self.store.sessions.list()) == before

    async def learner_resume(self) -> None:
        self.paused = False
        await self.dispatcher.let_go(P)

    # -- the producer ----------------------------------------------------------------------------

    async def producer_draw(self) -> None:
        """During a pause nothing is handed out; then the row goes on without work."""
        drawing = asyncio.create_task(self.dispatcher.draw(P))
        for _ in range(3):
            await asyncio.sleep(0)
        if self.paused:
            assert not drawing.done()
            drawing.cancel()
            await asyncio.wait([drawing])
        else:
            (self.work,) = await drawing

    def _ids(self) -> list[str]:
        assert self.work is not None
        return [f"{self.work.uid}-{k}-{self.work.attempt}" for k in range(2)]

    async def producer_open(self) -> None:
        if self.work is not None:
            for session_id in self._ids():
                self.traces.open(session_id, P)
            self.traces.insert_shared(self._ids(), make_segment(4, model_step=None))
            self.opened = True

    async def producer_insert(self) -> None:
        if self.opened:
            for session_id in self._ids():
                self.traces.insert(session_id, make_segment(5, model_step=self.model_step), 0)
            self.inserted = True

    async def producer_put(self) -> None:
        if not self.inserted:
            return
        assert self.work is not None
        status = Status.ABORTED if self.paused else Status.COMPLETED
        rollouts = [
            Rollout(s, status=status, task="math", attempt=self.work.attempt) for s in self._ids()
        ]
        group = Group(self.work.uid, "math", self.work.prompt, tuple(rollouts))
        assert await self.dispatcher.put(group, owner=P) is status
        self.put = True

    # -- what holds after each step --------------------------------------------------------------

    def check(self) -> None:
        self.dispatcher.check_books()
        assert self.store.check() == []
        sessions = self.store.sessions
        buffer = self.dispatcher.buffer
        filed = {sid for entry in buffer._index for sid in entry.group.session_ids}
        assert set(sessions.list("replay")) == filed
        assert sessions.list(L) == (list(self.batch.session_ids) if self.batch else [])
        assert sessions.list("eval") == []
        mine = set(self._ids()) if self.opened and not self.put else set()
        assert set(sessions.list(P)) == mine

    # -- deaths ----------------------------------------------------------------------------------

    async def kill(self, who: str) -> None:
        """Its sessions stay as they are; the driver notices."""
        if who == "learner":
            self.dispatcher.owner_died(L)
            self.batch = None
        else:
            self.dispatcher.owner_died(P)
            self.work, self.opened, self.inserted, self.put = None, False, False, False
            if self.paused:
                await self.dispatcher.hold(P)
        self.check()

    async def finish(self) -> None:
        """Whatever happened: the next batches come, and every prompt ends exactly once."""
        await self.learner_resume()
        trained = []
        for step in (2, 3):
            for _ in range(4):
                if self.dispatcher.ready(step):
                    break
                await self._produce_one()
            batch = await self.dispatcher.take(step, owner=L, timeout=1)
            trained += [group.uid for group in batch.groups]
            self.traces.release(batch.session_ids, owner=L)
            await self.dispatcher.set_steps(train_step=step + 1, model_step=step)
        assert len(trained) == len(set(trained)) == 2
        self.dispatcher.check_books()

    async def _produce_one(self) -> None:
        if self.work is not None and not self.put:
            work = self.work
            self.work = None
            self.dispatcher.owner_died(P)  # it is left over from an unfinished row: give it back
        (work,) = await asyncio.wait_for(self.dispatcher.draw(P), 1)
        if work.group is None:
            group = store_group(self.traces, work.uid, model_step=self.model_step, owner=P)
            await self.dispatcher.put(group.evolve(prompt=work.prompt), owner=P)
        else:
            done = [r.evolve(status=Status.COMPLETED) for r in work.group.rollouts]
            await self.dispatcher.put(work.group.with_rollouts(done), owner=P)


def _empty(store: Store, world: _World) -> None:
    world.dispatcher.buffer.close()
    store.sessions.release_owned(P)
    store.sessions.release_owned(L)
    assert store.stats().objects == 0


async def test_every_order_of_the_two_keeps_books_and_owners(store: Store) -> None:
    assert len(ORDERS) == 330
    for order in ORDERS:
        world = _World(store)
        await world.prepare()
        for who, what in _row(order):
            await world.step(who, what)
        assert world.trained == 2
        await world.finish()
        _empty(store, world)


@pytest.mark.parametrize("victim", ["learner", "producer"])
async def test_a_death_after_any_step_of_any_order_loses_nothing(store: Store, victim: str) -> None:
    """Every order with the death at every place: 330 orders, 11 places, 3,630 lives."""
    n_places = len(LEARNER) + len(PRODUCER)
    for order, place_of_death in itertools.product(ORDERS, range(n_places)):
        world = _World(store)
        await world.prepare()
        for place, (who, what) in enumerate(_row(order)):
            await world.step(who, what)
            if place == place_of_death:
                await world.kill(victim)
        await world.finish()
        _empty(store, world)


async def test_the_canary_of_a_release_without_owner_is_caught(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def release_all(self: _World) -> None:
        if self.batch is not None:
            self.store.sessions.release(self.store.sessions.list(), owner="*")
            self.trained += len(self.batch.rollouts)
            self.batch = None

    monkeypatch.setattr(_World, "learner_release", release_all)
    caught = 0
    for order in ORDERS[::7]:
        world = _World(store)
        await world.prepare()
        try:
            for who, what in _row(order):
                await world.step(who, what)
            await world.finish()
        except Exception:  # a session that is gone, or one that is not where it should be
            caught += 1
        store.sessions.release(store.sessions.list(), owner="*")
    assert caught > 10
