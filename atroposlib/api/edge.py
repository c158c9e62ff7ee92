"""The edge of the API: who may ask, how large and how packed a request is, and what every refusal looks like.

Pure ASGI, outermost first: `Gate` (access, metrics, connections), `BodyReader` (limits, gzip, content type).
"""

import asyncio
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api import auth
from atroposlib.api.group_codec import GROUPS_TYPE
from atroposlib.api.protocol import CONNECTION_KEY, Connection, Strangers
from atroposlib.api.run import Metrics
from atroposlib.api.schemas import Refused
from atroposlib.api.state_folder import StorageFull, Unreadable
from atroposlib.errors import GroupError

logger = logging.getLogger(__name__)

DISCARD_FACTOR = 16
"""A body over the limit is read to its end, up to this many times the limit, so that the client sees the answer."""

BODY_KEY = "atropos.body"
"""Where routes for groups find the body in the ASGI scope; Request.body() would copy it once more."""

INFLATE_INLINE_BYTES = 1 << 16
MEMBER_BYTES = 1 << 12
OPEN_PATHS = ("/health",)


@dataclass(eq=False)
class Gate:
    """Refuses strangers and web pages of other sites; times every request."""

    app: ASGIApp
    _: KW_ONLY
    token: str | None
    check_host: bool
    metrics: Metrics
    strangers: Strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        connection: Connection | None = scope.get(CONNECTION_KEY)
        if connection is not None:
            connection.next_request()
        started, status = time.perf_counter(), 500

        async def send_and_watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif connection is not None and not message.get("more_body"):
                connection.count_response()
            await send(message)

        refusal = self._refusal(scope)
        if connection is not None and refusal is None and (self.token is None or scope["path"] not in OPEN_PATHS):
            self.strangers.forget(connection)
        await (refusal or self.app)(scope, receive, send_and_watch)
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.request_done(route, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if auth.is_cross_site(headers):
            return refuse(403, "requests from web pages of other sites are refused")
        if self.check_host and not auth.names_this_machine(headers.get("host", "localhost")):
            return refuse(
                403, f"Host is {headers.get('host', '')[:80]!r}; this server has no token and answers only localhost"
            )
        if self.token is None or scope["path"] in OPEN_PATHS:
            return None
        if auth.is_authorized(headers.get("authorization"), self.token):
            return None
        response = refuse(
            401, f"this server needs a token: Authorization: Bearer TOKEN, http://:TOKEN@host, or {auth.TOKEN_VARIABLE}"
        )
        response.headers["WWW-Authenticate"] = 'Bearer, Basic realm="atropos"'
        return response


@dataclass(eq=False)
class BodyReader:
    """Hands each route its whole body, inflated and within limits, or answers 400, 413 or 415 itself."""

    app: ASGIApp
    _: KW_ONLY
    max_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body = await self._read(receive)
        if body is None:
            return  # the client left
        response = self._refusal(headers, body) if body else None
        if response is None and body and "gzip" in headers.get("content-encoding", "").lower():
            inflated = await self._inflate(body)
            body, response = (inflated, None) if isinstance(inflated, bytes) else (b"", inflated)
        if response is not None:
            await response(scope, receive, send)
            return
        scope[BODY_KEY] = body
        delivered = False

        async def receive_whole() -> Message:
            nonlocal delivered
            if delivered:
                return await receive()
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_whole, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; cut just over the limit when too long; None when the client left in the middle."""
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size <= self.max_bytes or not chunks or size - len(chunk) <= self.max_bytes:
                chunks.append(chunk)
            if not more or size > self.max_bytes * DISCARD_FACTOR:
                return b"".join(chunks)

    def _refusal(self, headers: Headers, body: bytes) -> Response | None:
        if len(body) > self.max_bytes:
            return self._too_large("the body")
        kind = _content_type(headers)
        if kind != "application/json" and kind != GROUPS_TYPE and not kind.endswith("+json"):
            return refuse(415, f"Content-Type is {kind[:80]!r}; expected application/json or {GROUPS_TYPE}")
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity") and "gzip" not in encoding:
            return refuse(415, f"Content-Encoding is {encoding[:80]!r}; expected gzip or none")
        return None

    async def _inflate(self, body: bytes) -> bytes | Response:
        try:
            if len(body) > INFLATE_INLINE_BYTES:
                return await asyncio.to_thread(gunzip, body, self.max_bytes)
            return gunzip(body, self.max_bytes)
        except OverflowError:
            return self._too_large("the inflated body")
        except (zlib.error, EOFError):
            return PlainTextResponse("Invalid gzip payload", status_code=400)

    def _too_large(self, what: str) -> Response:
        response = refuse(413, f"{what} is above {self.max_bytes} bytes; send smaller groups or raise --max-body-mb")
        response.headers["Connection"] = "close"
        return response


def is_binary(headers: Headers) -> bool:
    """Return True when the body is groups in binary form."""
    return _content_type(headers) == GROUPS_TYPE


def _content_type(headers: Headers) -> str:
    return headers.get("content-type", "application/json").partition(";")[0].strip().lower()


def gunzip(body: bytes, max_bytes: int) -> bytes:
    """Inflate all members of a gzip body; OverflowError above `max_bytes`, more than which is never held.

    EOFError: it ends in the middle. zlib.error: it is not gzip.
    """
    parts, size, at = [], 0, 0
    stream = zlib.decompressobj(wbits=31)
    while at < len(body):
        # a first member is usually all; of others little at a time, as what follows a member is copied
        piece = memoryview(body)[at : at + MEMBER_BYTES] if at else body
        part = stream.decompress(piece, max_bytes - size + 1)
        size += len(part)
        if size > max_bytes:
            raise OverflowError
        parts.append(part)
        at += len(piece) - len(stream.unused_data)
        if stream.eof and at < len(body):
            stream = zlib.decompressobj(wbits=31)
    if not stream.eof:
        raise EOFError
    return parts[0] if len(parts) == 1 else b"".join(parts)


def json_response(content: Mapping[str, object]) -> Response:
    """A small JSON response, without FastAPI's serialisation."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def refuse(status: int, sentence: str, code: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error response; clients read `detail`, programs may read `code`."""
    content = {"detail": sentence} if code is None else {"detail": sentence, "code": code}
    return _PlainJson(content, status_code=status, headers=headers)


class _PlainJson(JSONResponse):
    """ASCII, so that it can say what was no text: half of a surrogate pair."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def _refused(error: Refused) -> Response:
    if error.code == "not_registered":  # no failure to trainers of 0.4.0; null, as they take a list for a batch
        response = {"status": "error", "message": str(error), "batch": None, "code": error.code}
        return _PlainJson(response, status_code=error.status)
    return refuse(error.status, str(error), error.code)


def _unreadable(error: Unreadable) -> Response:
    # trainers that look at `batch` and not at the status find none, and ask again
    content = {"detail": str(error), "code": "unreadable", "batch": None}
    return _PlainJson(content, status_code=503, headers={"Retry-After": "5"})


def invalid_request(error: RequestValidationError) -> JSONResponse:
    """FastAPI's form, without echoing the input: a bad body of a megabyte must not come back."""
    details = [
        {
            "type": e["type"],
            "loc": [str(part)[:80] if isinstance(part, str) else part for part in e["loc"]],
            "msg": e["msg"][:500],
        }
        for e in error.errors()[:20]
    ]
    return _PlainJson({"detail": details}, status_code=422)


_RESPONSES: dict[type[Exception], Callable[..., Response]] = {
    Refused: _refused,
    GroupError: lambda error: _PlainJson(
        {"detail": [{"type": "value_error", "loc": ["body"], "msg": str(error)}]}, status_code=422
    ),
    StorageFull: lambda error: refuse(503, str(error), "storage_full", {"Retry-After": "5"}),
    Unreadable: _unreadable,
    RequestValidationError: invalid_request,
}


def add_error_responses(api: FastAPI) -> None:
    async def respond(request: Request, error: Exception) -> Response:
        return _RESPONSES[type(error)](error)

    for kind in _RESPONSES:
        api.add_exception_handler(kind, respond)
