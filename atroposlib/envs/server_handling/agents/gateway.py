"""The routes of rollouts: those of the model, opened by a rollout's key, and those of the environment.

A reply is generated and recorded whole; a stream is replayed from it. For `QUIET_S` nothing is sent, so that a fault
keeps its status; then an agent that waits is kept awake with events (blanks in front of JSON) that say nothing.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import orjson
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from xxhash import xxh3_128_digest

from atroposlib.api.auth import is_authorized
from atroposlib.envs.server_handling.agents.dialect import (
    CHAT,
    COMPLETIONS,
    Body,
    Dialect,
    json_object,
    refuse_begun_answer,
)
from atroposlib.envs.server_handling.agents.messages import MESSAGES
from atroposlib.envs.server_handling.agents.record import Exchange
from atroposlib.envs.server_handling.agents.responses import RESPONSES
from atroposlib.envs.server_handling.agents.rollouts import NotFoundError, Refusal, Rollout, Rollouts
from atroposlib.envs.server_handling.agents.settings import RolloutSettings
from atroposlib.envs.server_handling.proxy_client import UNKNOWN_SESSION, UnknownSessionError
from atroposlib.envs.server_handling.tool_arguments import escaped
from atroposlib.errors import AtroposError, ConfigError, KilledFault, RequestFault, RolloutFault
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

QUIET_S = 20.0
QUIET_JSON_S = 60.0
AWAKE_S = 10.0  # between two signs of life
LONGEST_POLL_S = 60.0
RETRY_AFTER_S = 2
CLIENT_GONE = 499  # nginx's; nobody reads it
MAX_BODY_BYTES = 64 * 1024 * 1024
DISCARD_FACTOR = 2  # of a longer body so much is read and thrown away, for a client that sends all before it reads

Endpoint = Callable[[Request], Awaitable[Response]]


class ScoreRequest(BaseModel):
    """A score of a rollout, or of one of its calls."""

    model_config = ConfigDict(extra="forbid")

    score: float
    name: str | None = None
    call_id: str | None = None
    final: bool = False


class EventRequest(BaseModel):
    """An event as agents of Agent-Lightning post it."""

    event_type: str
    data: JsonObject = {}


class RewardData(BaseModel):
    """Data of a reward event; what else is in it has no meaning here."""

    value: float


class EndRequest(BaseModel):
    """Why a rollout ends, and how long requests that run may take."""

    model_config = ConfigDict(extra="forbid")

    reason: str = "ended"
    grace_s: float = 0.0


class Gateway:
    """Serves rollouts over HTTP.

    Args:
        rollouts: that it creates and knows.
        token: of the environment, for what is no route of the model; None: those routes are open to all but the
            holders of a rollout's key.
        other: finds a rollout by the first part of a path that is no key, such as a session; raises what there is to
            say where there is none.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        *,
        token: str | None = None,
        other: Callable[[str], Rollout | None] | None = None,
        model: Callable[[], str] | None = None,
    ) -> None:
        self.rollouts, self._token, self._other, self._model = rollouts, token, other, model

    def model_routes(self) -> list[Route]:
        """Routes that an agent may call, with the key in a header or as the first part of the path."""
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/chat/completions", self._speaking(CHAT)),
            ("POST", "/v1/completions", self._speaking(COMPLETIONS)),
            ("POST", "/v1/responses", self._speaking(RESPONSES)),
            ("POST", "/v1/messages", self._speaking(MESSAGES)),
            ("POST", "/v1/messages/count_tokens", self._count_tokens),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{model:path}", self._models),
        ]
        paths = [(method, prefix + path, endpoint) for method, path, endpoint in endpoints for prefix in ("", "/{key}")]
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in paths]

    def event_routes(self) -> list[Route]:
        """Route where an agent that may set its own reward posts it, with the rollout's key for scores in the path."""
        return [Route("/{score_key}/events", self._event, methods=["POST"])]

    def control_routes(self) -> list[Route]:
        """Routes that the environment calls."""
        return [
            Route("/rollouts", self._controlling(self._create), methods=["POST"]),
            Route("/rollouts/{id}", self._controlling(self._record), methods=["GET"]),
            Route("/rollouts/{id}", self._controlling(self._forget), methods=["DELETE"]),
            Route("/rollouts/{id}/end", self._controlling(self._end), methods=["POST"]),
            Route("/rollouts/{id}/score", self._score, methods=["POST"]),
        ]

    # -- the model -----------------------------------------------------------------------------------------------

    def _speaking(self, dialect: Dialect) -> Endpoint:
        async def answer(request: Request) -> Response:
            try:
                rollout = self._agents_rollout(request)
                data = await request.body()
                body = json_object(data)
                asked = dialect.parse(body, rollout)
                if asked.chat is not None and not rollout.is_session:
                    refuse_begun_answer(asked.chat.messages)
            except Exception as error:
                return failure(dialect, error)
            tries = request.headers.get("x-stainless-retry-count", "0")
            key = request.headers.get("idempotency-key", "")
            digest = xxh3_128_digest(f"{dialect.name}/{key}/".encode() + data)
            exchange = rollout.exchange(asked, digest, is_retry=bool(key) or tries not in ("", "0"))
            return await self._replied(request, dialect, body, rollout, exchange)

        return answer

    async def _replied(
        self, request: Request, dialect: Dialect, body: Body, rollout: Rollout, exchange: Awaitable[Exchange]
    ) -> Response:
        is_stream = bool(body.get("stream"))

        async def whole() -> bytes:
            reply = dialect.reply(await exchange, body, rollout)
            return b"".join(dialect.events(reply, body)) if is_stream else orjson.dumps(reply)

        task = asyncio.ensure_future(whole())
        gone = asyncio.ensure_future(request.receive())  # behind the body only this comes: the client went away
        try:
            quiet_s = QUIET_S if is_stream else QUIET_JSON_S
            await asyncio.wait([task, gone], timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not task.done():
                task.cancel()
                return Response(status_code=CLIENT_GONE)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            gone.cancel()
        kind = "text/event-stream" if is_stream else "application/json"
        if not task.done():
            return _AwakeResponse(_kept_awake(dialect, task, is_stream), task, kind)
        if (error := task.exception()) is not None:
            return failure(dialect, error, is_session=rollout.is_session)
        return Response(task.result(), media_type=kind)

    async def _count_tokens(self, request: Request) -> Response:
        try:
            rollout = self._agents_rollout(request)
            asked = MESSAGES.parse(json_object(await request.body()), rollout)
            assert asked.chat is not None
            await rollout.managed.context_length()
            return _json({"input_tokens": len(rollout.managed.prompt_of(asked.chat).ids)})
        except Exception as error:
            return failure(MESSAGES, error)

    async def _models(self, request: Request) -> Response:
        try:
            if self._model is not None and "key" not in request.path_params and self._rollout_of(request) is None:
                listed = {"id": self._model(), "object": "model", "owned_by": "atropos"}
                return self._refusal(request) or _json({"object": "list", "data": [listed]})
            rollout = self._agents_rollout(request)
        except Exception as error:
            return failure(CHAT, error)
        name = request.path_params.get("model") or rollout.model_name
        model = {"id": name, "object": "model", "created": int(rollout.created), "owned_by": "atropos"}
        model |= {"type": "model", "display_name": name, "max_model_len": await rollout.managed.context_length()}
        return _json(model if "model" in request.path_params else {"object": "list", "data": [model]})

    def _agents_rollout(self, request: Request) -> Rollout:
        rollout = self._rollout_of(request)
        if rollout is None:
            raise UnknownKeyError("no rollout has this key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        return rollout

    def _rollout_of(self, request: Request) -> Rollout | None:
        holders = self._key_holders(request)
        if (in_path := request.path_params.get("key")) is not None:
            found = self.rollouts.of_key(in_path) or (self._other(in_path) if self._other is not None else None)
            holders = [found, *(one for one in holders if one is not found)] if found is not None else []
        if len(holders) > 1:
            raise UnknownKeyError("the request has the keys of two rollouts; send that of the one it belongs to")
        return holders[0] if holders else None

    def _key_holders(self, request: Request) -> list[Rollout]:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        keys = [bearer.strip() if scheme.lower() == "bearer" else ""]
        keys += [request.headers.get(name, "") for name in ("x-api-key", "x-goog-api-key")]
        return [found for key in dict.fromkeys(keys) if key and (found := self.rollouts.of_key(key)) is not None]

    # -- the environment -----------------------------------------------------------------------------------------

    def _controlling(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            if (refusal := self._refusal(request)) is not None:
                return refusal
            try:
                return await endpoint(request)
            except (AtroposError, HTTPException, ValidationError, ClientDisconnect, OSError) as error:
                return failure(CHAT, error)

        return checked

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """Status and sentence for one who may not use a route of the environment; None for one who may."""
        if self._key_holders(request):
            return 403, "the key of a rollout opens the routes of its model only"
        if self._token is not None and not is_authorized(request.headers.get("authorization"), self._token):
            return 401, "this route needs the gateway's token: send it as 'Authorization: Bearer TOKEN'"
        return None

    def _refusal(self, request: Request) -> Response | None:
        refusal = self.refusal(request)
        return None if refusal is None else _refused(CHAT, *refusal)

    async def _create(self, request: Request) -> Response:
        rollout = self.rollouts.create(RolloutSettings.model_validate(json_object(await request.body() or b"{}")))
        root = str(request.base_url).rstrip("/")
        return _json(
            {
                "id": rollout.id,
                "key": rollout.key,
                "score_key": rollout.score_key,
                "model": rollout.model_name,
                "openai_base_url": f"{root}/v1",
                "anthropic_base_url": root,
                "keyed_base_url": f"{root}/{rollout.key}/v1",
            }
        )

    async def _record(self, request: Request) -> Response:
        rollout = self._wanted(request)
        try:
            until_s = min(float(request.query_params.get("wait", 0)), LONGEST_POLL_S)
        except ValueError as error:
            raise RequestFault(f"wait must be a number of seconds: {error}") from error
        await rollout.wait_for_end(until_s)
        return _json(rollout.record())

    async def _end(self, request: Request) -> Response:
        rollout = self._wanted(request)
        asked = EndRequest.model_validate(json_object(await request.body() or b"{}"))
        await rollout.end(asked.reason, grace_s=asked.grace_s)
        return _json({"id": rollout.id, "end_reason": rollout.end_reason})

    async def _forget(self, request: Request) -> Response:
        rollout = self._wanted(request)
        await rollout.end("deleted")
        self.rollouts.forget(rollout)
        rollout.managed.reset()
        return _json({"id": rollout.id, "status": "deleted"})

    async def _score(self, request: Request) -> Response:
        """Open to the environment, and until the end to the rollout's own verifier."""
        rollout = self.rollouts.of_id(request.path_params["id"])
        is_verifier = rollout is not None and is_authorized(request.headers.get("authorization"), rollout.score_key)
        if not is_verifier and (refusal := self._refusal(request)) is not None:
            return refusal
        try:
            asked = ScoreRequest.model_validate(json_object(await request.body()))
            if rollout is None or self._wanted(request) is not rollout:  # deleted meanwhile, or there never was one
                raise NotFoundError(f"no rollout {request.path_params['id']!r}; create it with POST /rollouts")
            if is_verifier:
                rollout.refuse_if_sealed()
            rollout.add_score(asked.score, name=asked.name, call_id=asked.call_id, final=asked.final)
        except Exception as error:
            return failure(CHAT, error)
        return _json({"id": rollout.id, "score": rollout.score})

    async def _event(self, request: Request) -> Response:
        """Take an event in Agent-Lightning's form: a reward is a score, any other kind is answered only."""
        key = request.path_params["score_key"]
        if self.rollouts.of_key(key) is not None:
            return _refused(CHAT, 403, "the key of a rollout opens the routes of its model only")
        if (rollout := self.rollouts.of_score_key(key)) is None:
            return _refused(CHAT, 401, "no rollout has this key for scores; post to the address in AGL_EVENT_URL")
        try:
            asked = EventRequest.model_validate(json_object(await request.body()))
            reward = RewardData.model_validate(asked.data) if asked.event_type == "reward" else None
            rollout.refuse_if_sealed()
            if reward is not None:
                rollout.add_score(reward.value, name="reward")
        except Exception as error:
            return failure(CHAT, error)
        told = {"event_type": asked.event_type, "rollout_id": rollout.id, "attempt_id": "0", "data": asked.data}
        return _json({**told, "timestamp": time.time()})

    def _wanted(self, request: Request) -> Rollout:
        rollout = self.rollouts.of_id(request.path_params["id"])
        if rollout is None:
            raise NotFoundError(f"no rollout {request.path_params['id']!r}; create it with POST /rollouts")
        return rollout


class UnknownKeyError(Refusal):
    """No rollout has this key, or there are several."""

    status = 401


class BodyLimit:
    """Makes reading a body above `MAX_BODY_BYTES` raise HTTPException, on every route of an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size <= MAX_BODY_BYTES:
                return message
            while message.get("more_body") and size <= MAX_BODY_BYTES * DISCARD_FACTOR:
                message = await receive()
                size += len(message.get("body", b""))
            sentence = f"the body is above the {MAX_BODY_BYTES} bytes that are taken; send less"
            raise HTTPException(413, sentence, headers={"connection": "close"})

        await self._app(scope, counted, send)


def timed_protocol() -> "type[asyncio.Protocol]":
    """Return uvicorn's HTTP protocol with deadlines for what comes in: half a request does not hold its connection."""
    from atroposlib.api.protocol import ConnectionProtocol, Strangers

    return cast("type[asyncio.Protocol]", partial(ConnectionProtocol, Strangers(sys.maxsize)))  # which is only called


def close_connections(server: "uvicorn.Server") -> None:
    """Close all connections of a server that shall end: half a request would keep it."""
    for connection in list(server.server_state.connections):
        connection.transport.abort()


class _AwakeResponse(StreamingResponse):
    """Ends the wait for a reply when its client goes away."""

    def __init__(self, content: AsyncIterator[bytes], task: "asyncio.Future[bytes]", kind: str) -> None:
        super().__init__(content, media_type=kind)
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._task.cancel()


async def _kept_awake(dialect: Dialect, task: "asyncio.Future[bytes]", is_stream: bool) -> AsyncIterator[bytes]:
    while not task.done():
        yield dialect.keep_alive if is_stream else b" "
        await asyncio.wait([task], timeout=AWAKE_S)
    if (error := task.exception()) is None:
        yield task.result()
        return
    status, sentence, kind = _reason(error)
    fault = orjson.dumps(dialect.error(status, escaped(sentence), kind))
    if not is_stream:
        raise RuntimeError(f"the reply had begun when its generation failed: {sentence}")  # cuts the connection
    yield b"event: error\ndata: " + fault + b"\n\n"


def _reason(error: BaseException) -> tuple[int, str, str]:
    """Status, sentence and kind of a failure; never 5xx for what cannot work when it is sent again."""
    if isinstance(error, TemplateError):
        return 400, f"the chat template refused the messages: {error}", "invalid_request_error"
    if isinstance(error, Refusal):
        return error.status, str(error), error.kind
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, "invalid_request_error"
    if isinstance(error, UnknownSessionError):
        return 404, str(error), UNKNOWN_SESSION
    if isinstance(error, ClientDisconnect):
        return CLIENT_GONE, "the client went away before it had sent its request", "invalid_request_error"
    if isinstance(error, RecursionError):
        return 400, "the request is nested too deeply", "invalid_request_error"
    if isinstance(error, RequestFault | ConfigError | ValidationError):
        return 400, str(error), "invalid_request_error"
    if isinstance(error, KilledFault):
        return 429, str(error), f"{error.failure_class}_error"
    if isinstance(error, RolloutFault):
        return 503, str(error), f"{error.failure_class}_error"
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        sentence = f"the record cannot be written ({error.strerror}), so nothing is said before; free space, ask again"
        logger.error("%s", sentence)
        return 503, sentence, "server_error"
    logger.error("a request of an agent failed", exc_info=error)
    return 500, f"{type(error).__name__}: {error}", "server_error"


def failure(dialect: Dialect, error: BaseException, *, is_session: bool = False) -> Response:
    """Return the reply to a request that failed, in the form of its API."""
    status, sentence, kind = _reason(error)
    if is_session and isinstance(error, RolloutFault) and status > 400:
        status = 500  # clients of sessions know no other
    return _refused(dialect, status, sentence, kind)


def _refused(dialect: Dialect, status: int, sentence: str, kind: str = "invalid_request_error") -> Response:
    headers = {429: {"retry-after": str(RETRY_AFTER_S)}, 413: {"connection": "close"}}.get(status)
    fault = dialect.error(status, escaped(sentence), kind)
    return Response(orjson.dumps(fault), status, headers, "application/json")


def _json(value: object) -> Response:
    return Response(orjson.dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")
