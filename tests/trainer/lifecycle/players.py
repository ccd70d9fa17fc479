"""What the processes of the scenarios do: a producer, a learner, an evaluator, a driver that has
the replay buffer, each in a puppet.

Every function takes the puppet's state first; `join` makes it. `old=True` is the behaviour of the
system that this one replaces.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from shmstore import ObjectRef, Store
from shmstore.testing import Puppet
from trainer.engine.scripted import ByteTokenizer, Script, ScriptedEngine
from trainer.expiry import Expiry
from trainer.pending import ProducerParts
from trainer.replay import ReplayBuffer
from trainer.rollout import Batch, Group, Status
from trainer.testing import make_segment, store_group
from trainer.trace import TraceStore

State = dict[str, Any]


class Player:
    """A puppet that has joined an arena. `do(function, ...)` runs a function of this file in it."""

    def __init__(self, store: Store, owner: str, heir: str | None = None) -> None:
        self.puppet = Puppet()
        self.puppet.call(_run, "join", (store.name, owner, heir))

    def do(self, name: str, *args: Any) -> Any:
        return self.puppet.call(_run, name, args)

    def begin(self, name: str, *args: Any) -> None:
        self.puppet.begin(_run, name, args)

    def result(self) -> Any:
        return self.puppet.result()

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.puppet.close()


def _run(state: State, name: str, args: tuple[Any, ...]) -> Any:
    from tests.trainer.lifecycle import players

    return getattr(players, name)(state, *args)


def join(state: State, arena: str, owner: str, heir: str | None) -> None:
    """Attach, and act as `owner` from now on."""
    state["store"] = store = Store.attach(arena)
    state["owner"] = owner
    state["traces"] = TraceStore(store)
    store.sessions.bind(owner, heir=heir)


# -- a producer -----------------------------------------------------------------------------------


def make_group(
    state: State, uid: str, status: Status = Status.COMPLETED, model_step: int = 0
) -> Group:
    """A whole group, in sessions of this process's owner."""
    return store_group(
        state["traces"], uid, owner=state["owner"], status=status, model_step=model_step
    )


def produce(state: State, uid: str, failure_rate: float) -> Group:
    """A group as it comes out of production, with an engine that fails so often."""
    from tests.trainer.lifecycle.kit import Questions
    from trainer.group_context import Gate
    from trainer.pending import PendingGroup, ProducerConfig
    from trainer.work import Work

    pending = PendingGroup(
        Work(uid, "math", Questions().prompt(0)),
        _parts(state, failure_rate),
        ProducerConfig(group_size=2),
        owner=state["owner"],
        run_name="r",
        gate=Gate(),
    )
    pending.open()
    return asyncio.run(pending.produce())


def open_and_insert(state: State, session_id: str) -> None:
    """Begin a session with its prompt."""
    state["traces"].open(session_id, state["owner"])
    state["traces"].insert(session_id, make_segment(4, model_step=None))


def insert(state: State, session_id: str) -> int:
    """One more turn."""
    node: int = state["traces"].insert(session_id, make_segment(6, model_step=1), parent=0)
    return node


def produce_many(state: State, n: int) -> int:
    """`n` sessions of three turns, one after the other; -> how many came to their end."""
    traces = state["traces"]
    for i in range(n):
        open_and_insert(state, f"many-{i}")
        for _ in range(3):
            insert(state, f"many-{i}")
        assert traces.length(f"many-{i}") == 4
    return n


def model_steps(state: State, session_id: str) -> set[int]:
    """Those of the tokens of a session's only path."""
    return set(state["traces"].export(session_id).model_steps.tolist())


# -- a learner ------------------------------------------------------------------------------------


def train(state: State, session_ids: list[str], old: bool) -> list[int]:
    """A learner's step: read every trace, then release. Old: release everything that there is
    (a).
    """
    lengths = [len(state["traces"].export(session_id)) for session_id in session_ids]
    clear(state, session_ids, old)
    return lengths


def clear(state: State, session_ids: list[str], old: bool) -> list[str]:
    """The learner's clean-up after its step."""
    store: Store = state["store"]
    if old:
        return store.sessions.release(store.sessions.list(), owner="*")
    return store.sessions.release(session_ids, owner=state["owner"])


def train_after_clearing(state: State, session_ids: list[str]) -> list[int]:
    """The old order (i): first free, then check the lengths."""
    clear(state, session_ids, old=False)
    return [len(state["traces"].export(session_id)) for session_id in session_ids]


# -- an evaluator ---------------------------------------------------------------------------------


def evaluate(state: State, old: bool) -> None:
    """An evaluation in this process. Old: at its end everything that there is gets released (c)."""
    from tests.trainer.lifecycle.kit import Questions
    from trainer.evaluation import Evaluator
    from trainer.pending import ProducerConfig

    prompts = [Questions().prompt(i) for i in range(3)]
    asyncio.run(Evaluator(_parts(state), ProducerConfig(group_size=1), prompts).run())
    if old:
        clear(state, [], old=True)


