"""What is drawn ahead of weights that are still to come: prepared while the learner trains, begun
with them, and otherwise as if it had never been drawn (L25, L30).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import SLOW, OneTurn, Questions, SubmittedEngine, desk
from tests.trainer.lifecycle.scheduled import Parts, run_parts
from trainer.engine.protocol import SyncMode
from trainer.engine.scripted import Script, ScriptedEngine
from trainer.environment import Session
from trainer.errors import EndOfData, LearnerLost
from trainer.producer import Producer
from trainer.rollout import Batch, Group, Prompt, Rollout
from trainer.segment import Trace
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual
from trainer.work import Work

FRESH: dict[str, Any] = {"budget": StalenessBudget(0)}
"""Only the batch that comes next is drawn, and nothing stale is trained."""


class _Noted(OneTurn):
    """An environment that notes when its user code ran."""

    def __init__(self) -> None:
        self.began_s: list[float] = []

    async def run(self, session: Session, prompt: Prompt) -> None:
        self.began_s.append(asyncio.get_running_loop().time())
        await super().run(session, prompt)


@pytest.mark.parametrize("engine", [SubmittedEngine, ScriptedEngine])
@pytest.mark.parametrize("one_turn", [True, False])
def test_L30_the_next_batch_is_prepared_while_one_is_trained_and_begun_with_its_weights(
    store: Store, engine: type[ScriptedEngine], one_turn: bool
) -> None:
    async def main() -> None:
        environment = _Noted()
        options: dict[str, Any] = {"engine": engine(Script(token_s=0.1)), **FRESH}
        async with desk(store, environment=environment, one_turn=one_turn, **options) as made:
            prepared: list[tuple[int, int]] = []
            steps: list[list[int]] = []
            taken_s: list[float] = [0.0]

            class Noting(Parts):
                async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
                    found = [made.traces.export(r.session_id) for r in batch.rollouts]
                    sampled = np.concatenate([t.model_steps[t.model_steps >= 0] for t in found])
                    steps.append(sorted(set(sampled.tolist())))
                    done = await super().train(batch, train_step)
                    report = made.producer.report()
                    prepared.append((report.in_production, len(store.sessions.list("producer-0"))))
                    return done

                async def sync(self, model_step: int, mode: SyncMode) -> None:
                    await super().sync(model_step, mode)
                    taken_s.append(asyncio.get_running_loop().time())

            parts = Noting(made)
            await run_parts(made, "sync", parts)
            assert prepared == [(2, 4)] * 3 + [(0, 0)], "two groups of two, none after the last"
            assert steps == [[0], [1], [2], [3]], "every token is of the weights before its step"
            assert all(report.metrics["overlap"] == 0 for report in parts.reports)
            assert not {"pause", "resume"} & set(parts.log)
            if not one_turn:
                assert environment.began_s == [s for s in taken_s[:4] for _ in range(4)]

    run_virtual(main())
    assert store.sessions.list() == []


def test_L30_nothing_is_drawn_ahead_of_an_evaluation_or_a_checkpoint(store: Store) -> None:
    drawn: list[tuple[str, int]] = []

    async def main() -> None:
        async with desk(store, **FRESH) as made:

            class Noting(Parts):
                async def checkpoint(self, train_step: int) -> None:
                    drawn.append(("checkpoint", made.producer.report().in_production))

                async def evaluate(self, train_step: int) -> None:
                    drawn.append(("evaluate", made.producer.report().in_production))

            parts = Noting(made)
            await run_parts(made, "sync", parts, evaluate_every=2, checkpoint_every=3, steps=6)

    run_virtual(main())
    kinds = ["evaluate", "checkpoint", "evaluate", "evaluate", "checkpoint"]
    assert drawn == [(kind, 0) for kind in kinds]


def test_L25_a_run_that_is_stopped_while_it_trains_goes_on_as_if_nothing_had_been_prepared(
    store: Store,
) -> None:
    async def main() -> tuple[list[tuple[str, str, int]], ...]:
        states = []
        for prepares in (True, False):
            async with desk(store, **FRESH) as made:
                stop = asyncio.Event()

                class Stopping(Parts):
                    async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
                        done = await super().train(batch, train_step)
                        assert self.made.producer.report().in_production == (2 if prepares else 0)  # noqa: B023
                        stop.set()  # noqa: B023
                        return done

                parts = Stopping(made)
                await run_parts(made, "sync", parts, stop=stop, prepares=prepares)
                assert [report.train_step for report in parts.reports] == [1]
                assert made.producer.report().cancelled_rollouts == 0
                assert made.dispatcher.report()["produced"] == 4
                assert store.sessions.list() == []
                sampler = made.dispatcher.sampler
                again = [sampler.draw("math", "p") for _ in range(3)]
                states.append([(d.ticket, d.prompt.uid, d.attempt) for d in again if d])
                made.dispatcher.owner_died("p")
        return tuple(states)

    prepared, not_prepared = run_virtual(main())
    assert prepared == not_prepared == [(f"math-{n}", f"math/{n}", 0) for n in (2, 3, 4)]


def test_L07_a_batch_that_is_lost_is_made_again_before_what_was_prepared_for_later(
    store: Store,
) -> None:
    """A learner that died when it had let go of part of its batch."""

    async def main() -> None:
        async with desk(store, **FRESH) as made:
            tokens: list[set[int]] = []

            class Losing(Parts):
                lost = False

                async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
                    if train_step == 2 and not self.lost:
                        self.lost = True
                        await asyncio.sleep(1)
                        assert made.producer.report().in_production == 2
                        made.traces.release(batch.groups[0].session_ids, owner="learner")
                        raise LearnerLost("killed by signal 9")
                    steps = [made.traces.export(r.session_id).model_steps for r in batch.rollouts]
                    tokens.append({int(s) for one in steps for s in one if s >= 0})
                    return await super().train(batch, train_step)

            parts = Losing(made)
            await run_parts(made, "sync", parts)
            assert [report.train_step for report in parts.reports] == [1, 2, 3, 4]
            assert tokens == [{0}, {1}, {2}, {3}], "of the weights before each step, and no other"

    run_virtual(main())


def test_L08_what_weights_on_their_way_allow_is_prepared_while_the_batch_before_is_made(
    store: Store,
) -> None:
    async def main() -> None:
        budget = StalenessBudget(max_staleness=1)
        async with desk(store, script=SLOW, budget=budget) as made:
            prepared: list[int] = []
            ages: list[set[int]] = []

            class Noting(Parts):
                async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
                    found = [made.traces.export(r.session_id).model_steps for r in batch.rollouts]
                    ages.append({train_step - 1 - int(s) for one in found for s in one if s >= 0})
                    done = await super().train(batch, train_step)
                    prepared.append(sum(g.is_prepared for g in made.producer._groups.values()))
                    return done

            parts = Noting(made)
            await run_parts(made, "async", parts, sync_mode="in_flight", steps=6)
            assert prepared == [2] * 5 + [0], "the groups of a batch, and none behind the last step"
            assert ages[0] == {0}
            assert set().union(*ages) == {0, 1}, "the budget holds"
            assert not {"pause", "resume"} & set(parts.log)

    run_virtual(main())


def test_L23_what_waits_for_weights_does_not_count_for_a_batch_that_is_wanted_before_them(
    store: Store,
) -> None:
    """A group fails while its successors are prepared: another is drawn in its place and begun."""

    async def main() -> None:
        async with desk(store, run=False, **FRESH) as made:
            dispatcher = made.dispatcher
            now = await dispatcher.draw("p", 8)
            dispatcher.work_ahead(1)
            later = await dispatcher.draw("p", 8)
            assert [(work.uid, work.model_step) for work in [*now, *later]] == [
                *(("math-0", None), ("math-1", None)),
                *(("math-2", 1), ("math-3", 1)),
            ]
            await dispatcher.cancel(_drawn(now[0]), owner="p")
            (instead,) = await dispatcher.draw("p", 8)
            assert (instead.uid, instead.model_step) == ("math-4", None)
            await dispatcher.set_steps(train_step=2, model_step=1)
            assert not dispatcher.works_ahead
            dispatcher.owner_died("p")

    run_virtual(main())


def _drawn(work: Work) -> Group:
    return Group(work.uid, work.task, work.prompt, (Rollout("s", work.prompt.uid, work.task),))


class _FiltersLater:
    """The rewards of a prompt's first two answers differ, those of later ones do not."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        self.asked[prompt.uid] += 1
        return float(min(self.asked[prompt.uid], 3))


