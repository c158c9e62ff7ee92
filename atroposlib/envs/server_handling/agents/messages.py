"""Anthropic's Messages, and the count of a request's tokens.

Blocks of an assistant's turn (thinking, text, tool_use) are one message inside; results of tools come before the text
of the turn that they stand in, each as a message of its own. Tools without a schema, known to Anthropic's models only,
are left out, and the record says so. Claude Code's line about billing, which changes with each request and which
Anthropic takes out itself, is no part of the system prompt.
"""

import json
from collections.abc import Iterator, Sequence

from atroposlib.envs.server_handling.agents.dialect import (
    Body,
    Dialect,
    checked_messages,
    choice_of,
    function_tool,
    object_of,
    objects,
    sampling_of,
    sse,
    strict_of,
)
from atroposlib.envs.server_handling.agents.record import Exchange, reply_id
from atroposlib.envs.server_handling.agents.rollouts import Rollout
from atroposlib.envs.server_handling.agents.settings import Asked
from atroposlib.envs.server_handling.conversation import Message, joined_text
from atroposlib.envs.server_handling.managed_server import ChatRequest
from atroposlib.envs.server_handling.sampling import words
from atroposlib.errors import RequestFault
from atroposlib.json_lines import as_json
from atroposlib.type_definitions import Json, JsonObject

_NAMES = {"stop_sequences": "stop"}
_OTHER = words("messages system tools tool_choice model stream metadata n output_config")
_BILLING = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ERRORS |= {409: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}


def _parse(body: Body, rollout: Rollout) -> Asked:
    notes: list[str] = []
    messages: list[Message] = []
    system = body.get("system")
    if system:
        texts = (
            [system]
            if isinstance(system, str)
            else [joined_text([part], "system") for part in objects(system, "system")]
        )
        if text := "\n\n".join(text for text in texts if not text.startswith(_BILLING)):
            messages.append({"role": "system", "content": text})
    for index, message in enumerate(checked_messages(body.get("messages"))):
        messages += _turns(message, f"messages[{index}]")
    choice = object_of(body.get("tool_choice"), "tool_choice")
    kind = choice.get("type", "auto")
    tools = _tools(objects(body.get("tools") or [], "tools"), notes)
    asked = _CHOICES.get(kind, choice) if isinstance(kind, str) else choice
    wanted = choice_of(asked, tools, left_out=bool(notes))
    form = object_of(object_of(body.get("output_config"), "output_config").get("format"), "output_config.format")
    sampling = sampling_of(body, rollout, _NAMES, _OTHER, form)
    chat = ChatRequest(messages, tools or None, wanted, sampling)
    strict = strict_of((str(tool.get("name")), tool) for tool in body.get("tools") or ())
    one_call = choice.get("disable_parallel_tool_use") is True
    return Asked("messages", chat, None, sampling, str(body.get("model")), notes, strict, one_call=one_call)


def _tools(given: Sequence[JsonObject], notes: list[str]) -> list[JsonObject]:
    tools = []
    for tool in given:
        if tool.get("type") not in (None, "custom"):
            notes.append(f"the tool {tool['type']!r} was left out: only Anthropic's models know it")
            continue
        tools.append(function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema")))
    return tools


def _turns(message: JsonObject, where: str) -> list[Message]:
    """One message of Anthropic's as one or several of OpenAI's."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestFault(f"{where} has no role; give each message one, such as 'user'")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = objects(content, f"content of {where}")
    if role == "assistant":
        return [_answer(blocks, where)]
    if not blocks:
        raise RequestFault(f"{where} has no content; leave the message out")
    turns: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            inner = block.get("content") or ""
            text = inner if isinstance(inner, str) else joined_text(objects(inner, f"a result in {where}"), where)
            turns.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            texts.append(joined_text([block], where))
    return [*turns, {"role": role, "content": "\n".join(texts)}] if texts else turns


def _answer(blocks: Sequence[JsonObject], where: str) -> Message:
    message: Message = {"role": "assistant", "content": None}
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            message["content"] = (message["content"] or "") + joined_text([block], where)
    return message


def _reply(exchange: Exchange, body: Body, rollout: Rollout) -> JsonObject:
    answer = exchange.answers[0]
    message, name = answer.message, reply_id(rollout.id, exchange.dialect, exchange.number)
    content: list[JsonObject] = []
    if thoughts := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thoughts, "signature": name})
    calls = message.get("tool_calls") or ()
    if message.get("content") or not (calls or thoughts):
        content.append({"type": "text", "text": message.get("content") or ""})
    for call in calls:
        given = _object(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    stop = _stop_of(exchange)
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": rollout.model_name,
        "content": content,
        "stop_reason": "stop_sequence" if stop else _STOPS.get(answer.finish_reason, "end_turn"),
        "stop_sequence": stop,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": answer.completion_tokens,
        },
    }


def _stop_of(exchange: Exchange) -> str | None:
    """Return the stop sequence that ended the text, of several the first in it; None where there is none."""
    if exchange.answers[0].finish_reason != "stop" or not exchange.calls:
        return None
    text, stops = exchange.calls[0].text, exchange.used.get("stop") or ()
    found = [
        (text.find(stop), stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop and stop in text
    ]
    return min(found)[1] if found else None


def _object(arguments: str) -> JsonObject:
    """Return the arguments of a call as this API has them, as far as a reply can hold them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return as_json(value if isinstance(value, dict) else {"value": value})


def _events(reply: JsonObject, body: Body) -> Iterator[bytes]:
    def event(kind: str, **fields: Json) -> bytes:
        return sse({"type": kind, **fields}, kind)

    usage = reply["usage"]
    begun = {**reply, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield event("message_start", message=begun)
    for index, block in enumerate(reply["content"]):
        kind = block["type"]
        if kind == "text":
            empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        elif kind == "thinking":
            empty = {**block, "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            empty = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}]
        yield event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    delta = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
    yield event("message_delta", delta=delta, usage=usage)
    yield event("message_stop")


def _error(status: int, message: str, kind: str) -> JsonObject:
    return {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}}


MESSAGES = Dialect("messages", _parse, _reply, _events, _error, sse({"type": "ping"}, "ping"))
