"""Which prompts are handed out, to whom, and where a resumed run goes on (lifecycle L12, L25).

`PromptSampler` hands out prompts and knows which are still under way and with whom, so that the
prompts of a dead producer, and those that were under way when a run was killed, are handed out
again and none is skipped or doubled.

Lives in the driver, on its loop; no arena, no clock, no torch.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.errors import ConfigError
from trainer.json_values import json_problem, text_problem
from trainer.rollout import Prompt

__all__ = [
    "DrawnPrompt",
    "PromptSampler",
    "PromptSource",
    "SequenceSource",
    "prompt_problem",
]

#: Ids of sessions have 63 bytes, for `RUN-TASK-n-k-attempt`.
TASK_BYTES_MAX = 63 - len("r--0-0-0")


class PromptSource(Protocol):
    """The prompts of one task by number. Must be a pure function of the index."""

    @property
    def size(self) -> int | None:
        """How many there are; None for a procedural source without end."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The prompt with this number, from 0."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceSource:
    """A source over prompts that are already in memory."""

    prompts: tuple[Prompt, ...]

    @property
    def size(self) -> int | None:
        """Number of prompts."""
        return len(self.prompts)

    def prompt(self, index: int) -> Prompt:
        """The prompt with this number."""
        return self.prompts[index]


def prompt_problem(prompt: Prompt) -> str | None:
    """What of a prompt would not come back from a message or a snapshot as it is, with its path;
    None when all would.
    """
    if type(prompt) is not Prompt:
        return f"{prompt!r:.100} is a {type(prompt).__name__}; a Prompt itself is needed"
    return (
        text_problem(prompt.uid, "prompt.uid")
        or text_problem(prompt.task, "prompt.task")
        or (text_problem(prompt.text, "prompt.text") if prompt.text is not None else None)
        or (_token_ids_problem(prompt.token_ids) if prompt.token_ids is not None else None)
        or (_messages_problem(prompt.messages) if prompt.messages is not None else None)
        or json_problem(prompt.answer, "prompt.answer")
        or _dict_problem(prompt.metadata, "prompt.metadata")
    )


def _token_ids_problem(token_ids: Any) -> str | None:
    if type(token_ids) not in (tuple, list):
        kind = type(token_ids).__name__
        return f"prompt.token_ids is a {kind}; a tuple of whole numbers is needed (`tolist`)"
    if not token_ids or (
        set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < 1 << 31
    ):
        return None
    fits = (type(token) is int and 0 <= token < 1 << 31 for token in token_ids)
    place = next(i for i, fit in enumerate(fits) if not fit)
    return (
        f"prompt.token_ids[{place}] is {token_ids[place]!r:.100} of type "
        f"{type(token_ids[place]).__name__}; an int of 0 to {(1 << 31) - 1} is needed"
    )


def _messages_problem(messages: Any) -> str | None:
    if type(messages) not in (tuple, list):
        return f"prompt.messages is a {type(messages).__name__}; a tuple of dicts is needed"
    found = (_dict_problem(m, f"prompt.messages[{i}]") for i, m in enumerate(messages))
    return next((problem for problem in found if problem is not None), None)


