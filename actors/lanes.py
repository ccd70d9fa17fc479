"""Opening links: who may talk to this process, and how this process reaches others.

Owns the listener, every open link, and the greeting that makes a link trusted: the run's token,
compared before anything of the link is unpickled. Used by `node` on its loop.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import struct

from .errors import NotSupported, ProtocolError
from .messages import PROTOCOL_VERSION, Kind, pack
from .transport import Link, LinkOwner, UnixLink, UnixListener

__all__ = ["Lanes"]

_HELLO = struct.Struct("<8sII32s")  # magic, protocol version, actor number, token of the run
_MAGIC = b"shmrlact"


class Lanes:
    """The links of one node. `owner` hears of their frames and ends."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, owner: LinkOwner, uid: int, token: bytes
    ) -> None:
        self._loop = loop
        self._owner = owner
        self._uid = uid
        self._token = token
        self._links: set[Link] = set()
        self._listener: UnixListener | None = None

    def listen(self, path: str) -> str:
        """Accept links at this path of the run's directory; returns the address."""
        self._listener = UnixListener(self._loop, path, self._on_accept)
        return self._listener.address

    def _on_accept(self, sock: socket.socket) -> None:
        self._links.add(UnixLink(self._loop, sock, self._owner))

    def adopt(self, sock: socket.socket, peer_uid: int) -> Link:
        """A socket of a pair that we or our parent made: trusted by construction."""
        link = UnixLink(self._loop, sock, self._owner, peer_uid=peer_uid, trusted=True)
        self._links.add(link)
        return link

    def connect(self, address: str, peer_uid: int) -> Link | None:
        """A new link to the process at this address; None when nobody listens there."""
        scheme, _, place = address.partition("://")
        if scheme != "unix":
            raise NotSupported(
                f"the address {address!r} is not on this machine; runs over several machines are"
                " planned, not there yet"
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(place)
        except OSError:
            sock.close()
            return None
        # We trust who listens in our 0700 directory; the other side wants our greeting.
        link = self.adopt(sock, peer_uid)
        hello = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, self._uid, self._token)
        link.send(pack(Kind.HELLO, 0, body=hello))
        return link

    def admit(self, link: Link, kind: int, body: memoryview) -> int:
        """Check the first frame of an accepted link; returns who it is.

        Raises ProtocolError, which closes the link. Nothing is unpickled here.
        """
        if kind != Kind.HELLO or len(body) != _HELLO.size:
            raise ProtocolError("the first frame is not a greeting")
        magic, version, uid, token = _HELLO.unpack(body)
        if magic != _MAGIC or not hmac.compare_digest(token, self._token):
            raise ProtocolError("the greeting does not belong to this run")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {version}, this is {PROTOCOL_VERSION}")
        link.peer_uid = uid
        link.trusted = True
        return int(uid)

    def forget(self, link: Link) -> None:
        """The link has closed."""
        self._links.discard(link)

    def close(self) -> None:
        """Close every link and stop listening."""
        for link in list(self._links):
            link.close()
        if self._listener is not None:
            self._listener.close()
