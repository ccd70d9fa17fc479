"""Multi-turn conversations in which the policy calls tools.

Owns the loop and the text form of a call: the model writes
`<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`, the form that Qwen and
Hermes models are trained on, and reads `<tool_response>…</tool_response>`. Several calls in one
turn are answered in order.

Promises: a tool runs in a process of its own and is ended at its time limit, which fails this
rollout with `ToolError` and nobody else's (L13); a call that is no JSON or names no tool is
answered with an error text that the model sees, because to learn the form is part of the task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.environment import Session
from trainer.environments.single_turn import said
from trainer.errors import ToolError
from trainer.rollout import Prompt
from trainer.user_code.pool import CallFailed, CallPool

__all__ = ["ToolLoop", "calls_in"]

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_CALLS_PER_TURN_MAX = 16


class ToolLoop:
    """Model turn, tool calls, answers, and again, until a turn calls no tool or `max_turns` is met.

    `tools` are `module:function` names; the model calls them by the last part of the name.
    """

    def __init__(
        self, tools: Sequence[str], *, max_turns: int, timeout_s: float, processes: int = 2
    ) -> None:
        self._targets = {target.rpartition(":")[2].rpartition(".")[2]: target for target in tools}
        self._max_turns = max_turns
        self._pool = CallPool(processes, timeout_s)

    async def run(self, session: Session, prompt: Prompt) -> None:
        """One conversation. Raises ToolError when a tool raises, dies or exceeds its limit."""
        turn = await session.generate(said(prompt))
        for _ in range(self._max_turns - 1):
            calls = calls_in(turn.text)
            if not calls:
                return
            answers = [await self._answer(call) for call in calls[:_CALLS_PER_TURN_MAX]]
            turn = await session.generate("".join(answers))

    async def _answer(self, call: str) -> str:
        name, arguments, problem = self._parse(call)
        if problem:
            return _response({"error": problem})
        try:
            return _response(await self._pool.call(self._targets[name], **arguments))
        except CallFailed as error:
            raise ToolError(f"tool {error}") from error

    def _parse(self, call: str) -> tuple[str, dict[str, Any], str]:
        try:
            parsed = json.loads(call)
        except json.JSONDecodeError as error:
            return "", {}, f"the call is not JSON: {error}"
        if not isinstance(parsed, Mapping) or not isinstance(parsed.get("name"), str):
            return "", {}, 'a call needs {"name": ..., "arguments": {...}}'
        name, arguments = parsed["name"], parsed.get("arguments", {})
        if name not in self._targets:
            return name, {}, f"there is no tool {name!r}; there are {', '.join(self._targets)}"
        if not isinstance(arguments, Mapping):
            return name, {}, "arguments must be an object of names and values"
        return name, {str(k): v for k, v in arguments.items()}, ""

    async def aclose(self) -> None:
        """Ends the tool processes."""
        await self._pool.aclose()


def calls_in(text: str) -> list[str]:
    """The JSON texts of the tool calls in a model turn, in order."""
    return _CALL.findall(text)


def _response(value: object) -> str:
    body = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"\n<tool_response>\n{body}\n</tool_response>\n"
