"""The learner's state in the arena, so that a learner that is killed goes on exactly where it was.

After each train step the learner copies weights, optimizer moments and counters into one object
of a session of its own and attaches a small JSON object last: that attachment is the commit.
Whoever finds a session with the JSON object finds a whole state, and knows that this train step
is done, although the learner died before it could say so; a session without it is the debris of a
death in the middle.

Owner of these sessions is `state`, which the driver is bound to, so they outlive the learner and
end with the run. Called by the learner's process (`keep`) and by the driver (`find`, `drop`). No
torch: arrays are numpy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shmstore import Store

__all__ = ["STATE_OWNER", "KeptState", "LearnerStates"]

STATE_OWNER = "state"
_PREFIX = "state-"
_ALIGN = 64
_KEPT = 2
"""Objects of a whole state: the arrays, then the record."""


@dataclass(frozen=True)
class KeptState:
    """A whole state. `arrays` are read-only views of the arena; `record` is what `keep` was
    given.
    """

    train_step: int
    arrays: Mapping[str, NDArray[Any]]
    record: Mapping[str, Any]


class LearnerStates:
    """The states of one run's learner in the arena; at most two at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def keep(
        self, train_step: int, arrays: Mapping[str, NDArray[Any]], record: Mapping[str, Any]
    ) -> None:
        """Copies the state of `train_step`, commits it, and lets go of the one before.

        A state of the same step is replaced. Raises StoreFull when two states do not fit.
        """
        session = self._session(train_step)
        sessions = self._store.sessions
        sessions.release([session], owner=STATE_OWNER)
        sessions.open(session, owner=STATE_OWNER)
        layout, size = _plan(arrays)
        with self._store.build((size,), np.uint8, session=session) as draft:
            for name, place in layout.items():
                target = draft.array[place["at"] : place["at"] + arrays[name].nbytes]
                target.view(arrays[name].dtype)[:] = arrays[name].reshape(-1)
        committed = {"train_step": train_step, "layout": layout, "record": dict(record)}
        self._store.put(json.dumps(committed).encode(), session=session)
        self.drop(before=train_step)

    def find(self) -> KeptState | None:
        """The newest whole state, or None."""
        for step in sorted(self._steps(), reverse=True):
            entries = self._store.sessions.objects(self._session(step))
            if len(entries) < _KEPT:
                continue
            committed = json.loads(bytes(self._store.get(entries[1].ref)))
            raw = self._store.get(entries[0].ref)
            arrays = {
                name: raw[place["at"] : place["at"] + place["nbytes"]]
                .view(np.dtype(place["dtype"]))
                .reshape(place["shape"])
                for name, place in committed["layout"].items()
            }
            return KeptState(step, arrays, committed["record"])
        return None

    def drop(self, *, before: int | None = None) -> list[str]:
        """Releases the states of steps below `before` (None: all)."""
        old = [self._session(s) for s in self._steps() if before is None or s < before]
        return self._store.sessions.release(old, owner=STATE_OWNER)

    def _steps(self) -> list[int]:
        mine = self._store.sessions.list(owner=STATE_OWNER)
        return [int(session.removeprefix(_PREFIX)) for session in mine]

    def _session(self, train_step: int) -> str:
        return f"{_PREFIX}{train_step}"


def _plan(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, dict[str, Any]], int]:
    layout: dict[str, dict[str, Any]] = {}
    at = 0
    for name, array in arrays.items():
        layout[name] = {
            "at": at,
            "nbytes": array.nbytes,
            "dtype": array.dtype.str,
            "shape": list(array.shape),
        }
        at += -(-array.nbytes // _ALIGN) * _ALIGN
    return layout, max(at, _ALIGN)
