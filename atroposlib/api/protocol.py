"""TCP connections: who may stay, how long a request may take to come, and whether an answer really left.

ASGI does not tell an application what became of its last bytes: a `Connection` per socket does. Under another server
there are no connections, and a response counts as sent when the server took it.
"""

import array
import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTION_KEY = "atropos.connection"
CHUNK_BYTES = 1 << 18
MAX_STRANGERS = 512
_TIOCOUTQ = 0x5411  # bytes in a socket's send queue that the peer has not acknowledged (Linux)


@dataclass(slots=True)
class Progress:
    """The progress of a connection; small, as whoever waits for an answer's fate keeps it."""

    requests: int = 0  # that it brought
    answered: int = 0  # the last request whose whole answer was handed to the network
    broken: bool = False  # it ended in an error
    closed: bool = False

    def lost_response(self, request: int) -> bool:
        """Return True once it is certain that the answer to this request did not arrive."""
        return self.closed and self.requests == request and (self.broken or self.answered < request)

    def has_arrived(self, request: int) -> bool:
        """Return True once it is certain that the answer to this request arrived."""
        return self.requests > request or (self.closed and not self.lost_response(request))


@dataclass(eq=False)
class Connection:
    """One client connection; the scope of each of its requests holds it under `CONNECTION_KEY`."""

    transport: asyncio.Transport
    host: str = ""
    progress: Progress = field(default_factory=Progress)
    _on_fate: Callable[[bool], None] | None = None

    def next_request(self) -> None:
        """Count a further request: whoever sent it has read the answer to the one before."""
        self.progress.requests += 1
        self._decide(True)

    def count_response(self) -> None:
        """Count the current request as answered, unless its client has left."""
        if not self.is_leaving():
            self.progress.answered = self.progress.requests

    def lost(self, error: Exception | None) -> None:
        """The socket is gone."""
        self.progress.broken = self.progress.broken or error is not None
        self.progress.closed = True
        self._decide(not self.progress.broken)

    def peer_closed(self) -> None:
        """The client stopped sending; if it has not acknowledged all our bytes, it never will."""
        self.progress.broken = self.progress.broken or self._unacknowledged() > 0

    def is_leaving(self) -> bool:
        """Return True when what is sent now would not go out any more."""
        return self.progress.closed or self.transport.is_closing()

    def when_known(self, request: int, callback: Callable[[bool], None]) -> None:
        """Call back once, with True when the answer to this request surely arrived, with False when it broke off."""
        if self.progress.requests > request:
            callback(True)
            return
        self._on_fate = callback
        if self.progress.closed:
            self._decide(not self.progress.broken)

    def _decide(self, arrived: bool) -> None:
        callback, self._on_fate = self._on_fate, None
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


class Strangers:
    """Strangers: connections none of whose requests was let in yet.

    Of one host's at most `max_strangers` stay: the oldest gives way, so that whoever only holds connections open takes
    no descriptor from those who ask.
    """

    def __init__(self, max_strangers: int = MAX_STRANGERS) -> None:
        self.max_strangers = max_strangers
        self._strangers: dict[str, dict[Connection, None]] = {}  # host -> connections, oldest first

    def add(self, connection: Connection) -> None:
        """Count a new connection; the oldest stranger of its host is cut off when there are too many."""
        strangers = self._strangers.setdefault(connection.host, {})
        strangers[connection] = None
        if len(strangers) > self.max_strangers:
            oldest = next(iter(strangers))
            del strangers[oldest]
            oldest.transport.abort()

    def forget(self, connection: Connection) -> None:
        """Count a connection no longer: a request over it was let in, or it is gone."""
        strangers = self._strangers.get(connection.host, {})
        strangers.pop(connection, None)
        if not strangers:
            self._strangers.pop(connection.host, None)


HEAD_S = 15.0
"""From the first to the last byte of a request's head; a connection that brings none has as long for its first."""

BODY_S = 60.0
"""Longest wait for the next byte of a body."""

HEAD_BYTES = 1 << 16
"""If so much comes without ending a head, its sender gets no further."""


class ConnectionProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with deadlines for what comes in, which tells each request its connection."""

    def __init__(self, strangers: Strangers, **uvicorn_settings: Any) -> None:
        super().__init__(**uvicorn_settings)
        self._strangers = strangers
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = Connection(transport, (transport.get_extra_info("peername") or ("",))[0])
        self._strangers.add(self._connection)
        self._expect(HEAD_S)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may have {HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION_KEY] = self._connection  # pyright: ignore[reportGeneralTypeIssues]
        self._in_head, self._head_bytes = True, 0
        self._expect(HEAD_S)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._expect(BODY_S)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._expect(BODY_S)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect(None)

    def eof_received(self) -> None:
        self._connection.peer_closed()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.forget(self._connection)
        self._expect(None)
        self._connection.lost(exc)
        super().connection_lost(exc)

    def _expect(self, within_s: float | None) -> None:
        """Close the connection unless its client sends more within this time; None: expect nothing any more."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if within_s is None else self.loop.call_later(within_s, self._too_slow, within_s)

    def _too_slow(self, within_s: float) -> None:
        if self.flow.read_paused:  # it is the application that lets the client wait
            self._expect(within_s)
        else:
            self.transport.close()
