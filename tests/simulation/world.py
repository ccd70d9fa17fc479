"""A whole run on virtual time with random faults, decided by one seed.

Real: arena, traces, replay buffer, dispatcher, producers, conversations, schedules, snapshots.
Pretended: the model (scripted engine), the learner's arithmetic, time. Everything that can die
does: producers, the learner at three places of its step, the engine, judges, the whole driver,
which then resumes from its last snapshot in a new arena.

What is simulated is in `plan`, what must hold in `checker`. Called by the test and by
`python -m tests.simulation`.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shmstore import Store
from shmstore.testing import temporary_store
from tests.simulation.checker import Checker
from tests.simulation.plan import Plan
from tests.trainer.lifecycle.kit import (
    Branches,
    CountingJudge,
    OneTurn,
    Questions,
    SubmittedEngine,
    TwoTurns,
)
from trainer import snapshot
from trainer.dispatch import Dispatcher
from trainer.engine.protocol import SyncMode, WeightsVersion
from trainer.engine.scripted import ByteTokenizer, ScriptedEngine
from trainer.environment import Environment, RolloutAborted, Session
from trainer.errors import EndOfData, LearnerLost
from trainer.evaluation import Evaluator
from trainer.expiry import Expiry
from trainer.pending import ProducerConfig, ProducerParts
from trainer.producer import PauseReport, Producer
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.rollout import Batch, Group, Prompt
from trainer.schedule import ScheduleConfig, ScheduleParts, StepReport, run_schedule
from trainer.segment import Trace
from trainer.shares import TaskMix
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual
from trainer.trace import TraceStore
from trainer.work import DispatchConfig, HandedIn, Work

LEARNER = "learner"
_ENVIRONMENTS: dict[str, Environment] = {
    "one turn": OneTurn(),
    "two turns": TwoTurns(),
    "branches": Branches(),
}


class _Judge(CountingJudge):
    """Rewards by number; some verdicts fail or never come."""

    def __init__(self, rng: random.Random, failure_rate: float) -> None:
        super().__init__()
        self._rng = rng
        self._rate = failure_rate

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        if self._rng.random() < self._rate:
            if self._rng.random() < 0.5:
                raise ValueError("the judge has no opinion")
            await asyncio.sleep(1e6)
        return await super().score(prompt, text, trace)


class _Deaf:
    """An environment that goes on after some of its cancellations, with a session that is not its
    own any more.
    """

    def __init__(self, inner: Environment, plan: Plan, checker: Checker) -> None:
        self._inner = inner
        self._rate = plan.deaf_rate
        self._rng = random.Random(plan.seed + 2)
        self._checker = checker

    async def run(self, session: Session, prompt: Prompt) -> None:
        try:
            await self._inner.run(session, prompt)
        except asyncio.CancelledError:
            if self._rng.random() >= self._rate:
                raise
            await asyncio.sleep(60)
            try:
                await session.generate("once more; ")
            except RolloutAborted:
                raise
            except Exception:  # refused too late: the engine has worked for a session that is gone
                self._checker.late.append(session.id)
            else:
                self._checker.late.append(session.id)


class _Wire:
    """A producer's connection to the dispatcher; cut by its death.

    As with a real one, a call that has arrived is carried out also when its caller has died, and a
    call that comes after the cut gets no answer, ever.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.cut = False
        self._served: set[asyncio.Future[Any]] = set()

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        if self.cut:
            await asyncio.get_running_loop().create_future()  # no answer comes, ever
        served = asyncio.ensure_future(getattr(self._dispatcher, name)(*args, **options))
        self._served.add(served)
        served.add_done_callback(self._seen)
        return await asyncio.shield(served)

    def _seen(self, served: asyncio.Future[Any]) -> None:
        """Its error, if any, has gone to the caller or is of no interest to a dead one."""
        self._served.discard(served)
        if not served.cancelled():
            served.exception()

    async def draw(self, owner: str, n: int = 1) -> Sequence[Work]:
        return await self._call("draw", owner, n)  # type: ignore[no-any-return]

    async def hold(self, owner: str) -> None:
        await self._call("hold", owner)

    async def let_go(self, owner: str) -> None:
        await self._call("let_go", owner)

    async def put_all(self, groups: Sequence[Group], *, owner: str) -> Sequence[HandedIn]:
        return await self._call("put_all", groups, owner=owner)  # type: ignore[no-any-return]

    async def cancel(self, group: Group, *, owner: str) -> int:
        return await self._call("cancel", group, owner=owner)  # type: ignore[no-any-return]

    async def take_back(self, uids: Sequence[str], *, owner: str) -> None:
        await self._call("take_back", uids, owner=owner)

    async def give_back(self, owner: str) -> int:
        return await self._call("give_back", owner)  # type: ignore[no-any-return]


