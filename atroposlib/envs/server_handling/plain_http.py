"""HTTP/1.1 POST without TLS, at a third of the CPU that aiohttp takes.

Requests to inference servers are what an environment does all day: with groups of 16 short answers, aiohttp would be
an eighth of its CPU. Whatever else HTTP can do (TLS, redirects, streams, other methods) is left to it, see `transport`.
"""

import asyncio
import zlib
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import httptools

from atroposlib.envs.server_handling.faults import EndpointUnavailable


@dataclass(slots=True)
class Reply:
    """A whole reply, whatever its status."""

    status: int
    body: bytes
    retry_after: str | None


class PlainConnections:
    """The connections of one event loop: as many as there are requests at once, kept open between requests."""

    def __init__(self, *, connect_timeout_s: float, keepalive_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._open: set[_Connection] = set()
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}

    async def post(self, url: str, body: bytes, *, header_lines: bytes, deadline_s: float) -> Reply:
        """Send `body`.

        Args:
            header_lines: each ended by CRLF; host and length are added.

        Raises:
            EndpointUnavailable: no connection could be made.
            ConnectionError: the connection broke, or what came is not HTTP.
            TimeoutError: no whole reply within `deadline_s`.
        """
        address, head = _target(url)
        give_up_at = asyncio.get_running_loop().time() + deadline_s
        idle = self._idle.setdefault(address, deque())
        connection = self._take(idle) or await self._connect(address, deadline_s)
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (head, header_lines, len(body), body)
        reply = await connection.exchange(request, give_up_at)
        if not connection.is_closed:
            idle.append(connection)
        return reply

    def close(self) -> None:
        """Close all connections; requests in flight raise ConnectionError."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def _take(self, idle: "deque[_Connection]") -> "_Connection | None":
        """The connection used last, which the server is least likely to be closing."""
        oldest = asyncio.get_running_loop().time() - self._keepalive_s
        while idle:
            connection = idle.pop()
            if not connection.is_closed and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self, address: tuple[str, int], deadline_s: float) -> "_Connection":
        try:
            async with asyncio.timeout(min(self._connect_timeout_s, deadline_s)):
                loop = asyncio.get_running_loop()
                return (await loop.create_connection(lambda: _Connection(self._open), *address))[1]
        except (OSError, TimeoutError) as error:
            raise EndpointUnavailable(f"cannot connect to {':'.join(map(str, address))}: {error!r}") from error


class _Connection(asyncio.Protocol):
    """One request at a time. The methods without a docstring are called by the transport and the parser."""

    def __init__(self, members: "set[_Connection]") -> None:
        self._members = members
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Reply] | None = None
        self._headers: dict[bytes, bytes] = {}  # names in lower case
        self._parts: list[bytes] = []
        self._is_endless = False  # the reply that is coming does not say how long it is
        self._is_kept = False  # the last reply came whole, and the server takes another request
        self.idle_since = 0.0

    @property
    def is_closed(self) -> bool:
        """Nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, request: bytes, give_up_at: float) -> Reply:
        """Send and wait; closed afterwards unless the reply came whole and the server keeps the connection."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            raise ConnectionResetError("the server closed the connection")
        self._done, self._is_endless, self._is_kept = loop.create_future(), False, False
        alarm = loop.call_at(give_up_at, self._fail, TimeoutError())
        reply = None
        try:
            self._transport.write(request)
            reply = await self._done
            if self._headers.get(b"content-encoding") in (b"gzip", b"deflate"):  # though we asked for none
                reply.body = _inflated(reply.body)
            return reply
        finally:
            alarm.cancel()
            self._done, self.idle_since = None, loop.time()
            if reply is None or not self._is_kept:
                self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._is_endless = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]
        self._members.add(self)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.abort()  # the next request would take what nobody asked for as its reply
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the reply is not HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._members.discard(self)
        if self._is_endless and exc is None:
            self.on_message_complete()  # by closing the server says that the reply is whole
        self._fail(exc if isinstance(exc, ConnectionError) else ConnectionResetError(str(exc or "server disconnected")))

    def on_message_begin(self) -> None:
        self._headers, self._parts = {}, []
        self._is_endless = self._is_kept = False  # the latter when it follows the reply at once

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._is_endless = not self._headers.keys() & {b"content-length", b"transfer-encoding"}

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._done is not None and not self._done.done():
            retry_after = self._headers.get(b"retry-after", b"").decode("latin-1")
            self._is_kept = self._parser.should_keep_alive()
            self._done.set_result(Reply(status, b"".join(self._parts), retry_after or None))
        self._parts = []


def _inflated(body: bytes) -> bytes:
    try:
        return zlib.decompress(body, wbits=32 + zlib.MAX_WBITS)  # with either header
    except zlib.error as error:
        raise ConnectionError(f"the compressed reply is damaged: {error}") from error


@lru_cache(maxsize=256)
def _target(url: str) -> tuple[tuple[str, int], bytes]:
    """Host and port of a URL, and the head of a POST to it up to the first of its own header lines."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return (parts.hostname or "", parts.port or 80), f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n".encode("ascii")