def test_L07_a_lost_batch_gets_the_prompts_that_were_prepared_for_later_when_there_are_no_others(
    store: Store,
) -> None:
    async def main() -> None:
        sources = {"math": Questions(size=4)}
        options: dict[str, Any] = {"sources": sources, "epochs": 1, **FRESH}
        async with desk(store, judge=_FiltersLater(), **options) as made:

            class Losing(Parts):
                lost = False

                async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
                    if not self.lost:
                        self.lost = True
                        await asyncio.sleep(100)
                        assert made.dispatcher.sampler.remaining("math") == 0, "all is drawn"
                        made.traces.release(batch.session_ids, owner="learner")
                        raise LearnerLost("killed by signal 9")
                    self.log.append(" ".join(group.uid for group in batch.groups))
                    return await super().train(batch, train_step)

            parts = Losing(made)
            with pytest.raises(EndOfData):
                await run_parts(made, "async", parts, sync_mode="in_flight", steps=2)
            assert "math-2 math-3" in parts.log

    run_virtual(main())


class _Cut:
    """The desk as a dead process sees it: no answer, ever."""

    def __getattr__(self, name: str) -> Any:
        async def never(*args: Any, **options: Any) -> None:
            await asyncio.get_running_loop().create_future()

        return never


def test_L12_what_a_dead_producer_had_prepared_its_successor_prepares(store: Store) -> None:
    async def main() -> None:
        async with desk(store, run=False, **FRESH) as made:
            successor = made.producer
            first = Producer(made.dispatcher, successor._parts, successor._config)
            made.producer = first
            running = [asyncio.create_task(first.run())]

            class Dying(Parts):
                async def train(self, batch: Batch, train_step: int) -> Mapping[str, float]:
                    if train_step == 2:
                        await asyncio.sleep(1)
                        assert first.report().in_production == 2
                        prepared = store.sessions.list("producer-0")
                        first._dispatcher = _Cut()
                        running[0].cancel()
                        store.sessions.release_owned("producer-0")
                        made.dispatcher.owner_died("producer-0")
                        made.producer = successor
                        running.append(asyncio.create_task(successor.run()))
                        await asyncio.sleep(1)
                        assert successor.report().in_production == 2
                        # The same ids: engines draw their seeds from them.
                        assert store.sessions.list("producer-0") == prepared
                    return await super().train(batch, train_step)

            await run_parts(made, "sync", Dying(made))
            books = made.dispatcher.report()
            assert (books["trained"], books["produced"]) == (16, 16)
        await running[1]

    run_virtual(main())


