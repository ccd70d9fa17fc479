"""What can be called on an actor: the table of public methods of a class.

Owns `@actors.method` and the classification of methods. Pure; used by `spawn` (to ship the table
with a handle), by `handle` (to refuse a wrong name early) and by `mailbox` (to run a call).
"""

from __future__ import annotations

import dis
import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from .errors import UsageError
from .messages import NAME_BYTES_MAX

__all__ = ["DEFAULT_GROUP", "Method", "MethodFlag", "Shape", "method", "method_table", "methods_of"]

DEFAULT_GROUP = ""
_MARK = "__actors_method__"

F = TypeVar("F", bound=Callable[..., Any])


class Shape(enum.Enum):
    """How a method runs."""

    INLINE = "inline"  # async def that never awaits: run in place on the loop, no task
    ASYNC = "async"
    SYNC = "sync"  # in a thread of its group
    ASYNC_STREAM = "async stream"
    SYNC_STREAM = "sync stream"


class MethodFlag(enum.IntFlag):
    """What a caller has to know of a method; shipped inside a handle."""

    NONE = 0
    IDEMPOTENT = 1
    STREAM = 2


@dataclass(frozen=True, slots=True)
class _Marks:
    group: str = DEFAULT_GROUP
    idempotent: bool = False
    reentrant: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """One public method of an actor's class."""

    name: str
    shape: Shape
    group: str
    idempotent: bool
    reentrant: bool

    @property
    def flags(self) -> MethodFlag:
        flags = MethodFlag.IDEMPOTENT if self.idempotent else MethodFlag.NONE
        if self.shape in (Shape.ASYNC_STREAM, Shape.SYNC_STREAM):
            flags |= MethodFlag.STREAM
        return flags


@overload
def method(function: F) -> F: ...
@overload
def method(
    *, group: str = ..., idempotent: bool = ..., reentrant: bool = ...
) -> Callable[[F], F]: ...
def method(
    function: F | None = None,
    *,
    group: str = DEFAULT_GROUP,
    idempotent: bool = False,
    reentrant: bool = False,
) -> F | Callable[[F], F]:
    """Say more about a method than its signature does; optional.

    `group`: calls of one caller start in order within a group, and `def` methods of a group run one
    at a time; groups do not wait for each other. `idempotent`: may be run again after a death
    (`using(retries=…)`). `reentrant`: may be called by an actor that this actor itself is calling.
    """
    if len(group.encode()) > NAME_BYTES_MAX:
        raise UsageError(f"a group name has at most {NAME_BYTES_MAX} bytes, got {len(group)}")
    marks = _Marks(group, idempotent, reentrant)

    def mark(function: F) -> F:
        setattr(function, _MARK, marks)
        return function

    return mark if function is None else mark(function)


def methods_of(cls: type) -> dict[str, Method]:
    """The public methods of a class, inherited ones included."""
    found = {}
    for name in dir(cls):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if callable(value) and not isinstance(value, type):
            found[name] = _classify(name, value)
    return found


def method_table(cls: type) -> dict[str, int]:
    """Name → MethodFlag, as a handle carries it."""
    return {name: int(found.flags) for name, found in methods_of(cls).items()}


def _classify(name: str, function: Any) -> Method:
    marks = getattr(function, _MARK, None) or _Marks()
    plain = inspect.unwrap(function)
    if inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(plain):
        shape = Shape.ASYNC_STREAM
    elif inspect.iscoroutinefunction(function):
        shape = Shape.ASYNC if _awaits(function) else Shape.INLINE
    elif inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(plain):
        shape = Shape.SYNC_STREAM
    else:
        shape = Shape.SYNC
    return Method(name, shape, marks.group, marks.idempotent, marks.reentrant)


def _awaits(function: Any) -> bool:
    """False only if the coroutine's own code cannot suspend: then it needs no task to run in.

    Half of the cost of an empty call is the task around it.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    return any(
        step.opname in ("GET_AWAITABLE", "SEND", "YIELD_VALUE", "YIELD_FROM")
        for step in dis.get_instructions(code)
    )
