"""OpenAI's chat and completion routes, in the shapes SGLang gives them. Replies carry no token ids, as SGLang's."""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from atroposlib.errors import RequestFault
from atroposlib.type_definitions import JsonObject
from atroposlib_engine.engine import Engine
from atroposlib_engine.generation import Generation, TopLogprobs
from atroposlib_engine.http import JsonResponse, read_json, unless_disconnected
from atroposlib_engine.llama import Vocabulary
from atroposlib_engine.openai_requests import chat_generations, completion_generations
from atroposlib_engine.replies import visible_text
from atroposlib_engine.waiting import run_all, watch

Handler = Callable[[Request], Awaitable[Response]]


def routes(engine: Engine) -> list[tuple[str, Handler, list[str]]]:
    """(path, handler, methods)."""

    async def chat(request: Request) -> Response:
        return await _answer(request, engine, _Chat(engine.llama.vocabulary), chat_generations)

    async def completions(request: Request) -> Response:
        return await _answer(request, engine, _Completion(engine.llama.vocabulary), completion_generations)

    return [("/v1/chat/completions", chat, ["POST"]), ("/v1/completions", completions, ["POST"])]


def error_body(message: str, kind: str, code: int) -> JsonObject:
    """SGLang's error object on OpenAI routes."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


async def _answer(
    request: Request,
    engine: Engine,
    shape: "_Chat | _Completion",
    parse: Callable[[JsonObject, Engine], list[Generation]],
) -> Response:
    try:
        body = await read_json(request)
        generations = parse(body, engine)
    except RequestFault as error:
        return JsonResponse(error_body(str(error), "BadRequestError", 400), status_code=400)
    head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": body.get("model") or engine.model_name}
    if body.get("stream"):
        return StreamingResponse(_stream(engine, shape, generations, head, body), media_type="text/event-stream")
    await unless_disconnected(request, run_all(engine, generations))
    reply = {
        "id": head["id"],
        "object": shape.whole,
        "created": head["created"],
        "model": head["model"],
        "choices": [shape.choice(at, generation, body) for at, generation in enumerate(generations)],
        "usage": _usage(generations),
        "metadata": {"weight_version": generations[0].weight_version},
    }
    return JsonResponse(reply)


async def _stream(
    engine: Engine, shape: "_Chat | _Completion", generations: list[Generation], head: JsonObject, body: JsonObject
) -> AsyncIterator[bytes]:
    def event(choices: list[JsonObject], **more: object) -> bytes:
        chunk = {"id": head["id"], "object": shape.part, "created": head["created"], "model": head["model"]}
        return b"data: " + orjson.dumps({**chunk, "choices": choices, **more}) + b"\n\n"

    sent = [_Sent(at) for at in range(len(generations))]
    async for place, generation in watch(engine, generations):
        for choice in shape.deltas(sent[place], generation):
            yield event([choice])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event([], usage=_usage(generations))
    yield b"data: [DONE]\n\n"


@dataclass
class _Sent:
    """The part of one choice that has gone out."""

    index: int
    text: str = ""
    tokens: int | None = None

    def new_text(self, generation: Generation, vocabulary: Vocabulary) -> str:
        """Return what was added since the last call; a stop string that appears late cannot be taken back."""
        text = visible_text(generation, vocabulary)
        new = text[len(self.text) :]
        self.text = text if len(text) > len(self.text) else self.text
        return new


class _Chat:
    """`choice` is a finished one, `deltas` what has been added to one since the last call; also below."""

    whole, part = "chat.completion", "chat.completion.chunk"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def choice(self, index: int, generation: Generation, body: JsonObject) -> JsonObject:
        text = visible_text(generation, self._vocabulary)
        message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
        logprobs = self._logprobs(generation, 0, len(generation.logprobs))
        return {"index": index, "message": message, "logprobs": logprobs, **_ending(generation)}

    def deltas(self, sent: _Sent, generation: Generation) -> list[JsonObject]:
        choices = []
        if sent.tokens is None:
            sent.tokens = 0
            role = {"reasoning_content": None, "role": "assistant", "content": ""}
            choices.append(_delta(sent.index, role, None))
        until = len(generation.logprobs)
        text = sent.new_text(generation, self._vocabulary)
        if text or (until > sent.tokens and generation.wish.output):
            logprobs = self._logprobs(generation, sent.tokens, until)
            choices.append(_delta(sent.index, {"reasoning_content": None, "content": text}, logprobs))
        sent.tokens = until
        if generation.finish is not None:
            ending = _delta(sent.index, {"reasoning_content": None, "content": None}, None)
            choices.append({**ending, **_ending(generation)})
        return choices

    def _logprobs(self, generation: Generation, first: int, until: int) -> JsonObject | None:
        if not generation.wish.output:
            return None

        def entry(token: int, logprob: float) -> JsonObject:
            raw = self._vocabulary.token_bytes(token)
            return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": logprob}

        content = []
        for at in range(first, until):
            best: TopLogprobs = generation.top[at] if generation.wish.top else []
            token = generation.tokens[len(generation.prompt) + at]
            top = [entry(other, logprob) for logprob, other in best]
            content.append({**entry(token, generation.logprobs[at]), "top_logprobs": top})
        return {"content": content}


class _Completion:
    whole = part = "text_completion"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def choice(self, index: int, generation: Generation, body: JsonObject) -> JsonObject:
        echo = self._vocabulary.decode(generation.prompt) if body.get("echo") else ""
        text = echo + visible_text(generation, self._vocabulary)
        logprobs = self._logprobs(generation, 0, len(generation.logprobs), with_prompt=bool(body.get("echo")))
        return {"index": index, "text": text, "logprobs": logprobs, **_ending(generation)}

    def deltas(self, sent: _Sent, generation: Generation) -> list[JsonObject]:
        until = len(generation.logprobs)
        text = sent.new_text(generation, self._vocabulary)
        logprobs = self._logprobs(generation, sent.tokens or 0, until, with_prompt=False)
        sent.tokens = until
        return [{"index": sent.index, "text": text, "logprobs": logprobs, **_ending(generation)}]

    def _logprobs(self, generation: Generation, first: int, until: int, *, with_prompt: bool) -> JsonObject | None:
        if not generation.wish.output:
            return None

        def piece(token: int) -> str:
            return self._vocabulary.decode([token], special=True)

        start = len(generation.prompt)
        tokens = generation.tokens[start + first : start + until]
        values: list[float | None] = [*generation.logprobs[first:until]]
        top: list[TopLogprobs | None] = [*generation.top[first:until]]
        if with_prompt:
            tokens = generation.prompt + tokens
            values = (generation.prompt_logprobs or [None]) + values
            top = (generation.prompt_top or [None]) + top if generation.wish.top else []
        return {
            "text_offset": [-1] * len(tokens),
            "token_logprobs": values,
            "tokens": [piece(token) for token in tokens],
            "top_logprobs": [
                None if best is None else {piece(token): logprob for logprob, token in best} for best in top
            ],
        }


def _delta(index: int, delta: JsonObject, logprobs: JsonObject | None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, "matched_stop": None}


def _ending(generation: Generation) -> JsonObject:
    finish = generation.finish
    return {
        "finish_reason": None if finish is None else finish.kind,
        "matched_stop": None if finish is None else finish.matched,
    }


def _usage(generations: list[Generation]) -> JsonObject:
    """Every prompt counts once, every choice's new tokens count."""
    prompts = sum(len(generation.prompt) for generation in generations if generation.index == 0)
    completions = sum(generation.completion_tokens for generation in generations)
    return {
        "prompt_tokens": prompts,
        "total_tokens": prompts + completions,
        "completion_tokens": completions,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }
