"""Reading replies of HTTP services."""

import logging
from typing import Protocol

from atroposlib.type_definitions import Json

_logger = logging.getLogger(__name__)

MAX_LOGGED_CHARACTERS = 2000


class HttpResponse(Protocol):
    """The part of an aiohttp response that is used."""

    def raise_for_status(self) -> object: ...

    async def json(self) -> Json: ...

    async def text(self) -> str: ...


async def parse_http_response(resp: HttpResponse, logger: logging.Logger | None = None) -> Json:
    """The reply's JSON. An error status or a body that is no JSON is logged with that body, then raised as it came."""
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:
        body = await resp.text()
        (logger or _logger).error("request failed: error=%s body=%s", error, body[:MAX_LOGGED_CHARACTERS])
        raise
