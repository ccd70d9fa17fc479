"""Judges: what a finished rollout is worth.

Owns the kinds that a configuration can name (exact, numeric, math_verify, reasoning_gym, a
callable of the user). Promises: a verdict is a finite float or a `JudgeError`, which fails that
one rollout (L13); judges that run foreign code do so in a process of their own and within their
time limit, so that one that hangs is killed and costs nobody else anything.

`build_judge` is called in the producer process; scoring happens on its event loop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from trainer.config import JudgeConfig, TaskConfig
from trainer.errors import JudgeError
from trainer.rollout import Prompt
from trainer.segment import Trace
from trainer.user_code.pool import CallFailed, CallPool

__all__ = ["TaskJudge", "build_judge", "finite", "score_exact", "score_numeric"]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class TaskJudge(Protocol):
    """What the producer asks; also the shape of a judge that a library user passes in."""

    def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float | Awaitable[float]:
        """The reward; see `trainer.environment.Judge`. Raises `JudgeError`."""
        ...

    async def aclose(self) -> None:
        """Ends what it started."""
        ...


def build_judge(task: TaskConfig) -> TaskJudge:
    """The judge of a task."""
    config = task.judge
    if config.kind == "exact":
        if task.format_reward > 0.0:
            return _Inline(lambda prompt, text: _exact_or_form(prompt, text, task.format_reward))
        return _Inline(score_exact)
    if config.kind == "numeric":
        return _Inline(lambda prompt, text: score_numeric(prompt, text, config.tolerance))
    if config.kind == "reasoning_gym":
        source = task.source
        return _InProcess(
            "trainer.user_code.judges:reasoning_gym_score",
            config,
            {"dataset": source.dataset, "params": dict(source.params)},
        )
    if config.kind == "math_verify":
        return _InProcess("trainer.user_code.judges:math_verify_score", config, {})
    assert config.target is not None, "the checks let no callable without a target through"
    return _InProcess(config.target, config, None)


def finite(value: object, who: str) -> float:
    """`value` as a float, or JudgeError when it is none, infinite or NaN."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise JudgeError(
        f"{who} returned {value!r} ({type(value).__name__}); a finite number is needed"
    )


def score_exact(prompt: Prompt, text: str) -> float:
    """1.0 when text and answer agree but for white space around them."""
    return float(text.strip() == str(prompt.answer).strip())


def score_numeric(prompt: Prompt, text: str, tolerance: float) -> float:
    """1.0 when the last number in the text is the answer within a relative `tolerance`."""
    wanted = _last_number(str(prompt.answer))
    if wanted is None:
        raise JudgeError(f"the answer of prompt {prompt.uid} holds no number: {prompt.answer!r}")
    given = _last_number(text)
    return float(
        given is not None and math.isclose(given, wanted, rel_tol=tolerance, abs_tol=tolerance)
    )


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _exact_or_form(prompt: Prompt, text: str, partial: float) -> float:
    if score_exact(prompt, text):
        return 1.0
    return partial if sorted(text.strip()) == sorted(str(prompt.answer)) else 0.0


class _Inline:
    """A pure function of ours that cannot hang."""

    def __init__(self, score: Callable[[Prompt, str], float]) -> None:
        self._score = score

    def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        return self._score(prompt, text)

    async def aclose(self) -> None:
        return None


class _InProcess:
    """Foreign code behind a time limit. `extra` None: the function takes (prompt, text) only."""

    def __init__(self, target: str, config: JudgeConfig, extra: Mapping[str, Any] | None) -> None:
        self._target = target
        self._extra = extra
        self._pool = CallPool(config.processes, config.timeout_s)

    async def score(self, prompt: Prompt, text: str, trace: Trace | None) -> float:
        plain = {
            "uid": prompt.uid,
            "task": prompt.task,
            "text": prompt.text,
            "messages": None if prompt.messages is None else [dict(m) for m in prompt.messages],
            "answer": prompt.answer,
            "metadata": dict(prompt.metadata),
        }
        try:
            value = await self._pool.call(self._target, plain, text, **(self._extra or {}))
        except CallFailed as error:
            raise JudgeError(f"judge {error}") from error
        return finite(value, f"judge {self._target}")

    async def aclose(self) -> None:
        await self._pool.aclose()
