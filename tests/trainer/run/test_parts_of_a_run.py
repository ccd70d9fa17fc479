"""What holds a run together, piece by piece: deaths at bad moments, damaged files, broken pipes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import trainer.cli
from actors import ActorDied
from shmstore import Store
from tests.trainer.run.runs import ROOT, TINY
from trainer import snapshot
from trainer.checkpoint import Checkpoint, read_checkpoint
from trainer.config import load
from trainer.errors import ConfigError, EngineError, SnapshotError, SnapshotVersion
from trainer.fit import _Run
from trainer.replay import REPLAY_OWNER
from trainer.rollout import Group, Prompt, Rollout, Status
from trainer.run.desk import FailedRollouts
from trainer.run.display import QuietDisplay
from trainer.run.driver import Driver
from trainer.run.engine_actor import EngineUse
from trainer.run.learner_actor import (
    LEARNER_OWNER,
    LearnerReady,
    StepDone,
    rows_of,
    to_bytes,
)
from trainer.run.learner_link import LearnerLink, StateLost
from trainer.run.opening import open_dispatcher, open_sources
from trainer.run.producer_actor import ProducerActor, groups_at_once
from trainer.run.producer_link import ProducerLink
from trainer.run.step_metrics import StepTimes, speed_metrics
from trainer.run.summary import Summary
from trainer.run.wiring import PRODUCER_OWNER
from trainer.testing import store_group
from trainer.trace import TraceStore


class _Learner:
    """The handle of a learner that keeps no state in the arena and dies in its first step."""

    state = "ready"

    def __init__(self, store: Store, *, released: bool) -> None:
        self._store = store
        self._released = released
        self.batches: list[list[str]] = []

    @property
    def start(self) -> Any:
        async def start(*_: object) -> LearnerReady:
            return LearnerReady(0, 1, {}, "start")

        return SimpleNamespace(using=lambda **_: start)

    async def train(self, rows: bytes, train_step: int, publish: bool) -> bytes:
        ids = rows_of(rows).sessions
        self.batches.append(ids)
        if len(self.batches) == 1:
            if self._released:
                self._store.sessions.release(ids, owner=LEARNER_OWNER)
            else:  # as its heir gets them when it dies
                self._store.sessions.transfer(ids, src=LEARNER_OWNER, dst=REPLAY_OWNER)
            raise ActorDied("learner", "killed by signal 9")
        assert self._store.sessions.list(LEARNER_OWNER) == sorted(ids)
        return to_bytes(StepDone(train_step, {}, 0))


@pytest.mark.parametrize("released", [False, True])
async def test_L07_a_learner_without_a_state_that_dies_in_its_first_step(
    store: Store, released: bool
) -> None:
    """Before its batch was released the batch is trained again; after that, it is lost with it."""
    handle = _Learner(store, released=released)
    link = LearnerLink(cast(Any, handle), store, note=lambda _: None)
    await link.start(None)
    group = store_group(TraceStore(store), "a", owner=LEARNER_OWNER)
    if released:
        with pytest.raises(StateLost, match="it died when step 1 was done"):
            await link.train([group], 1)
    else:
        await link.train([group], 1)
    assert len(handle.batches) == (1 if released else 2)


class _Producer:
    """A producer's handle whose first start ends because an engine that it asked died."""

    state = "up"
    starts = 0

    @property
    def prepare(self) -> Any:
        return SimpleNamespace(using=lambda when_down: _nothing)

    @property
    def start(self) -> Any:
        return self

    def using(self, when_down: str) -> Any:
        async def start(*_: object) -> int:
            self.starts += 1
            if self.starts == 1:
                raise ActorDied("engine-0", "killed by SIGKILL", -9, "")
            return 2

        return start


async def _nothing(*_: object) -> None:
    return None


async def test_a_producer_whose_engine_died_while_it_was_started_is_started_once_more() -> None:
    handle = _Producer()
    link = ProducerLink(cast(Any, handle), {}, "producer-0", lambda text: None)
    link._weights = cast(Any, object())
    await link._start_again()
    assert (handle.starts, link._incarnation) == (2, 2)