def _dict_problem(value: Any, path: str) -> str | None:
    if isinstance(value, dict):
        return json_problem(value, path)
    return f"{path} is {value!r:.100} of type {type(value).__name__}; a dict is needed"


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A prompt under way. `ticket` names this draw for good; `attempt` counts how often it was
    handed out.
    """

    ticket: str
    task: str
    prompt: Prompt
    attempt: int


class PromptSampler:
    """Hands out prompts of several tasks.

    `epochs`: how often a finite source is gone through, None for ever; one number for all tasks,
    or one a task. Each epoch is shuffled by `seed` (None: in order).
    """

    def __init__(
        self,
        sources: Mapping[str, PromptSource],
        *,
        seed: int | None = 0,
        epochs: int | Mapping[str, int | None] | None = None,
    ) -> None:
        if not sources:
            raise ConfigError("no prompt sources were given; at least one is needed")
        for task, source in sources.items():
            problem = text_problem(task, "the name of a task")
            if problem is not None:
                raise ConfigError(problem)
            if not 0 < len(task.encode()) <= TASK_BYTES_MAX:
                raise ConfigError(
                    f"task {task!r}: names of tasks have 1 to {TASK_BYTES_MAX} bytes; a longer one "
                    "leaves no room in the ids of its sessions"
                )
            if source.size == 0:
                raise ConfigError(f"the prompt source of task {task!r} is empty")
        if seed is not None and (type(seed) is not int or json_problem(seed, "seed")):
            raise ConfigError(f"seed is {seed!r}; an int of 64 bits is needed, or None: in order")
        self._sources = dict(sources)
        self._seed = seed
        self._epochs = epochs if isinstance(epochs, Mapping) else dict.fromkeys(sources, epochs)
        self._tasks = {task: _TaskState() for task in sources}
        self._made: dict[tuple[str, int], Prompt] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(self._sources)

    def remaining(self, task: str) -> int | None:
        """How many more prompts can be drawn now; None without end."""
        state = self._tasks[task]
        size, epochs = self._sources[task].size, self._epochs[task]
        if size is None or epochs is None:
            return None
        return len(state.returned) + size * epochs - state.position

    def outstanding(self, task: str) -> int:
        """How many prompts are handed out and not settled."""
        return len(self._tasks[task].out)

    def draw(self, task: str, owner: str) -> DrawnPrompt | None:
        """The next prompt of `task`, now under way with `owner`; None when there is no more.

        `ConfigError` when it holds what a snapshot could not keep.
        """
        state = self._tasks[task]
        if not state.returned and self.remaining(task) == 0:
            return None
        ordinal = state.returned[0] if state.returned else state.position
        prompt = self._made.pop((task, ordinal), None)
        if prompt is None:
            prompt = self._prompt(task, ordinal)  # a source may raise: nothing has changed yet
        if state.returned:
            state.returned.popleft()
        else:
            state.position += 1
        attempt = state.attempts.pop(ordinal, 0)
        state.out[ordinal] = _Out(owner, attempt)
        return DrawnPrompt(f"{task}-{ordinal}", task, prompt, attempt)

    def prepare(self, task: str, n: int) -> None:
        """Make the next `n` new prompts of `task`, so that drawing them costs nothing; they are
        not drawn by that.
        """
        state, left = self._tasks[task], self.remaining(task)
        if left is not None:
            n = min(n, left - len(state.returned))
        for ordinal in range(state.position, state.position + n):
            if (task, ordinal) not in self._made:
                try:
                    self._made[task, ordinal] = self._prompt(task, ordinal)
                except Exception:  # who draws it hears of it: nobody asks for anything here
                    return

    def settle(self, ticket: str) -> bool:
        """The prompt of `ticket` came to an end or is kept by the buffer; -> whether it was under
        way.
        """
        task, ordinal = self._parse(ticket)
        return self._tasks[task].out.pop(ordinal, None) is not None

    def give_back(self, ticket: str) -> bool:
        """The prompt of `ticket` will be handed out again, before new ones; -> whether it was under
        way.
        """
        task, ordinal = self._parse(ticket)
        state = self._tasks[task]
        out = state.out.pop(ordinal, None)
        if out is None:
            return False
        self._return(state, ordinal, out.attempt + 1)
        return True

    def undraw(self, ticket: str) -> None:
        """As if the prompt of `ticket` had not been drawn: it is the next, in the same attempt.
        Of several, the last drawn first.
        """
        task, ordinal = self._parse(ticket)
        state = self._tasks[task]
        out = state.out.pop(ordinal, None)
        if out is not None:
            state.returned.appendleft(ordinal)
            state.attempts[ordinal] = out.attempt

    def redraw(self, ticket: str, attempt: int) -> None:
        """Hand out again a prompt that was settled, because what the buffer kept of it was lost
        (L12).
        """
        task, ordinal = self._parse(ticket)
        self._return(self._tasks[task], ordinal, attempt)

    def give_back_all(self, owner: str) -> int:
        """Everything under way with `owner` will be handed out again; -> how many prompts."""
        count = 0
        for state in self._tasks.values():
            for ordinal in sorted(o for o, out in state.out.items() if out.owner == owner):
                self._return(state, ordinal, state.out.pop(ordinal).attempt + 1)
                count += 1
        return count

    def to_json(self) -> dict[str, Any]:
        """Position and all prompts that are under way or wait to be handed out again."""
        return {
            "seed": self._seed,
            "tasks": {
                task: {
                    "position": state.position,
                    # A prefetched prompt is not a finished one: it counts as not yet handed out.
                    "again": [[o, out.attempt] for o, out in state.out.items()]
                    + [[o, state.attempts.get(o, 0)] for o in state.returned],
                }
                for task, state in self._tasks.items()
            },
        }

    def load_json(self, value: Mapping[str, Any], *, same_attempts: bool = True) -> None:
        """Go on where `to_json` was taken; prompts under way then are handed out first, in their
        order and attempt, so that the same is sampled for them.

        Without `same_attempts` each is another attempt: for where sessions of the first may live.
        """
        if value["seed"] != self._seed:
            raise ConfigError(
                f"the snapshot was taken with prompt seed {value['seed']}, this run has "
                f"{self._seed}; "
                "another order of prompts cannot be resumed"
            )
        unknown = sorted(set(value["tasks"]) - set(self._tasks))
        if unknown:
            raise ConfigError(f"the snapshot has tasks {unknown} for which there is no source now")
        for task, saved in value["tasks"].items():
            state = _TaskState(position=saved["position"])
            for ordinal, attempt in saved["again"]:
                self._return(state, ordinal, attempt if same_attempts else attempt + 1)
            self._tasks[task] = state

    @staticmethod
    def _return(state: _TaskState, ordinal: int, attempt: int) -> None:
        if ordinal not in state.attempts:
            state.returned.append(ordinal)
        state.attempts[ordinal] = attempt

    def _parse(self, ticket: str) -> tuple[str, int]:
        task, _, ordinal = ticket.rpartition("-")
        if task not in self._tasks or not ordinal.isdecimal():
            raise ConfigError(f"{ticket!r} is not a ticket of this sampler")
        return task, int(ordinal)

    def _prompt(self, task: str, ordinal: int) -> Prompt:
        """Made by its source; `ConfigError` when it holds what a snapshot could not keep."""
        source = self._sources[task]
        place = ordinal
        if source.size is not None:
            epoch, place = divmod(ordinal, source.size)
            if self._seed is not None:
                place = _shuffled(source.size, f"{self._seed}/{task}/{epoch}")[place]
        prompt = source.prompt(place)
        problem = prompt_problem(prompt)
        if problem is not None:
            raise ConfigError(f"prompt {ordinal} of task {task!r}: {problem}")
        return prompt


class _Out:
    """A prompt under way."""

    __slots__ = ("attempt", "owner")

    def __init__(self, owner: str, attempt: int) -> None:
        self.owner = owner
        self.attempt = attempt


class _TaskState:
    """Position of one task; ordinals count draws over all epochs."""

    __slots__ = ("attempts", "out", "position", "returned")

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.out: dict[int, _Out] = {}
        self.returned: deque[int] = deque()
        self.attempts: dict[int, int] = {}


@functools.lru_cache(maxsize=8)
def _shuffled(size: int, seed: str) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)
