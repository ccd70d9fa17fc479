"""One process of a run: its links, the calls it waits for, the actors that live in it.

Owns the tables of peers, pending calls and local actors, and the wire protocol's state machine.
There is one node in the driver and one in each actor process. Everything here runs on the thread
of the node's event loop, except `call_threadsafe`, `on_loop_thread` and `next_call_id`.

What it promises: every call ends, by an answer, an error, its deadline, its cancellation, or
ActorDied; it is sent at most once; a reply that comes too late is dropped, and its refs with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import faults
from .answers import Answers
from .calls import Pending, StreamState
from .codec import Codec, Encoded, StoreLike
from .context import CURRENT_CALL
from .errors import (
    ActorError,
    CallTimeout,
    NoSuchActor,
    ProtocolError,
    QueueFull,
    RuntimeClosed,
)
from .lanes import Lanes
from .messages import HEADER, HEADER_BYTES, Flag, Kind, pack
from .peers import AGENT, Notice, Peer, State
from .tracing import Tracing
from .transport import Link, LoopbackLink

if TYPE_CHECKING:
    from .mailbox import LocalActor

__all__ = ["IN_FLIGHT_MAX", "WAITING_MAX", "Node"]

log = logging.getLogger("actors")

# Calls in flight from one process to one actor; more wait in the caller.
IN_FLIGHT_MAX = 4096
# Calls that wait in the caller for one actor; more raise QueueFull.
WAITING_MAX = 1 << 18
# Dead actors of which this process remembers why.
DEAD_REMEMBERED_MAX = 1024
# After a link broke: how long to wait for the supervisor's word on why.
POST_MORTEM_S = 0.8
_RESULT, _ERROR, _CALL, _TELL = int(Kind.RESULT), int(Kind.ERROR), int(Kind.CALL), int(Kind.TELL)
_REFS = int(Flag.REFS)


class Node:
    """See the module. `uid` is 0 in the driver, else the number of the process's actor."""

    def __init__(
        self,
        uid: int,
        token: bytes,
        *,
        store: StoreLike | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        keys: tuple[bytes, bytes] | None = None,
        incarnation: int = 1,
    ) -> None:
        self.uid = uid
        self.loop = asyncio.get_running_loop()
        self.codec = Codec(store, self)
        self.peers: dict[int, Peer] = {}
        self.locals: dict[int, LocalActor] = {}
        self.pending: dict[int, Pending] = {}
        self.links: dict[int, Link] = {}  # by process
        self.closed = False
        self.in_flight_max = in_flight_max
        self.on_exit: Callable[[int], None] | None = None  # sys.exit in a method
        self.on_process_lost: Callable[[int, str], None] | None = None
        self.resolve: Callable[[int], Any] | None = None  # asks the hub; set by client/hub
        self.late_replies = 0
        self.tracing: Tracing | None = None
        self._thread = threading.get_ident()
        self._ids = itertools.count(1)
        self._lanes = Lanes(self.loop, self, uid, token, incarnation, keys)
        self._loopback = LoopbackLink(self.loop, self, uid)
        self.links[uid] = self._loopback
        self._answers = Answers(self)
        self._dead: deque[int] = deque()
        self._resolving: set[asyncio.Task[None]] = set()

    # ---- threads ------------------------------------------------------------------------------

    def on_loop_thread(self) -> bool:
        """True on the thread that runs the node's loop."""
        return threading.get_ident() == self._thread

    def call_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        """Run on the loop thread, soon. Raises RuntimeClosed once the loop is gone."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise RuntimeClosed("the event loop of this runtime is closed") from error

    def next_call_id(self) -> int:
        return next(self._ids)

    # ---- links --------------------------------------------------------------------------------

    def listen(self, path: str) -> str:
        """Accept links at this path; returns the address to hand out."""
        return self._lanes.listen(path)

    def adopt_socket(self, sock: socket.socket, peer_uid: int, incarnation: int = 1) -> Link:
        """A socket of a pair that we or our parent made: trusted by construction."""
        link = self._lanes.adopt(sock, peer_uid, incarnation)
        self._set_process_link(peer_uid, link)
        return link

    def _connect(self, peer: Peer) -> Link | None:
        """A link to the process of `peer`; None when nobody listens there.

        The driver listens nowhere: its link is the lifeline, and is not made again.
        """
        if "://" not in peer.address:
            return None
        link = self._lanes.connect(peer.address, peer.node_uid, peer.incarnation)
        if link is not None:
            self._set_process_link(peer.node_uid, link)
        return link

    def _set_process_link(self, node_uid: int, link: Link) -> None:
        self.links[node_uid] = link
        for peer in self.peers.values():
            if peer.node_uid == node_uid and peer.state == State.UP:
                peer.link = link
                peer.lost = 0

    def on_link_closed(self, link: Link, why: str) -> None:
        """Cancel what that caller asked of us; our calls to it await the supervisor's word."""
        self._lanes.forget(link)
        for actor in list(self.locals.values()):
            actor.caller_gone(link)
        node_uid = link.peer_uid
        if self.links.get(node_uid) is not link or self.closed:
            return
        del self.links[node_uid]
        for peer in list(self.peers.values()):
            if peer.node_uid != node_uid or peer.link is not link:
                continue
            peer.link = None
            peer.lost = peer.incarnation
            if peer.state == State.UP:
                self.loop.call_later(
                    POST_MORTEM_S, self._post_mortem_over, peer, peer.incarnation, why
                )
        if self.on_process_lost is not None:
            self.on_process_lost(node_uid, why)

    def _post_mortem_over(self, peer: Peer, incarnation: int, why: str) -> None:
        """Nobody said why the link broke: what was sent over it must not wait any longer.

        The actor may be alive all the same; what was not sent yet gets one more try to reach it.
        """
        if peer.lost != incarnation or peer.state != State.UP or self.closed:
            return
        peer.lost = 0
        peer.death = (f"the link to its process broke: {why}", None, "")
        self._fail_calls(peer, unsent_too=False, waiting_too=False)
        if peer.waiting_live and peer.link is None:
            peer.link = self._connect(peer)
            if peer.link is None:
                self._fail_calls(peer, unsent_too=True)
            else:
                self.drain(peer)

    # ---- what the hub says --------------------------------------------------------------------

    def peer(self, uid: int, name: str = "") -> Peer:
        """The record of an actor, made on first use."""
        peer = self.peers.get(uid)
        if peer is None:
            peer = self.peers[uid] = Peer(uid, name or f"#{uid}", self.in_flight_max)
        return peer

    def agent_peer(self, uid: int) -> Peer:
        """The agent of actor process `uid`; not in the directory, kept under `-uid`."""
        agent = self.peers.get(-uid)
        if agent is None:
            agent = self.peers[-uid] = Peer(AGENT, f"agent of #{uid}", self.in_flight_max)
            agent.node_uid = uid
            agent.state = State.UP
            agent.incarnation = 1
            agent.link = self.links.get(uid)
        return agent

    def note(self, notice: Notice) -> None:
        """Take in a notice; calls that it decides end here."""
        peer = self.peer(notice.uid, notice.name)
        if notice.incarnation < peer.incarnation or notice.version < peer.version:
            return
        peer.version = notice.version
        peer.name, peer.node_uid, peer.incarnation = (
            notice.name, notice.node_uid, notice.incarnation,
        )  # fmt: skip
        peer.address, peer.state, peer.pid = notice.address, notice.state, notice.pid
        if notice.class_name:
            peer.class_name, peer.methods = notice.class_name, notice.methods
        if notice.state == State.UP:
            peer.death = None
            peer.link = self.links.get(peer.node_uid)
            peer.lost = 0
            self.drain(peer)
        elif notice.state in (State.DEAD, State.RESTARTING):
            peer.link = None
            peer.death = (notice.reason, notice.exit_code, notice.stderr_tail)
            self._fail_calls(peer, unsent_too=notice.state == State.DEAD)
            if notice.state == State.DEAD:
                self._remember_dead(notice.uid)
            hosted = self.locals.get(notice.uid)
            if hosted is not None and notice.node_uid == self.uid != notice.uid:
                del self.locals[notice.uid]
                hosted.close()
            if notice.node_uid == notice.uid:
                agent = self.peers.pop(-notice.uid, None)
                if agent is not None:
                    agent.death = peer.death
                    self._fail_calls(agent, unsent_too=True)
                self._drop_process(notice.uid, notice.incarnation)

    def _remember_dead(self, uid: int) -> None:
        """Keep the last dead ones, to say why; handles that are still held keep theirs anyway."""
        self._dead.append(uid)
        if len(self._dead) > DEAD_REMEMBERED_MAX:
            self.peers.pop(self._dead.popleft(), None)

    def _drop_process(self, node_uid: int, incarnation: int) -> None:
        if node_uid != self.uid:
            link = self.links.get(node_uid)
            if link is not None and link.peer_incarnation <= incarnation:
                del self.links[node_uid]
            self._lanes.close_peer(node_uid, incarnation)

    def _fail_calls(self, peer: Peer, *, unsent_too: bool, waiting_too: bool = True) -> None:
        """End the calls that were in flight to a dead process (at most once: none is resent).

        Of those not sent: all, or (`waiting_too`) those that do not wait for a restart, or none.
        """
        for call in [c for c in self.pending.values() if c.peer is peer]:
            if call.frame is None or unsent_too or (waiting_too and not call.waits_when_down):
                self.forget(call)
                call.fail(peer.died())

    # ---- calling ------------------------------------------------------------------------------

    def inherited(self) -> tuple[tuple[int, ...], int, tuple[int, int, int]]:
        """Chain, deadline and trace of the call that is running here, if it still runs."""
        call = CURRENT_CALL.get()
        if call is None or not call.active:
            return (), 0, (0, 0, 0)
        return call.chain, call.deadline_ns, call.trace

    def submit(self, call: Pending, timeout_s: float | None = None) -> None:
        """Send a call, or let it wait for its actor. The call's frame is set already."""
        if self.closed:
            call.fail(RuntimeClosed(f"{call.label}: this runtime has ended"))
            return
        if call.abandoned:  # cancelled on another thread before it got here
            return
        peer = call.peer
        self.pending[call.call_id] = call
        if timeout_s is not None:
            call.timer = self.loop.call_later(timeout_s, self._expire, call, timeout_s)
        link = peer.link
        if link is not None and peer.in_flight < peer.in_flight_max and not peer.waiting_live:
            self._send(peer, link, call)
        else:
            self._wait_or_fail(peer, call)

    def _send(self, peer: Peer, link: Link, call: Pending) -> None:
        frame = call.frame
        assert frame is not None, "a call is sent once"
        try:
            link.send(frame)
        except QueueFull as error:
            self._refuse(call, error)
            return
        call.frame = None
        peer.in_flight += 1
        if call.keep:
            link.kept[call.call_id, 0, 0] = call.keep
            call.keep = ()
        if faults.hook is not None:
            faults.hook("call.sent")

    def _wait_or_fail(self, peer: Peer, call: Pending) -> None:
        """No link, or too many in flight: decide by the actor's state."""
        if peer.state == State.DEAD or (
            peer.state == State.RESTARTING and not call.waits_when_down
        ):
            self._refuse(call, peer.died())
            return
        if peer.waiting_live >= WAITING_MAX:
            error = QueueFull(f"{WAITING_MAX} calls wait for actor {peer.name!r} already")
            self._refuse(call, error)
            return
        peer.waiting.append(call)
        peer.waiting_live += 1
        if peer.link is None:
            self._open(peer)

    def _open(self, peer: Peer) -> None:
        """Get a link to a peer whose address is known, or ask the hub where it is."""
        if peer.state == State.UP and peer.lost != peer.incarnation:
            peer.link = self.links.get(peer.node_uid) or self._connect(peer)
            if peer.link is None:
                peer.lost = peer.incarnation
                self.loop.call_later(
                    POST_MORTEM_S, self._post_mortem_over, peer, peer.incarnation,
                    "nobody listens at its address",
                )  # fmt: skip
            else:
                self.drain(peer)
        elif not peer.state and self.resolve is not None:
            peer.state = State.STARTING
            task = self.loop.create_task(self._resolve(peer))
            self._resolving.add(task)
            task.add_done_callback(self._resolving.discard)

    async def _resolve(self, peer: Peer) -> None:
        assert self.resolve is not None
        try:
            notice = await self.resolve(peer.uid)
        except ActorError as error:
            if peer.state != State.STARTING:
                return  # news came first
            peer.state = State.DEAD
            peer.death = (str(error), None, "")
            self._fail_calls(peer, unsent_too=True)
        else:
            self.note(notice)

    def drain(self, peer: Peer) -> None:
        """Send what waits, as far as the limit allows."""
        waiting = peer.waiting
        if waiting and peer.link is None:
            self._open(peer)
            return
        while waiting and peer.link is not None and peer.in_flight < peer.in_flight_max:
            call = waiting.popleft()
            if call.abandoned or call.frame is None:
                continue
            peer.waiting_live -= 1
            self._send(peer, peer.link, call)

    def forget(self, call: Pending) -> None:
        """Take a call out of the tables; it gets its end from the caller of this."""
        if self.pending.pop(call.call_id, None) is None:
            return
        if self.tracing is not None:
            self.tracing.end(call.call_id, "ended without an answer")
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        peer = call.peer
        if call.frame is None:
            peer.in_flight -= 1
            if peer.waiting_live:
                self.drain(peer)
        elif not call.abandoned:
            call.abandoned = True
            peer.waiting_live -= 1
            if len(peer.waiting) > 2 * peer.waiting_live + 64:
                peer.waiting = deque(c for c in peer.waiting if not c.abandoned)
        call.keep = ()

    def _refuse(self, call: Pending, error: ActorError) -> None:
        """End a call that is neither sent nor waiting."""
        del self.pending[call.call_id]
        if self.tracing is not None:
            self.tracing.end(call.call_id, str(error))
        if call.timer is not None:
            call.timer.cancel()
        call.keep = ()
        call.fail(error)

    def abandon(self, call_id: int) -> None:
        """The caller no longer wants the answer: cancel the call at the actor."""
        call = self.pending.get(call_id)
        if call is None:
            return
        sent, link, uid = call.frame is None, call.peer.link, call.peer.uid
        self.forget(call)
        if sent and link is not None:
            link.send(pack(Kind.CANCEL, call_id, uid))

    def _expire(self, call: Pending, timeout_s: float) -> None:
        if call.call_id in self.pending:
            call.timer = None
            self.abandon(call.call_id)
            call.fail(CallTimeout(f"{call.label} did not answer within {timeout_s:.3g} s"))

    def grant(self, state: StreamState, n: int) -> None:
        """Let a stream send `n` more items."""
        if state.peer.link is not None and state.frame is None:
            state.peer.link.send(pack(Kind.CREDIT, state.call_id, state.peer.uid, timeout_ns=n))

    # ---- frames -------------------------------------------------------------------------------

    def on_frame(self, link: Link, frame: memoryview) -> None:
        """Dispatch one frame. Raises ProtocolError, which closes the link."""
        head = HEADER.unpack_from(frame)
        kind = head[1]
        if not link.trusted:
            uid = self._lanes.admit(link, kind, frame[HEADER_BYTES:])
            old = self.links.get(uid)
            if old is None or old.closed:
                self._set_process_link(uid, link)
        elif kind in (_RESULT, _ERROR):
            self._answers.on_answer(link, head, frame)
        elif kind <= Kind.STREAM:
            self._on_call(link, head, frame)
        elif kind == Kind.ITEM:
            self._answers.on_item(link, head, frame)
        elif kind == Kind.DONE:
            self._answers.on_done(head[4])
        elif kind == Kind.ACK:
            link.kept.pop((head[4], head[5], 1 if head[2] & Flag.REPLY else 0), None)
        elif kind == Kind.CANCEL:
            actor = self.locals.get(head[5])
            if actor is not None:
                actor.cancel(link, head[4])
        elif kind == Kind.CREDIT:
            actor = self.locals.get(head[5])
            if actor is not None:
                actor.credit(link, head[4], head[10])
        else:
            raise ProtocolError(f"unknown kind of frame {kind}")

    def _on_call(self, link: Link, head: tuple[int, ...], frame: memoryview) -> None:
        if faults.hook is not None:
            faults.hook("call.received")
        actor = self.locals.get(head[5])
        if actor is not None:
            actor.receive(link, head, frame)
            return
        if head[2] & Flag.REFS:  # not taken in: the sender may let go
            link.send(pack(Kind.ACK, head[4]))
        if head[1] == _TELL:
            link.send(pack(Kind.DONE, head[4]))
            return
        error = NoSuchActor(f"no actor #{head[5]} lives in process {os.getpid()}")
        self.reply(link, Kind.ERROR, head[4], self.codec.encode_error(error))

    def reply(self, link: Link, kind: Kind, call_id: int, encoded: Encoded, item: int = 0) -> None:
        """Send an answer; its refs are kept until the caller has them."""
        if link.closed:
            return
        if faults.hook is not None:
            faults.hook("reply.encoded")
        if encoded.keep:
            link.kept[call_id, item, 1] = encoded.keep
        try:
            link.send(
                pack(
                    kind, call_id, item, flags=encoded.flags, body=encoded.body,
                    buffers=encoded.buffers, inline=encoded.inline,
                )
            )  # fmt: skip
        except QueueFull as error:
            log.error("closing the link to #%d: %s", link.peer_uid, error)
            link.close()
        if faults.hook is not None:
            faults.hook("reply.sent")

    # ---- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail what is pending, close every link. The loop goes on."""
        if self.closed:
            return
        self.closed = True
        for task in self._resolving:
            task.cancel()
        for call in list(self.pending.values()):
            self.forget(call)
            call.fail(RuntimeClosed(f"{call.label}: the runtime ended before the answer came"))
        self._lanes.close()
        self._loopback.close()
        self.links.clear()
