"""The arena against a dictionary: random operations by real processes that are killed, stopped,
forked and attached anew, and after every step the arena says what the dictionary says.

The model knows which sessions exist and who owns them, which objects each holds, which process
holds which never-attached object, and which owner a process acts as, with what heir. Everything the
store promises follows from those.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shmstore import ObjectFreed, ObjectRef, SessionExists, SessionReleased, Store
from shmstore.testing import Puppet, unique_name

PROCESSES = 3
SESSIONS = [f"s-{i}" for i in range(5)]
OWNERS = ["producer", "replay", "learner"]
STEPS = 40
EXAMPLES = 8


@dataclass
class Thing:
    """One object of the model."""

    ref: ObjectRef  # a plain name
    key: int
    length: int
    holders: set[int] = field(default_factory=set)
    attached_ever: bool = False
    ended: bool = False


# -- what the puppets run
# ---------------------------------------------------------------------------


def join(state: Any, name: str) -> int:
    state.update(store=Store.attach(name), refs={}, views={})
    return int(state["store"].client_slot)


def put(state: Any, key: int, length: int, session: str | None) -> ObjectRef:
    ref = state["store"].put(np.full(length, key), session=session)
    if session is None:
        state["refs"][key] = ref
    return ObjectRef.from_bytes(bytes(ref))


def hold(state: Any, key: int, name: ObjectRef) -> bool:
    try:
        state["refs"][key] = state["store"].hold(name)
    except ObjectFreed:
        return False
    return True


def drop(state: Any, key: int) -> None:
    del state["refs"][key]


def look(state: Any, key: int, name: ObjectRef, keep: bool) -> Any:
    try:
        view = state["store"].get(name)
    except ObjectFreed:
        return None
    if keep:
        state["views"][key] = view
    return int(view.min()), int(view.max()), len(view)


def views_sound(state: Any) -> bool:
    return all(int(view.min()) == int(view.max()) == key for key, view in state["views"].items())


def free(state: Any, names: list[ObjectRef]) -> int:
    return int(state["store"].free(names))


def session_call(state: Any, method: str, *arguments: Any) -> Any:
    try:
        return getattr(state["store"].sessions, method)(*arguments)
    except (SessionExists, SessionReleased, ObjectFreed) as error:
        return type(error).__name__


def rejoin(state: Any, name: str) -> None:
    state["refs"].clear()
    state["store"].close()
    state["store"] = Store.attach(name)


def fork_and_die(state: Any, name: str) -> bool:
    """A child inherits everything, attaches anew, puts, and dies without a word."""
    child = os.fork()
    if child == 0:
        mine = Store.attach(name)
        kept = [mine.put(b"child" * 100) for _ in range(5)]
        os._exit(0 if mine.get(kept[0]) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class ArenaAgainstDictionary(RuleBasedStateMachine):
    """The machine; one arena an example, puppets shared by all examples of the test."""

    puppets: dict[int, Puppet]

    def __init__(self) -> None:
        super().__init__()
        self.store = Store.create(unique_name(), "16MiB", max_objects=1 << 12, max_sessions=64)
        self.things: list[Thing] = []
        self.sessions: dict[str, tuple[str, list[Thing]]] = {}
        self.joined: set[int] = set()
        self.stopped: set[int] = set()
        self.bound: dict[int, str] = {}
        self.heirs: dict[str, str | None] = {}
        self.key = 0

    def teardown(self) -> None:
        for number in self.stopped:
            self.puppets[number].resume()
        for number in self.joined:
            self.puppets[number].call(lambda state: (state["refs"].clear(), state["views"].clear()))
            self.puppets[number].call(lambda state: state["store"].close())
        self.store.sessions.release(self.store.sessions.list(), owner="*")
        self.things.clear()
        gc.collect()
        self.store.sweep()
        problems, stats = self.store.check(), self.store.stats()
        self.store.close()
        Store.unlink(self.store.name)
        assert problems == []
        assert (stats.objects, stats.used, stats.sessions, stats.clients) == (0, 0, 0, 1)

    # -- helpers
    # ---------------------------------------------------------------------------------------

    def process(self, wish: int) -> int | None:
        """A process that runs, joined; None when all are stopped."""
        awake = [n for n in range(PROCESSES) if n not in self.stopped]
        if not awake:
            return None
        number = awake[wish % len(awake)]
        if number not in self.joined:
            self.puppets[number].call(join, self.store.name)
            self.joined.add(number)
        return number

    def thing(self, wish: int) -> Thing | None:
        return self.things[wish % len(self.things)] if self.things else None

    def alive(self, thing: Thing) -> bool:
        if thing.ended:
            return False
        if thing.attached_ever:
            return any(thing in held for _, held in self.sessions.values())
        return bool(thing.holders)

    def settle(self) -> None:
        """Whatever nothing keeps has ended for good: a later hold or attach does not revive it."""
        for thing in self.things:
            if not self.alive(thing):
                thing.ended = True
                thing.holders.clear()

    wishes = st.integers(0, 1000)
    session_ids = st.sampled_from(SESSIONS)

    # -- rules
    # -------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.process(0)

    @rule(wish=wishes, length=st.integers(1, 20_000), session=st.none() | session_ids)
    def put(self, wish: int, length: int, session: str | None) -> None:
        if (number := self.process(wish)) is None:
            return
        if session is not None and session not in self.sessions:
            session = None
        self.key += 1
        ref = self.puppets[number].call(put, self.key, length, session)
        thing = Thing(ref, self.key, length)
        if session is None:
            thing.holders.add(number)
        else:
            thing.attached_ever = True
            self.sessions[session][1].append(thing)
        self.things.append(thing)

    @rule(wish=wishes, which=wishes)
    def hold(self, wish: int, which: int) -> None:
        number, thing = self.process(wish), self.thing(which)
        if number is None or thing is None:
            return
        assert self.puppets[number].call(hold, thing.key, thing.ref) == self.alive(thing)
        if self.alive(thing):
            thing.holders.add(number)

    @rule(wish=wishes, which=wishes)
    def drop(self, wish: int, which: int) -> None:
        number, thing = self.process(wish), self.thing(which)
        if number is None or thing is None or number not in thing.holders:
            return
        self.puppets[number].call(drop, thing.key)
        thing.holders.discard(number)

    @rule(wish=wishes, which=wishes, keep=st.booleans())
    def get(self, wish: int, which: int, keep: bool) -> None:
        number, thing = self.process(wish), self.thing(which)
        if number is None or thing is None:
            return
        seen = self.puppets[number].call(look, thing.key, thing.ref, keep)
        assert seen == ((thing.key, thing.key, thing.length) if self.alive(thing) else None)

    @rule(wish=wishes, which=st.lists(wishes, max_size=4))
    def free(self, wish: int, which: list[int]) -> None:
        if (number := self.process(wish)) is None or not self.things:
            return
        chosen = [self.things[w % len(self.things)] for w in which]
        ending = {t.key for t in chosen if self.alive(t) and not t.attached_ever}
        assert self.puppets[number].call(free, [t.ref for t in chosen]) == len(ending)
        for thing in chosen:
            thing.ended |= thing.key in ending

    @rule(wish=wishes, session=session_ids, owner=st.sampled_from(OWNERS))
    def open(self, wish: int, session: str, owner: str) -> None:
        if (number := self.process(wish)) is None:
            return
        answer = self.puppets[number].call(session_call, "open", session, owner)
        if session in self.sessions:
            assert answer == "SessionExists"
        else:
            assert answer is None
            self.sessions[session] = (owner, [])

    @rule(wish=wishes, which=wishes, session=session_ids)
    def attach(self, wish: int, which: int, session: str) -> None:
        number, thing = self.process(wish), self.thing(which)
        if number is None or thing is None:
            return
        answer = self.puppets[number].call(session_call, "attach", session, thing.ref)
        if session not in self.sessions:
            assert answer == "SessionReleased" or (answer == "ObjectFreed" and thing.ended)
        elif not self.alive(thing):
            assert answer == "ObjectFreed"
        else:
            assert answer == len(self.sessions[session][1])
            self.sessions[session][1].append(thing)
            thing.attached_ever = True

    @rule(wish=wishes, session=session_ids, keep=st.integers(0, 4))
    def truncate(self, wish: int, session: str, keep: int) -> None:
        if (number := self.process(wish)) is None:
            return
        answer = self.puppets[number].call(session_call, "truncate", session, keep)
        if session not in self.sessions:
            assert answer == "SessionReleased"
        else:
            held = self.sessions[session][1]
            assert answer == max(0, len(held) - keep)
            del held[keep:]

    @rule(
        wish=wishes,
        ids=st.lists(session_ids, max_size=6),
        src=st.sampled_from(OWNERS),
        dst=st.sampled_from(OWNERS),
    )
    def transfer(self, wish: int, ids: list[str], src: str, dst: str) -> None:
        if (number := self.process(wish)) is None:
            return
        moving = [i for i in dict.fromkeys(ids) if self.sessions.get(i, ("",))[0] == src]
        answer = self.puppets[number].call(session_call, "transfer", ids, src, dst, False)
        assert answer == moving
        for name in moving:
            self.sessions[name] = (dst, self.sessions[name][1])

    @rule(wish=wishes, ids=st.lists(session_ids, max_size=6), owner=st.sampled_from([*OWNERS, "*"]))
    def release(self, wish: int, ids: list[str], owner: str) -> None:
        if (number := self.process(wish)) is None:
            return
        ending = [
            i
            for i in dict.fromkeys(ids)
            if i in self.sessions and owner in ("*", self.sessions[i][0])
        ]
        assert self.puppets[number].call(session_call, "release", ids, owner) == ending
        for name in ending:
            del self.sessions[name]

    @rule(wish=wishes, owner=st.sampled_from(OWNERS), heir=st.none() | st.sampled_from(OWNERS))
    def bind(self, wish: int, owner: str, heir: str | None) -> None:
        number = self.process(wish)
        if number is None or number in self.bound or heir == owner:
            return
        self.puppets[number].call(session_call, "bind", owner, heir)
        self.bound[number] = owner
        self.heirs[owner] = heir

    @rule(wish=wishes)
    def kill(self, wish: int) -> None:
        number = wish % PROCESSES
        self.puppets[number].close()
        self.puppets[number] = Puppet()
        self.forget(number)
        self.store.sweep()

    @rule(wish=wishes)
    def attach_anew(self, wish: int) -> None:
        if (number := self.process(wish)) is None:
            return
        self.puppets[number].call(rejoin, self.store.name)
        self.let_go(number)

    @rule(wish=wishes)
    def fork(self, wish: int) -> None:
        if (number := self.process(wish)) is None:
            return
        assert self.puppets[number].call(fork_and_die, self.store.name)
        self.store.sweep()

    @precondition(lambda self: len(self.stopped) < PROCESSES - 1)
    @rule(wish=wishes)
    def stop(self, wish: int) -> None:
        if (number := self.process(wish)) is not None:
            self.puppets[number].pause()
            self.stopped.add(number)

    @precondition(lambda self: self.stopped)
    @rule()
    def go_on(self) -> None:
        number = self.stopped.pop()
        self.puppets[number].resume()
        assert self.puppets[number].call(views_sound)

    def forget(self, number: int) -> None:
        self.joined.discard(number)
        self.stopped.discard(number)
        self.let_go(number)

    def let_go(self, number: int) -> None:
        """The process has left: its holds drop, and its owner's sessions fall to the heir if it
        was the last that acted as that owner."""
        for thing in self.things:
            thing.holders.discard(number)
        owner = self.bound.pop(number, None)
        if owner is None or owner in self.bound.values():
            return
        heir = self.heirs.pop(owner)
        for session in [s for s, (holder, _) in self.sessions.items() if holder == owner]:
            if heir is None:
                del self.sessions[session]
            else:
                self.sessions[session] = (heir, self.sessions[session][1])

    # -- after every step
    # ----------------------------------------------------------------------------------

    @invariant()
    def the_arena_says_what_the_dictionary_says(self) -> None:
        self.settle()
        s = self.store.sessions
        assert sorted(s.list()) == sorted(self.sessions)
        for name, (owner, held) in self.sessions.items():
            assert s.owner(name) == owner
            assert [entry.ref for entry in s.objects(name)] == [thing.ref for thing in held]
        living = [thing for thing in self.things if not thing.ended]
        assert self.store.stats().objects == len(living)
        for thing in self.things:
            assert thing.ref.alive == (not thing.ended)
        assert self.store.check() == []
        for number in self.joined - self.stopped:
            assert self.puppets[number].call(views_sound)


def test_random_operations_of_mortal_processes_agree_with_a_dictionary() -> None:
    puppets = {number: Puppet() for number in range(PROCESSES)}
    ArenaAgainstDictionary.puppets = puppets
    try:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            ArenaAgainstDictionary,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                print_blob=True,
                phases=[Phase.reuse, Phase.generate],  # add Phase.shrink to debug: it takes minutes
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        for puppet in puppets.values():
            puppet.close()
