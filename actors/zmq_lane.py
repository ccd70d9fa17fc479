"""The lane for `tcp://`: ZeroMQ ROUTER and DEALER, encrypted and authenticated by CURVE.

Owns the ZeroMQ context and sockets of a process. Used by `lanes` when an address says tcp; loads
pyzmq only then. Beside the Unix lane for same-host links it is about half as fast
(docs/decisions/0301), so it serves addresses that a Unix socket cannot reach.

What it promises: a peer that does not hold the run's key never gets a byte to the code above
(ZeroMQ's handshake ends it); nothing is lost at a high-water mark, because there is none: what may
be under way is bounded by the calls in flight; a send never blocks. Sockets are edge-triggered: the
edge can be consumed by a send (pyzmq#1203), so every send is followed by a look for input.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from .errors import ProtocolError
from .messages import FRAME_BYTES_MAX, HEADER, HEADER_BYTES
from .transport import LinkOwner

__all__ = ["CurveKeys", "ZmqLanes", "new_keys"]

log = logging.getLogger("actors")

_ZAP = "inproc://zeromq.zap.01"
_LINGER_MS = 500
# A connection attempt that hears nothing ends the link.
_HANDSHAKE_MS = 2000
_GONE = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class CurveKeys(NamedTuple):
    """The run's key pair: every process of the run holds it, nobody else does."""

    public: bytes  # Z85, 40 characters
    secret: bytes


def new_keys() -> CurveKeys:
    """A fresh pair for a run."""
    return CurveKeys(*zmq.curve_keypair())


class ZmqLink:
    """One peer: a DEALER that we connected, or one identity behind our ROUTER."""

    def __init__(
        self,
        send: Callable[[bytes], None],
        on_close: Callable[[ZmqLink], None],
        owner: LinkOwner,
        *,
        peer_uid: int,
        trusted: bool,
    ) -> None:
        self.peer_uid = peer_uid
        self.peer_incarnation = 0
        self.trusted = trusted
        self.closed = False
        self.kept: dict[tuple[int, int, int], Any] = {}
        self._send = send
        self._on_close = on_close
        self._owner = owner

    def send(self, frame: bytes) -> None:
        if not self.closed:
            self._send(frame)

    def deliver(self, frame: memoryview) -> None:
        """One message came in; a broken one closes the link."""
        try:
            if not HEADER_BYTES <= len(frame) <= FRAME_BYTES_MAX:
                raise ProtocolError(f"a message of {len(frame)} bytes is no frame")
            if HEADER.unpack_from(frame)[0] != len(frame):
                raise ProtocolError("a frame's length is not that of its message")
            self._owner.on_frame(self, frame)
        except ProtocolError as error:
            self.fail(str(error))

    def close(self) -> None:
        self.fail("closed here")

    def fail(self, why: str) -> None:
        """End the link; its owner hears of it once."""
        if self.closed:
            return
        self.closed = True
        self._on_close(self)
        self._owner.on_link_closed(self, why)
        self.kept.clear()


