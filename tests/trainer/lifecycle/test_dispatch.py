"""The front desk: what may be drawn (L12, L19, L23, L31, bytes), and what happens when data or
sense run out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shmstore import Store
from tests.trainer.lifecycle.kit import Questions, desk
from trainer.dispatch import Dispatcher
from trainer.errors import BadGroup, ConfigError, EndOfData, PartFailed, StalenessError
from trainer.expiry import Expiry, ExpiryAction
from trainer.prompts import PromptSampler
from trainer.replay import ReplayBuffer
from trainer.rollout import Group, Prompt, Rollout, Status
from trainer.shares import TaskMix
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual, store_group
from trainer.trace import TraceStore
from trainer.work import DispatchConfig, Work

P, L = "producer-0", "learner"


def _dispatcher(
    store: Store,
    *,
    sources: dict[str, Questions] | None = None,
    weights: dict[str, float] | None = None,
    expiry: Expiry | None = None,
    max_bytes: int | None = None,
    epochs: int | None = None,
    m: int | None = 0,
    s: int = 1,
    **config: Any,
) -> Dispatcher:
    sources = sources or {"math": Questions()}
    config = {"batch_groups": 2, "group_size": 2, "budget": StalenessBudget(m, s), **config}
    return Dispatcher(
        ReplayBuffer(store, expiry=expiry, max_bytes=max_bytes),
        PromptSampler(sources, seed=None, epochs=epochs),
        DispatchConfig(**config),
        TaskMix(weights) if weights else None,
    )


def _made(
    traces: TraceStore, work: Work, status: Status = Status.COMPLETED, **options: Any
) -> Group:
    """The group that a producer would hand in for `work`."""
    group = store_group(traces, work.uid, task=work.task, status=status, owner=P, **options)
    return group.evolve(prompt=work.prompt)


async def _draw(dispatcher: Dispatcher, n: int = 99) -> list[Work]:
    return await asyncio.wait_for(dispatcher.draw(P, n), 1)


async def _would_wait(dispatcher: Dispatcher) -> bool:
    drawing = asyncio.create_task(dispatcher.draw(P))
    await asyncio.sleep(0.01)
    waits = not drawing.done()
    drawing.cancel()
    await asyncio.wait([drawing])
    return waits


async def test_L23_no_more_is_drawn_than_the_budget_can_use(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store, m=1, s=2)  # weights of step 0 serve batches 1 to 4
    works = await _draw(dispatcher)
    assert len(works) == 8
    assert await _would_wait(dispatcher)
    await dispatcher.set_steps(train_step=3)  # two batches fewer
    for work in works[:4]:
        await dispatcher.put(_made(traces, work), owner=P)
    for work in works[4:]:
        await dispatcher.cancel(_made(traces, work), owner=P)
    assert await _would_wait(dispatcher)  # batches 3 and 4 are there
    await dispatcher.set_steps(model_step=2)  # serves batches 3 to 6
    assert len(await _draw(dispatcher)) == 4


async def test_L23_a_model_that_is_too_old_stops_production_at_once(store: Store) -> None:
    dispatcher = _dispatcher(store)
    waiting = asyncio.create_task(dispatcher.draw(P))
    await waiting
    await dispatcher.set_steps(train_step=2)
    assert await _would_wait(dispatcher)
    assert await dispatcher.must_sync_first(2)


async def test_L23_when_neither_training_nor_producing_can_go_on_the_error_states_every_counter(
    store: Store,
) -> None:
    dispatcher = _dispatcher(store)
    await dispatcher.set_steps(train_step=5)
    with pytest.raises(StalenessError) as error:
        await dispatcher.take(5, owner=L, timeout=1)
    text = str(error.value)
    for wanted in (
        "step 5 needs {'math': 2}",
        "model step 0",
        "batches usable 0",
        "'completed': 0",
        "in production 0",
        "sync weights first",
    ):
        assert wanted in text


async def test_L23_the_ready_batch_is_trained_also_when_the_model_is_too_old(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store)
    for work in await _draw(dispatcher):
        await dispatcher.put(_made(traces, work), owner=P)
    assert len(await dispatcher.take(1, owner=L, timeout=1)) == 2
    assert await dispatcher.must_sync_first(2)


async def test_L31_tasks_share_the_budget_by_weight(store: Store) -> None:
    sources = {"math": Questions("math"), "code": Questions("code")}
    dispatcher = _dispatcher(
        store, sources=sources, weights={"math": 3, "code": 1}, batch_groups=4, m=1
    )
    works = await _draw(dispatcher)
    assert {task: sum(w.task == task for w in works) for task in sources} == {"math": 6, "code": 2}


async def test_L31_a_task_whose_data_end_leaves_its_share_to_the_others(
    store: Store, traces: TraceStore
) -> None:
    sources = {"math": Questions("math"), "code": Questions("code", size=1)}
    dispatcher = _dispatcher(store, sources=sources, batch_groups=4, epochs=1)
    works = await _draw(dispatcher)
    assert sorted(w.task for w in works) == ["code", "math", "math"]
    for work in works:
        await dispatcher.put(_made(traces, work), owner=P)
    (extra,) = await _draw(dispatcher)  # the end of `code` was noticed: its place goes to `math`
    assert extra.task == "math"
    await dispatcher.put(_made(traces, extra), owner=P)
    batch = await dispatcher.take(1, owner=L, timeout=1)
    assert sorted(group.task for group in batch.groups) == ["code", "math", "math", "math"]


async def test_the_end_of_all_data_reaches_a_waiting_learner_instead_of_hanging(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store, sources={"math": Questions(size=1)}, epochs=1)
    taking = asyncio.create_task(dispatcher.take(1, owner=L))
    (work,) = await _draw(dispatcher)
    await dispatcher.put(_made(traces, work), owner=P)
    assert await _would_wait(dispatcher)
    with pytest.raises(EndOfData, match=r"step 1 \(math: its prompts ran out\)"):
        await asyncio.wait_for(taking, 1)


async def test_L31_a_task_that_only_fails_is_left_out_with_its_last_error(
    store: Store, traces: TraceStore
) -> None:
    sources = {"math": Questions("math"), "code": Questions("code")}
    dispatcher = _dispatcher(store, sources=sources, useless_in_row_max=3)
    taking = asyncio.create_task(dispatcher.take(1, owner=L))
    while not taking.done():
        for work in await _draw(dispatcher):
            group = _made(traces, work, Status.FAILED if work.task == "code" else Status.COMPLETED)
            members = [r.evolve(error_msg="no compiler") for r in group.rollouts]
            await dispatcher.put(group.with_rollouts(members), owner=P)
        await asyncio.sleep(0)
    assert [group.task for group in (await taking).groups] == ["math", "math"]
    ended = next(line for line in dispatcher.describe() if line.startswith("task code"))
    assert "3 groups in a row were failed or filtered; the last: no compiler" in ended


async def test_rewards_that_are_equal_for_ever_end_the_run_with_a_clear_message(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store, useless_in_row_max=4)
    taking = asyncio.create_task(dispatcher.take(1, owner=L))
    for _ in range(2):
        for work in await _draw(dispatcher):
            await dispatcher.put(_made(traces, work, Status.FILTERED), owner=P)
    with pytest.raises(EndOfData, match="all rewards of the group were equal"):
        await asyncio.wait_for(taking, 1)


@pytest.mark.parametrize("alone", [True, False])
async def test_L25_a_resumed_desk_takes_the_names_of_no_session_that_lives(
    store: Store, traces: TraceStore, alone: bool
) -> None:
    """In an arena of its own the prompts under way are sampled again as they were."""
    dispatcher = _dispatcher(store)
    first = await _draw(dispatcher)
    if not alone:
        traces.open("r-math-0-0-0", owner=P)
    frozen = dispatcher.freeze()
    frozen.thaw()
    resumed = _dispatcher(store)
    resumed.restore(frozen.state)
    again = await _draw(resumed)
    assert [w.uid for w in again] == [w.uid for w in first]
    assert [w.attempt for w in again] == ([0, 0] if alone else [1, 1])
    store.sessions.release_owned(P)


async def test_L12_the_prompts_of_a_dead_producer_go_out_again_and_its_sessions_are_gone(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store)
    first = await _draw(dispatcher)
    traces.open("half-done", owner=P)
    assert dispatcher.owner_died(P) == 2
    assert store.sessions.list() == []
    again = await _draw(dispatcher)
    assert [w.prompt.uid for w in again] == [w.prompt.uid for w in first]
    assert [w.attempt for w in again] == [1, 1]
    dispatcher.check_books()


@pytest.mark.parametrize("is_lent", [False, True])
async def test_L12_a_task_has_not_ended_while_what_a_dead_producer_had_of_it_is_to_be_drawn_again(
    store: Store, traces: TraceStore, is_lent: bool
) -> None:
    """The last prompts of a finite source; who waits for their batch goes on waiting."""
    dispatcher = _dispatcher(store, sources={"math": Questions(size=2)}, epochs=1)
    for work in await _draw(dispatcher):
        if is_lent:
            await dispatcher.put(_made(traces, work, Status.ABORTED), owner=P)
    if is_lent:
        assert len(await _draw(dispatcher)) == 2
    taking = asyncio.create_task(dispatcher.take(1, owner=L))
    await asyncio.sleep(0)
    dispatcher.owner_died(P)
    assert dispatcher.ended_tasks() == {}
    await asyncio.sleep(0)
    for work in await _draw(dispatcher):
        await dispatcher.put(_made(traces, work), owner=P)
    assert len((await taking).groups) == 2


async def test_L12_a_draw_that_a_dead_producer_left_behind_gets_no_work(store: Store) -> None:
    dispatcher = _dispatcher(store)
    await _draw(dispatcher)
    left_behind = asyncio.create_task(dispatcher.draw(P))
    await asyncio.sleep(0)
    dispatcher.owner_died(P)
    with pytest.raises(PartFailed, match="died while it waited"):
        await left_behind
    assert len(await _draw(dispatcher)) == 2  # the successor, under the same name


async def test_L12_a_draw_that_had_been_woken_when_its_producer_gave_back_gets_no_work(
    store: Store, traces: TraceStore
) -> None:
    """Simulation seed 10284: sessions of a producer that had stopped were left at the end."""
    dispatcher = _dispatcher(store, batch_groups=1)
    (work,) = await _draw(dispatcher)
    left_behind = asyncio.create_task(dispatcher.draw(P))
    await asyncio.sleep(0)
    await dispatcher.put(_made(traces, work, Status.ABORTED), owner=P)  # it could go on now
    await dispatcher.give_back(P)
    with pytest.raises(PartFailed, match="died while it waited"):
        await left_behind
    assert store.sessions.list(P) == []
    assert len(await _draw(dispatcher)) == 1


async def test_L12_what_was_drawn_before_a_source_failed_is_handed_out_and_the_error_comes_next(
    store: Store, traces: TraceStore
) -> None:
    class Damaged(Questions):
        def prompt(self, index: int) -> Prompt:
            if index == 1:
                raise ValueError("line 2 is damaged")
            return super().prompt(index)

    dispatcher = _dispatcher(store, sources={"math": Damaged()})
    (work,) = await _draw(dispatcher)
    for _ in range(2):
        with pytest.raises(ValueError, match="line 2 is damaged"):
            await _draw(dispatcher)
    await dispatcher.put(_made(traces, work), owner=P)
    assert "in production 0" in "".join(dispatcher.describe())


async def test_L12_a_lent_group_dies_with_its_producer_and_its_prompt_goes_out_again(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store, batch_groups=1)
    (work,) = await _draw(dispatcher)
    await dispatcher.put(_made(traces, work, Status.ABORTED), owner=P)
    (lent,) = await _draw(dispatcher)
    assert lent.group is not None
    dispatcher.owner_died(P)
    dispatcher.check_books()
    assert dispatcher.report()["cancelled"] == 2
    (again,) = await _draw(dispatcher)
    assert (again.group, again.prompt.uid) == (None, work.prompt.uid)
    assert again.attempt == lent.attempt == 1


async def test_a_group_can_be_handed_in_only_by_who_drew_it_and_once(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store)
    works = await _draw(dispatcher)
    group = _made(traces, works[0])
    with pytest.raises(BadGroup, match="not in production with 'producer-9'"):
        await dispatcher.put(group, owner="producer-9")
    await dispatcher.put(group, owner=P)
    with pytest.raises(BadGroup, match="not in production"):
        await dispatcher.put(group, owner=P)
    dispatcher.check_books()


async def test_L21_a_cancelled_group_is_released_and_counted_once(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store)
    works = await _draw(dispatcher)
    group = _made(traces, works[0])
    assert await dispatcher.cancel(group, owner=P) == 2
    assert await dispatcher.cancel(group, owner=P) == 0
    assert store.sessions.list() == []
    assert dispatcher.report()["cancelled"] == dispatcher.report()["produced"] == 2
    dispatcher.check_books()


async def test_a_straggler_cannot_pin_its_mates_for_ever(store: Store, traces: TraceStore) -> None:
    dispatcher = _dispatcher(store, batch_groups=1, attempts_max=3)
    (work,) = await _draw(dispatcher)
    group = _made(traces, work)
    status = Status.ABORTED
    for attempt in range(3):
        straggler = group.rollouts[1].evolve(status=Status.ABORTED, attempt=attempt)
        status = await dispatcher.put(group.with_rollouts([group.rollouts[0], straggler]), owner=P)
        if attempt < 2:
            assert status is Status.ABORTED
            (lent,) = await _draw(dispatcher)
            assert lent.group is not None
    assert status is Status.FAILED
    assert store.sessions.list() == []
    dispatcher.check_books()


@pytest.mark.parametrize("size", [0, 2])
async def test_L19_expired_groups_are_retried_at_once_or_when_enough_have_gathered(
    store: Store, traces: TraceStore, size: int
) -> None:
    expiry = Expiry(max_staleness=0, tail_batch=size)
    dispatcher = _dispatcher(store, expiry=expiry, over_sampling=1.0)
    works = await _draw(dispatcher)
    assert len(works) == 4  # with over-sampling
    await dispatcher.put(_made(traces, works[0]), owner=P)
    await dispatcher.set_steps(train_step=2, model_step=1)
    assert dispatcher.buffer.count("math", Status.EXPIRED) == 1
    for work in works[1:]:
        await dispatcher.cancel(_made(traces, work), owner=P)
    (drawn,) = await _draw(dispatcher, 1)
    assert (drawn.group is not None) == (size == 0)
    if size:
        await dispatcher.put(_made(traces, drawn, model_step=0), owner=P)  # stale on arrival
        tail = await _draw(dispatcher)
        assert [w.group is not None for w in tail] == [
            True,
            True,
        ]  # and nothing but what is missing


async def test_L19_fewer_expired_groups_than_asked_are_retried_when_nothing_more_can_gather(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(
        store,
        sources={"math": Questions(size=1)},
        epochs=1,
        expiry=Expiry(max_staleness=0, tail_batch=5),
    )
    (work,) = await _draw(dispatcher)
    await dispatcher.put(_made(traces, work), owner=P)
    await dispatcher.set_steps(train_step=2, model_step=1)
    (again,) = await _draw(dispatcher)
    assert again.group is not None


async def test_L19_with_drop_expired_groups_are_never_retried(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store, expiry=Expiry(ExpiryAction.DROP, max_staleness=0))
    works = await _draw(dispatcher)
    await dispatcher.put(_made(traces, works[0]), owner=P)
    await dispatcher.set_steps(train_step=2, model_step=1)
    assert store.sessions.list() == []
    assert all(w.group is None for w in await _draw(dispatcher))
    dispatcher.check_books()


async def test_production_stops_at_the_byte_limit_and_goes_on_when_there_is_room(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store, m=None, batch_groups=1)
    (one,) = await _draw(dispatcher, 1)
    await dispatcher.put(_made(traces, one), owner=P)
    size = dispatcher.buffer.nbytes
    dispatcher.buffer.max_bytes = 3 * size
    works = await _draw(dispatcher)
    assert len(works) == 2
    assert await _would_wait(dispatcher)
    for work in works:
        await dispatcher.put(_made(traces, work), owner=P)
    assert dispatcher.buffer.nbytes <= 3 * size
    assert await _would_wait(dispatcher)
    await dispatcher.take(1, owner=L, timeout=1)
    assert len(await _draw(dispatcher)) == 1


async def test_a_taker_that_begins_to_wait_wakes_a_draw_that_the_byte_limit_held_back(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store, m=None, batch_groups=2, max_bytes=1)
    (one,) = await _draw(dispatcher, 1)
    await dispatcher.put(_made(traces, one), owner=P)
    drawing = asyncio.create_task(dispatcher.draw(P))
    await asyncio.sleep(0)
    assert not drawing.done()
    taking = asyncio.create_task(dispatcher.take(1, owner=L))
    (other,) = await asyncio.wait_for(drawing, 10)
    await dispatcher.put(_made(traces, other), owner=P)
    batch = await asyncio.wait_for(taking, 10)
    assert len(batch.groups) == 2
    traces.release(batch.session_ids, owner=L)


async def test_what_a_taker_lacks_is_produced_also_when_the_split_has_changed_since(
    store: Store, traces: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {task: Questions(task) for task in ("math", "code")}
    dispatcher = _dispatcher(store, sources=sources, batch_groups=2)
    monkeypatch.setattr(dispatcher._shares, "need", lambda step: {"code": 2})
    taking = asyncio.create_task(dispatcher.take(1, owner=L))
    await asyncio.sleep(0)
    for _ in range(3):
        for work in await asyncio.wait_for(dispatcher.draw(P, 1), 10):
            await dispatcher.put(_made(traces, work), owner=P)
    batch = await asyncio.wait_for(taking, 10)
    assert [group.task for group in batch.groups] == ["code", "code"]
    traces.release(batch.session_ids, owner=L)


async def test_a_dead_part_reaches_a_producer_that_waits_for_work(store: Store) -> None:
    dispatcher = _dispatcher(store)
    await _draw(dispatcher)
    drawing = asyncio.create_task(dispatcher.draw(P))
    await asyncio.sleep(0)
    await dispatcher.fail("engine", "exit code 139")
    with pytest.raises(PartFailed, match="engine failed: exit code 139"):
        await drawing


async def test_over_sampling_stops_when_the_batch_is_complete(
    store: Store, traces: TraceStore
) -> None:
    dispatcher = _dispatcher(store, over_sampling=1.0)
    works = await _draw(dispatcher)
    assert len(works) == 4
    for work in works[:2]:
        await dispatcher.put(_made(traces, work), owner=P)
    await dispatcher.cancel(_made(traces, works[2]), owner=P)
    assert await _would_wait(dispatcher)


def test_L23_a_budget_that_outruns_expiry_is_refused(store: Store) -> None:
    with pytest.raises(
        ConfigError, match="allows 3 train steps, but the buffer expires groups at 1"
    ):
        _dispatcher(store, m=2, expiry=Expiry(max_staleness=0))


def test_a_mix_of_other_tasks_than_the_sources_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"tasks \['code'\], the sources \['math'\]"):
        _dispatcher(store, weights={"code": 1})


def test_a_group_of_another_task_than_was_drawn_is_refused(store: Store) -> None:
    async def main() -> None:
        async with desk(store, run=False) as made:
            (work,) = await made.dispatcher.draw("producer-0", 1)
            made.traces.open("s", owner="producer-0")
            member = Rollout("s", status=Status.COMPLETED, reward=1.0)
            group = Group(work.uid, work.task, None, (member,))
            with pytest.raises(BadGroup, match="is of task 'code', but was drawn of 'math'"):
                await made.dispatcher.put(group.evolve(task="code"), owner="producer-0")
            assert store.sessions.owner("s") == "producer-0"
            assert await made.dispatcher.put(group, owner="producer-0") is Status.COMPLETED

    run_virtual(main())
