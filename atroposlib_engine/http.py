"""JSON in and out for the engine's routes, without a schema layer: bodies can hold thousands of token ids."""

import asyncio
from collections.abc import Coroutine

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from atroposlib.errors import RequestFault
from atroposlib.type_definitions import JsonObject


class JsonResponse(Response):
    """A JSON body written by orjson."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)


async def read_json(request: Request) -> JsonObject:
    """The body as an object; an empty body is `{}`."""
    raw = await request.body()
    if not raw.strip():
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestFault(f"the body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestFault(f"the body must be a JSON object, got {type(body).__name__}.")
    return body


async def unless_disconnected(request: Request, work: Coroutine[object, object, None]) -> None:
    """Finish `work`, or cancel it when the client goes away first; the body must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client closed the connection")
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
