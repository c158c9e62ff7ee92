"""HTTP to one inference server: JSON bytes out, reply bytes in, every failure as one of our faults.

One connection pool per event loop, without a cap on connections: how many requests run is decided by semaphores
and the rollout pool. Pools close themselves when their event loop ends. TLS goes through the proxy that the environment
names (HTTPS_PROXY, NO_PROXY); plain HTTP stays inside a cluster. Its POSTs, which are what an environment does all day,
take a way of their own at a third of aiohttp's CPU; TLS, redirects, streams and other methods are left to aiohttp.
"""

import asyncio
import base64
import json
import zlib
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httptools
import numpy as np
import orjson
from pydantic import BaseModel

from atroposlib.envs.server_handling.faults import DeadlineFault, EndpointUnavailable, ReplyFault, fault_of_status
from atroposlib.envs.server_handling.sampling import as_plain
from atroposlib.errors import RequestFault
from atroposlib.type_definitions import JsonObject

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0
"""Below the 5 s after which uvicorn (SGLang, vLLM) closes idle connections, so that none is closed under a request."""


class Transport:
    """Posts and gets for one server."""

    def __init__(self, api_key: str | None = None, base_url: str | None = None) -> None:
        """`base_url` may hold a login, which takes the place of the key."""
        login = authorization(api_key, base_url)
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json", **login}
        self._header_lines = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items()).encode()
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}

    async def post(
        self, url: str, payload: JsonObject, *, deadline_s: float, headers: dict[str, str] | None = None
    ) -> bytes:
        """Body of the 2xx reply to `payload`.

        Raises:
            RequestFault: the server refused the request (4xx), with its words; or the payload is no JSON.
            EndpointUnavailable, ReplyFault, DeadlineFault: see there.
        """
        pool, data = await self._pool(), request_json(payload)
        is_plain = url.startswith("http://") and headers is None and "@" not in url
        with connection_faults(url, deadline_s):
            reply = None
            if is_plain:
                reply = await pool.plain.post(url, data, header_lines=self._header_lines, deadline_s=deadline_s)
            if reply is None or 300 <= reply.status < 400:
                timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_TIMEOUT_S)
                options = {"headers": headers, "timeout": timeout, "proxy": _proxy_of(url)}
                async with pool.session.post(url, data=data, **options) as answer:
                    reply = Reply(answer.status, await answer.read(), answer.headers.get("Retry-After"))
        if reply.status >= 300:
            raise fault_of_status(url, reply.status, reply.body, reply.retry_after)
        return reply.body

    async def stream(
        self,
        url: str,
        payload: JsonObject,
        on_event: Callable[[bytes], None],
        *,
        deadline_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Hand the data of each server-sent event of the reply to `on_event`, as it comes; faults as `post`.

        An event that is an error object counts as that error: SGLang says 200 before it has looked at the request.
        """
        session = (await self._pool()).session
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_TIMEOUT_S)
        with connection_faults(url, deadline_s):
            data, proxy = request_json(payload), _proxy_of(url)
            async with session.post(url, data=data, headers=headers, timeout=timeout, proxy=proxy) as reply:
                if reply.status >= 300:
                    raise fault_of_status(url, reply.status, await reply.read(), reply.headers.get("Retry-After"))
                if reply.content_type == "application/json":  # a server, or a gateway, that does not stream
                    on_event(await reply.read())
                    return
                rest = b""
                async for chunk in reply.content.iter_any():
                    rest += chunk
                    if b"\n" in chunk:  # JSON has none, so an event may have ended
                        *events, rest = rest.split(b"\n\n")
                        for event in events:
                            # lines with a colon first are comments, by which gateways keep a connection open
                            lines = (line for line in event.splitlines() if line[:1] not in (b":", b""))
                            data = b"\n".join(line.removeprefix(b"data: ") for line in lines)
                            if not data:
                                continue
                            if data.startswith(b'{"error"'):
                                raise fault_of_status(url, _status_of_error(data), data)
                            on_event(data)

    async def get(self, url: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body; EndpointUnavailable when nothing answers in time."""
        session = (await self._pool()).session
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            async with session.get(url, timeout=timeout, proxy=_proxy_of(url)) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EndpointUnavailable(f"GET {url} failed: {error!r}") from error

    async def close(self) -> None:
        """Close this loop's pool; requests in flight fail with ReplyFault, later ones open a new pool."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None and pool.owner is not None:
            await pool.owner.aclose()

    async def _pool(self) -> "_Pool":
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            self._pools = {known: kept for known, kept in self._pools.items() if not known.is_closed()}
            owner = _own_pool(self._headers)
            pool = self._pools[loop] = await anext(owner)
            pool.owner = owner
        return pool


@dataclass(slots=True)
class _Pool:
    session: aiohttp.ClientSession
    plain: "PlainConnections"
    owner: AsyncGenerator["_Pool", None] | None = None


async def _own_pool(headers: dict[str, str]) -> AsyncGenerator[_Pool, None]:
    """Yields one pool. As a generator it is closed by the event loop's own shutdown, whoever forgets to."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    plain = PlainConnections(connect_timeout_s=CONNECT_TIMEOUT_S, keepalive_s=KEEPALIVE_S)
    try:
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            yield _Pool(session, plain)
    finally:
        plain.close()
        await asyncio.sleep(0)  # for the transports to close


def _proxy_of(url: str) -> str | None:
    """As OpenAI's own client finds it for TLS; on compute nodes it is often the only way out."""
    if not url.startswith("https://") or proxy_bypass(urlsplit(url).netloc):
        return None
    return getproxies().get("https")


def authorization(api_key: str | None, base_url: str | None = None) -> dict[str, str]:
    """The authorization header, if there is a key or a login; a line end that a file left on a key is not sent."""
    login = urlsplit(base_url or "").netloc.rpartition("@")[0]
    if login:
        user, _, password = login.partition(":")
        pair = f"{unquote(user)}:{unquote(password)}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    key = (api_key or "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def request_json(payload: JsonObject) -> bytes:
    """Write a payload as OpenAI's own client does, which may hold its message objects; NumPy's numbers, too.

    Raises:
        RequestFault: something in it cannot be written, such as half a surrogate pair.
    """
    try:
        return orjson.dumps(payload, default=_jsonable, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # keys that are numbers (`logit_bias`), integers beyond 64 bits
        try:
            return json.dumps(payload, default=_jsonable, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RequestFault(f"the request cannot be written as JSON: {error}") from error


def _jsonable(value: object) -> object:
    """A message object without the fields that nobody set; NumPy's scalars and arrays as Python's."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True, exclude_none=True, warnings=False)
    if isinstance(value, array) and value.typecode == "i":
        return np.frombuffer(value, np.int32)  # written without a Python number for each
    plain = as_plain(value)
    if plain is value:
        raise TypeError(f"{type(value).__name__} is no JSON")
    return plain


@contextmanager
def connection_faults(url: str, deadline_s: float) -> Iterator[None]:
    """Turn what connections raise inside the block into our faults."""
    try:
        yield
    except EndpointUnavailable:
        raise
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EndpointUnavailable(f"cannot connect to {url}: {error}") from error
    except TimeoutError as error:
        raise DeadlineFault(
            f"POST {url} gave no reply within its deadline of {deadline_s:.0f} s; if the engine is only slow, "
            "raise the server config's timeout or lower max_num_workers"
        ) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ReplyFault(f"POST {url} lost its connection: {error!r}") from error


def _status_of_error(event: bytes) -> int:
    """The status that SGLang would have answered; before it said so in `code` it sent only refusals as events."""
    try:
        code = orjson.loads(event)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return 400
    return code if isinstance(code, int) and code >= 400 else 400


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
