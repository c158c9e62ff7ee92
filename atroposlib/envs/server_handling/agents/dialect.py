"""The APIs that agents speak, their common part, and the first of them: OpenAI's chat completions and text completions.

A request is understood, a reply written, at once or as events. Events are made of the whole reply: what is streamed is
what is recorded.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson

from atroposlib.envs.server_handling.agents.record import Exchange, reply_id
from atroposlib.envs.server_handling.agents.rollouts import Rollout
from atroposlib.envs.server_handling.agents.settings import Asked
from atroposlib.envs.server_handling.managed_server import ChatRequest
from atroposlib.envs.server_handling.openai_wire import usage_of
from atroposlib.envs.server_handling.sampling import (
    AGENT_OPTIONS,
    GRAMMARS,
    OPTIONS,
    check_sampling,
    known_options,
    words,
)
from atroposlib.errors import RequestFault
from atroposlib.type_definitions import Json, JsonObject

_SESSION_OPTIONS = OPTIONS - words("prompt input_ids extra_body extra_headers timeout") | {"split"}
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "grammar", "choice")}
_STRUCTURED = {inside: name for name, inside in GRAMMARS.items()}

_UNMET = words("audio conversation echo function_call functions logprobs mcp_servers suffix top_logprobs")
"""Fields of these APIs that change what the model sees or what a reply has, and are not there."""

MOST_CHOICES = 128
DEEPEST, MOST_WRITTEN = 200, 254
"""Levels in the body of a request, and those that orjson writes, some of which are a record's own. It reads 1,024."""

Body = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: pure functions between its JSON and ours."""

    name: str
    parse: Callable[[Body, Rollout], Asked]  # RequestFault: what is wrong with the request
    reply: Callable[[Exchange, Body, Rollout], JsonObject]
    events: Callable[[JsonObject, Body], Iterator[bytes]]  # of a reply
    error: Callable[[int, str, str], JsonObject]  # status, sentence, kind
    keep_alive: bytes = b": still generating\n\n"  # an event that says nothing


def sse(data: Json, event: str | None = None) -> bytes:
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + (data if isinstance(data, bytes) else orjson.dumps(data)) + b"\n\n"


def objects(value: Json, what: str) -> Sequence[JsonObject]:
    """Return a list of objects, or what is wrong with it."""
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise RequestFault(f"{what} must be a list of objects, not {value!r:.100}")
    return value


def json_object(data: bytes) -> JsonObject:
    """Parse the body of a request; RequestFault unless it is a JSON object that a record can hold."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestFault(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestFault(f"the body must be a JSON object, not {type(body).__name__}")
    if data.count(b"[") + data.count(b"{") > DEEPEST and not _can_be_recorded(body):
        raise RequestFault(f"the body is nested more than {DEEPEST} levels deep; send what is deeper as a text")
    return body


def _can_be_recorded(body: JsonObject) -> bool:
    inside: object = body
    for _ in range(MOST_WRITTEN - DEEPEST):
        inside = [inside]
    try:
        orjson.dumps(inside)
    except TypeError:
        return False
    return True


def object_of(value: Json, what: str) -> Mapping[str, Json]:
    """Return an object, empty where nothing was given; RequestFault for anything else."""
    if value is not None and not isinstance(value, dict):
        raise RequestFault(f"{what} must be an object, not {value!r:.100}")
    return value or {}


