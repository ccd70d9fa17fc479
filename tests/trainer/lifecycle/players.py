"""What the processes of the scenarios do: a producer, a learner, an evaluator, each in a puppet.

Every function takes the puppet's state first; `join` makes it. `old=True` is the behaviour of the
system that this one replaces.
"""

from __future__ import annotations

import asyncio
from typing import Any

from shmstore import ObjectRef, Store
from shmstore.testing import Puppet
from trainer.rollout import Group, Status
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


def make_group(state: State, uid: str, status: Status = Status.COMPLETED) -> Group:
    """A whole group, in sessions of this process's owner."""
    return store_group(state["traces"], uid, owner=state["owner"], status=status)


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


def train(state: State, session_ids: list[str], old: bool) -> list[int]:
    """A learner's step: read every trace, then release. Old: release everything that there is
    (a).
    """
    traces, store = state["traces"], state["store"]
    lengths = [len(traces.export(session_id)) for session_id in session_ids]
    clear(state, session_ids, old)
    del store
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


def evaluate(state: State, old: bool) -> None:
    """An evaluation in this process. Old: at its end everything that there is gets released (c)."""
    from tests.trainer.lifecycle.kit import CountingJudge, OneTurn, Questions
    from trainer.engine.scripted import ByteTokenizer, Script, ScriptedEngine
    from trainer.evaluation import Evaluator
    from trainer.pending import ProducerConfig, ProducerParts

    parts = ProducerParts(
        ScriptedEngine(Script()), state["traces"], ByteTokenizer(), OneTurn(), CountingJudge()
    )
    prompts = [Questions().prompt(i) for i in range(3)]
    asyncio.run(Evaluator(parts, ProducerConfig(group_size=1), prompts).run())
    if old:
        clear(state, [], old=True)


def free_by_name(state: State, names: list[str]) -> int:
    """Free objects through wrappers made in this process."""
    freed: int = state["store"].free([ObjectRef.from_hex(name) for name in names])
    return freed
