"""Whether a value stays what it is in JSON (lifecycle L25).

What users put into prompts goes into snapshots and messages. An encoder accepts much that comes
back as something else (bytes as text, NaN as null, keys that are numbers as text) or refuses it
hours later, when the checkpoint is due (whole numbers of more than 64 bits); so it is checked when
it is handed in. Pure; called by the sampler and the replay buffer.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["json_problem", "text_problem"]

#: Lists and dicts within each other.
DEPTH_MAX = 64

_ALLOWED = (
    "None, bool, int of 64 bits, finite float, text, and lists and dicts of those with text as keys"
)


def json_problem(value: Any, path: str) -> str | None:
    """What is wrong with the first part of `value` that JSON would not keep, with its path; None
    when all is well. A tuple comes back as a list and is taken for one.
    """
    found = _find(value, DEPTH_MAX)
    if found is None:
        return None
    where, what = found
    return f"{path}{where} {what}; a snapshot keeps {_ALLOWED}"


def text_problem(value: Any, path: str) -> str | None:
    """As `json_problem`, for what has to be text."""
    if type(value) is str:
        return json_problem(value, path)
    return f"{path} is {value!r:.100} of type {type(value).__name__}; text is needed"


def _find(value: Any, depth: int) -> tuple[str, str] | None:
    kind = type(value)
    if value is None or kind is bool:
        return None
    if kind is int:
        fits = -(1 << 63) <= value < 1 << 64
        return None if fits else ("", "is a whole number of more than 64 bits")
    if kind is str:
        return None if value.isascii() or _is_utf8(value) else ("", "is text that is no UTF-8")
    if kind is float:
        return None if math.isfinite(value) else ("", f"is {value!r}")
    if depth == 0:
        return "", f"is nested deeper than {DEPTH_MAX}"
    if kind is list or kind is tuple:
        parts = ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                return "", f"has the key {key!r} of type {type(key).__name__}"
            if not (key.isascii() or _is_utf8(key)):
                return "", f"has the key {key!r}, which is no UTF-8"
        parts = ((f"[{key!r}]", item) for key, item in value.items())
    else:
        return "", f"is a {kind.__name__}"
    for where, item in parts:
        found = _find(item, depth - 1)
        if found is not None:
            return where + found[0], found[1]
    return None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
