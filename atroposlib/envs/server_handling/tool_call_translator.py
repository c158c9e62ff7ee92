"""Between the text a model writes for tool calls and the OpenAI form that agents read and send.

Outwards, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` becomes `tool_calls`. Inwards, an assistant message
with `tool_calls` becomes the very text the model wrote, so that a next turn extends the stored tokens instead of
re-rendering them. Rollouts always keep the raw text.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from atroposlib.errors import ConfigError
from atroposlib.utils.tool_call_parser import parse_lenient_object

VLLM_AVAILABLE = True
"""Tool parsing is available. The parsers are our own; the name is what callers test for."""

_THINK_END = "</think>"
_HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class FunctionCall(BaseModel):
    """Which function, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call in OpenAI's form."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


def parse_hermes(text: str) -> tuple[str, list[FunctionCall]] | None:
    """Text before the first call, and all calls; None when there are none or one is no usable JSON.

    The last tag may be unclosed. Tags inside a finished think block are thoughts, not calls.
    """
    answer_starts = text.find(_THINK_END) + len(_THINK_END) if _THINK_END in text else 0
    matches = list(_HERMES_CALL.finditer(text, answer_starts))
    calls = [_function_call(match[1]) for match in matches]
    usable = [call for call in calls if call is not None]
    if not usable or len(usable) < len(calls):
        return None
    return text[: matches[0].start()], usable


PARSERS: Mapping[str, Callable[[str], tuple[str, list[FunctionCall]] | None]] = {"hermes": parse_hermes}


class ToolCallTranslator:
    """Translates for one conversation; remembers the raw text behind every call id it gave out."""

    def __init__(self, tokenizer: Decoder, parser_name: str = "hermes") -> None:
        if parser_name not in PARSERS:
            raise ConfigError(f"tool_parser is {parser_name!r}; known parsers: {', '.join(sorted(PARSERS))}")
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.call_id_to_raw_text: dict[str, str] = {}

    def parse_model_output(
        self,
        raw_text: str,
        tool_choice: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str | None, list[ToolCall] | None, Literal["stop", "tool_calls"]]:
        """Content, calls and finish reason of one generation.

        Without `tools`, with `tool_choice="none"` or without a usable call: (raw_text, None, "stop"). The "stop" then
        says only that no tool was called; the engine's own reason is the one to report.
        """
        parsed = PARSERS[self.parser_name](raw_text) if tools and tool_choice != "none" else None
        if parsed is None:
            return raw_text, None, "stop"
        content, functions = parsed
        calls = [ToolCall(id=f"call_{uuid.uuid4().hex}", function=function) for function in functions]
        self.call_id_to_raw_text.update({call.id: raw_text for call in calls})
        return content or None, calls, "tool_calls"

    def message_of(self, raw_text: str, tool_choice: Any, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """The assistant message of one generation in OpenAI's form; `tool_calls` are dicts, absent without calls."""
        wanted = tool_choice if isinstance(tool_choice, str) else "auto"
        content, calls, _ = self.parse_model_output(raw_text, wanted, tools)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        return {**message, "tool_calls": [call.model_dump() for call in calls]} if calls else message

    def record_of(self, message: dict[str, Any], raw_text: str) -> dict[str, Any]:
        """The message for a record: as it is, or only the raw text where text behind a call would be lost."""
        begins = len(message.get("content") or "")
        if "tool_calls" not in message or not _HERMES_CALL.sub("", raw_text[begins:]).strip():
            return message
        return {"role": "assistant", "content": raw_text}

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: Sequence[Mapping[str, Any]]) -> str:
        """What the model wrote for these calls, or the same calls written afresh when their id is unknown."""
        if not tool_calls:
            return ""
        return self._remembered(tool_calls) or "\n".join(map(_written, tool_calls))

    def convert_messages_for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with every assistant's `tool_calls` turned into text; others as they are."""
        return [self._as_text(message) if message.get("tool_calls") else dict(message) for message in messages]

    def decode_with_tool_awareness(self, token_ids: list[int], has_tools: bool = False) -> str:
        """Text of the ids; with tools the special tokens stay, because some models mark calls with them."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=not has_tools)

    def _remembered(self, tool_calls: Sequence[Mapping[str, Any]]) -> str | None:
        return self.call_id_to_raw_text.get(tool_calls[0].get("id", ""))

    def _as_text(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = message["tool_calls"]
        raw = self._remembered(calls)
        if raw is not None:
            return {"role": message["role"], "content": raw}
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
        text = "\n".join(filter(None, [content, self.reconstruct_raw_text_from_tool_calls(calls)]))
        return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _function_call(text: str) -> FunctionCall | None:
    call = parse_lenient_object(text.strip())
    if call is None or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    try:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a Python literal may hold sets, bytes and numbers of any length
        return None
    return FunctionCall(name=_escaped(call["name"]), arguments=_escaped(written))


def _escaped(text: str) -> str:
    """`text` with half a surrogate pair, which no reply can carry, as JSON's escape for it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _written(tool_call: Mapping[str, Any]) -> str:
    """One call as a Hermes model would write it."""
    function = tool_call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_lenient_object(arguments) or arguments
    call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{call}</tool_call>"
