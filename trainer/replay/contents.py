"""What the arena says about a group: whose its sessions are, what they hold (lifecycle L04, L09).

Reads only. Called by the replay buffer, on its loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmstore import NotOwner
from trainer.rollout import Group

if TYPE_CHECKING:
    from shmstore.sessions import Sessions
    from trainer.trace import TraceStore

__all__ = ["described", "refuse_foreign"]


def refuse_foreign(sessions: Sessions, group: Group, owner: str) -> None:
    """`NotOwner` when a live session of the group is not `owner`'s; those that are gone do not
    matter to a group that ends.
    """
    ids = group.session_ids
    holders = dict(zip(ids, sessions.owners(ids), strict=True))
    foreign = [sid for sid in ids if holders[sid] not in (owner, None)]
    if foreign:
        raise NotOwner(
            f"group {group.uid!r} of {owner!r} cannot end: {foreign[0]!r} is owned by "
            f"{holders[foreign[0]]!r}",
            tuple(foreign),
        )


def described(traces: TraceStore, sessions: Sessions, group: Group) -> Group:
    """With what its traces say where the producer left it out."""
    bare = [not (r.leaves or r.n_prompt_tokens) for r in group.rollouts]
    if not any(bare):
        return group
    return group.with_rollouts(
        [
            traces.describe(r) if lacks and r.session_id in sessions else r
            for r, lacks in zip(group.rollouts, bare, strict=True)
        ]
    )
