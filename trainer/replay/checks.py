"""What the replay buffer refuses before anything has changed: groups, needs and limits that cannot
be meant (lifecycle L09, L25).

A group that is filed will be in a snapshot, so what JSON would not keep is refused here, by name,
while its producer still has it, and not when the checkpoint is due. Pure; called by
`trainer.replay`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from shmstore import BadValue
from shmstore.usage import parse_size
from trainer.errors import BadGroup, ReplayError
from trainer.json_values import json_problem
from trainer.prompts import prompt_problem
from trainer.rollout import Group, Prompt, Rollout, Status

__all__ = ["check_max_bytes", "check_need", "checked_group"]

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Rollout)


def checked_group(group: Group, task: str | None) -> Group:
    """The group as it is filed: of `task` if that is given, with plain numbers; `BadGroup` when it
    cannot be.
    """
    if not isinstance(group, Group):
        raise BadGroup(f"put takes a Group, not {group!r}")
    if not isinstance(group.uid, str) or not isinstance(task or group.task, str):
        raise BadGroup(f"uid and task are text, not {group.uid!r} and {task or group.task!r}")
    if group.prompt is not None and not isinstance(group.prompt, Prompt):
        raise BadGroup(f"the prompt of group {group.uid!r} is a Prompt, not {group.prompt!r}")
    if task is not None and task != group.task:
        group = group.evolve(task=task)
    if not group.task:
        raise BadGroup(f"group {group.uid!r} is of no task; say which with task=")
    unfinished = [r.uid for r in group.rollouts if r.status is Status.INIT]
    if unfinished:
        raise BadGroup(f"rollouts {unfinished} of group {group.uid!r} are still INIT")
    problem = None if group.prompt is None else prompt_problem(group.prompt)
    if problem is not None:
        raise BadGroup(f"group {group.uid!r}: {problem}")
    members = tuple(_plain(rollout, group.uid) for rollout in group.rollouts)
    if all(new is old for new, old in zip(members, group.rollouts, strict=True)):
        return group
    return group.with_rollouts(members)


def _plain(rollout: Rollout, uid: str) -> Rollout:
    """As a snapshot would bring it back: numpy's numbers as Python's, lists as tuples. One that is
    so already comes back itself.
    """
    try:
        raw = _ENCODER.encode(rollout)
    except (TypeError, ValueError):
        values = {name: getattr(rollout, name) for name in Rollout.__struct_fields__}
        rollout = rollout.evolve(**{name: _as_python(value) for name, value in values.items()})
        try:
            raw = _ENCODER.encode(rollout)
        except (TypeError, ValueError) as error:
            raise BadGroup(f"group {uid!r}: rollout {rollout.uid!r}: {error}") from error
    reward = rollout.reward
    if reward is not None and (type(reward) not in (int, float) or not math.isfinite(reward)):
        raise BadGroup(
            f"group {uid!r}: the reward of rollout {rollout.uid!r} is {reward!r}; it must be a "
            "finite number, or None"
        )
    problem = json_problem(rollout.metrics, "metrics") if rollout.metrics else None
    if problem is not None:
        raise BadGroup(f"group {uid!r}: rollout {rollout.uid!r}: {problem}")
    try:
        kept = _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        raise BadGroup(f"group {uid!r}: rollout {rollout.uid!r}: {error}") from error
    return rollout if kept == rollout else kept


def _as_python(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_as_python(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _as_python(item) for key, item in value.items()}
    return value


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
