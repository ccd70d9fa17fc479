"""Opening links: who may talk to this process, and how this process reaches others.

Owns the listener, every open link, and the greeting that makes a link trusted: the run's token,
compared before anything of the link is unpickled. Used by `node` on its loop.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

from .errors import NotSupported, ProtocolError
from .messages import PROTOCOL_VERSION, Kind, pack
from .transport import Link, LinkOwner, UnixLink, UnixListener

if TYPE_CHECKING:
    from .zmq_lane import ZmqLanes

__all__ = ["Lanes"]

_HELLO = struct.Struct("<8sIII32s")  # magic, protocol version, actor, incarnation, token
_MAGIC = b"shmrlact"


class Lanes:
    """The links of one node. `owner` hears of their frames and ends."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        owner: LinkOwner,
        uid: int,
        token: bytes,
        incarnation: int = 1,
        keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._loop = loop
        self._owner = owner
        self._uid = uid
        self._token = token
        self._incarnation = incarnation
        self._links: set[Link] = set()
        self._listener: UnixListener | None = None
        self._keys = keys
        self._zmq: ZmqLanes | None = None

    def listen(self, where: str) -> str:
        """Accept links at a path of the run's directory or "tcp://HOST"; returns the address."""
        if where.startswith("tcp://"):
            return self._tcp().listen(where.removeprefix("tcp://"), self._links.add)
        return self._listen_unix(where)

    def _listen_unix(self, path: str) -> str:
        self._listener = UnixListener(self._loop, path, self._on_accept)
        return self._listener.address

    def _on_accept(self, sock: socket.socket) -> None:
        self._links.add(UnixLink(self._loop, sock, self._owner))

    def adopt(self, sock: socket.socket, peer_uid: int, incarnation: int) -> Link:
        """A socket of a pair that we or our parent made: trusted by construction."""
        link = UnixLink(self._loop, sock, self._owner, peer_uid=peer_uid, trusted=True)
        link.peer_incarnation = incarnation
        self._links.add(link)
        return link

    def connect(self, address: str, peer_uid: int, incarnation: int) -> Link | None:
        """A new link to the process at this address; None when nobody listens there."""
        scheme, _, place = address.partition("://")
        if scheme == "tcp":
            tcp = self._tcp().connect(address, peer_uid)
            tcp.peer_incarnation = incarnation
            self._links.add(tcp)
            self._greet(tcp)
            return tcp
        if scheme != "unix":
            raise NotSupported(f"there is no lane to the address {address!r}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(place)
        except OSError:
            sock.close()
            return None
        # We trust who listens in our 0700 directory; the other side wants our greeting.
        link = self.adopt(sock, peer_uid, incarnation)
        self._greet(link)
        return link

    def _greet(self, link: Link) -> None:
        hello = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, self._uid, self._incarnation, self._token)
        link.send(pack(Kind.HELLO, 0, body=hello))

    def _tcp(self) -> ZmqLanes:
        """The ZeroMQ lanes, made on first use: a run on one machine needs no pyzmq."""
        if self._zmq is None:
            from .zmq_lane import CurveKeys, ZmqLanes

            if self._keys is None:
                raise NotSupported(
                    "tcp links need the keys of the run: start it with Runtime(transport='tcp')"
                )
            self._zmq = ZmqLanes(self._loop, self._owner, CurveKeys(*self._keys))
        return self._zmq

    def admit(self, link: Link, kind: int, body: memoryview) -> int:
        """Check the first frame of an accepted link; returns who it is.

        Raises ProtocolError, which closes the link. Nothing is unpickled here.
        """
        if kind != Kind.HELLO or len(body) != _HELLO.size:
            raise ProtocolError("the first frame is not a greeting")
        import hmac  # here, so that a driver, which accepts no links, starts without hashlib

        magic, version, uid, incarnation, token = _HELLO.unpack(body)
        if magic != _MAGIC or not hmac.compare_digest(token, self._token):
            raise ProtocolError("the greeting does not belong to this run")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {version}, this is {PROTOCOL_VERSION}")
        link.peer_uid, link.peer_incarnation = uid, incarnation
        link.trusted = True
        return int(uid)

    def close_peer(self, peer_uid: int, incarnation: int) -> None:
        """Close the links to a process that is dead; a tcp link does not see that by itself.

        Its successor may have greeted us before the news of the death came: that link stays.
        """
        for link in list(self._links):
            if link.peer_uid == peer_uid and link.peer_incarnation <= incarnation:
                link.close()

    def forget(self, link: Link) -> None:
        """The link has closed."""
        self._links.discard(link)

    def close(self) -> None:
        """Close every link and stop listening."""
        for link in list(self._links):
            link.close()
        if self._listener is not None:
            self._listener.close()
        if self._zmq is not None:
            self._zmq.close()
            self._zmq = None
