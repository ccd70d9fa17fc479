"""What the replay buffer refuses before anything has changed: groups, needs and limits that cannot
be meant (lifecycle L09, L25).

A group that is filed will be in a snapshot, so what JSON would not keep is refused here, by name,
while its producer still has it, and not when the checkpoint is due. Pure; called by
`trainer.replay`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

from shmstore import BadValue
from shmstore.usage import parse_size
from trainer.errors import BadGroup, ReplayError
from trainer.expiry import Expiry
from trainer.json_values import text_problem
from trainer.prompts import prompt_problem
from trainer.replay.index import Order
from trainer.rollout import Group, Status, as_carried

__all__ = [
    "check_max_bytes",
    "check_need",
    "check_resume",
    "check_step",
    "check_taker",
    "check_timeout",
    "checked_group",
]


def checked_group(group: Group, task: str | None, carried: bool = False) -> Group:
    """The group as it is filed: of `task` if that is given, with plain numbers; `BadGroup` when it
    cannot be. `carried`: it was drawn here and came in a message, and so has all but members that
    are known to have been run.
    """
    if carried:
        _check_finished(group)
        return group
    if not isinstance(group, Group):
        raise BadGroup(f"put takes a Group, not {group!r}")
    if not isinstance(task, str | None):
        raise BadGroup(f"put takes the name of a task, not {task!r:.100}")
    problem = (
        text_problem(group.uid, "its uid")
        or text_problem(task or group.task, "its task")
        or (prompt_problem(group.prompt) if group.prompt is not None else None)
    )
    if problem is not None:
        raise BadGroup(f"group {group.uid!r}: {problem}")
    if not (task or group.task):
        raise BadGroup(f"group {group.uid!r} is of no task; say which with task=")
    _check_finished(group)
    return group.evolve(task=task or group.task, rollouts=as_carried(group))


def _check_finished(group: Group) -> None:
    """`BadGroup` when a member has not been run."""
    unfinished = [r.uid for r in group.rollouts if r.status is Status.INIT]
    if unfinished:
        raise BadGroup(f"rollouts {unfinished} of group {group.uid!r} are still INIT")


def check_step(step: SupportsIndex) -> int:
    """A step as the snapshot keeps it; `ReplayError` unless it is a whole number."""
    try:
        return operator.index(step)
    except TypeError:
        raise ReplayError(f"the step is {step!r}; a whole number is needed") from None


def check_taker(owner: str, buffer: str) -> None:
    """`ReplayError` unless `owner` can be told from the buffer, which would offer again what it
    took.
    """
    if not isinstance(owner, str) or not owner or owner == buffer:
        raise ReplayError(
            f"groups go to an owner with a name of its own, not to {owner!r}; the buffer is "
            f"{buffer!r}"
        )


def check_timeout(timeout: float | None) -> None:
    """`ReplayError` unless it is a number of seconds, or None for no limit."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout >= 0):
        raise ReplayError(
            f"the timeout is {timeout!r}; it is a number of seconds from 0, or None for no limit"
        )


def check_need(need: Mapping[str, int]) -> dict[str, int]:
    """The tasks of which something is needed; `ReplayError` unless that is at least one group."""
    if not isinstance(need, Mapping):
        raise ReplayError(f"take needs a mapping of task to number of groups, not {need!r}")
    wrong = {
        task: count
        for task, count in need.items()
        if not isinstance(task, str) or type(count) is not int or count < 0
    }
    if wrong or not any(need.values()):
        raise ReplayError(
            f"take needs whole numbers of groups by task, at least one in all, not {dict(need)}"
        )
    return {task: count for task, count in need.items() if count}


def check_max_bytes(limit: int | str | None) -> int | None:
    """The limit in bytes, from a number or a text such as "4GiB"; None for no limit."""
    if limit is None:
        return None
    try:
        nbytes = parse_size(limit, "max_bytes")
    except BadValue as error:
        raise ReplayError(f"{error}; or None for no limit") from error
    if nbytes < 1:
        raise ReplayError(f"max_bytes is {limit!r}; it must be above 0, or None for no limit")
    return nbytes


def check_resume(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed buffer is to have in place of what the snapshot says."""
    unknown = options.keys() - _RESUMED.keys()
    if unknown:
        raise ReplayError(f"resume takes order, max_bytes and expiry, not {sorted(unknown)}")
    return {name: _RESUMED[name](value) for name, value in options.items()}


_RESUMED: Mapping[str, Callable[[Any], Any]] = {
    "order": Order.parse,
    "max_bytes": check_max_bytes,
    "expiry": Expiry.parse,
}