async def test_a_mixture_that_holds_nothing_out_trains_without_evaluation() -> None:
    config = load(TINY, ["tasks[0].source.holdout=0"])
    assert config.eval.prompts > 0
    assert open_sources(config, held_out=True) == []
    driver = object.__new__(Driver)
    driver._config, driver._held_out, driver._evaluated_on = config, [], []
    driver._display = QuietDisplay()
    await driver._evaluate()  # asks no producer: there is none


async def test_engine_time_of_a_step_leaves_out_its_evaluation_and_not_what_was_before() -> None:
    """An evaluation began the count anew: the step in which it fell reported an idle engine."""

    def at(busy_s: float) -> dict[str, EngineUse]:
        return {"engine-0": EngineUse(int(busy_s * 100), busy_s, busy_s, busy_s, 0, 0, 0)}

    class Producer:
        busy_s = 13.0

        async def use(self) -> dict[str, EngineUse]:
            return at(self.busy_s)

        async def evaluate(self, *_: object) -> dict[str, float]:
            self.busy_s += 5.0
            return {"reward": 1.0, "rollouts": 1.0}

    driver = object.__new__(Driver)
    driver._config, driver._evaluated_on = load(TINY), [Prompt("p", "sort")]
    driver._parts, driver._display = cast(Any, SimpleNamespace(producer=Producer())), QuietDisplay()
    driver._moved, driver._summary = print, cast(Any, SimpleNamespace(evals=[]))
    for at_sync in ({}, at(12.0)):
        driver._use, driver._use_at_sync = at(10.0), at_sync
        await driver._evaluate()
        assert driver._use == at(15.0)
        assert driver._use_at_sync == (at(17.0) if at_sync else {})


async def test_cpu_time_counts_a_producer_and_its_engines_together_wherever_they_are() -> None:
    """With engines in processes of their own the producer's own time was in no metric."""
    producer = object.__new__(ProducerActor)
    producer._inline, producer._engines = None, {}
    before, after = await producer.use(), await producer.use()
    while after["producer"].process_cpu_s <= before["producer"].process_cpu_s + 1e-3:
        after = await producer.use()
    engine = EngineUse(10, 1.0, 1.0, 1.0, 0, 0, 0), EngineUse(20, 2.0, 2.0, 2.5, 0, 0, 0)
    times = StepTimes(2.0, 0.1, 0.1, 0.1, engines=1, overlap=False)
    found = speed_metrics(
        times,
        {"tokens_generated": 10.0, "tokens_trained": 10.0},
        [engine, (before["producer"], after["producer"])],
    )
    assert found["cpu/engine_arithmetic"] == 1.0
    assert found["cpu/producer"] > 0.5
    assert found["engine_busy"] == 0.5


def test_the_first_failed_rollout_is_told_at_once_and_the_rest_ever_more_rarely() -> None:
    told: list[str] = []
    failed = FailedRollouts(told.append)
    for n in range(60):
        members = [
            Rollout(f"{n}-a", status=Status.FAILED, error_msg=f"ValueError: {n}"),
            Rollout(f"{n}-b", status=Status.COMPLETED),
        ]
        failed.add(Group(f"g{n}", "math", None, tuple(members)))
    assert told == [
        "failed: a rollout of task math; the last: ValueError: 0",
        "failed: 10 rollouts so far of task math; the last: ValueError: 9",
    ]


async def test_a_producer_that_cannot_be_prepared_ends_the_learners_start() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def start(*_: object) -> LearnerReady:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async def prepare() -> None:
        await started.wait()
        raise EngineError("no engine")

    async def host(*_: object, **__: object) -> None: ...

    parts: Any = SimpleNamespace(
        runtime=SimpleNamespace(host=host),
        learner=SimpleNamespace(start=start),
        producer=SimpleNamespace(prepare=prepare),
    )
    run = object.__new__(_Run)
    run.checkpoint, run.display, run.stop = None, QuietDisplay(), asyncio.Event()
    with pytest.raises(EngineError, match="no engine"):
        await run._start(parts)
    assert ended.is_set()


