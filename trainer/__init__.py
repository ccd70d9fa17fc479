"""Asynchronous reinforcement learning of language models: rollouts, traces, replay, producer,
learner.

The lifecycle is a library of its own (no torch): `TraceStore`, `ReplayBuffer` and the records they
pass. Names are resolved on first use, so importing `trainer` costs nothing and a command that needs
no array library loads none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.expiry import Expiry
    from trainer.ledger import Ledger
    from trainer.replay import ReplayBuffer
    from trainer.rollout import Batch, FinishReason, Group, Prompt, Rollout, Status
    from trainer.segment import IGNORE_LABEL, Segment, Trace
    from trainer.trace import Match, TraceStore

__all__ = [
    "IGNORE_LABEL",
    "Batch",
    "Expiry",
    "FinishReason",
    "Group",
    "Ledger",
    "Match",
    "Prompt",
    "ReplayBuffer",
    "Rollout",
    "Segment",
    "Status",
    "Trace",
    "TraceStore",
]

_HOMES = {
    "Expiry": "expiry",
    "Ledger": "ledger",
    "ReplayBuffer": "replay",
    "IGNORE_LABEL": "segment",
    "Match": "trace",
    "Segment": "segment",
    "Trace": "segment",
    "TraceStore": "trace",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trainer.{_HOMES.get(name, 'rollout')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
