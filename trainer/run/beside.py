"""Work with helpers beside it, and which error it was that ended them all.

Used by `trainer.fit` and `trainer.run.eval_run`, in the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

__all__ = ["beside", "first_error"]

T = TypeVar("T")


async def beside(
    background: Sequence[Coroutine[Any, Any, None]], main: Coroutine[Any, Any, T]
) -> T:
    """Runs `main` to its end; `background` is ended with it, and an error of any ends all."""
    async with asyncio.TaskGroup() as tasks:
        helpers = [tasks.create_task(helper) for helper in background]
        result = await main
        for helper in helpers:
            helper.cancel()
    return result


def first_error(error: BaseException) -> BaseException:
    """The error itself, out of the groups in which it comes."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
