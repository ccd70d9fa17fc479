"""Snapshots: whole or absent after a kill at every step, while everything goes on (L24, L25)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shmstore import BadName, SessionReleased, Store, headers
from shmstore.testing import temporary_store
from tests.trainer.lifecycle.kit import desk, filled_buffer
from tests.trainer.lifecycle.resumed import payload, resumed
from trainer import snapshot
from trainer.engine.protocol import WeightsVersion
from trainer.engine.scripted import Script
from trainer.errors import ConfigError, ReplayError, SnapshotError, SnapshotVersion
from trainer.expiry import Expiry
from trainer.replay import ReplayBuffer
from trainer.rollout import Group, Rollout, Status
from trainer.staleness import StalenessBudget
from trainer.testing import run_virtual, store_group
from trainer.trace import TraceStore

P, L = "producer-0", "learner"


async def test_L25_order_statuses_payloads_and_counters_come_back(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await filled_buffer(store, traces)
    await buffer.put(store_group(traces, "bad", status=Status.FAILED), owner=P)
    await buffer.snapshot(tmp_path / "s")
    before = [(entry.group, payload(traces, entry.group)) for entry in buffer._index]
    with temporary_store("16MiB") as other:
        again = await ReplayBuffer.resume(tmp_path / "s", other)
        assert again.accounts.to_json() == buffer.accounts.to_json()
        assert again.train_step == 4
        again.check_books()
        there = TraceStore(other)
        assert [(e.group, payload(there, e.group)) for e in again._index] == before
        taken = await again.take({"math": 3}, train_step=4, owner=L)
        assert [g.uid for g in taken.groups] == ["g1", "g3", "g0"]
        assert taken.report.total.failed_samples == 2  # not yet handed out before the snapshot
        there.release(taken.session_ids, owner=L)
        again.close()


async def test_L25_a_segment_shared_by_sessions_is_shared_again(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await filled_buffer(store, traces, n=1)
    await buffer.snapshot(tmp_path / "s")
    with temporary_store("16MiB") as other:
        again = await ReplayBuffer.resume(tmp_path / "s", other)
        assert other.stats().objects == store.stats().objects == 3
        again.close()


def _values() -> dict[str, Any]:
    """One of each kind that a session can hold, but for pickles."""
    torch = pytest.importorskip("torch")
    return {
        "array": np.arange(12, dtype=np.float32).reshape(3, 4),
        "by columns": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        "scalar": np.array(3.5),
        "empty": np.empty((0, 2), np.uint8),
        "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "bytes": b"bytes",
        "bytearray": bytearray(b"array"),
        "tensor": torch.arange(4.0).reshape(2, 2),
        "bf16": torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
        "table": pa.table({"x": [1, None, 3], "y": ["a", "b", None]}),
        "batch": pa.record_batch({"x": pa.array(["p", "q", "p"]).dictionary_encode()}),
        "other words": pa.record_batch({"x": pa.array(["q"]).dictionary_encode()}),
    }


async def test_L25_whatever_a_session_holds_comes_back_to_the_byte(
    store: Store, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(store)
    store.sessions.open("s", owner=P)
    for value in _values().values():
        store.put(value, session="s")
    await buffer.put(Group(rollouts=[Rollout("s", status=Status.COMPLETED)]), task="t", owner=P)
    await buffer.snapshot(tmp_path / "s")
    before = [bytes(memoryview(store.pin(e.ref))) for e in store.sessions.objects("s")]
    with temporary_store("16MiB") as other:
        again = await ReplayBuffer.resume(tmp_path / "s", other)
        refs = [entry.ref for entry in other.sessions.objects("s")]
        after = [bytes(memoryview(other.pin(ref))) for ref in refs]
        assert dict(zip(_values(), after, strict=True)) == dict(zip(_values(), before, strict=True))
        for ref, (name, value) in zip(refs, _values().items(), strict=True):
            assert type(other.get(ref)) is type(value), name
        again.close()


async def test_L25_there_is_no_pickle_in_a_snapshot(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await filled_buffer(store, traces)
    await buffer.snapshot(tmp_path / "s")
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".arrow"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert path.read_bytes()[:6] == b"ARROW1"
    store.put(object, session="g0-0")  # a class: only pickle could keep it
    with pytest.raises(SnapshotError, match="'g0-0' holds a pickled value at position 2"):
        await buffer.snapshot(tmp_path / "t")
    assert not (tmp_path / "t").exists(), "it is refused before anything is written"
    assert store.sessions.list("snapshot") == []


async def test_L25_a_pickle_that_was_smuggled_into_a_snapshot_is_not_loaded(
    store: Store, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(store)
    store.sessions.open("s", owner=P)
    store.put(b"\x80\x04N.", session="s")
    await buffer.put(Group(rollouts=[Rollout("s", status=Status.COMPLETED)]), task="t", owner=P)
    await buffer.snapshot(tmp_path)
    (payload,) = tmp_path.rglob("payload-*.arrow")
    header = headers.pack(headers.Kind.BYTES, 0)
    raw = payload.read_bytes()
    assert header in raw
    payload.write_bytes(raw.replace(header, headers.pack(headers.Kind.PICKLE, 0)))
    _reseal(tmp_path)
    with temporary_store("16MiB") as other:
        with pytest.raises(SnapshotError, match="holds a pickle, and those are never read"):
            await ReplayBuffer.resume(tmp_path, other)
        assert other.stats().objects == 0


async def test_L25_a_format_of_another_version_is_refused_with_both_named(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await filled_buffer(store, traces, n=1)
    await buffer.snapshot(tmp_path)
    marker = tmp_path / "snapshot.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 99}))
    with pytest.raises(SnapshotVersion, match="has format 99; this version reads format 2"):
        await resumed(tmp_path)
    marker.write_text("{")
    with pytest.raises(SnapshotError, match="is not the JSON of a snapshot"):
        await resumed(tmp_path)
    with pytest.raises(SnapshotError, match="holds no snapshot"):
        await resumed(tmp_path / "nowhere")


def _reseal(folder: Path) -> None:
    """Make the checksums those of the files as they are now: whole files that do not fit."""
    marker = folder / "snapshot.json"
    content = json.loads(marker.read_text())
    for name in content["files"]:
        raw = (folder / content["data"] / name).read_bytes()
        content["files"][name] = {
            "nbytes": len(raw),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
    marker.write_text(json.dumps(content))


async def _refused(folder: Path, said: str | None = None) -> None:
    """Resuming is a `SnapshotError`, and leaves nothing in the arena."""
    with temporary_store("16MiB") as other:
        with pytest.raises(SnapshotError, match=said):
            await ReplayBuffer.resume(folder, other)
        assert (other.sessions.list(), other.stats().objects) == ([], 0)


FILES = ["state.json", "sessions.json", "groups.json", "payload-0.arrow", "snapshot.json"]


@pytest.mark.parametrize("name", FILES)
async def test_L25_a_file_with_one_changed_byte_is_refused_by_name(
    store: Store, traces: TraceStore, tmp_path: Path, name: str
) -> None:
    buffer = await filled_buffer(store, traces)
    await buffer.snapshot(tmp_path)
    (path,) = tmp_path.rglob(name)
    good = path.read_bytes()
    said = name if name != "snapshot.json" else None  # there any file may be named, or none
    for place in range(0, len(good), max(1, len(good) // 40)):
        flipped = bytes([good[place] ^ 0x11])
        if flipped.isspace() and good[place : place + 1].isspace():
            continue
        path.write_bytes(good[:place] + flipped + good[place + 1 :])
        await _refused(tmp_path, said)
    if name != "snapshot.json":
        for cut in (good[: len(good) // 2], b"", good + b" "):
            path.write_bytes(cut)
            await _refused(tmp_path, f"{name} is not what was written")
        path.unlink()
        await _refused(tmp_path, f"{name} cannot be read")


@pytest.mark.parametrize("name", ["state.json", "sessions.json", "groups.json"])
@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"a": 1}', "[1]", "{", "renamed"])
async def test_L25_whole_files_that_do_not_fit_together_are_refused(
    store: Store, traces: TraceStore, tmp_path: Path, name: str, content: str
) -> None:
    buffer = await filled_buffer(store, traces)
    await buffer.snapshot(tmp_path)
    (path,) = tmp_path.rglob(name)
    if content == "renamed":
        content = path.read_text().replace("g1-0", "g1-9").replace("accounts", "accountants")
    if (name, content) == ("groups.json", "[]"):
        return  # a buffer without groups is a good one
    path.write_text(content)
    _reseal(tmp_path)
    await _refused(tmp_path)


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
    buffer = await filled_buffer(store, traces)
    before = [(entry.group, payload(traces, entry.group)) for entry in buffer._index]
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
    assert await resumed(tmp_path / "s") == before
    assert store.sessions.list("snapshot") == []
    assert sorted(store.sessions.list()) == ["g2-0", "g2-1", "later-0", "later-1"]


async def test_a_snapshot_that_is_cancelled_ends_before_anyone_removes_its_folder(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    """A thread cannot be cancelled: it must not write to a folder that is given up."""
    buffer = await filled_buffer(store, traces)
    reached, go_on = asyncio.Event(), threading.Event()
    loop, steps = asyncio.get_running_loop(), []

    def hook(step: str) -> None:
        steps.append(step)
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(30)

    writing = asyncio.create_task(snapshot.write(buffer.freeze(), tmp_path / "s", hook))
    await reached.wait()
    writing.cancel()
    await asyncio.sleep(0)
    assert not writing.done()
    assert store.sessions.list("snapshot") != []
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert len(await resumed(tmp_path / "s")) == 4
    assert store.sessions.list("snapshot") == []


async def test_nothing_stays_pinned_when_a_session_is_gone(
    store: Store, traces: TraceStore
) -> None:
    groups = [store_group(traces, "a"), store_group(traces, "b")]
    store.sessions.release(groups[1].session_ids, owner="*")
    with pytest.raises(SessionReleased):
        snapshot.freeze(store, groups, {})
    assert store.sessions.list("snapshot") == []


def _arena_objects(store: Store) -> int:
    return store.stats().objects


async def test_L24_freezing_copies_nothing(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await filled_buffer(store, traces)
    used, objects = store.stats().used, _arena_objects(store)
    frozen = buffer.freeze()
    assert (store.stats().used, _arena_objects(store)) == (used, objects)
    frozen.thaw()
    assert store.sessions.list("snapshot") == []


async def test_a_group_taken_but_not_trained_is_part_of_the_snapshot(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await filled_buffer(store, traces)
    batch = await buffer.take({"math": 2}, train_step=4, owner=L)
    await buffer.snapshot(tmp_path)
    uids = [group.uid for group, _ in await resumed(tmp_path)]
    assert uids == ["g0", "g1", "g2", "g3"]
    traces.release(batch.session_ids, owner=L)


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


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"order": "bad"}, ConfigError, "replay order 'bad' is unknown"),
        ({"max_bytes": -1}, ReplayError, "max_bytes must be positive, not -1"),
        ({"expiry": 5}, ConfigError, "expiry action 5 is unknown"),
        ({"owner": ""}, BadName, "an owner must be 1 to 63 bytes"),
        ({"colour": 1}, ReplayError, "resume takes order, max_bytes and expiry"),
    ],
)
async def test_a_mistake_at_a_resume_is_told_as_ones_own_and_leaves_nothing(
    store: Store, traces: TraceStore, tmp_path: Path, options: Any, error: Any, said: str
) -> None:
    buffer = await filled_buffer(store, traces)
    await buffer.snapshot(tmp_path)
    buffer.close()
    with pytest.raises(error, match=said):
        await ReplayBuffer.resume(tmp_path, store, **options)
    assert store.sessions.list() == []


async def test_a_resume_that_is_cancelled_leaves_no_session(
    store: Store, traces: TraceStore, tmp_path: Path
) -> None:
    buffer = await filled_buffer(store, traces)
    await buffer.snapshot(tmp_path)
    buffer.close()
    resuming = asyncio.create_task(ReplayBuffer.resume(tmp_path, store))
    await asyncio.sleep(0)
    resuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resuming
    assert store.sessions.list() == []
    assert len(await ReplayBuffer.resume(tmp_path, store)) == 4
