"""A scripted inference engine behind real HTTP on a free loopback port: SGLang's `/generate` and OpenAI's routes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.fakes import EOS, FakeTokenizer

Handler = Callable[[web.Request, dict[str, Any]], Any]


class FakeEngine:
    """Can be stopped and started again on its port.

    Attributes:
        scripted: replies to give first, one per request: (status, JSON body), an exception class meaning "cut the
            connection", or seconds to hang.
        requests: (path, body) of every generation.
        ignores_n: give one choice whatever n is.
        ready: health says 503 while False.
        has_generate: False leaves `/generate` out, as stock vLLM does; set it before the start.
        text: what every choice says; a stream continues where the prompt already ends in a part of it.
    """

    def __init__(self) -> None:
        self.text = "hello"
        self.weight_version = "default"
        self.scripted: list[Any] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.health_probes = 0
        self.ignores_n = False
        self.ready = True
        self.has_generate = True
        self.about: dict[str, dict[str, Any]] = {}  # path -> reply
        self.reads: Callable[[str], list[int]] | None = None  # its own tokenizer, for prompts that are text
        self.loads: dict[str, Any] | None = None
        self.metrics: str | None = None
        self.held: asyncio.Event | None = None  # generations wait for it
        self.on_request: Callable[[], object] = lambda: None  # called with every generation asked for
        self.break_stream_after: int | None = None  # events, then the connection is cut; once
        self.running = 0
        self.most_running = 0
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._tokenizer = FakeTokenizer()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/metrics", self._metrics)
        for path in ("/model_info", "/get_model_info", "/get_server_info"):
            app.router.add_get(path, self._about)
        app.router.add_post("/tokenize", self._tokenize)
        if self.has_generate:
            app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.health_probes += 1
        return web.Response(status=200 if self.ready else 503)

    async def _about(self, request: web.Request) -> web.Response:
        reply = self.about.get(request.path)
        return web.json_response(reply, status=404 if reply is None else 200)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.reads is None:
            return web.Response(status=404)
        return web.json_response({"tokens": self.reads((await request.json())["prompt"])})

    async def _models(self, request: web.Request) -> web.Response:
        self.health_probes += 1
        if request.path in self.about:
            return web.json_response(self.about[request.path])
        return web.json_response({"object": "list", "data": [{"id": "fake", "max_model_len": 4096}]})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response(self.loads, status=404 if self.loads is None else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics or "", status=404 if self.metrics is None else 200)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._generations)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._chat_reply)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._completion_reply)

    async def _answer(self, request: web.Request, reply: Callable[[dict[str, Any]], Any]) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body))
        self.on_request()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.held is not None:
                await self.held.wait()
            if self.scripted:
                return await self._play(request, self.scripted.pop(0))
            if body.get("stream"):
                return await self._stream(request, body)
            return web.json_response(reply(body))
        finally:
            self.running -= 1

    async def _play(self, request: web.Request, step: Any) -> web.StreamResponse:
        if isinstance(step, tuple):
            status, body = step
            return (
                web.json_response(body, status=status)
                if not isinstance(body, str)
                else web.Response(text=body, status=status)
            )
        if isinstance(step, int | float):
            await asyncio.sleep(step)
        elif request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    def _generations(self, body: dict[str, Any], ids: list[int] | None = None) -> Any:
        ids = [*self._tokenizer.encode(self.text), EOS] if ids is None else ids
        if self.reads is not None and "text" in body:
            return {"meta_info": {"input_token_logprobs": [[None, token, None] for token in self.reads(body["text"])]}}
        one = {
            "text": self.text,
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": EOS},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "weight_version": self.weight_version,
                "output_token_logprobs": [[-0.25, token, None] for token in ids],
            },
        }
        n = body["sampling_params"].get("n", 1)
        return one if n == 1 else [one] * n

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Cumulative events of one token each, as SGLang sends them."""
        whole = [*self._tokenizer.encode(self.text), EOS]
        prompt = body["input_ids"]
        there = next(size for size in range(len(whole) - 1, -1, -1) if prompt[len(prompt) - size :] == whole[:size])
        rest = whole[there:][: body["sampling_params"].get("max_new_tokens", len(whole))]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for count in range(1, len(rest) + 1):
            event = self._generations({**body, "sampling_params": {}}, rest[:count])
            if count < len(rest):
                event["meta_info"]["finish_reason"] = None
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if self.break_stream_after == count and request.transport is not None:
                self.break_stream_after = None
                await asyncio.sleep(0.05)  # let the client read what was sent
                request.transport.abort()
                return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chat_reply(self, body: dict[str, Any]) -> Any:
        message = {"role": "assistant", "content": self.text}
        return self._openai(body, "chat.completion", {"message": message})

    def _completion_reply(self, body: dict[str, Any]) -> Any:
        return self._openai(body, "text_completion", {"text": self.text})

    def _openai(self, body: dict[str, Any], kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        n = 1 if self.ignores_n else body.get("n", 1)
        return {
            "id": "x",
            "object": kind,
            "created": 0,
            "model": body.get("model", "fake"),
            "choices": [{"index": i, "finish_reason": "stop", "logprobs": None, **choice} for i in range(n)],
            "usage": {"prompt_tokens": 7, "completion_tokens": 2 * n, "total_tokens": 7 + 2 * n},
            "metadata": {"weight_version": self.weight_version},
        }


@asynccontextmanager
async def running_engine() -> AsyncIterator[FakeEngine]:
    """A started engine."""
    engine = FakeEngine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
