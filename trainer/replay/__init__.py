"""The replay buffer (`buffer`), and what it is made of: who waits, what is away with whom, the
index by task and status, the accounts, what is refused at the door. No torch.

Exports the buffer with what goes in and comes out of it: groups of rollouts, and the traces whose
sessions it owns. `examples/custom_trainer.py` needs no more of the trainer.
"""

from trainer.expiry import Refreshed
from trainer.replay.buffer import REPLAY_OWNER, ReplayBuffer
from trainer.rollout import Batch, Group, Rollout, Status
from trainer.segment import IGNORE_LABEL, Segment, Trace
from trainer.trace import TraceStore

__all__ = [
    "IGNORE_LABEL",
    "REPLAY_OWNER",
    "Batch",
    "Group",
    "Refreshed",
    "ReplayBuffer",
    "Rollout",
    "Segment",
    "Status",
    "Trace",
    "TraceStore",
]
