"""OpenAI's Responses: items in, items out. Stateless, or by `previous_response_id` of the same rollout.

Items of one assistant's turn (reasoning, message, calls) are one message inside. Custom tools are functions with one
text, `input`; tools that OpenAI would run itself are left out, and the record says so. The model knows a tool of a
namespace as `namespace.name`; in items the two stand apart.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from atroposlib.envs.server_handling.agents.dialect import (
    Body,
    Dialect,
    choice_of,
    function_tool,
    object_of,
    objects,
    openai_error,
    sampling_of,
    sse,
    strict_of,
)
from atroposlib.envs.server_handling.agents.record import Exchange, name_of, reply_id
from atroposlib.envs.server_handling.agents.rollouts import Rollout
from atroposlib.envs.server_handling.agents.settings import Asked
from atroposlib.envs.server_handling.conversation import Message, joined_text
from atroposlib.envs.server_handling.managed_server import ChatRequest
from atroposlib.envs.server_handling.sampling import words
from atroposlib.errors import RequestFault
from atroposlib.type_definitions import Json, JsonObject

_NAMES = {"max_output_tokens": "max_tokens"}
_OTHER = words(
    """input instructions tools tool_choice model stream stream_options previous_response_id text user prompt
    top_logprobs n max_tool_calls metadata parallel_tool_calls"""
)
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _parse(body: Body, rollout: Rollout) -> Asked:
    notes: list[str] = []
    messages = _history(body.get("previous_response_id"), rollout)
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": str(body["instructions"])})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += _messages(objects(given, "input"))
    if not messages:
        raise RequestFault("input must not be empty")
    declared = [*_declared(objects(body.get("tools") or [], "tools"))]
    tools = _tools(declared, notes)
    choice = choice_of(body.get("tool_choice") or "auto", tools, left_out=any("was left out" in note for note in notes))
    form = object_of(object_of(body.get("text"), "text").get("format"), "text.format")
    sampling = sampling_of(body, rollout, _NAMES, _OTHER, form)
    chat = ChatRequest(messages, tools or None, choice, sampling)
    strict = strict_of((name, tool) for name, _, tool in declared if tool.get("type") == "function")
    begun, one_call = bool(body.get("instructions")), body.get("parallel_tool_calls") is False
    return Asked("responses", chat, None, sampling, str(body.get("model")), notes, strict, begun, one_call)


def _history(previous: Json, rollout: Rollout) -> list[Message]:
    """The messages up to and including a response, without the instructions of its request: they are for that only."""
    if previous is None:
        return []
    for exchange in reversed(rollout.exchanges):
        name, calls = reply_id(rollout.id, exchange.dialect, exchange.number), exchange.calls
        if name == previous and calls and calls[0].chat is not None:
            turns = calls[0].chat.turns[bool(exchange.asked.get("instructions")) : -1]
            return [*(turn.said for turn in turns), exchange.answers[0].message]
    if rollout.end_reason is not None:  # which is what the request is told; its responses may be in the log only
        return []
    raise RequestFault(f"previous_response_id {previous!r} is no response of this rollout; send the whole input")


def _declared(given: Sequence[JsonObject], namespace: str = "") -> Iterator[tuple[str, str, JsonObject]]:
    """Each tool with its namespace ("" outside of any), behind the name by which the model knows it."""
    for tool in given:
        name = f"{namespace}.{tool.get('name')}" if namespace else str(tool.get("name"))
        if tool.get("type") == "namespace":
            yield from _declared(objects(tool.get("tools") or [], "tools of a namespace"), name)
        else:
            yield name, namespace, tool


def _tools(declared: Sequence[tuple[str, str, JsonObject]], notes: list[str]) -> list[JsonObject]:
    tools: list[JsonObject] = []
    for name, _, tool in declared:
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            notes.append(f"the tool {kind!r} was left out: it would run at OpenAI")
            continue
        if object_of(tool.get("format"), "format of a tool").get("type") == "grammar":
            notes.append(f"the grammar of the tool {name!r} was not used")
        parameters = _CUSTOM if kind == "custom" else tool.get("parameters")
        tools.append(function_tool(name, tool.get("description"), parameters))
    return tools


def _messages(items: Sequence[JsonObject]) -> list[Message]:
    """Items as messages of chat completions."""
    messages: list[Message] = []

    def answer(*, new: bool) -> Message:
        """Return the assistant's message that an item belongs to."""
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if last is None or (new and ("tool_calls" in last or last["content"] is not None)):
            messages.append(last := {"role": "assistant", "content": None})
        return last

    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        where = f"input[{index}]"
        if kind == "message" and not isinstance(item.get("role"), str):
            raise RequestFault(f"{where} has no role; give each message one, such as 'user'")
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": str(item.get("role")), "content": _text(item.get("content"), where)})
        elif kind == "message":
            message = answer(new=True)
            message["content"] = (message["content"] or "") + _text(item.get("content"), where)
        elif kind == "reasoning":
            parts = objects(item.get("content") or item.get("summary") or [], f"reasoning of {where}")
            if text := "".join(str(part.get("text") or "") for part in parts):
                message = answer(new=True)
                message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
            name = f"{item['namespace']}.{item.get('name')}" if item.get("namespace") else item.get("name")
            call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
            answer(new=False).setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = _text(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            raise RequestFault(f"{where} is a {kind!r}; the model takes messages, reasoning, calls and outputs")
    return messages


def _text(content: Json, where: str) -> str:
    return content if isinstance(content, str) else joined_text(objects(content or [], f"content of {where}"), where)


def _reply(exchange: Exchange, body: Body, rollout: Rollout) -> JsonObject:
    answer = exchange.answers[0]
    message = answer.message
    declared = {name: (namespace, tool) for name, namespace, tool in _declared(body.get("tools") or ())}
    output: list[JsonObject] = []
    if thoughts := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thoughts}]
        name = name_of("rs_", rollout.id, exchange.number)
        output.append({"id": name, "type": "reasoning", "summary": summary, "encrypted_content": name})
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        part = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}
        output.append(
            {
                "id": name_of("msg_", rollout.id, exchange.number),
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for index, call in enumerate(calls):
        output.append(_call_item(call, name_of("fc_", rollout.id, exchange.number, str(index)), declared))
    is_cut = answer.finish_reason == "length"
    tokens = answer.prompt_tokens, answer.completion_tokens
    name = reply_id(rollout.id, exchange.dialect, exchange.number)
    return {
        "id": name,
        "object": "response",
        "created_at": int(exchange.ended),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "model": rollout.model_name,
        "output": output,
        "parallel_tool_calls": bool(body.get("parallel_tool_calls", True)),
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": exchange.used.get("temperature"),
        "top_p": exchange.used.get("top_p"),
        "metadata": body.get("metadata") or {},
        "usage": {
            "input_tokens": tokens[0],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": tokens[1],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(tokens),
        },
    }


def _call_item(call: JsonObject, item_id: str, declared: Mapping[str, tuple[str, JsonObject]]) -> JsonObject:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    namespace, tool = declared.get(name, ("", {"name": name}))
    base = {"id": item_id, "call_id": call["id"], "name": tool.get("name"), "status": "completed"}
    if namespace:
        base["namespace"] = namespace
    if tool.get("type") != "custom":
        return {**base, "type": "function_call", "arguments": arguments}
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        text = arguments
    return {**base, "type": "custom_tool_call", "input": text if isinstance(text, str) else json.dumps(text)}


def _events(reply: JsonObject, body: Body) -> Iterator[bytes]:
    number = -1

    def event(kind: str, **fields: Json) -> bytes:
        nonlocal number
        number += 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)

    begun = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(reply["output"]):
        place = {"output_index": index}
        yield event("response.output_item.added", item=_empty(item), **place)
        place |= {"item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            text = {**place, "content_index": 0}
            yield event("response.content_part.added", part={**part, "text": ""}, **text)
            yield event("response.output_text.delta", delta=part["text"], logprobs=[], **text)
            yield event("response.output_text.done", text=part["text"], logprobs=[], **text)
            yield event("response.content_part.done", part=part, **text)
        elif item["type"] == "reasoning":
            part = item["summary"][0]
            text = {**place, "summary_index": 0}
            yield event("response.reasoning_summary_part.added", part={**part, "text": ""}, **text)
            yield event("response.reasoning_summary_text.delta", delta=part["text"], **text)
            yield event("response.reasoning_summary_text.done", text=part["text"], **text)
            yield event("response.reasoning_summary_part.done", part=part, **text)
        elif item["type"] == "custom_tool_call":
            yield event("response.custom_tool_call_input.delta", delta=item["input"], **place)
            yield event("response.custom_tool_call_input.done", input=item["input"], **place)
        else:
            arguments = item["arguments"]
            yield event("response.function_call_arguments.delta", delta=arguments, **place)
            yield event("response.function_call_arguments.done", arguments=arguments, name=item["name"], **place)
        yield event("response.output_item.done", item=item, output_index=index)
    yield event(f"response.{reply['status']}", response=reply)


def _empty(item: JsonObject) -> JsonObject:
    """Return an item before its first delta."""
    nothing = {"content": [], "summary": [], "arguments": "", "input": ""}
    started = {key: nothing.get(key, value) for key, value in item.items()}
    return {**started, "status": "in_progress"} if "status" in item else started


RESPONSES = Dialect("responses", _parse, _reply, _events, openai_error)
