"""An error as text that can be kept and sent, whatever user code made of it (lifecycle L13, L25).

A message may hold halves of letters (names of files that are no UTF-8), be of any length, or raise
when it is asked for; the text of one rollout's error must not end the producer that reports it.
Pure; called where user code ends, in every process.
"""

from __future__ import annotations

__all__ = ["carried_text", "error_text"]

#: Beyond this the middle of a text is left out.
CHARS_MAX = 16_384


def error_text(error: BaseException) -> str:
    """`ValueError: what it says`."""
    return carried_text(f"{type(error).__name__}: {_said(error)}")


def carried_text(text: str) -> str:
    """The text as UTF-8 can have it, and not longer than is of use."""
    if len(text) > CHARS_MAX:
        text = f"{text[: CHARS_MAX // 2]}\n... cut ...\n{text[-CHARS_MAX // 2 :]}"
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a user's __str__ raised; its type is all there is
        return f"(its __str__ raised {type(broken).__name__})"
