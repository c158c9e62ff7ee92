"""TCP connections: how bytes come in, who may stay, and whether an answer really left.

uvicorn's HTTP protocol sits behind a buffer that lets a large body arrive in one piece. Through the HTTP parser a
body of 1.1 MB comes in dozens of pieces, each copied four times, and the socket is stopped and started for most of
them. Here the parser sees the head of a request and what came with it; when the application then asks for the rest
(`receive_into`), the kernel writes it straight to where it will be used. The parser is told nothing of it: it is
replaced by a fresh one, as the next byte begins a new request. Between a head and the application's question nothing
is read, so strangers cannot make the server hold their bodies.

ASGI does not tell an application what became of its last bytes: a `Connection` per socket does. The last bytes of a
batch bypass uvicorn on their way out (`Connection.send_last`). Under another server, or a uvicorn that has changed,
there are no connections, and a response counts as sent when the server took it.
"""

import array
import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
MAX_STRANGERS = 512
MOST_DESCRIPTORS = 1 << 16
_TIOCOUTQ = 0x5411  # bytes in a socket's send queue that the peer has not acknowledged (Linux)


@dataclass(slots=True)
class Progress:
    """How far a connection has come; small, as whoever waits for an answer's fate keeps it.

    Attributes:
        requests: how many it brought.
        answered: the last request whose whole answer was handed to the network.
        broken: it ended in an error.
    """

    requests: int = 0
    answered: int = 0
    broken: bool = False
    closed: bool = False

    def lost_answer(self, request: int) -> bool:
        """Return True once it is certain that the answer to this request did not arrive."""
        return self.closed and self.requests == request and (self.broken or self.answered < request)


class Connection:
    """One client connection.

    Attributes:
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
        self.progress = Progress()
        self._count_sent = count_sent
        self._on_fate: Callable[[bool], None] | None = None

    def next_request(self) -> None:
        """Count a further request: whoever sent it has read the answer to the one before."""
        self.progress.requests += 1
        self._decide(True)

    def note_answer(self) -> None:
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
        """Whether what is sent now would not go out any more."""
        return self.progress.closed or self.transport.is_closing()

    def send_last(self, last: bytes, commit: Callable[[], None]) -> None:
        """Note an answer and send its last bytes, with as little as can be between the two.

        Everything before them must have left, and the connection must not be leaving.
        """
        write = self.transport.write
        commit()
        write(last)
        self._count_sent(len(last))

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


HEAD_S = 15.0
"""From the first to the last byte of a request's head; a connection that brings none has as long for its first."""

BODY_S = 60.0
"""Longest wait for the next byte of a body."""

HEAD_BYTES = 1 << 16
"""Read at once; and if so much comes without ending a head or being a body, its sender gets no further."""


class _Http(HttpToolsProtocol):
    """uvicorn's protocol, which can be told that the application took the rest of a body itself.

    Attributes:
        pending: bytes that the parser has and nobody else yet, such as those of an unfinished head.
    """

    def __init__(self, **uvicorn_settings: Any) -> None:
        super().__init__(**uvicorn_settings)
        self.pending = 0
        self._answering = self.cycle

    def data_received(self, data: bytes) -> None:
        self.pending += len(data)
        super().data_received(data)
        if self.pending > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may have {HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self.pending = 0
        super().on_headers_complete()
        if not self.pipeline:  # else it waits there for its turn
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self.pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.pending = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering, _ = self.pipeline[-1]
        super().on_response_complete()

    def awaits_body(self) -> bool:
        """Whether the current request's body is unfinished and somebody may want it."""
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete

    def body_was_taken(self) -> None:
        """The current request is complete; the next byte belongs to another one."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def answer_was_sent(self, nbytes: int) -> None:
        """The application sent so many bytes of the current answer itself; `cycle` may be one that waits behind it."""
        self._answering.expected_content_length -= nbytes


class Intake(asyncio.BufferedProtocol):
    """One client connection: bytes go to the HTTP parser, or into the buffer that the application gave."""

    _head = memoryview(bytearray(HEAD_BYTES))  # of all connections: what it is filled with is copied out at once

    def __init__(self, connections: Connections, http: _Http) -> None:
        self._http = http
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._rest: memoryview | None = None
        self._filled: asyncio.Future[bool] | None = None

    async def receive_into(self, rest: memoryview) -> bool:
        """Fill `rest`, the unread part of the current request's body; False when the client left before it was full."""
        self._rest, self._filled = rest, asyncio.get_running_loop().create_future()
        self._http.flow.resume_reading()
        return await self._filled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._http.connection_made(transport)
        self._peer = tuple(transport.get_extra_info("peername") or ())[:2]
        self._connection = Connection(transport, self.receive_into, self._http.answer_was_sent)
        self._connections.add(self._peer, self._connection)
        self._expect(HEAD_S)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._head if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        if self._rest is None:
            self._http.data_received(bytes(self._head[:nbytes]))
            if self._http.awaits_body():
                self._http.flow.pause_reading()  # until the application asks
                self._expect(BODY_S)
            elif not self._http.pending:
                self._expect(None)
            elif self._deadline is None:
                self._expect(HEAD_S)
            return
        self._rest = self._rest[nbytes:]
        self._expect(BODY_S if self._rest else None)
        if not self._rest:
            self._http.body_was_taken()
            self._finish(True)

    def eof_received(self) -> None:
        self._connection.peer_closed()
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self._peer, self._connection)
        self._expect(None)
        self._connection.lost(exc)
        self._http.connection_lost(exc)
        self._finish(False)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def _expect(self, within_s: float | None) -> None:
        """Close the connection unless its client sends more within so many seconds; None: expect nothing any more."""
        if self._deadline is not None:
            self._deadline.cancel()
        loop = self._http.loop
        self._deadline = None if within_s is None else loop.call_later(within_s, self._too_slow, within_s)

    def _too_slow(self, within_s: float) -> None:
        self._deadline = None
        if self._http.flow.read_paused:  # it is the application that lets the client wait
            self._expect(within_s)
        else:
            self._http.transport.close()

    def _finish(self, complete: bool) -> None:
        filled, self._rest, self._filled = self._filled, None, None
        if filled is not None and not filled.done():
            filled.set_result(complete)


def protocol(connections: Connections) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`, which only calls it: makes protocols that keep `connections` up to date.

    Where this uvicorn lacks what they reach into, it is uvicorn's own protocol: slower, and without `connections`.
    """

    def make(**uvicorn_settings: Any) -> asyncio.BaseProtocol:
        http = _Http(**uvicorn_settings)
        missing = [name for name in _REACHED_INTO if not hasattr(http, name)]
        if not missing:
            return Intake(connections, http)
        _warn_once(", ".join(missing))
        return HttpToolsProtocol(**uvicorn_settings)

    return cast(type[asyncio.Protocol], make)


@cache
def _warn_once(missing: str) -> None:
    logger.warning(
        "uvicorn %s has no %s in its HTTP protocol: large bodies cost more, broken deliveries are not noticed, idle "
        "connections are not cut off; install a version from the range of this package",
        uvicorn.__version__,
        missing,
    )


_REACHED_INTO = ("cycle", "parser", "flow", "pipeline", "transport", "on_response_complete", "send_400_response")