class _Socket:
    """One ZeroMQ socket on the loop: drained by its descriptor, sends queued when it is full."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[Any]], None],
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_message = on_message
        self._out: list[list[bytes]] = []
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        loop.add_reader(self._fd, self._on_edge)
        self._look_soon()  # the edge of what came in before we watched is gone

    def send(self, parts: list[bytes]) -> None:
        """Queue a message; it goes out with this turn of the loop."""
        self._out.append(parts)
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._on_edge)

    def _on_edge(self) -> None:
        """Send what waits, take what is there, until both say no: then the next edge wakes us."""
        self._scheduled = False
        sent = 0
        while sent < len(self._out) and not self._socket.closed:
            try:
                self._socket.send_multipart(self._out[sent], zmq.NOBLOCK, copy=True)
            except zmq.Again:
                break
            except zmq.ZMQError as error:  # the peer behind a ROUTER is gone
                log.debug("a message to a lost peer: %s", error)
            sent += 1
        del self._out[:sent]
        while not self._socket.closed:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._on_message(parts)

    def close(self) -> None:
        """What was sent is delivered if that takes no longer than the linger time."""
        if self._socket.closed:
            return
        if self._out:
            self._on_edge()
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=_LINGER_MS)


class ZmqLanes:
    """The tcp links of one node."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: LinkOwner, keys: CurveKeys) -> None:
        self._loop = loop
        self._owner = owner
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: _Socket | None = None
        self._inbound: dict[bytes, ZmqLink] = {}
        self._sockets: list[_Socket] = []
        self._on_link: Callable[[ZmqLink], None] | None = None
        self._guard: _Socket | None = None

    def listen(self, host: str, on_link: Callable[[ZmqLink], None]) -> str:
        """Accept peers that hold the run's key; returns the address with its port."""
        self._on_link = on_link
        self._start_guard()
        router = self._context.socket(zmq.ROUTER)
        self._set_up(router)
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = self._keys
        router.zap_domain = b"shmrl"
        router.router_mandatory = True
        port = router.bind_to_random_port(f"tcp://{host}")
        self._router = _Socket(self._loop, router, self._on_routed)
        self._sockets.append(self._router)
        return f"tcp://{host}:{port}"

    def connect(self, address: str, peer_uid: int) -> ZmqLink:
        """A link to the process at this address; whether it answers, its first event tells."""
        dealer = self._context.socket(zmq.DEALER)
        self._set_up(dealer)
        dealer.curve_serverkey = self._keys.public
        dealer.curve_publickey, dealer.curve_secretkey = self._keys
        dealer.handshake_ivl = _HANDSHAKE_MS
        monitor = dealer.get_monitor_socket(_GONE)
        socket = _Socket(self._loop, dealer, lambda parts: link.deliver(parts[0].buffer))
        watch = _Socket(self._loop, monitor, lambda parts: self._on_event(link, parts))
        self._sockets += [socket, watch]

        def close(_: ZmqLink) -> None:
            watch.close()
            dealer.disable_monitor()
            socket.close()
            self._sockets.remove(socket)
            self._sockets.remove(watch)

        link = ZmqLink(
            lambda frame: socket.send([frame]), close, self._owner, peer_uid=peer_uid, trusted=True
        )
        dealer.connect(address)
        return link

    def _on_event(self, link: ZmqLink, parts: list[Any]) -> None:
        event = parse_monitor_message([bytes(part) for part in parts])["event"]
        link.fail(f"the connection ended ({zmq.Event(event).name})")

    def _on_routed(self, parts: list[Any]) -> None:
        """A message of a peer: the first of an identity is a new link."""
        identity = bytes(parts[0])
        link = self._inbound.get(identity)
        if link is None:
            router = self._router
            assert router is not None
            link = ZmqLink(
                lambda frame: router.send([identity, frame]),
                lambda _: self._forget_identity(identity),
                self._owner, peer_uid=-1, trusted=False,
            )  # fmt: skip
            self._inbound[identity] = link
            assert self._on_link is not None
            self._on_link(link)
        link.deliver(parts[-1].buffer)

    def _forget_identity(self, identity: bytes) -> None:
        self._inbound.pop(identity, None)

    def _start_guard(self) -> None:
        """Answer ZeroMQ's question (ZAP, RFC 27) whether a client's public key may come in."""
        guard = self._context.socket(zmq.ROUTER)  # a REP would refuse to look before it answers
        guard.bind(_ZAP)
        self._guard = _Socket(self._loop, guard, self._on_zap)
        self._sockets.append(self._guard)

    def _on_zap(self, parts: list[Any]) -> None:
        who, empty, version, request_id, _, _, _, mechanism, *credentials = map(bytes, parts)
        known = (
            mechanism == b"CURVE"
            and len(credentials) == 1
            and z85.encode(credentials[0]) == self._keys.public
        )
        code, text = (b"200", b"OK") if known else (b"400", b"not of this run")
        assert self._guard is not None
        user = b"actor" if known else b""
        self._guard.send([who, empty, version, request_id, code, text, user, b""])

    def _set_up(self, socket: zmq.Socket[bytes]) -> None:
        socket.sndhwm = socket.rcvhwm = 0  # bounded by calls in flight, not by dropping
        socket.linger = _LINGER_MS

    def close(self) -> None:
        """Close every socket and the context."""
        for socket in list(self._sockets):
            socket.close()
        self._sockets.clear()
        self._context.term()
