"""Snapshots: whole or absent after a kill at every step, while everything goes on (L24, L25)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import Store
from shmstore.testing import Puppet, temporary_store
from tests.trainer.lifecycle.kit import desk
from trainer import snapshot
from trainer.engine.protocol import WeightsVersion
from trainer.engine.scripted import Script
from trainer.errors import SnapshotError, SnapshotVersion
from trainer.expiry import Expiry
from trainer.replay import ReplayBuffer
from trainer.rollout import Group, Rollout, Status
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual, store_group
from trainer.trace import TraceStore

P, L = "producer-0", "learner"


async def _filled(store: Store, traces: TraceStore, n: int = 4) -> ReplayBuffer:
    buffer = ReplayBuffer(store)
    for i in range(n):
        status = Status.ABORTED if i % 3 == 2 else Status.COMPLETED
        group = store_group(traces, f"g{i}", model_step=3 - i % 2, status=status)
        await buffer.put(group, owner=P, train_step=4)
    return buffer


def _payload(traces: TraceStore, group: Group) -> list[bytes]:
    """Every byte of every segment of a group."""
    found = []
    for session_id in group.session_ids:
        for node in range(traces.length(session_id)):
            segment = traces.segment(session_id, node)
            for name in ("token_ids", "labels", "logprobs", "model_steps", "routed_experts"):
                array = getattr(segment, name)
                found.append(b"" if array is None else array.tobytes())
            found.append(segment.text.encode())
    return found


async def _resumed(folder: Path, **options: Any) -> list[tuple[Group, list[bytes]]]:
    """Groups and payloads of a snapshot, read into a new arena."""
    with temporary_store("16MiB") as other:
        buffer = await ReplayBuffer.resume(folder, other, **options)
        traces = TraceStore(other)
        found = [(entry.group, _payload(traces, entry.group)) for entry in buffer._index]
        buffer.check_books()
        buffer.close()
    return found


async def test_L25_order_statuses_payloads_and_counters_come_back(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await _filled(store, traces)
    await buffer.put(store_group(traces, "bad", status=Status.FAILED), owner=P)
    await buffer.snapshot(tmp_path / "s")
    before = [(entry.group, _payload(traces, entry.group)) for entry in buffer._index]
    with temporary_store("16MiB") as other:
        again = await ReplayBuffer.resume(tmp_path / "s", other)
        assert again.accounts.to_json() == buffer.accounts.to_json()
        assert again.train_step == 4
        again.check_books()
        there = TraceStore(other)
        assert [(e.group, _payload(there, e.group)) for e in again._index] == before
        taken = await again.take({"math": 3}, train_step=4, owner=L)
        assert [g.uid for g in taken.groups] == ["g1", "g3", "g0"]
        assert taken.report.total.failed_samples == 2  # not yet handed out before the snapshot
        there.release(taken.session_ids, owner=L)
        again.close()


async def test_L25_a_segment_shared_by_sessions_is_shared_again(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await _filled(store, traces, n=1)
    await buffer.snapshot(tmp_path / "s")
    with temporary_store("16MiB") as other:
        again = await ReplayBuffer.resume(tmp_path / "s", other)
        assert other.stats().objects == store.stats().objects == 3
        again.close()


async def test_L25_other_payloads_than_segments_come_back_too(store: Store, tmp_path: Path) -> None:
    buffer = ReplayBuffer(store)
    store.sessions.open("s", owner=P)
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    store.put(array, session="s")
    store.put(b"bytes", session="s")
    await buffer.put(Group(rollouts=[Rollout("s", status=Status.COMPLETED)]), task="t", owner=P)
    await buffer.snapshot(tmp_path / "s")
    with temporary_store("16MiB") as other:
        again = await ReplayBuffer.resume(tmp_path / "s", other)
        first, second = (other.get(entry.ref) for entry in other.sessions.objects("s"))
        np.testing.assert_array_equal(first, array)
        assert bytes(second) == b"bytes"
        del first, second
        again.close()


async def test_L25_there_is_no_pickle_in_a_snapshot(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await _filled(store, traces)
    await buffer.snapshot(tmp_path / "s")
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".arrow"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert path.read_bytes()[:6] == b"ARROW1"
    store.put(object, session="g0-0")  # a class: only pickle could keep it
    with pytest.raises(SnapshotError, match="session 'g0-0' holds a type"):
        await buffer.snapshot(tmp_path / "t")
    assert not (tmp_path / "t" / "snapshot.json").exists()
    assert store.sessions.list("snapshot") == []


async def test_L25_a_format_of_another_version_is_refused_with_both_named(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await _filled(store, traces, n=1)
    await buffer.snapshot(tmp_path)
    marker = tmp_path / "snapshot.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 99}))
    with pytest.raises(SnapshotVersion, match="has format 99; this version reads format 1"):
        await _resumed(tmp_path)
    marker.write_text("{")
    with pytest.raises(SnapshotError, match="is not JSON"):
        await _resumed(tmp_path)
    with pytest.raises(SnapshotError, match="holds no snapshot"):
        await _resumed(tmp_path / "nowhere")


async def test_a_snapshot_that_cannot_be_read_whole_leaves_no_session_behind(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await _filled(store, traces)
    await buffer.snapshot(tmp_path)
    (payload, *_) = tmp_path.rglob("payload-*.arrow")
    payload.write_bytes(payload.read_bytes()[: payload.stat().st_size // 2])
    with temporary_store("16MiB") as other:
        with pytest.raises(SnapshotError, match="cannot be read"):
            await ReplayBuffer.resume(tmp_path, other)
        assert other.sessions.list() == []


@pytest.mark.parametrize("name", ["state.json", "sessions.json", "groups.json"])
@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"a": 1}', "[1]", "renamed"])
async def test_L25_a_damaged_file_is_refused_and_leaves_the_arena_as_it_was(
    store: Store, traces: TraceStore, tmp_path: Path, name: str, content: str
) -> None:
    buffer = await _filled(store, traces)
    await buffer.snapshot(tmp_path)
    (path,) = tmp_path.rglob(name)
    if content == "renamed":
        content = path.read_text().replace("g1-0", "g1-9").replace("accounts", "accountants")
    if (name, content) == ("groups.json", "[]"):
        return  # a buffer without groups is a good one
    path.write_text(content)
    with temporary_store("16MiB") as other:
        with pytest.raises(SnapshotError):
            await ReplayBuffer.resume(tmp_path, other)
        assert other.sessions.list() == []


async def test_L25_order_and_limits_come_back_unless_others_are_given(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(store, order="fifo", max_bytes=10**6, expiry=Expiry(max_staleness=9))
    for i in range(3):
        await buffer.put(store_group(traces, f"g{i}", model_step=5 - i), owner=P)
    await buffer.snapshot(tmp_path)
    with temporary_store("16MiB") as other:
        again = await ReplayBuffer.resume(tmp_path, other)
        assert (again.max_bytes, again.expiry) == (buffer.max_bytes, buffer.expiry)
        taken = await again.take({"math": 3}, train_step=5, owner=L)
        assert [group.uid for group in taken.groups] == ["g0", "g1", "g2"]
        other.sessions.release(taken.session_ids, owner=L)
        again.close()
    with temporary_store("16MiB") as other:
        again = await ReplayBuffer.resume(tmp_path, other, order="staleness", max_bytes=None)
        taken = await again.take({"math": 1}, train_step=5, owner=L)
        assert (again.max_bytes, taken.groups[0].uid) == (None, "g2")
        other.sessions.release(taken.session_ids, owner=L)
        again.close()


async def test_L24_the_snapshot_is_of_one_moment_while_learner_and_producer_go_on(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await _filled(store, traces)
    before = [(entry.group, _payload(traces, entry.group)) for entry in buffer._index]
    reached, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hook(step: str) -> None:
        if step == "make folder":  # in the writer's thread, before any payload was read
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)

    writing = asyncio.create_task(snapshot.write(buffer.freeze(), tmp_path / "s", hook))
    await reached.wait()
    batch = await buffer.take({"math": 3}, train_step=4, owner=L)
    traces.release(batch.session_ids, owner=L)  # the learner has trained all of it
    await buffer.put(store_group(traces, "later"), owner=P)
    go_on.set()
    await writing
    assert await _resumed(tmp_path / "s") == before
    assert store.sessions.list("snapshot") == []
    assert sorted(store.sessions.list()) == ["g2-0", "g2-1", "later-0", "later-1"]


def _arena_objects(store: Store) -> int:
    return store.stats().objects


async def test_L24_freezing_copies_nothing(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await _filled(store, traces)
    used, objects = store.stats().used, _arena_objects(store)
    frozen = buffer.freeze()
    assert (store.stats().used, _arena_objects(store)) == (used, objects)
    frozen.thaw()
    assert store.sessions.list("snapshot") == []


async def test_a_group_taken_but_not_trained_is_part_of_the_snapshot(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await _filled(store, traces)
    batch = await buffer.take({"math": 2}, train_step=4, owner=L)
    await buffer.snapshot(tmp_path)
    uids = [group.uid for group, _ in await _resumed(tmp_path)]
    assert uids == ["g0", "g1", "g2", "g3"]
    traces.release(batch.session_ids, owner=L)


def _all_steps(tmp_path: Path) -> list[str]:
    """The names of all steps of one write, in order."""

    async def main() -> list[str]:
        steps: list[str] = []
        with temporary_store("16MiB") as store:
            buffer = await _filled(store, TraceStore(store))
            await snapshot.write(buffer.freeze(), tmp_path / "probe", steps.append)
            buffer.close()
        return steps

    return asyncio.run(main())


def _write_and_die(state: dict[str, Any], folder: str, n_groups: int, die_at: int) -> None:
    """In a process of its own: fill a buffer and be killed at a step of writing it."""
    from tests.trainer.lifecycle import test_snapshot as here

    steps = 0

    def hook(_: str) -> None:
        nonlocal steps
        if steps == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    async def main() -> None:
        with here.temporary_store("16MiB") as store:
            buffer = await here._filled(store, here.TraceStore(store), n_groups)
            await here.snapshot.write(buffer.freeze(), here.Path(folder), hook)
            buffer.close()

    here.asyncio.run(main())


def _fork_and_write(state: dict[str, Any], folder: str, n_groups: int, die_at: int) -> int:
    """`_write_and_die` in a child of the puppet, which has opened no arena itself; -> how it
    ended.
    """
    from tests.trainer.lifecycle import test_snapshot as here

    child = here.os.fork()
    if child == 0:
        try:
            here._write_and_die({}, folder, n_groups, die_at)
        finally:
            here.os._exit(1)
    return here.os.waitstatus_to_exitcode(here.os.waitpid(child, 0)[1])


def test_L24_after_a_kill_at_any_step_the_old_snapshot_is_whole_or_the_new_one_is(
    tmp_path: Path,
) -> None:
    steps = _all_steps(tmp_path)
    assert steps[0] == "make folder"
    assert steps[-1] == "remove older"
    wanted = {1: ["g0"], 4: ["g0", "g1", "g2", "g3"]}
    seen = set()
    _write_and_die({}, str(tmp_path / "s"), 1, -1)
    with Puppet() as puppet:
        for die_at in range(len(steps)):
            _copy(tmp_path / "s", tmp_path / f"copy-{die_at}")
            ended = puppet.call(_fork_and_write, str(tmp_path / f"copy-{die_at}"), 4, die_at)
            assert ended == -signal.SIGKILL
    for die_at in range(len(steps)):
        folder = tmp_path / f"copy-{die_at}"
        found = asyncio.run(_resumed(folder))
        uids = [group.uid for group, _ in found]
        new = die_at > steps.index("replace marker")
        assert uids == wanted[4 if new else 1], steps[die_at]
        assert all(payload for _, payload in found)
        seen.add(new)
        _write_and_die({}, str(folder), 4, -1)  # the next writer clears away what is left
        assert len(list(folder.iterdir())) == 2
    assert seen == {False, True}
    _sweep_arenas()


def _copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def _sweep_arenas() -> None:
    """Arenas of killed puppets are debris; remove exactly those."""
    for name in Store.list():
        if name.startswith("test-"):
            pid = int(name.split("-")[1])
            if not Path(f"/proc/{pid}").exists():
                Store.unlink(name)


def test_L24_a_whole_desk_resumes_with_sampler_steps_and_books(
    store: Store, tmp_path: Path
) -> None:
    """Snapshot under a running producer, go on in a fresh arena: every prompt is trained once."""
    trained: list[str] = []
    budget = StalenessBudget(max_staleness=2)
    options: dict[str, Any] = {
        "script": Script(token_s=0.1, failure_rate=0.02),
        "dispatch": {"batch_groups": 2, "budget": budget},
    }

    async def first() -> dict[str, Any]:
        async with desk(store, **options) as made:
            for step in (1, 2):
                trained.extend(g.uid for g in (await made.train(step)).groups)
                await made.engine.load_weights(WeightsVersion(b"", step), "in_flight")
                await made.dispatcher.set_steps(model_step=step)
            writing = asyncio.create_task(made.dispatcher.snapshot(tmp_path))
            await asyncio.sleep(0)
            books = made.dispatcher.report()
            await made.train(3)  # is lost with the crash that follows
            await writing
        return books

    async def second(books: dict[str, Any]) -> None:
        with temporary_store("16MiB") as other:
            state = snapshot.read_state(tmp_path)
            async with desk(other, **options, run=False) as made:
                made.buffer.close()
                resumed = await ReplayBuffer.resume(tmp_path, other)
                made.dispatcher.buffer = made.buffer = resumed
                resumed.on_change(made.dispatcher._wake)
                made.dispatcher.restore(state)
                assert made.dispatcher.report() == books
                await made.engine.load_weights(WeightsVersion(b"", 2))
                running = asyncio.create_task(made.producer.run())
                for step in (3, 4, 5):
                    trained.extend(g.uid for g in (await made.train(step)).groups)
                    await made.engine.load_weights(WeightsVersion(b"", step), "in_flight")
                    await made.dispatcher.set_steps(model_step=step)
                made.dispatcher.check_books()
                await made.producer.stop(10)
                await running

    books = run_virtual(first())
    run_virtual(second(books))
    assert len(trained) == len(set(trained)) == 10
