"""OpenAI's chat completions and text completions."""

from collections.abc import Iterator, Mapping
from typing import Any

from atroposlib.envs.server_handling.agents.dialect import (
    Body,
    Dialect,
    checked_messages,
    choice_of,
    name_of,
    object_of,
    objects,
    sampling_of,
    sse,
    strict_of,
)
from atroposlib.envs.server_handling.agents.record import Answer, Exchange
from atroposlib.envs.server_handling.agents.rollouts import Rollout
from atroposlib.envs.server_handling.agents.settings import Asked
from atroposlib.envs.server_handling.managed_server import ChatRequest
from atroposlib.envs.server_handling.sampling import words
from atroposlib.errors import RequestFault

_NAMES = {"max_completion_tokens": "max_tokens"}
_OTHER = words(
    """messages prompt tools tool_choice model stream stream_options user logprobs top_logprobs response_format
    parallel_tool_calls"""
)


def _parse(body: Body, rollout: Rollout) -> Asked:
    object_of(body.get("stream_options"), "stream_options")
    messages = checked_messages(body.get("messages"))
    tools = list(objects(body["tools"], "tools")) if body.get("tools") else None
    sampling = sampling_of(body, rollout, _NAMES, _OTHER, _form(body))
    choice = choice_of(body.get("tool_choice") or "auto", tools or [])
    chat = ChatRequest(messages, tools, choice, sampling)
    strict, one_call = strict_of(map(_named, tools or ())), body.get("parallel_tool_calls") is False
    return Asked("chat", chat, None, sampling, str(body.get("model")), strict=strict, one_call=one_call)


def _parse_completion(body: Body, rollout: Rollout) -> Asked:
    object_of(body.get("stream_options"), "stream_options")
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise RequestFault(f"prompt must be one text, not {prompt!r:.100}")
    sampling = sampling_of(body, rollout, _NAMES, _OTHER, _form(body))
    return Asked("completions", None, prompt, sampling, str(body.get("model")))


def _named(tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return str(object_of(tool.get("function"), "function of a tool").get("name")), tool


def _form(body: Body) -> Mapping[str, Any]:
    return object_of(body.get("response_format"), "response_format")


def usage_of(exchange: Exchange) -> dict[str, int]:
    """Tokens of the prompt, which counts once, and of all choices."""
    prompt = max(answer.prompt_tokens for answer in exchange.answers)
    completion = sum(answer.completion_tokens for answer in exchange.answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(exchange: Exchange, rollout: Rollout, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": name_of(prefix, rollout, exchange),
        "object": kind,
        "created": int(exchange.ended),
        "model": rollout.model_name,
    }


def _reply(exchange: Exchange, body: Body, rollout: Rollout) -> dict[str, Any]:
    choices = [
        {"index": index, "message": answer.message, "logprobs": None, "finish_reason": answer.finish_reason}
        for index, answer in enumerate(exchange.answers)
    ]
    return {**_head(exchange, rollout, "chatcmpl-", "chat.completion"), "choices": choices, "usage": usage_of(exchange)}


def _reply_completion(exchange: Exchange, body: Body, rollout: Rollout) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": answer.message["content"] or "",
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        for index, answer in enumerate(exchange.answers)
    ]
    head = _head(exchange, rollout, "cmpl-", "text_completion")
    return {**head, "choices": choices, "usage": usage_of(exchange)}


def _events(reply: dict[str, Any], body: Body) -> Iterator[bytes]:
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(choice: dict[str, Any], delta: dict[str, Any], reason: str | None = None) -> bytes:
        part = {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": reason}
        return sse({**head, "choices": [part]})

    for choice in reply["choices"]:
        message = choice["message"]
        yield chunk(choice, {"role": "assistant", "content": ""})
        for key in ("reasoning_content", "content"):
            if message.get(key):
                yield chunk(choice, {key: message[key]})
        for index, call in enumerate(message.get("tool_calls") or ()):
            begun = {**call, "index": index, "function": {**call["function"], "arguments": ""}}
            yield chunk(choice, {"tool_calls": [begun]})
            rest = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
            yield chunk(choice, {"tool_calls": [rest]})
        yield chunk(choice, {}, choice["finish_reason"])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield sse({**head, "choices": [], "usage": reply["usage"]})
    yield sse(b"[DONE]")


def _events_completion(reply: dict[str, Any], body: Body) -> Iterator[bytes]:
    for choice in reply["choices"]:
        yield sse({**reply, "choices": [choice], "usage": None})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield sse({**reply, "choices": []})
    yield sse(b"[DONE]")


def openai_error(status: int, message: str, kind: str) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


CHAT = Dialect("chat", _parse, _reply, _events, openai_error, b": still generating\n\n")
COMPLETIONS = Dialect(
    "completions", _parse_completion, _reply_completion, _events_completion, openai_error, b": still generating\n\n"
)

__all__ = ["CHAT", "COMPLETIONS", "Answer", "openai_error", "usage_of"]