def _parts(state: State, failure_rate: float = 0.0) -> ProducerParts:
    from tests.trainer.lifecycle.kit import CountingJudge, OneTurn

    engine = ScriptedEngine(Script(failure_rate=failure_rate))
    return ProducerParts(engine, state["traces"], ByteTokenizer(), OneTurn(), CountingJudge())


# -- a driver -------------------------------------------------------------------------------------


def own_buffer(state: State, scenario: str = "", expiry: Expiry | None = None) -> None:
    """A new buffer, as the old system did it in `scenario`, that notes how it releases."""
    from tests.trainer.lifecycle.old_ways import BUFFERS

    store: Any = _WatchedStore(state["store"])
    state["buffer"] = store.sessions.buffer = BUFFERS[scenario](store, expiry=expiry)


def put(state: State, group: Group, train_step: int = 1) -> Status:
    """File a group of the producer's."""
    status: Status = asyncio.run(
        state["buffer"].put(group, owner="producer-0", train_step=train_step)
    )
    return status


def take(state: State, n: int, train_step: int, owner: str) -> Batch:
    """A batch for `owner`."""
    buffer: ReplayBuffer = state["buffer"]
    return asyncio.run(buffer.take({"math": n}, train_step=train_step, owner=owner, timeout=10))


def lend(state: State, status: Status, owner: str) -> Group | None:
    """The next group with which `owner` goes on."""
    buffer: ReplayBuffer = state["buffer"]
    return buffer.lend("math", status, owner=owner)


def refresh(state: State, train_step: int) -> list[bool]:
    """Expire; -> for each release that this took, whether the buffer's lock was held."""
    buffer: Any = state["buffer"]
    buffer._store.sessions.releases.clear()
    asyncio.run(buffer.refresh(train_step))
    found: list[bool] = buffer._store.sessions.releases
    return found


def put_and_take_cancelled(
    state: State, groups: list[Group], n: int, n_turns: int, owner: str
) -> tuple[list[str], list[str]]:
    """A take and puts, all cancelled after so many turns of the loop; -> sessions that are filed
    then, and sessions that are with `owner`, as the buffer sees it.
    """
    buffer: ReplayBuffer = state["buffer"]

    async def main() -> None:
        calls = [asyncio.create_task(buffer.take({"math": n}, train_step=1, owner=owner))]
        calls += [asyncio.create_task(buffer.put(g, owner="producer-0")) for g in groups]  # type: ignore[arg-type]
        for _ in range(n_turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    asyncio.run(main())
    filed = [sid for entry in buffer._index for sid in entry.group.session_ids]
    taken = [sid for entry in buffer._away.taken for sid in entry.group.session_ids]
    return filed, taken


def snapshot(state: State, folder: Path) -> None:
    """Write the buffer."""
    asyncio.run(state["buffer"].snapshot(folder))


def resume_buffer(state: State, folder: Path) -> int:
    """Own what a snapshot holds; -> completed groups in it."""
    buffer = asyncio.run(ReplayBuffer.resume(folder, state["store"]))
    state["buffer"] = buffer
    return buffer.count("math", Status.COMPLETED)


def owner_died(state: State, owner: str) -> tuple[int, list[Group]]:
    """Tell the buffer."""
    found: tuple[int, list[Group]] = state["buffer"].owner_died(owner)
    return found


def close_buffer(state: State) -> dict[str, int]:
    """Balance the books and close; -> what they say of the task."""
    buffer: ReplayBuffer = state["buffer"]
    buffer.check_books()
    books = dataclasses.asdict(buffer.accounts.ledger.task("math"))
    buffer.close()
    return books


class _Watched:
    """Sessions that note whether a release finds the buffer's lock taken."""

    def __init__(self, sessions: Any) -> None:
        self._sessions = sessions
        self.buffer: ReplayBuffer | None = None
        self.releases: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sessions, name)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def release(self, ids: Any, owner: str) -> Any:
        assert self.buffer is not None
        self.releases.append(self.buffer._lock.locked())
        return self._sessions.release(ids, owner=owner)


class _WatchedStore:
    """The store with watched sessions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sessions = _Watched(store.sessions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# -- anyone ---------------------------------------------------------------------------------------


def put_bytes(state: State, value: bytes) -> str:
    """An object that no session holds; -> its name. This process keeps it."""
    state["kept"] = state["store"].put(value)
    name: str = state["kept"].hex()
    return name


def free_by_name(state: State, names: list[str], old: bool = False) -> int:
    """Free objects through wrappers made in this process, one a name; -> how many ended. Old:
    wrappers are told apart by their Python identity, and an end is counted for each (f).
    """
    refs = [ObjectRef.from_hex(name) for name in names]
    freed: int = state["store"].free(refs)
    return len({id(ref) for ref in refs}) if old else freed
