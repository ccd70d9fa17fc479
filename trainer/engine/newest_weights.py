"""Handing the newest weights to whoever starts, while still newer ones may be published.

Owns that retry alone: a version is retired once all known engines have a newer one, also under the
eyes of one that is just about to start. Used by the router, for replicas, and by the driver's link
to the producer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from shmstore import ObjectFreed
from trainer.engine.protocol import WeightsVersion

__all__ = ["send_newest"]

T = TypeVar("T")


async def send_newest(
    newest: Callable[[], WeightsVersion | None],
    send: Callable[[WeightsVersion], Awaitable[T]],
) -> T:
    """`send`s the newest version until none was published meanwhile; -> what the last call gave.

    Raises what `send` raises; `ObjectFreed` only if the newest version itself is gone.
    """
    while True:
        sent = newest()
        assert sent is not None, "nothing was published"
        try:
            result = await send(sent)
        except ObjectFreed:
            if sent is newest():
                raise
            continue  # retired while it was on the way
        if sent is newest():
            return result
