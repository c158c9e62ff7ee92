"""HTTP to one inference server: JSON bytes out, reply bytes in, every failure as one of our faults.

One connection pool per event loop, without a cap on connections: how many requests run is decided by semaphores
and the rollout pool. Pools close themselves when their event loop ends. Plain POSTs take the short way of `plain_http`.
TLS goes through the proxy that the environment names (HTTPS_PROXY, NO_PROXY); plain HTTP stays inside a cluster.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson
from pydantic import BaseModel

from atroposlib.envs.server_handling.faults import DeadlineFault, EndpointUnavailable, ReplyFault, fault_of_status
from atroposlib.envs.server_handling.plain_http import PlainConnections, Reply
from atroposlib.envs.server_handling.sampling import as_plain
from atroposlib.errors import RequestFault
from atroposlib.type_definitions import JsonObject

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0
"""Below the 5 s after which uvicorn (SGLang, vLLM) closes idle connections, so that none is closed under a request."""


class Transport:
    """Posts and gets for one server."""

    def __init__(self, api_key: str | None = None) -> None:
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json", **bearer(api_key)}
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
                reply = await _post(pool.session, url, data, deadline_s=deadline_s, headers=headers)
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
                rest = b""
                async for chunk in reply.content.iter_any():
                    rest += chunk
                    if b"\n" in chunk:  # JSON has none, so an event may have ended
                        *events, rest = rest.split(b"\n\n")
                        for event in events:
                            data = event.removeprefix(b"data: ")
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
    plain: PlainConnections
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


async def _post(
    session: aiohttp.ClientSession, url: str, data: bytes, *, deadline_s: float, headers: dict[str, str] | None
) -> Reply:
    """With TLS, redirects and whatever else a request may need."""
    timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_TIMEOUT_S)
    async with session.post(url, data=data, headers=headers, timeout=timeout, proxy=_proxy_of(url)) as reply:
        return Reply(reply.status, await reply.read(), reply.headers.get("Retry-After"))


def _proxy_of(url: str) -> str | None:
    """As OpenAI's own client finds it for TLS; on compute nodes it is often the only way out."""
    if not url.startswith("https://") or proxy_bypass(urlsplit(url).netloc):
        return None
    return getproxies().get("https")


def bearer(api_key: str | None) -> dict[str, str]:
    """The authorization header, if there is a key; a line end that a file or secret left on it is not sent."""
    key = (api_key or "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def request_json(payload: JsonObject) -> bytes:
    """Write a payload as OpenAI's own client does, which may hold its message objects; NumPy's numbers, too.

    Raises:
        RequestFault: something in it cannot be written, such as half a surrogate pair.
    """
    try:
        return orjson.dumps(payload, default=_jsonable)
    except TypeError:  # keys that are numbers (`logit_bias`), integers beyond 64 bits
        try:
            return json.dumps(payload, default=_jsonable, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RequestFault(f"the request cannot be written as JSON: {error}") from error


def _jsonable(value: object) -> object:
    """A message object without the fields that nobody set; NumPy's scalars and arrays as Python's."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True, exclude_none=True, warnings=False)
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
