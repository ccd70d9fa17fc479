"""Makes the environments and judges of a configuration and routes each prompt to its task's.

Owns: the dispatch by task, the time limit of one whole rollout, and closing what the parts started.
Called in the producer process, and in tests without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any

from trainer.config.schema import EnvironmentConfig, TaskConfig
from trainer.environment import Environment, Session
from trainer.environments.single_turn import SingleTurn, content_of
from trainer.environments.tools import ToolLoop
from trainer.errors import ToolError
from trainer.group_context import Content
from trainer.judge import TaskJudge, build_judge
from trainer.rollout import Prompt
from trainer.segment import Trace
from trainer.user_code.targets import TargetError, resolve

__all__ = ["ByTask", "build_environment"]


def build_environment(config: EnvironmentConfig) -> Environment:
    """The environment of one task. Raises TargetError when a user's class cannot be made."""
    if config.kind == "single_turn":
        return SingleTurn()
    if config.kind == "tools":
        return ToolLoop(config.tools, max_turns=config.max_turns, timeout_s=config.tool_timeout_s)
    assert config.target is not None, "the checks let no class without a target through"
    made = resolve(config.target)(**config.params)
    if not isinstance(made, Environment):
        raise TargetError(f"{config.target!r} has no `async def run(session, prompt)`")
    return made


class ByTask:
    """Environment and judge of a mixture: each prompt meets those of its task."""

    def __init__(self, tasks: Sequence[TaskConfig]) -> None:
        self._environments: Mapping[str, Environment] = {
            task.name: build_environment(task.environment) for task in tasks
        }
        self._limits_s = {task.name: task.environment.timeout_s for task in tasks}
        self._judges: Mapping[str, TaskJudge] = {task.name: build_judge(task) for task in tasks}

    def run(self, session: Session, prompt: Prompt) -> Coroutine[Any, Any, None]:
        """Runs the task's environment within its limit; a foreign error becomes a ToolError."""
        environment = self._environments[prompt.task]
        if isinstance(environment, SingleTurn):
            # One generation, which the engine ends: a timer for each of thousands would cost more
            # than it could ever save.
            return environment.run(session, prompt)
        return self._run_within(self._limits_s[prompt.task], environment, session, prompt)

    def one_turn(self, prompt: Prompt) -> Content | None:
        """What `run` would say about the prompt, when that is all that it would do; else None."""
        known = type(self._environments.get(prompt.task)) is SingleTurn
        return content_of(prompt) if known else None

    async def _run_within(
        self, limit_s: float, environment: Environment, session: Session, prompt: Prompt
    ) -> None:
        try:
            async with asyncio.timeout(limit_s) as scope:
                await environment.run(session, prompt)
        except TimeoutError as error:
            if scope.expired():
                raise ToolError(f"rollout took longer than {limit_s:g} s") from error
            raise ToolError(f"environment of task {prompt.task}: {error!r}") from error

    def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float | Awaitable[float]:
        """The verdict of the task's judge."""
        return self._judges[prompt.task].score(prompt, text, trace)

    async def aclose(self) -> None:
        """Ends what environments and judges started."""
        for part in (*self._judges.values(), *self._environments.values()):
            closer: Any = getattr(part, "aclose", None)
            if closer is not None:
                await closer()