@dataclass
class _Learner:
    """Trains by waiting; dies before it reads, after it read, or after it released."""

    world: _World
    rng: random.Random
    mean_s: float
    trained_step: int = 0

    async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
        world = self.world
        world.checker.batch(batch, train_step, world.traces, world.dispatcher)
        dies = self.mean_s and self.rng.random() < 1 / self.mean_s
        place = self.rng.randrange(3) if dies else None
        if place == 0:
            self._die()
        await asyncio.sleep(self.rng.uniform(0, 3))
        if place == 1:
            self._die()
        released = world.traces.release(batch.session_ids, owner=LEARNER)
        world.checker.demand(
            released == list(batch.session_ids), f"step {train_step} released {released}"
        )
        world.checker.trained(batch, train_step)
        self.trained_step = train_step
        if place == 2:
            self._die()
        return {}

    def _die(self) -> None:
        world = self.world
        if self.rng.random() < 0.5:  # the heir rule has worked already, or the driver is first
            held = world.store.sessions.list(LEARNER)
            world.store.sessions.transfer(held, src=LEARNER, dst="replay")
        raise LearnerLost("scripted death")


@dataclass
class _World:
    """All parts of one run in one arena."""

    plan: Plan
    store: Store
    checker: Checker
    rng: random.Random
    folder: Path
    dispatcher: Dispatcher = field(init=False)
    traces: TraceStore = field(init=False)
    engine: ScriptedEngine = field(init=False)
    judge: _Judge = field(init=False)
    producers: dict[str, tuple[Producer, _Wire, asyncio.Task[None]]] = field(default_factory=dict)
    paused: bool = False
    #: Tasks of killed producers; they wait for answers that never come.
    graveyard: list[asyncio.Task[None]] = field(default_factory=list)
    #: One at a time: pausing, resuming, and replacing a dead producer.
    moves: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def build(self, resume: bool) -> int:
        """Make the parts, fresh or from the last snapshot; -> the first step to train."""
        plan = self.plan
        self.traces = TraceStore(self.store)
        self.judge = _Judge(self.rng, plan.judge_failure_rate)
        options: dict[str, Any] = {
            "order": plan.order,
            "max_bytes": plan.max_bytes,
            "expiry": Expiry(
                plan.action,
                plan.max_staleness,
                plan.sync_interval,
                plan.max_token_staleness,
                plan.tail_batch,
            ),
        }
        if resume:
            buffer = await ReplayBuffer.resume(self.folder, self.store, **options)
        else:
            buffer = ReplayBuffer(self.store, **options)
        sources = {task: Questions(task, size) for task, size in plan.sizes.items()}
        self.dispatcher = Dispatcher(
            buffer,
            PromptSampler(sources, seed=plan.seed, epochs=2),
            DispatchConfig(
                batch_groups=plan.batch_groups,
                group_size=plan.group_size,
                budget=StalenessBudget(plan.max_staleness, plan.sync_interval),
                over_sampling=plan.over_sampling,
                attempts_max=6,
                useless_in_row_max=40,
            ),
            TaskMix(plan.tasks),
        )
        if resume:
            self.dispatcher.restore(snapshot.read_state(self.folder))
        self.engine = self._engine(self.dispatcher.model_step)
        for n in range(plan.n_producers):
            self.spawn_producer(f"producer-{n}")
        return self.dispatcher.train_step

    def _engine(self, model_step: int) -> ScriptedEngine:
        """One that is awaited, or one that answers by a call."""
        kind = SubmittedEngine if self.plan.seed % 4 < 2 else ScriptedEngine
        return kind(self.plan.script, model_step)

    def parts_of(self) -> ProducerParts:
        plan = self.plan
        environment = _Deaf(_ENVIRONMENTS[plan.environment], plan, self.checker)
        parts = ProducerParts(self.engine, self.traces, ByteTokenizer(), environment, self.judge)
        if plan.environment == "one turn" and plan.seed % 2:  # without running it
            return replace(parts, one_turn=lambda prompt: prompt.text)
        return parts

    def spawn_producer(self, name: str) -> None:
        config = ProducerConfig(
            group_size=self.plan.group_size,
            groups_max=4,
            partial_rollout=self.plan.partial_rollout,
            judge_timeout_s=5,
            rollout_timeout_s=20,
            filter_equal_rewards=True,
        )
        wire = _Wire(self.dispatcher)
        producer = Producer(wire, self.parts_of(), config, owner=name, run_name="sim")
        task = asyncio.get_running_loop().create_task(producer.run())
        self.producers[name] = (producer, wire, task)

    async def kill_producer(self, name: str) -> None:
        """kill -9: nothing of it runs again; then the driver notices and starts a successor."""
        async with self.moves:
            _, wire, task = self.producers.pop(name)
            wire.cut = True
            self.graveyard.append(task)
            task.cancel()  # takes its groups with it, each at the point where it waits
            await asyncio.sleep(self.rng.uniform(0, 1))
            self.dispatcher.owner_died(name)
            self.spawn_producer(name)
            await asyncio.sleep(0.5)  # it works before it hears of a pause
            if self.paused:
                await self.producers[name][0].pause(10)

    async def kill_engine(self) -> None:
        """Every request fails; a new engine has the last weights."""
        old = self.engine
        self.engine = self._engine(old.model_step)
        await old.aclose()
        for name in list(self.producers):
            await self.kill_producer(name)  # with an inline engine the producer dies too

    async def pause(self, timeout_s: float) -> PauseReport:
        async with self.moves:
            self.paused = True
            reports = [await p.pause(timeout_s) for p, _, _ in self.producers.values()]
            slowest_s = max((r.seconds for r in reports), default=0.0)
            self.checker.demand(slowest_s < timeout_s + 10.1, f"a pause took {slowest_s} s")
        return PauseReport(
            sum(r.finished_groups for r in reports),
            sum(r.cancelled_rollouts for r in reports),
            sum(r.seconds for r in reports),
        )

    async def resume(self) -> None:
        async with self.moves:
            self.paused = False
            for producer, _, _ in self.producers.values():
                await producer.resume()

    async def to_engine(self) -> None: ...

    async def to_learner(self) -> None: ...

    async def sync_weights(self, model_step: int, mode: SyncMode) -> None:
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        await self.engine.load_weights(WeightsVersion(b"", model_step), mode)
        for producer, _, _ in self.producers.values():
            producer.weights_taken()

    async def evaluate(self, train_step: int) -> None:
        before = self.store.sessions.list("replay")
        prompts = [Questions().prompt(i) for i in range(2)]
        config = ProducerConfig(group_size=1, judge_timeout_s=5, rollout_timeout_s=20)
        await Evaluator(self.parts_of(), config, prompts).run()
        if self.paused:
            self.checker.demand(
                self.store.sessions.list("replay") == before, "an evaluation changed the buffer"
            )
        self.checker.demand(self.store.sessions.list("eval") == [], "an evaluation left sessions")

    async def checkpoint(self, train_step: int) -> None:
        await self.dispatcher.snapshot(self.folder)

    async def on_step(self, report: StepReport) -> None:
        self.checker.arena(self.store, self.dispatcher)

    async def faults(self) -> None:
        """Kill things at random, for ever."""
        kinds = [k for k in ("producer", "engine") if self.plan.kills[k]]
        while kinds:
            kind = self.rng.choice(kinds)
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.kills[kind]))
            if kind == "producer":
                await self.kill_producer(self.rng.choice(sorted(self.producers)))
            else:
                await self.kill_engine()

    async def run(self, first_step: int) -> None:
        """All steps by the plan's schedule, with faults beside it."""
        plan = self.plan
        parts = ScheduleParts(
            dispatcher=self.dispatcher,
            learner=_Learner(self, self.rng, plan.kills["learner"]),
            producer=self,
            sync_weights=self.sync_weights,
            evaluate=self.evaluate,
            checkpoint=self.checkpoint,
            on_step=self.on_step,
            devices=self if plan.schedule == "colocated" else None,
            prepares=plan.seed % 3 > 0,
        )
        config = ScheduleConfig(
            steps=plan.steps,
            first_step=first_step,
            sync_interval=plan.sync_interval,
            sync_mode=plan.sync_mode,
            evaluate_every=2 * plan.sync_interval,
            evaluate_first=True,
            checkpoint_every=plan.checkpoint_every,
            pause_timeout_s=30,
            take_timeout_s=3_000,
        )
        faults = asyncio.get_running_loop().create_task(self.faults())
        try:
            await run_schedule(plan.schedule, parts, config)
        finally:
            async with self.moves:  # not between a death and its successor
                faults.cancel()
            await asyncio.wait([faults])
            if not faults.cancelled() and faults.exception() is not None:
                raise faults.exception() or AssertionError

    async def close(self) -> None:
        """End in order; then nothing may be left."""
        for producer, _, task in self.producers.values():
            await producer.stop(30)
            await task
        self.checker.arena(self.store, self.dispatcher)
        self.dispatcher.buffer.close()
        left = {i: self.store.sessions.owner(i) for i in self.store.sessions.list()}
        self.checker.demand(left == {}, f"sessions are left at the end: {left}")
        self.dispatcher.check_books()


