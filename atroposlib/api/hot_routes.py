"""The hot routes: groups in, and what environments ask all the time. Past FastAPI's layers, not past its docs."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.routing import BaseRoute

from atroposlib.api import schemas
from atroposlib.api.answers import ERROR_ANSWERS, json_response
from atroposlib.api.group_intake import Receipt
from atroposlib.api.lifting import Body as RequestBody
from atroposlib.api.middleware import BODY_KEY, CONNECTION_KEY, App, Receive, Scope, Send
from atroposlib.api.payload import Payload, read_group, read_list
from atroposlib.api.refusal import Refused
from atroposlib.api.service import TrajectoryService

RUN_HEADER = "X-Atropos-Run"
SMALL_BODY_BYTES = 1 << 16
LARGE_BODY_BYTES = 1 << 21
"""From here on a body is read in a thread, which costs more CPU but holds up nobody."""

T = TypeVar("T")


class RawRoute(APIRoute):
    """A route whose endpoint takes the request and gives the response: documented as usual, at a third of the cost."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


class DirectRoutes:
    """Takes requests to raw routes past FastAPI's dozen layers, which cost 0.3 ms each time; passes on all others."""

    def __init__(self, app: App, *, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = {(method, r.path): r for r in routes if isinstance(r, RawRoute) for method in r.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope.get("method", ""), scope.get("path", "")))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            answer = await route.endpoint(Request(scope, receive))
        except tuple(ERROR_ANSWERS) as error:
            answer = ERROR_ANSWERS[type(error)](error)
        await answer(scope, receive, send)


def add_hot_routes(api: FastAPI) -> Sequence[BaseRoute]:
    """Adds them, and returns them for `DirectRoutes`."""
    router = APIRouter(route_class=RawRoute)

    @router.post("/scored_data", response_model=schemas.Received, openapi_extra=_takes({"$ref": _SCORED_DATA}))
    async def scored_data(request: Request) -> Response:
        """Store one group. The answer comes when it is on disk; 503 when there is no room: try again later."""
        payload = await _in_turn(request, read_group)
        (receipt,) = await _store_groups(request, [payload])
        return json_response(_received(receipt))

    @router.post(
        "/scored_data_list",
        response_model=schemas.ReceivedList,
        openapi_extra=_takes({"type": "array", "items": {"$ref": _SCORED_DATA}}),
    )
    async def scored_data_list(request: Request) -> Response:
        """Store several groups, all or none."""
        payloads = await _in_turn(request, read_list)
        return json_response(_received_list(await _store_groups(request, payloads)))

    @router.get("/status-env", response_model=schemas.EnvStatus, openapi_extra=_NAMES_ENV)
    async def status_env(request: Request) -> Response:
        """What an environment bases its back-pressure on. The id comes as a JSON body or in the query."""
        service: TrajectoryService = request.app.state.service
        return json_response(service.env_status(_asking_env(request)))

    api.include_router(router)
    return router.routes


async def _in_turn(request: Request, read: Callable[[RequestBody], T]) -> T:
    """`read` the body without keeping other requests waiting: one body between two looks at the sockets."""
    body: RequestBody = request.scope[BODY_KEY]
    if len(body) < SMALL_BODY_BYTES:
        return read(body)
    async with request.app.state.reading:
        if len(body) > LARGE_BODY_BYTES:
            return await asyncio.to_thread(read, body)
        result = read(body)
        await asyncio.sleep(0)
        return result


async def _store_groups(request: Request, payloads: list[Payload]) -> list[Receipt]:
    service: TrajectoryService = request.app.state.service
    return await service.groups.add(
        payloads, run_id=request.headers.get(RUN_HEADER), connection=request.scope.get(CONNECTION_KEY)
    )


def _asking_env(request: Request) -> int:
    body, query = request.scope[BODY_KEY], request.query_params
    try:
        if body:
            return schemas.EnvIdentifier.model_validate_json(bytes(body)).env_id
        if "env_id" in query:
            return schemas.EnvIdentifier.model_validate({"env_id": query["env_id"]}).env_id
    except ValidationError as error:
        place = "body" if body else "query"
        raise RequestValidationError([{**e, "loc": (place, *e["loc"])} for e in error.errors()]) from None
    raise Refused(422, 'env_id is missing; send {"env_id": 0} as JSON body or ?env_id=0')


def _takes(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI of a route that reads its body itself."""
    run_id = {
        "name": RUN_HEADER,
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": "`run_id` of /register-env; groups of a run that was reset are refused.",
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "parameters": [run_id],
        "responses": {str(code): {"description": text} for code, text in _REFUSALS.items()},
    }


_NAMES_ENV: dict[str, Any] = {
    "requestBody": {"content": {"application/json": {"schema": schemas.EnvIdentifier.model_json_schema()}}},
    "parameters": [
        {
            "name": "env_id",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 0},
            "description": "Instead of the JSON body.",
        }
    ],
    "responses": {
        "404": {"description": "Unknown environment."},
        "409": {"description": "It has disconnected."},
        "422": {"description": "No number."},
    },
}
_SCORED_DATA = "#/components/schemas/ScoredData"
_REFUSALS = {
    404: "Unknown environment.",
    409: "The environment has disconnected.",
    413: "Too large.",
    422: "A bad group.",
    503: "No room.",
}


def _received(receipt: Receipt) -> dict[str, Any]:
    answer: dict[str, Any] = {"status": "received"}
    if receipt.buffered is not None:
        answer = {"status": "buffered", "buffer_size": receipt.buffered}
    return {**answer, "duplicate": True} if receipt.duplicate else answer


def _received_list(receipts: list[Receipt]) -> dict[str, Any]:
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
    buffered = [receipt.buffered for receipt in receipts if receipt.buffered is not None]
    if buffered:
        answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    duplicates = sum(receipt.duplicate for receipt in receipts)
    return {**answer, "duplicates": duplicates} if duplicates else answer
