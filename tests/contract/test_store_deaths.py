"""Killed processes and fork children: what falls to whom, and who is unharmed."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from shmstore import ObjectFreed, ObjectRef, Store, StoreError
from tests.contract.support import MIB, in_child


def _die_as(far: Connection, name: str, owner: str, heir: str | None) -> None:
    store = Store.attach(name)
    store.sessions.bind(owner, heir=heir)
    store.sessions.open(f"{owner}-1", owner=owner)
    store.put(b"left behind", session=f"{owner}-1")
    loose = store.put(np.zeros(MIB, dtype=np.uint8))
    far.send(loose.hex())
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("heir", ["replay", None])
def test_sessions_of_the_dead_fall_to_the_heir_or_are_released(
    store: Store, name: str, heir: str | None
) -> None:
    loose = ObjectRef.from_hex(in_child(_die_as, name, "learner", heir))
    store.sweep()
    if heir:
        assert store.sessions.owner("learner-1") == heir
        assert store.get(store.sessions.objects("learner-1")[0].ref) == b"left behind"
    else:
        assert "learner-1" not in store.sessions
        assert store.stats().objects == 0
    with pytest.raises(ObjectFreed):
        store.get(loose)
    assert store.check() == []


def _fork_child(store: Store, ref: ObjectRef, view: Any) -> int:
    """In a fork child: 0 when all is as promised."""
    if view.tolist() != [0, 1, 2]:
        return 1
    for use in (lambda: store.get(ref), lambda: store.put(b"x"), store.stats):
        try:
            use()
        except StoreError:
            continue
        return 2
    with Store.attach(store.name) as own:
        if own.get(ref).tolist() != [0, 1, 2]:
            return 3
    del view
    store.close()
    return 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_child_attaches_anew_and_the_parent_is_unharmed(store: Store) -> None:
    ref = store.put(np.arange(3))
    view = store.get(ref)
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = _fork_child(store, ref, view)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert view.tolist() == [0, 1, 2]
    assert store.get(ref).tolist() == [0, 1, 2]
    store.sweep()
    assert store.check() == []
