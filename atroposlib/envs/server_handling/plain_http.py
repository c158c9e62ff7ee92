"""HTTP/1.1 POST without TLS, redirects, cookies or compression, at a third of the CPU that aiohttp takes.

Requests to inference servers are what an environment does all day: with groups of 16 short answers, aiohttp's part
would be a fifth of all CPU. Everything else (TLS, streams, other methods, own headers) goes through aiohttp, see
`transport`.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import httptools


@dataclass(slots=True)
class PlainReply:
    """A whole reply. Header names are in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Target:
    host: str
    port: int
    head: bytes  # of the request, up to its own header lines


class PlainConnections:
    """Keeps connections of one event loop open between requests; as many as there are requests at once."""

    def __init__(self, *, connect_timeout_s: float, keepalive_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._open: set[_Connection] = set()
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}

    async def post(self, url: str, body: bytes, *, header_lines: bytes, deadline_s: float) -> PlainReply:
        """The reply, whatever its status.

        Args:
            header_lines: each ended by CRLF; host and length are added.

        Raises:
            ConnectionError: the connection broke, or what came is not HTTP.
            ConnectError: there is no connection.
            TimeoutError: no whole reply within `deadline_s`.
        """
        target = _target(url)
        give_up_at = asyncio.get_running_loop().time() + deadline_s
        connection = self._take(target) or await self._connect(target, deadline_s)
        head = b"%b%bContent-Length: %d\r\n\r\n" % (target.head, header_lines, len(body))
        reply = await connection.exchange(head + body, give_up_at)
        if not connection.is_closed:
            self._idle.setdefault((target.host, target.port), deque()).append(connection)
        return reply

    def close(self) -> None:
        """Close all connections; requests in flight raise ConnectionError."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def _take(self, target: _Target) -> "_Connection | None":
        """The connection used last, which the server is least likely to be closing."""
        idle = self._idle.get((target.host, target.port))
        oldest = asyncio.get_running_loop().time() - self._keepalive_s
        while idle:
            connection = idle.pop()
            if not connection.is_closed and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self, target: _Target, deadline_s: float) -> "_Connection":
        try:
            async with asyncio.timeout(min(self._connect_timeout_s, deadline_s)):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._open), target.host, target.port
                )
        except (OSError, TimeoutError) as error:
            raise ConnectError(str(error) or type(error).__name__) from error
        return connection


class ConnectError(Exception):
    """No connection could be made."""


class _Connection(asyncio.Protocol):
    """One request at a time. The methods without a docstring are called by the transport and the parser."""

    def __init__(self, members: "set[_Connection]") -> None:
        self._members = members
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[PlainReply] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._is_kept = False  # the last reply came whole, and more may follow
        self.idle_since = 0.0

    @property
    def is_closed(self) -> bool:
        """Nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, request: bytes, give_up_at: float) -> PlainReply:
        """Send and wait; closed afterwards unless the reply came whole and the server keeps the connection."""
        loop = asyncio.get_running_loop()
        self._done = done = loop.create_future()
        self._headers, self._parts, self._is_kept = {}, [], False
        alarm = loop.call_at(give_up_at, self._expire)
        try:
            if self._transport is None:
                raise ConnectionResetError("the server closed the connection")
            self._transport.write(request)
            return await done
        finally:
            alarm.cancel()
            self._done = None
            if not self._is_kept:
                self.abort()
            self.idle_since = loop.time()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _expire(self) -> None:
        self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]
        self._members.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the reply is not HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._members.discard(self)
        if self._done is not None and self._ends_with_the_connection():
            self.on_message_complete()
        self._fail(exc if isinstance(exc, ConnectionError) else ConnectionResetError(str(exc or "server disconnected")))

    def _ends_with_the_connection(self) -> bool:
        """The reply has begun and says nowhere how long it is."""
        return bool(self._headers) and not self._headers.keys() & {b"content-length", b"transfer-encoding"}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._done is not None and not self._done.done():
            self._is_kept = self._parser.should_keep_alive()
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._done.set_result(PlainReply(status, self._headers, body))


@lru_cache(maxsize=256)
def _target(url: str) -> _Target:
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
    return _Target(parts.hostname or "", parts.port or 80, head.encode("ascii"))