async def test_L27_a_checkpoint_of_other_tasks_is_refused_and_leaves_no_session(
    store: Store, tmp_path: Path
) -> None:
    config = load(TINY)
    before = await open_dispatcher(config, store, None)
    group = store_group(TraceStore(store), "g", task=config.tasks[0].name)
    await before.buffer.put(group, owner=PRODUCER_OWNER)
    await snapshot.write(before.freeze(), tmp_path / "buffer")
    before.buffer.close()
    checkpoint = Checkpoint(1, tmp_path, tmp_path / "buffer", {})
    with pytest.raises(ConfigError, match="there is no source now"):
        await open_dispatcher(load(TINY, ["tasks[0].name=other"]), store, checkpoint)
    assert len(store.sessions) == 0


TOTALS = Summary("r").totals()
GOOD = {"format": 2, "train_step": 7, "totals": TOTALS}


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        json.dumps(GOOD)[:-9],
        "[]",
        json.dumps({**GOOD, "train_step": None}),
        json.dumps({**GOOD, "totals": {"steps": 7}}),
        json.dumps({**GOOD, "totals": {**TOTALS, "rewards": "0.5"}}),
        json.dumps({**GOOD, "totals": {**TOTALS, "wall_s": None}}),
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_names_the_file(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "driver.json").write_text(text)
    with pytest.raises(SnapshotError, match=r"driver\.json is damaged .*latest"):
        read_checkpoint(tmp_path)


def test_a_whole_checkpoint_is_read_and_one_of_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "driver.json").write_text(json.dumps(GOOD))
    assert read_checkpoint(tmp_path).train_step == 7
    (tmp_path / "driver.json").write_text(json.dumps({**GOOD, "format": 9}))
    with pytest.raises(SnapshotVersion, match="format 9; this version reads 2"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("(cli._tell('x' * 100_000), 3)[1]", 3),
        ("(cli._tell('x'), 3)[1]", 3),
        ("(print('x'), 3)[1]", 3),
        ("(print('x' * 100_000), 3)[1]", 0),
    ],
)
def test_a_reader_that_has_gone_does_not_change_how_a_command_ends(
    command: str, status: int
) -> None:
    """What the command came to when that is known: `print` may fail before."""
    code = f"import sys; from trainer import cli; sys.exit(cli._guarded(lambda: {command}, []))"
    read, write = os.pipe()
    os.close(read)
    try:
        child = subprocess.run(
            [sys.executable, "-E", "-c", code],  # whether it buffers is not the environment's
            cwd=ROOT,
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    finally:
        os.close(write)
    assert (child.returncode, child.stderr) == (status, b"")


def test_a_pipe_that_breaks_elsewhere_is_an_error_of_the_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def command() -> int:
        raise BrokenPipeError(32, "a tool has gone")

    assert trainer.cli._guarded(command, []) == 1
    assert "a tool has gone" in capfd.readouterr().err


def test_no_more_groups_are_in_production_than_the_engines_let_wait() -> None:
    at_rest = load(TINY, ("engine.max_batch=8", "engine.waiting_max=1000"))
    assert groups_at_once(at_rest, 4, engines=1) == 4 + 2, "a batch, and what the engine holds"
    assert groups_at_once(at_rest, 4, engines=3) == 6 + 6, "what the engines hold, twice"
    strict = load(TINY, ("engine.max_batch=8", "engine.waiting_max=24"))
    for members in (1, 3, 4, 16):
        for engines in (1, 2):
            asked = 2 * members * groups_at_once(strict, members, engines)  # and an evaluation
            assert asked <= (8 + 24) * engines
    assert groups_at_once(strict, 100, engines=1) == 1, "a group is asked for whatever happens"
