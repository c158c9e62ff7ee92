"""Whether a response really left: TCP connections as the service sees them.

ASGI does not tell an application what became of its last bytes. `run-api` therefore serves with `intake.py`, which
keeps a `Connection` per socket. Under another server there is none, and a response counts as sent when the server
took it.
"""

import array
import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
MAX_STRANGERS = 512
MOST_DESCRIPTORS = 1 << 16
_TIOCOUTQ = 0x5411  # bytes in a socket's send queue that the peer has not acknowledged (Linux)


class Connection:
    """One client connection.

    Attributes:
        requests: how many requests it brought.
        answered: the last request whose whole answer was handed to the network.
        broken: it ended in an error.
        receive_into: fills a buffer with the unread part of a request's body; False when the client left.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        receive_into: Callable[[memoryview], Awaitable[bool]],
        count_sent: Callable[[int], None],
    ) -> None:
        self.transport = transport
        self.receive_into = receive_into
        self._count_sent = count_sent
        self.requests = self.answered = 0
        self.broken = False
        self.closed = False
        self._on_settled: Callable[[bool], None] | None = None

    def next_request(self) -> None:
        """A further request: whoever sent it has read the answer to the one before."""
        self.requests += 1
        self._settle(True)

    def note_answer(self) -> None:
        """Count the current request as answered, unless its client has left."""
        if not self.is_leaving():
            self.answered = self.requests

    def lost_answer(self, request: int) -> bool:
        """Return True once it is certain that the answer to this request did not arrive."""
        return self.closed and self.requests == request and (self.broken or self.answered < request)

    def lost(self, error: Exception | None) -> None:
        """The socket is gone."""
        self.broken = self.broken or error is not None
        self.closed = True
        self._settle(not self.broken)

    def peer_closed(self) -> None:
        """The client stopped sending; if it has not acknowledged all our bytes, it never will."""
        self.broken = self.broken or self._unacknowledged() > 0

    def is_leaving(self) -> bool:
        """Whether what is sent now would not go out any more."""
        return self.closed or self.transport.is_closing()

    def send_last(self, last: bytes, commit: Callable[[], None]) -> None:
        """Note an answer and send its last bytes, with as little as can be between the two.

        Everything before them must have left, and the connection must not be leaving.
        """
        write = self.transport.write
        commit()
        write(last)
        self._count_sent(len(last))

    def when_settled(self, request: int, callback: Callable[[bool], None]) -> None:
        """Call back once, with True when the answer to this request surely arrived, with False when it broke off."""
        if self.requests > request:
            callback(True)
            return
        self._on_settled = callback
        if self.closed:
            self._settle(not self.broken)

    def _settle(self, arrived: bool) -> None:
        callback, self._on_settled = self._on_settled, None
        if callback is not None:
            callback(arrived)

    def _unacknowledged(self) -> int:
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        if sock is None or self.transport.get_write_buffer_size() > 0:
            return self.transport.get_write_buffer_size()
        import fcntl

        pending = array.array("i", [0])
        try:
            fcntl.ioctl(sock.fileno(), _TIOCOUTQ, pending)
        except OSError:
            return 0
        return pending[0]


class Connections:
    """Open connections by peer address, as in an ASGI scope's `client`.

    A connection is a stranger until one of its requests was let in. Of one host's strangers at most `max_strangers`
    stay: the oldest gives way, so that whoever only holds connections open takes no descriptor from those who ask.
    """

    def __init__(self, max_strangers: int = MAX_STRANGERS) -> None:
        self.max_strangers = max_strangers
        self._by_peer: dict[Any, Connection] = {}
        self._strangers: dict[str, dict[Connection, None]] = {}  # host -> connections, oldest first

    def __len__(self) -> int:
        return len(self._by_peer)

    def get(self, peer: Any) -> Connection | None:
        """Return the connection from that address and port, if there is one."""
        return self._by_peer.get(peer)

    def add(self, peer: Any, connection: Connection) -> None:
        """Count a new connection; the oldest stranger of its host is cut off when there are too many."""
        self._by_peer[peer] = connection
        strangers = self._strangers.setdefault(_host(peer), {})
        strangers[connection] = None
        if len(strangers) > self.max_strangers:
            oldest = next(iter(strangers))
            del strangers[oldest]
            oldest.transport.abort()

    def let_in(self, peer: Any) -> None:
        """Note that a request over this connection was let in."""
        strangers = self._strangers.get(_host(peer))
        if strangers is not None and (connection := self._by_peer.get(peer)) is not None:
            self._forget_stranger(peer, connection)

    def remove(self, peer: Any, connection: Connection) -> None:
        """Forget a connection that is gone, not a later one from the same port."""
        if self._by_peer.get(peer) is connection:
            del self._by_peer[peer]
        self._forget_stranger(peer, connection)

    def _forget_stranger(self, peer: Any, connection: Connection) -> None:
        strangers = self._strangers.get(_host(peer), {})
        strangers.pop(connection, None)
        if not strangers:
            self._strangers.pop(_host(peer), None)


def _host(peer: Any) -> str:
    return peer[0] if peer else ""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to what the system allows this process; return it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
