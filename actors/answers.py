"""Answers to the calls of this process: unpickled, handed over, acknowledged.

Owns nothing; works on the node's table of pending calls. Called by `node` on its loop thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import faults
from .calls import Pending
from .errors import NotSerializable, ProtocolError
from .messages import HEADER_BYTES, Flag, Kind, pack, parse
from .transport import Link

if TYPE_CHECKING:
    from .node import Node

__all__ = ["Answers"]

_ERROR = int(Kind.ERROR)
_REFS = int(Flag.REFS)


class Answers:
    """Of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def on_answer(self, link: Link, head: tuple[int, ...], frame: memoryview) -> None:
        """RESULT or ERROR: the end of a call, or a reply that comes too late and is dropped."""
        if faults.hook is not None:
            faults.hook("reply.received")
        call_id, flags = head[4], head[2]
        call = self._node.pending.pop(call_id, None)
        if call is None:
            self._node.late_replies += 1
            if flags & _REFS:
                self._ack_reply(link, call_id, 0)
            return
        if call.timer is not None:
            call.timer.cancel()
        if self._node.tracing is not None:
            self._node.tracing.end(call_id, "the method raised" if head[1] == _ERROR else "")
        peer = call.peer
        peer.in_flight -= 1
        if head[1] == _ERROR:
            call.fail(self._node.codec.decode_error(frame[HEADER_BYTES:]))
        elif not head[9] and not head[3]:
            call.settle(None)
        else:
            self._settle(link, call, head, frame, 0)
        if peer.waiting_live:
            self._node.drain(peer)

    def _settle(
        self, link: Link, call: Pending, head: tuple[int, ...], frame: memoryview, item: int
    ) -> None:
        """Unpickle an answer or a stream's item and hand it over."""
        flags = head[2]
        try:
            if not head[3] and not flags:
                value = self._node.codec.decode(frame[HEADER_BYTES:])
            else:
                parts = parse(head, frame)
                value = self._node.codec.decode(parts.body, flags, parts.buffers, parts.inline)
        except ProtocolError:
            raise
        except Exception as error:  # a user's class refuses to be unpickled: the caller hears it
            failure = NotSerializable(
                f"the answer of {call.label} cannot be unpickled here:"
                f" {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            if item:
                self._node.abandon(call.call_id)
            call.fail(failure)
        else:
            if faults.hook is not None:
                faults.hook("reply.decoded")
            if item:
                call.item(value)
            else:
                call.settle(value)
        if flags & _REFS:
            self._ack_reply(link, call.call_id, item)

    def _ack_reply(self, link: Link, call_id: int, item: int) -> None:
        link.send(pack(Kind.ACK, call_id, item, flags=Flag.REPLY))
        if faults.hook is not None:
            faults.hook("reply.acked")

    def on_item(self, link: Link, head: tuple[int, ...], frame: memoryview) -> None:
        """ITEM of a stream."""
        call = self._node.pending.get(head[4])
        if call is not None:
            self._settle(link, call, head, frame, head[5])
        elif head[2] & _REFS:
            self._ack_reply(link, head[4], head[5])

    def on_done(self, call_id: int) -> None:
        """DONE: a tell was taken in."""
        call = self._node.pending.get(call_id)
        if call is not None:
            self._node.forget(call)
            call.settle(None)
