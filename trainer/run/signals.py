"""What a run makes of Ctrl-C, of a scheduler's SIGTERM and of a terminal that was closed: once, it
ends in order; twice, at once; after its end, while the loop is taken down, nothing. An evaluation
has no order to keep: once ends it at once. Before either has begun, once ends the command.

Owns the handlers of those signals while a command lasts. Called by `trainer.cli`, `trainer.fit` and
`trainer.run.eval_run`, on the main thread. The command takes the signals over before it imports
anything that takes long, so asyncio is imported where it is needed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "cancelled_by_signals",
    "handlers_put_back",
    "ignored_from_now_on",
    "interrupted_by_signals",
    "stop_by_signals",
]

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Iterator[list[str]]:
    """Around a command: until a run takes the signals over, each raises KeyboardInterrupt. Gives
    the names of those that came: an import that one of them ended may raise what it likes. On
    leaving, the signals are ignored.
    """
    came: list[str] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        came.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    for number in _stopping():
        signal.signal(number, interrupt)
    try:
        yield came
    finally:
        ignored_from_now_on()


def ignored_from_now_on() -> None:
    """What comes after the end changes nothing."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def handlers_put_back() -> Iterator[None]:
    """Around a loop, or a command that is not the whole process: afterwards the handlers of before
    are back.
    """
    before = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was installed from C cannot be put back
                signal.signal(number, handler)


@contextmanager
def stop_by_signals(note: Callable[[str], None]) -> Iterator[asyncio.Event]:
    """In the task of the run: an event that the first signal sets; the second cancels the task.

    On leaving, the signals are ignored.
    """
    import asyncio

    stop = asyncio.Event()

    def first(name: str) -> bool:
        if stop.is_set():
            return False
        stop.set()
        note(f"{name}: ends after the step under way, if any; once more ends it at once")
        return True

    with _handled(note, first):
        yield stop


@contextmanager
def cancelled_by_signals(note: Callable[[str], None]) -> Iterator[None]:
    """The first signal cancels this task. On leaving, the signals are ignored."""
    with _handled(note, lambda _: False):
        yield


@contextmanager
def _handled(note: Callable[[str], None], instead: Callable[[str], bool]) -> Iterator[None]:
    """A signal cancels this task, unless something is done `instead`; a later one is only told."""
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt(name: str) -> None:
        if task.cancelling():
            note(f"{name}: it is ending; what the arena and the processes hold is let go of")
        elif not instead(name):
            task.cancel()

    stopping = _stopping()
    for number in stopping:
        loop.add_signal_handler(number, interrupt, number.name)
    try:
        yield
    finally:
        for number in stopping:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _stopping() -> list[signal.Signals]:
    # `nohup` has asked for the terminal's end to be ignored.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _STOPPING if not (ignored and number == signal.SIGHUP)]
