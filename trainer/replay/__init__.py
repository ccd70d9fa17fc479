"""The replay buffer (`buffer`), and what it is made of: who waits, what is away with whom, the
index by task and status, the accounts, what is refused at the door. No torch.
"""

from trainer.replay.buffer import (
    REPLAY_OWNER,
    Refreshed,
    ReplayBuffer,
)

__all__ = [
    "REPLAY_OWNER",
    "Refreshed",
    "ReplayBuffer",
]
