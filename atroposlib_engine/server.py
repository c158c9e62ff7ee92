"""SGLang's HTTP interface over the embedded engine: its own routes are here.

OpenAI's are in `openai_routes`, those that only report are in `status`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from atroposlib.errors import ModelError, RequestFault
from atroposlib_engine import openai_routes, status
from atroposlib_engine.engine import Engine
from atroposlib_engine.generation import LogprobWish
from atroposlib_engine.http import JsonResponse, read_json, unless_disconnected
from atroposlib_engine.replies import generate_reply
from atroposlib_engine.requests import GenerateRequest, build_generations, parse_generate
from atroposlib_engine.sampling import SamplingParams
from atroposlib_engine.waiting import run_all, watch

logger = logging.getLogger(__name__)

HEALTH_DEADLINE_S = 20.0
_PAUSE_MODES = ("abort", "retract", "in_place")
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


def build_app(engine: Engine) -> Starlette:
    """The application; the engine is started and stopped by the caller."""
    native = _NativeRoutes(engine)
    both, get, post = ["GET", "POST"], ["GET"], ["POST"]
    routes: list[tuple[str, Callable[[Request], Awaitable[Response]], list[str]]] = [
        ("/generate", native.generate, ["POST", "PUT"]),
        ("/health", native.health, get),
        ("/health_generate", native.health_generate, get),
        ("/abort_request", native.abort_request, post),
        ("/pause_generation", native.pause_generation, post),
        ("/continue_generation", native.continue_generation, post),
        ("/flush_cache", native.flush_cache, both),
        ("/update_weights_from_disk", native.update_weights, post),
        ("/update_weight_version", native.update_weight_version, post),
        *status.routes(engine),
        *openai_routes.routes(engine),
    ]
    return Starlette(
        routes=[Route(path, handler, methods=methods) for path, handler, methods in routes],
        exception_handlers={RequestFault: _refused, HTTPException: _http_error},
    )


class _NativeRoutes:
    """SGLang's own routes that compute or change something."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: Request) -> Response:
        asked = parse_generate(await read_json(request), self._engine)
        if asked.stream:
            return StreamingResponse(self._stream(asked), media_type="text/event-stream")
        await unless_disconnected(request, run_all(self._engine, asked.generations))
        replies = [
            generate_reply(generation, self._engine.llama.vocabulary, text_in_logprobs=asked.text_in_logprobs)
            for generation in asked.generations
        ]
        return JsonResponse(replies[0] if asked.is_single else replies)

    async def _stream(self, asked: GenerateRequest) -> AsyncIterator[bytes]:
        async for place, generation in watch(self._engine, asked.generations):
            reply = generate_reply(generation, self._engine.llama.vocabulary, text_in_logprobs=asked.text_in_logprobs)
            if not asked.is_single:
                reply["index"] = place
            yield b"data: " + orjson.dumps(reply) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._engine.fault is None else 503)

    async def health_generate(self, _request: Request) -> Response:
        """200 after a real token; 503 when none comes in time, as while paused."""
        probe = build_generations(self._engine, [0], SamplingParams(max_new_tokens=1), LogprobWish(), None)
        try:
            await asyncio.wait_for(run_all(self._engine, probe), HEALTH_DEADLINE_S)
        except TimeoutError:
            return Response(status_code=503)
        return Response(status_code=503 if self._engine.fault else 200)

    async def abort_request(self, request: Request) -> Response:
        body = await read_json(request)
        rid = None if body.get("abort_all") else str(body.get("rid", ""))
        await asyncio.wrap_future(self._engine.call(lambda: self._engine.scheduler.abort(rid)))
        return Response()

    async def pause_generation(self, request: Request) -> Response:
        mode = (await read_json(request)).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise RequestFault(f"mode must be one of {', '.join(_PAUSE_MODES)}, got {mode!r}.")
        await asyncio.wrap_future(self._engine.call(lambda: self._engine.scheduler.pause(mode)))
        return JsonResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, _request: Request) -> Response:
        await asyncio.wrap_future(self._engine.call(self._engine.scheduler.resume))
        return JsonResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, _request: Request) -> Response:
        flushed = await asyncio.wrap_future(self._engine.call(self._engine.scheduler.flush))
        return PlainTextResponse(_FLUSHED, status_code=200 if flushed else 400)

    async def update_weights(self, request: Request) -> Response:
        body = await read_json(request)
        version = body.get("weight_version")
        if body.get("abort_all_requests"):
            await asyncio.wrap_future(self._engine.call(lambda: self._engine.scheduler.abort(None)))
        try:
            gguf = _gguf_of(str(body.get("model_path", "")))
            await asyncio.wrap_future(self._engine.swap_weights(gguf, None if version is None else str(version)))
        except ModelError as error:
            failure = {"success": False, "message": f"{error}", "num_paused_requests": 0}
            return JsonResponse(failure, status_code=400)
        self._engine.model_path = str(body["model_path"])
        named = "" if version is None else f" Weight version updated to {version}."
        message = f"Succeeded to update model weights.{named}"
        return JsonResponse({"success": True, "message": message, "num_paused_requests": 0})

    async def update_weight_version(self, request: Request) -> Response:
        body = await read_json(request)
        version = str(body.get("new_version", ""))
        if not version:
            raise RequestFault("new_version is missing.")

        def rename() -> None:
            if body.get("abort_all_requests"):
                self._engine.scheduler.abort(None)
            self._engine.scheduler.weight_version = version

        await asyncio.wrap_future(self._engine.call(rename))
        message = f"Weight version updated to {version}"
        return JsonResponse({"success": True, "message": message, "new_version": version})


def _gguf_of(model_path: str) -> Path:
    """The GGUF file that `model_path` is, or the only one in that folder."""
    path = Path(model_path)
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(found) != 1:
        raise ModelError(f"{model_path} holds {len(found)} .gguf files; the embedded engine needs one: give its path")
    return found[0]


async def _refused(_request: Request, error: Exception) -> Response:
    return JsonResponse({"error": {"message": str(error)}}, status_code=400)


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JsonResponse(
        openai_routes.error_body(error.detail, str(error.status_code), error.status_code), error.status_code
    )
