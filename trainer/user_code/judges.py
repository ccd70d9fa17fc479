"""Judges of installed packages, as the call worker runs them.

Called by name from `trainer.judge` inside a worker process (`trainer.user_code.worker`), where the
time limit is kept by killing the process; the packages' own limits, which rely on signals, are off.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

__all__ = ["math_verify_score", "reasoning_gym_score"]


def math_verify_score(prompt: Mapping[str, Any], text: str) -> float:
    """1.0 when math-verify finds answer and text equal."""
    import math_verify

    answer = str(prompt["answer"])
    gold = math_verify.parse(
        answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None
    )
    given = math_verify.parse(text, parsing_timeout=None)
    return float(math_verify.verify(gold, given, timeout_seconds=None))


def reasoning_gym_score(
    prompt: Mapping[str, Any], text: str, dataset: str, params: Mapping[str, Any]
) -> float:
    """The data set's own score of the text, between 0 and 1."""
    entry = {
        "question": prompt["text"],
        "answer": prompt["answer"],
        "metadata": dict(prompt["metadata"]),
    }
    return float(_dataset(dataset, tuple(sorted(params.items()))).score_answer(text.strip(), entry))


@functools.lru_cache(maxsize=64)
def _dataset(name: str, params: tuple[tuple[str, Any], ...]) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=1, **dict(params))
