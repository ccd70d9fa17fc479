"""Helpers for tests of code that uses the store: arenas that clean up, and processes that die on
request.

Owns nothing at run time. `temporary_store` gives an arena of a name that nobody else has and
demands at the end that it is sound and empty. `Puppet` is a real process that runs functions one at
a time and can be stopped or killed between or inside them. Needs cloudpickle (a dependency of the
distribution). Tests only.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Self

from .errors import StoreError, StoreNotFound
from .store import Store

_counter = itertools.count()
_LENGTH = struct.Struct("<Q")


class LeakFound(AssertionError):
    """An arena that a test left unsound or not empty."""


class PuppetDied(Exception):
    """The puppet's process ended before it answered; `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the puppet ended with exit code {exit_code}")
        self.exit_code = exit_code


def unique_name(prefix: str = "test") -> str:
    """An arena name that carries this process's pid, so that leftovers can be told apart."""
    return f"{prefix}-{os.getpid()}-{next(_counter)}"


@contextmanager
def temporary_store(capacity: int | str = "64MiB", **options: Any) -> Iterator[Store]:
    """A fresh arena, closed and unlinked at the end. LeakFound when it is unsound then, or when
    sessions or objects are left after the caller's own references are gone."""
    name = unique_name()
    store = Store.create(name, capacity, **options)
    try:
        yield store
        if store.is_open:
            assert_sound(store)
    finally:
        store.close()
        with suppress(StoreNotFound):  # the test removed it itself
            Store.unlink(name)


def assert_sound(store: Store) -> None:
    """Sweep the dead, then demand that the audit finds nothing."""
    store.sweep()
    problems = store.check()
    if problems:
        raise LeakFound("the arena is unsound:\n" + "\n".join(problems))


def assert_empty(store: Store) -> None:
    """Demand no session and no object besides a sound audit."""
    assert_sound(store)
    stats = store.stats()
    if stats.sessions or stats.objects or stats.used:
        raise LeakFound(
            f"left in the arena: {stats.sessions} sessions, {stats.objects} objects, "
            f"{stats.used} bytes, by owner {dict(stats.by_owner)}"
        )


class Puppet:
    """A real process that runs `function(state, *args)` on request; `state` is a dict that it
    keeps.

    Functions may be local or lambdas: they travel by value. A context manager that kills on
    leaving.
    """

    def __init__(self) -> None:
        start = (
            "import sys; sys.path[:0] = sys.argv[1:]; "
            "from shmstore.testing import _puppet_main; _puppet_main()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, *(path for path in sys.path if path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run and wait. Raises what the function raised; PuppetDied when the process ended
        instead."""
        self.begin(function, *args)
        return self.result()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Start it and return; fetch the answer with `result`."""
        import cloudpickle  # type: ignore[import-untyped]

        module = sys.modules.get(function.__module__)
        if module is not None and not module.__name__.startswith("shmstore"):
            cloudpickle.register_pickle_by_value(module)
        try:
            _send(self._stdin, cloudpickle.dumps((function, args)))
        except BrokenPipeError:
            raise PuppetDied(self._process.wait()) from None

    def result(self) -> Any:
        """The answer to the last `begin`."""
        message = _receive(self._stdout)
        if message is None:
            raise PuppetDied(self._process.wait())
        good, value, trace = pickle.loads(message)
        if good:
            return value
        value.add_note(f"in puppet {self.pid}:\n{trace}")
        raise value

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self._process.send_signal(number)
        return self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: alive, but it does nothing until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it if it still runs, and close the pipes."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._stdout.close()
        with suppress(BrokenPipeError):  # it died with a request unread
            self._stdin.close()

    def wait(self) -> int:
        """Wait for the end that the process brings about itself; returns the exit code."""
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)) + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    length = _LENGTH.unpack(head)[0]
    message = pipe.read(length)
    return message if len(message) == length else None


def _puppet_main() -> None:
    """The child's loop. Standard output is the answer pipe, so prints go to standard error."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    state: dict[str, Any] = {}
    while (message := _receive(requests)) is not None:
        try:
            function, args = pickle.loads(message)
            answer: tuple[bool, Any, str] = (True, function(state, *args), "")
        except BaseException as error:  # the boundary of the puppet: every failure is its answer
            answer = (False, error, traceback.format_exc())
        _send(answers, _dump_answer(answer))
        del answer


def _dump_answer(answer: tuple[bool, Any, str]) -> bytes:
    try:
        return pickle.dumps(answer, protocol=5)
    except Exception as error:  # an answer that cannot travel is told as text
        return pickle.dumps((False, StoreError(f"unpicklable answer: {error!r}"), answer[2]))


__all__ = [
    "LeakFound",
    "Puppet",
    "PuppetDied",
    "assert_empty",
    "assert_sound",
    "temporary_store",
    "unique_name",
]