def sampling_of(
    body: Body,
    rollout: Rollout,
    names: Mapping[str, str],
    ignored: frozenset[str],
    form: Mapping[str, Json] | None = None,
) -> JsonObject:
    """Return the sampling parameters of a request under the engines' names, checked; a grammar by SGLang's.

    Args:
        rollout: which may be a session, whose client may say more than an agent.
        names: of this API, with that of the engines.
        ignored: what is no sampling parameter.
        form: of the reply, as the API has it: `{"type": "json_schema", "schema": ...}`.

    Raises:
        RequestFault: a value is of the wrong kind, there is more than one grammar, or a field asks for what is not
            there.
    """
    unmet = [name for name in sorted(_UNMET) if body.get(name)] + ["prompt"] * isinstance(body.get("prompt"), dict)
    if unmet and not rollout.is_session:
        raise RequestFault(f"{', '.join(unmet)} cannot be met here, and the reply would be another one; leave it out")
    grammar = grammar_of(body, form or {})
    given = {names.get(key, key): value for key, value in body.items() if key not in ignored and value is not None}
    given = {key: value for key, value in given.items() if key not in _GRAMMAR_FIELDS}
    sampling: JsonObject
    if rollout.is_session:
        sampling = known_options(given, _SESSION_OPTIONS) | grammar
    else:
        sampling = {key: value for key, value in known_options(given).items() if key in AGENT_OPTIONS} | grammar
    check_sampling(sampling)
    if (choices := sampling.get("n") or 1) > MOST_CHOICES and not rollout.is_session:
        raise RequestFault(f"n is {choices}; one request can have {MOST_CHOICES} choices at most")
    return sampling


def strict_of(tools: Iterable[tuple[str, Mapping[str, Json]]]) -> JsonObject | None:
    """The schema for the arguments of each tool, by its name, any object where it is not strict; None: no tool is.

    Args:
        tools: with their names, each as any of the APIs has it.
    """
    functions = [(name, tool.get("function") or tool) for name, tool in tools]
    if not any(function.get("strict") is True for _, function in functions):
        return None
    anything = {"type": "object"}
    schemas = [function.get("parameters") or function.get("input_schema") or anything for _, function in functions]
    strict = [function.get("strict") is True for _, function in functions]
    return {name: schemas[i] if strict[i] else anything for i, (name, _) in enumerate(functions)}


_GRAMMAR_FIELDS = frozenset({*GRAMMARS, *_GUIDED, "structured_outputs"})


def grammar_of(body: Body, form: Mapping[str, Json]) -> dict[str, str]:
    """Return the grammar that a request names, by SGLang's name for it; {} where it names none.

    Args:
        body: with fields of the engines, such as `regex`, `guided_json`, `structured_outputs`.
        form: of the reply, as OpenAI and Anthropic have it.

    Raises:
        RequestFault: there are several, or one that is not understood.
    """
    kind, found = form.get("type", "text"), []
    if kind == "json_object":
        found.append(("json_schema", {"type": "object"}))
    elif kind == "json_schema":
        schema = object_of(form.get("json_schema"), "json_schema").get("schema", form.get("schema"))
        found.append(("json_schema", object_of(schema, "the schema of the reply")))
    elif kind == "structural_tag":
        found.append(("structural_tag", dict(form)))
    elif kind != "text":
        raise RequestFault(f"the reply cannot have the form {kind!r}; known are text, json_object, json_schema")
    inside = dict(object_of(body.get("structured_outputs"), "structured_outputs"))
    inside |= {name: body[key] for key, name in _GUIDED.items() if body.get(key) is not None}
    for name, value in inside.items():
        if name == "choice":
            found.append(("regex", "|".join(f"({re.escape(str(one))})" for one in value)))
        elif name == "json_object":
            found += [("json_schema", {"type": "object"})] if value else []
        elif name not in _STRUCTURED:
            raise RequestFault(f"structured_outputs has {name!r}; known are {', '.join([*_STRUCTURED, 'choice'])}")
        else:
            found.append((_STRUCTURED[name], value))
    found += [(name, body[name]) for name in GRAMMARS if body.get(name) is not None]
    if len(found) > 1:
        raise RequestFault(f"a reply can have one grammar, not {len(found)}: {', '.join(name for name, _ in found)}")
    return {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in found}


