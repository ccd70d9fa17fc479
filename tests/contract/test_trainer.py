"""The lifecycle as a library, by behaviour: what a loop of somebody's own calls, and no model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmstore import NotOwner, SessionReleased, Store, StoreError
from tests import tree
from trainer import Group, ReplayBuffer, Rollout, Segment, Status, TraceStore
from trainer.errors import TraceMismatch

LAYERS, TOP_K = 4, 2
IGNORE = -100


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.create(f"contract-{uuid.uuid4().hex[:12]}", capacity="32MiB") as made:
        yield made
        for owner in list(made.stats().by_owner):
            made.sessions.release_owned(owner)
        assert made.stats().objects == 0
        assert made.check() == []
    Store.unlink(made.name)


@pytest.fixture
def traces(store: Store) -> TraceStore:
    return TraceStore(store)


def segment(text: str, step: int | None = None, routed: bool = True) -> Segment:
    """A token a letter; sampled at `step`, or read when it is None."""
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    n = len(ids)
    sampled = step is not None
    return Segment(
        token_ids=ids,
        labels=ids if sampled else np.full(n, IGNORE, dtype=np.int32),
        logprobs=np.full(n, -0.5 if sampled else 0.0, dtype=np.float32),
        model_steps=np.full(n, step if sampled else -1, dtype=np.int32),
        text=text,
        routed_experts=(
            np.broadcast_to(ids[:, None, None] % 7, (n, LAYERS, TOP_K)).astype(np.uint8)
            if routed
            else None
        ),
    )


def ids(text: str) -> list[int]:
    return list(text.encode())


# -- traces ---------------------------------------------------------------------------------------


def test_a_trace_is_exported_as_it_was_inserted(traces: TraceStore) -> None:
    traces.open("s-1", owner="producer-0")
    root = traces.insert("s-1", parent=None, segment=segment("2+3="))
    leaf = traces.insert("s-1", parent=root, segment=segment("5.", step=4))
    trace = traces.export("s-1", text="2+3=5.")
    assert trace.token_ids.tolist() == ids("2+3=5.")
    assert trace.labels.tolist() == [IGNORE] * 4 + ids("5.")
    assert trace.logprobs.tolist() == [0.0] * 4 + [-0.5] * 2
    assert trace.model_steps.tolist() == [-1] * 4 + [4] * 2
    assert trace.routed_experts.shape == (6, LAYERS, TOP_K)
    assert trace.routed_experts.dtype == np.uint8
    assert (trace.routed_experts[:, 0, 0] == np.array(ids("2+3=5.")) % 7).all()
    assert traces.leaves("s-1") == [leaf]
    for other in (traces.export("s-1", node=leaf), traces.export("s-1", token_ids=ids("2+3=5."))):
        assert other.token_ids.tolist() == trace.token_ids.tolist()


def test_the_tree_of_a_session_branches(traces: TraceStore) -> None:
    traces.open("s", owner="producer-0")
    root = traces.insert("s", parent=None, segment=segment("ask "))
    one = traces.insert("s", parent=root, segment=segment("yes", step=0))
    two = traces.insert("s", parent=root, segment=segment("no", step=1))
    assert traces.leaves("s") == [one, two]
    assert traces.export("s", text="ask no").model_steps.tolist() == [-1] * 4 + [1, 1]


def test_search_finds_the_longest_stored_prefix(traces: TraceStore) -> None:
    traces.open("s", owner="producer-0")
    root = traces.insert("s", parent=None, segment=segment("hello "))
    leaf = traces.insert("s", parent=root, segment=segment("world", step=0))
    whole = traces.search("s", text="hello world and more")
    assert (whole.length, list(whole.nodes)) == (11, [root, leaf])
    part = traces.search("s", text="hello woman")
    assert (part.length, list(part.nodes)) == (6, [root])
    assert traces.search("s", token_ids=ids("hello there")).length == 6
    assert traces.search("s", text="nothing").length == 0


def test_a_mismatch_says_where_it_diverges(traces: TraceStore) -> None:
    traces.open("s", owner="producer-0")
    traces.insert("s", parent=None, segment=segment("hello world"))
    with pytest.raises(TraceMismatch, match="6"):
        traces.export("s", text="hello there")


def test_turns_with_and_without_routed_experts_are_an_error_that_names_them(
    traces: TraceStore,
) -> None:
    traces.open("s", owner="producer-0")
    root = traces.insert("s", parent=None, segment=segment("ask "))
    traces.insert("s", parent=root, segment=segment("yes", step=0, routed=False))
    with pytest.raises(Exception, match="rout") as gap:
        traces.export("s", text="ask yes")
    assert type(gap.value).__module__.startswith("trainer")


def test_L03_release_answers_each_id_once(traces: TraceStore) -> None:
    for session in ("a", "b"):
        traces.open(session, owner="learner")
    assert traces.release(["b", "gone", "a", "b"], owner="learner") == ["b", "a"]


def test_a_late_insert_does_not_resurrect_a_session(traces: TraceStore, store: Store) -> None:
    traces.open("s", owner="producer-0")
    traces.release(["s"], owner="producer-0")
    with pytest.raises(SessionReleased):
        traces.insert("s", parent=None, segment=segment("late"))
    assert store.stats().objects == 0
    with pytest.raises(SessionReleased):
        traces.export("s", text="late")


# -- the buffer -----------------------------------------------------------------------------------


def make_group(
    traces: TraceStore, name: str, status: Status = Status.COMPLETED, step: int = 0
) -> Group:
    rollouts = []
    for k in range(2):
        session = f"{name}-{k}"
        traces.open(session, owner="producer-0")
        root = traces.insert(session, parent=None, segment=segment("ask "))
        leaf = traces.insert(session, parent=root, segment=segment("answer", step=step))
        rollouts.append(
            Rollout(
                session_id=session,
                status=status,
                reward=float(k),
                leaves=(leaf,),
                n_prompt_tokens=4,
                n_response_tokens=6,
                model_step_min=step,
                model_step_max=step,
            )
        )
    return Group(uid=name, task="math", rollouts=tuple(rollouts))


async def test_L06_taking_a_batch_moves_exactly_its_sessions(
    traces: TraceStore, store: Store
) -> None:
    buffer = ReplayBuffer(store, order="staleness")
    for i in range(3):
        group = make_group(traces, f"g{i}")
        status = await buffer.put(group, task="math", owner="producer-0", train_step=1)
        assert status is Status.COMPLETED
    assert buffer.count("math", Status.COMPLETED) == 3
    assert len(store.sessions.list(owner="replay")) == 6
    batch = await buffer.take({"math": 2}, train_step=1, owner="learner", timeout=60)
    assert len(batch.groups) == 2
    mine = [session for group in batch.groups for session in group.session_ids]
    assert sorted(store.sessions.list(owner="learner")) == sorted(mine)
    assert len(store.sessions.list(owner="replay")) == 2
    assert traces.release(mine, owner="learner") == mine
    assert buffer.count("math", Status.COMPLETED) == 1


@pytest.mark.parametrize("status", [Status.FAILED, Status.FILTERED])
async def test_L09_useless_groups_never_enter_and_are_released_at_once(
    traces: TraceStore, store: Store, status: Status
) -> None:
    buffer = ReplayBuffer(store)
    group = make_group(traces, "bad", status)
    assert await buffer.put(group, task="math", owner="producer-0", train_step=1) is status
    assert buffer.count("math", Status.COMPLETED) == 0
    assert len(store.sessions) == 0
    assert store.stats().objects == 0


async def test_a_put_of_somebody_elses_sessions_changes_nothing(
    traces: TraceStore, store: Store
) -> None:
    buffer = ReplayBuffer(store)
    group = make_group(traces, "g")
    with pytest.raises(NotOwner):
        await buffer.put(group, task="math", owner="producer-1", train_step=1)
    assert buffer.count("math", Status.COMPLETED) == 0
    assert len(store.sessions.list(owner="producer-0")) == 2


async def test_L14_a_taker_wakes_when_its_batch_is_complete(
    traces: TraceStore, store: Store
) -> None:
    buffer = ReplayBuffer(store)
    taking = asyncio.create_task(
        buffer.take({"math": 2}, train_step=1, owner="learner", timeout=60)
    )
    await buffer.put(make_group(traces, "g0"), task="math", owner="producer-0", train_step=1)
    assert not taking.done()
    await buffer.put(make_group(traces, "g1"), task="math", owner="producer-0", train_step=1)
    assert [group.uid for group in (await taking).groups] == ["g0", "g1"]


async def test_a_taker_that_waits_in_vain_gets_an_error_of_ours(store: Store) -> None:
    buffer = ReplayBuffer(store)
    with pytest.raises(Exception, match=r"math") as late:
        await buffer.take({"math": 1}, train_step=1, owner="learner", timeout=0.01)
    assert type(late.value).__module__.startswith("trainer")


async def test_L15_the_oldest_is_taken_first(traces: TraceStore, store: Store) -> None:
    for order, expected in (("staleness", ["old", "new"]), ("fifo", ["new", "old"])):
        buffer = ReplayBuffer(store, order=order)
        for name, step in (("new", 5), ("old", 3)):
            group = make_group(traces, name, step=step)
            await buffer.put(group, task="math", owner="producer-0", train_step=6)
        batch = await buffer.take({"math": 2}, train_step=6, owner="learner", timeout=60)
        assert [group.uid for group in batch.groups] == expected
        traces.release(batch.session_ids, owner="learner")


async def test_L25_a_snapshot_is_resumed_with_its_payloads(
    traces: TraceStore, store: Store, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(store)
    for name in ("g0", "g1"):
        await buffer.put(make_group(traces, name), task="math", owner="producer-0", train_step=1)
    await buffer.snapshot(tmp_path / "snap")
    store.sessions.release_owned("replay")
    assert not list(tmp_path.rglob("*.pkl"))
    elsewhere = f"contract-{uuid.uuid4().hex[:12]}"
    with Store.create(elsewhere, capacity="32MiB") as other:
        Store.unlink(elsewhere)
        resumed = await ReplayBuffer.resume(tmp_path / "snap", other)
        assert resumed.count("math", Status.COMPLETED) == 2
        batch = await resumed.take({"math": 2}, train_step=1, owner="learner", timeout=60)
        assert [group.uid for group in batch.groups] == ["g0", "g1"]
        trace = TraceStore(other).export("g1-0", text="ask answer")
        assert trace.token_ids.tolist() == ids("ask answer")
        assert trace.routed_experts is not None
        del trace
        TraceStore(other).release(batch.session_ids, owner="learner")
        assert other.stats().objects == 0


async def test_a_folder_that_is_no_snapshot_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises((StoreError, Exception)) as refused:
        await ReplayBuffer.resume(tmp_path / "nothing", store)
    assert type(refused.value).__module__.split(".")[0] in ("trainer", "shmstore")


# -- command line ---------------------------------------------------------------------------------


def shmrl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from trainer.cli import main; sys.exit(main())",
            *words,
        ],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_command_line_names_its_subcommands() -> None:
    shown = shmrl("--help")
    assert shown.returncode == 0
    for word in ("train", "resume", "eval", "top", "doctor", "store", "node", "bench"):
        assert word in shown.stdout


def test_a_wrong_command_line_is_refused_with_a_status() -> None:
    assert shmrl("no-such-command").returncode not in (0, 1)
    missing = shmrl("train", "no-such-file.yaml")
    assert missing.returncode != 0
    assert "no-such-file.yaml" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_mistakes_in_a_configuration_are_told_all_at_once(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    text = tree.source(tree.ROOT / "examples" / "quickstart.yaml")
    config.write_text(text + "\nno_such_key: 1\n")
    refused = shmrl("train", str(config), "--set", "learner.lr=-1", "--set", "bogus.key=2")
    assert refused.returncode != 0
    for mistake in ("no_such_key", "learner.lr", "bogus"):
        assert mistake in refused.stderr
    assert "Traceback" not in refused.stderr