def simulate(seed: int) -> dict[str, Any]:
    """One run; raises what went wrong. -> its books and its history."""
    plan = Plan.from_seed(seed)
    checker = Checker(plan)
    rng = random.Random(seed + 1)
    outcome: dict[str, Any] = {"plan": plan, "ended": "steps"}
    with tempfile.TemporaryDirectory() as folder:
        crashed = False
        for crash_after_s in (plan.crash_after_s, None):
            with temporary_store("16MiB", max_objects=1 << 12, max_sessions=1 << 10) as store:
                world_folder = Path(folder) / "snapshot"
                resume = crashed and (world_folder / "snapshot.json").exists()
                crashed = run_virtual(
                    _live(plan, store, checker, rng, world_folder, resume, crash_after_s, outcome)
                )
                store.sessions.release(store.sessions.list(), owner="*")
            if not crashed:
                break
    outcome["history"] = checker.history
    return outcome


async def _live(
    plan: Plan,
    store: Store,
    checker: Checker,
    rng: random.Random,
    folder: Path,
    resume: bool,
    crash_after_s: float | None,
    outcome: dict[str, Any],
) -> bool:
    """One life of the driver; -> whether it crashed."""
    world = _World(plan, store, checker, rng, folder)
    first_step = await world.build(resume)
    # What was trained after the snapshot is lost with the learner that knew it.
    checker.history = {s: uids for s, uids in checker.history.items() if s < first_step}
    if first_step > plan.steps:
        await world.close()
        return False
    running = asyncio.get_running_loop().create_task(world.run(first_step))
    done, _ = await asyncio.wait([running], timeout=crash_after_s)
    if not done:
        everything = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
        for task in everything:
            task.cancel()
        await asyncio.wait(everything)
        return True
    try:
        running.result()
    except EndOfData as error:
        outcome["ended"] = str(error)
    await world.close()
    outcome["books"] = world.dispatcher.report()
    return False
