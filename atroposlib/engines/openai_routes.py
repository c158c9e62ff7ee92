"""OpenAI's chat and completion routes, in the shapes SGLang gives them."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from atroposlib.engines.engine import Engine
from atroposlib.engines.http import Json


def routes(engine: Engine) -> list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]]:
    """(path, handler, methods)."""
    return []


def error_body(message: str, kind: str, code: int) -> Json:
    """SGLang's error object on OpenAI routes."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}
