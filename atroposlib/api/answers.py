"""What the API answers besides data: refusals in one sentence, and every error as the answer that clients know."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from atroposlib.api.refusal import Refused
from atroposlib.api.store import StorageFull, Unreadable
from atroposlib.errors import GroupError


def json_response(content: dict[str, Any]) -> Response:
    """A small JSON answer, without FastAPI's serialisation."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def refuse(status: int, sentence: str, code: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error answer; clients read `detail`, programs may read `code`."""
    content = {"detail": sentence} if code is None else {"detail": sentence, "code": code}
    return _PlainJson(content, status_code=status, headers=headers)


class _PlainJson(JSONResponse):
    def render(self, content: object) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def add_error_answers(api: FastAPI) -> None:
    def handler(answer: Callable[[Any], Response]):
        async def handle(request: Request, error: Exception) -> Response:
            return answer(error)

        return handle

    for kind, answer in ERROR_ANSWERS.items():
        api.exception_handler(kind)(handler(answer))


def _refused(error: Refused) -> Response:
    if error.code == "not_registered":  # no failure to trainers of 0.4.0; null, as they take a list for a batch
        answer = {"status": "error", "message": str(error), "batch": None, "code": error.code}
        return JSONResponse(answer, status_code=error.status)
    return refuse(error.status, str(error), error.code)


def _bad_group(error: GroupError) -> Response:
    return JSONResponse({"detail": [{"type": "value_error", "loc": ["body"], "msg": str(error)}]}, status_code=422)


def _storage_full(error: StorageFull) -> Response:
    return refuse(503, str(error), "storage_full", {"Retry-After": "5"})


def _unreadable(error: Unreadable) -> Response:
    # trainers that look at `batch` and not at the status find none, and ask again
    content = {"detail": str(error), "code": "unreadable", "batch": None}
    return JSONResponse(content, status_code=503, headers={"Retry-After": "5"})


def _invalid(error: RequestValidationError) -> Response:
    """FastAPI's form, without echoing the input: a bad body of a megabyte must not come back."""
    details = [
        {
            "type": e["type"],
            "loc": [str(part)[:80] if isinstance(part, str) else part for part in e["loc"]],
            "msg": e["msg"][:500],
        }
        for e in error.errors()[:20]
    ]
    return JSONResponse({"detail": details}, status_code=422)


ERROR_ANSWERS: dict[type[Exception], Callable[[Any], Response]] = {
    Refused: _refused,
    GroupError: _bad_group,
    StorageFull: _storage_full,
    Unreadable: _unreadable,
    RequestValidationError: _invalid,
}