def choice_of(choice: Json, tools: Sequence[Mapping[str, Json]], *, left_out: bool = False) -> str | JsonObject:
    """Return a tool choice in the form of chat completions.

    Args:
        tools: in that form, too.
        left_out: more tools were offered, such as hosted ones; a choice of one of those means nothing.

    Raises:
        RequestFault: it is none that can be met.
    """
    names = [object_of(tool.get("function"), "function of a tool").get("name") for tool in tools]
    if not set(map(type, names)) <= {str}:
        raise RequestFault(f"each tool must be a function with a name, not {tools!r:.200}")
    if isinstance(choice, str) and choice in ("auto", "none", "required", "any"):
        if choice in ("required", "any") and not names:
            if not left_out:
                raise RequestFault(f"tool_choice is {choice!r}, but no tools are given")
            return "auto"
        return choice
    named = choice if isinstance(choice, dict) and choice.get("type") in ("function", "tool", "custom") else {}
    name = object_of(named.get("function") or named, "function of tool_choice").get("name")
    if name in names:
        return {"type": "function", "function": {"name": name}}
    if left_out:
        return "auto"
    raise RequestFault(f"tool_choice is {choice!r:.100}; it must be auto, none, required or one of the tools {names}")


def function_tool(name: Json, description: Json, parameters: Json) -> JsonObject:
    """Return a tool in the form of chat completions."""
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def refuse_begun_answer(messages: Sequence[Mapping[str, Json]]) -> None:
    """RequestFault where the last message is the assistant's: its turn has ended, and nobody is to be answered."""
    if messages[-1].get("role") == "assistant":
        raise RequestFault(
            "the last message is the assistant's, and the model cannot continue a turn; end with a message of the user "
            "or a tool's result"
        )


def checked_messages(messages: Json) -> Sequence[JsonObject]:
    """Return a list of objects that is not empty; RequestFault otherwise."""
    if not objects(messages, "messages"):
        raise RequestFault("messages must not be empty")
    return messages


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


def _named(tool: JsonObject) -> tuple[str, JsonObject]:
    return str(object_of(tool.get("function"), "function of a tool").get("name")), tool


def _form(body: Body) -> Mapping[str, Json]:
    return object_of(body.get("response_format"), "response_format")


def _whole(exchange: Exchange, rollout: Rollout, kind: str, choices: list[JsonObject]) -> JsonObject:
    ends = [{"logprobs": None, "finish_reason": answer.finish_reason} for answer in exchange.answers]
    return {
        "id": reply_id(rollout.id, exchange.dialect, exchange.number),
        "object": kind,
        "created": int(exchange.ended),
        "model": rollout.model_name,
        "choices": [{"index": index, **choices[index], **end} for index, end in enumerate(ends)],
        "usage": usage_of([(answer.prompt_tokens, answer.completion_tokens) for answer in exchange.answers]),
    }


def _reply(exchange: Exchange, body: Body, rollout: Rollout) -> JsonObject:
    return _whole(exchange, rollout, "chat.completion", [{"message": answer.message} for answer in exchange.answers])


def _reply_completion(exchange: Exchange, body: Body, rollout: Rollout) -> JsonObject:
    texts = [{"text": answer.message["content"] or ""} for answer in exchange.answers]
    return _whole(exchange, rollout, "text_completion", texts)


def _events(reply: JsonObject, body: Body) -> Iterator[bytes]:
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(choice: JsonObject, delta: JsonObject, reason: str | None = None) -> bytes:
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


def _events_completion(reply: JsonObject, body: Body) -> Iterator[bytes]:
    for choice in reply["choices"]:
        yield sse({**reply, "choices": [choice], "usage": None})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield sse({**reply, "choices": []})
    yield sse(b"[DONE]")


def openai_error(status: int, message: str, kind: str) -> JsonObject:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


CHAT = Dialect("chat", _parse, _reply, _events, openai_error)
COMPLETIONS = Dialect("completions", _parse_completion, _reply_completion, _events_completion, openai_error)
