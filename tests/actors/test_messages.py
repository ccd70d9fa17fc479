"""The frame: what is packed is parsed, and no bytes make the parser do more than refuse."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import messages
from actors.codec import Codec, make_remote_error
from actors.errors import ActorDied, MessageTooLarge, ProtocolError, RemoteError
from actors.messages import HEADER, HEADER_BYTES, Buffer, Kind, pack, parse

CALL_IDS = st.integers(0, (1 << 64) - 1)
BUFFERS = st.lists(st.one_of(st.binary(max_size=70), st.none()), max_size=6)


@given(
    kind=st.sampled_from(Kind),
    call_id=CALL_IDS,
    target=st.integers(0, (1 << 32) - 1),
    method=st.binary(max_size=40),
    group=st.binary(max_size=40),
    chain=st.lists(st.integers(0, (1 << 32) - 1), max_size=5),
    body=st.binary(max_size=200),
    buffers=BUFFERS,
    timeout_ns=st.integers(0, (1 << 63) - 1),
)
@settings(deadline=None, max_examples=300)
def test_what_is_packed_is_parsed(
    kind: Kind, call_id: int, target: int, method: bytes, group: bytes, chain: list[int],
    body: bytes, buffers: list[bytes | None], timeout_ns: int,
) -> None:  # fmt: skip
    table = tuple(
        Buffer(7, b"r" * 24) if data is None else Buffer(len(data), None) for data in buffers
    )
    inline = tuple(memoryview(data) for data in buffers if data is not None)
    frame = pack(
        kind, call_id, target, flags=1, method=method, group=group, chain=tuple(chain), body=body,
        buffers=table, inline=inline, timeout_ns=timeout_ns, trace=(1, 2, 3),
    )  # fmt: skip
    head = messages.Head(*HEADER.unpack_from(frame))
    assert (head.size, head.kind, head.call_id, head.target) == (len(frame), kind, call_id, target)
    assert (head.timeout_ns, head.trace_high, head.trace_low, head.span) == (timeout_ns, 1, 2, 3)
    parts = parse(head, memoryview(frame))
    assert (parts.method, parts.group, list(parts.chain)) == (method, group, chain)
    assert bytes(parts.body) == body
    assert parts.buffers == table
    assert [bytes(view) for view in parts.inline] == [bytes(view) for view in inline]


@given(st.binary(min_size=HEADER_BYTES, max_size=400), st.integers(0, 63), st.integers(0, 255))
@settings(deadline=None, max_examples=500)
def test_no_bytes_make_the_parser_read_outside_of_them(data: bytes, at: int, value: int) -> None:
    frame = bytearray(data)
    frame[:4] = len(frame).to_bytes(4, "little")
    frame[at] = value
    try:
        parts = parse(HEADER.unpack_from(frame), memoryview(frame))
    except ProtocolError:
        return
    assert sum(map(len, (parts.method, parts.group, parts.body, *parts.inline))) <= len(frame)


def test_a_frame_beyond_a_limit_is_refused_by_its_sender() -> None:
    with pytest.raises(MessageTooLarge, match="256"):
        pack(Kind.CALL, 1, chain=tuple(range(257)))
    with pytest.raises(MessageTooLarge, match="4096"):
        pack(Kind.CALL, 1, buffers=(Buffer(0, b"x" * 24),) * 4097)


ERRORS: list[Exception] = [
    ValueError("x"), KeyError("k"), OSError(2, "no", "file"), MemoryError(), StopIteration(3),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), ImportError("m", name="mod"), SyntaxError("s"),
    ExceptionGroup("g", [ValueError("inner")]), ActorDied("a", "r", 3, "tail"), RecursionError(),
    ZeroDivisionError(), TimeoutError("late"), AttributeError("a"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_each_built_in_error_arrives_as_itself_and_can_be_passed_on(error: Exception) -> None:
    codec = Codec()

    def travel(what: BaseException) -> Any:
        return codec.decode_error(codec.encode_error(what).body)

    once = travel(error)
    twice = travel(once)  # an actor that lets the error of its own call out
    for arrived in (once, twice):
        assert isinstance(arrived, type(error))
        assert isinstance(arrived, RemoteError)
        assert repr(arrived.args) == repr(error.args)
        assert str(arrived) == str(error)
    assert isinstance(pickle.loads(pickle.dumps(once)), type(error))


class _Ours(Exception):
    """A root of errors, as libraries have them."""


class _OursAndBuiltIn(_Ours, MemoryError):
    """And one of them that is a built-in one as well; it keeps more than its text."""

    def __init__(self, text: str = "", *, needed: int = 0) -> None:
        super().__init__(text)
        self.needed = needed


def test_an_error_of_ours_and_of_a_built_in_class_arrives_as_both() -> None:
    """It was text: which `__new__` makes it, its layout decides and not the order of its bases."""
    sent = _OursAndBuiltIn("full", needed=3)
    arrived = make_remote_error(sent, "ours", "full", "Traceback ...")
    assert isinstance(arrived, _OursAndBuiltIn)
    assert isinstance(arrived, RemoteError)
    assert (str(arrived), arrived.needed) == ("full", 3)


def test_an_error_of_an_unknown_class_is_text() -> None:
    arrived = make_remote_error(None, "far.away.Oops", "it broke", "Traceback ...")
    assert type(arrived) is RemoteError
    assert str(arrived) == "far.away.Oops: it broke"
    assert arrived.remote_traceback == "Traceback ..."
    assert "Traceback" in arrived.__notes__[0]
