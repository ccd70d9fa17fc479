"""The process in which judges and tools of users run, so that one that hangs can be killed.

Owns: reading requests from the descriptor that was standard input and writing answers to that which
was standard output; what user code prints goes to standard error, and it has nothing to read.
Protocol: frames of a 4-byte little-endian
length and a msgpack map. Request `{"target", "args", "kwargs"}`, or `{"target"}` alone, which
only imports it; answer `{"value"}` or `{"error", "traceback"}`.

Promises: one call at a time; it ends when its parent does (end of input, or the kernel's
parent-death signal while user code runs). Started only by `trainer.user_code.pool`.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from trainer.error_text import carried_text, error_text
from trainer.user_code.targets import resolve

__all__ = ["FRAME_BYTES_MAX", "main"]

FRAME_BYTES_MAX = 64 << 20
"""A text longer than this is no judgement."""

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("<I")


def main() -> None:
    """Serves calls until the input ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before the kernel was told to watch it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    # Duplicates, which no program that user code starts inherits.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    known: dict[str, Callable[..., Any]] = {}
    worker = os.getpid()
    while (frame := _read(requests)) is not None:
        answer = _frame(_answer(msgspec.msgpack.decode(frame), known))
        if os.getpid() != worker:
            os._exit(0)  # user code forked, and both come back: one answers
        answers.write(answer)


def _read(stream: BinaryIO) -> bytes | None:
    head = _exactly(stream, _LENGTH.size)
    if head is None:
        return None
    return _exactly(stream, _LENGTH.unpack(head)[0])


def _exactly(stream: BinaryIO, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = stream.read(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _frame(value: dict[str, Any]) -> bytes:
    try:
        body = msgspec.msgpack.encode(value, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        body = msgspec.msgpack.encode({"error": f"answer cannot be sent: {error}", "traceback": ""})
    return _LENGTH.pack(len(body)) + body


def _plain(value: object) -> object:
    """What numpy computes is a number, too."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(f"{type(value).__qualname__} is no plain data")


def _answer(request: dict[str, Any], known: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    target = str(request["target"])
    try:
        if target not in known:
            known[target] = resolve(target)
        if "args" not in request:
            return {"value": None}
        value = known[target](*request["args"], **request["kwargs"])
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
    except BaseException as error:  # theirs, `sys.exit()` too: text is what travels to the run
        return {"error": error_text(error), "traceback": carried_text(traceback.format_exc())}
    return {"value": value}


if __name__ == "__main__":
    main()