def test_L21_a_pause_gives_back_what_waits_for_weights_and_what_was_just_drawn_for_them(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store, produce={"groups_max": 1}, **FRESH) as made:
            parts = Parts(made)
            made.dispatcher.rest()
            await asyncio.sleep(1)
            made.dispatcher.work_ahead(1)
            await asyncio.sleep(1)
            assert made.producer.report().in_production == 1
            report = await made.producer.pause(5)
            assert (report.finished_groups, report.cancelled_rollouts, report.seconds) == (0, 0, 0)
            assert store.sessions.list() == []
            await parts.sync(1, "pause")  # also weights begin nothing in a pause
            await asyncio.sleep(1)
            assert store.sessions.list() == []
            await made.producer.resume()
            await made.train(1)

    run_virtual(main())


def test_L21_work_that_arrives_in_a_pause_for_weights_to_come_does_not_keep_others_waiting(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store, **FRESH) as made:
            made.dispatcher.rest()
            await asyncio.sleep(1)
            made.dispatcher.work_ahead(1)
            pausing = asyncio.create_task(made.producer.pause(5))  # the draw is answered meanwhile
            await pausing
            assert not made.dispatcher.rest(), "it has been drawn"
            made.dispatcher.work()
            await made.producer.resume()
            batch = await made.train(1)  # of the weights that there are
            assert {group.model_step_min for group in batch.groups} == {0}

    run_virtual(main())


def test_the_time_of_a_rollout_counts_from_its_begin_and_not_from_its_preparation(
    store: Store,
) -> None:
    async def main() -> None:
        produce = {"rollout_timeout_s": 20.0, "grace_s": 1.0}
        async with desk(store, script=Script(token_s=1.0), produce=produce, **FRESH) as made:
            parts = Parts(made)
            made.dispatcher.rest()
            await asyncio.sleep(1)
            made.dispatcher.work_ahead(1)
            await asyncio.sleep(1000)
            await parts.sync(1, "pause")
            await made.dispatcher.set_steps(model_step=1)
            batch = await made.train(1)
            times_s = [rollout.generation_time_s for rollout in batch.rollouts]
            assert all(0 < time_s <= 20 for time_s in times_s)

    run_virtual(main())


def test_L11_groups_that_wait_to_be_gone_on_with_come_before_what_could_be_prepared(
    store: Store,
) -> None:
    async def main() -> None:
        async with desk(store, script=Script(token_s=1.0), **FRESH) as made:
            await asyncio.sleep(2)
            await made.producer.pause(5)  # two groups are aborted into the buffer
            made.dispatcher.rest()
            await made.producer.resume()
            made.dispatcher.work_ahead(1)
            await asyncio.sleep(10)
            assert made.producer.report().in_production == 0
            made.dispatcher.work()
            batch = await made.train(1)
            assert {rollout.attempt for rollout in batch.rollouts} == {1}
            assert {group.uid for group in batch.groups} == {"math-0", "math-1"}

    run_virtual(main())


def test_prompts_that_were_not_drawn_after_all_come_in_their_order_before_those_that_wait() -> None:
    from trainer.prompts import PromptSampler

    sampler = PromptSampler({"math": Questions(size=6)}, seed=None, epochs=1)
    first = [sampler.draw("math", "p") for _ in range(3)]
    sampler.give_back(first[2].ticket)  # type: ignore[union-attr]
    sampler.give_back(first[1].ticket)  # type: ignore[union-attr]
    drawn = [sampler.draw("math", "p") for _ in range(3)]
    for one in reversed(drawn):
        assert one is not None
        sampler.undraw(one.ticket)
        sampler.undraw(one.ticket)  # twice is no error
    saved = sampler.to_json()
    again = [sampler.draw("math", "p") for _ in range(3)]
    assert again == drawn
    resumed = PromptSampler({"math": Questions(size=6)}, seed=None, epochs=1)
    resumed.load_json(saved)
    # What was under way when it was saved comes first, then the same.
    first_again, *rest = [resumed.draw("math", "p") for _ in range(4)]
    assert (first_again, rest) == (first[0], drawn)
