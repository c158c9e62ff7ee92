"""Between the text a model writes for tool calls and the OpenAI form that agents read and send.

Outwards, the calls in a text become `tool_calls`. Inwards, an assistant message with `tool_calls` becomes the very text
the model wrote as long as it says what was handed out; one that was changed is written as it is now. Rollouts always
keep the raw text.

Ids of calls follow from the prompt and the text, so that an agent that is run again says the same: some chat templates
show ids to the model, and a journal knows a response by its prompt.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from atroposlib.envs.server_handling.conversation import Message, copied, joined_text, keys_of, shows_tools
from atroposlib.envs.server_handling.tool_formats import WrittenCall, find_calls, tool_format
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import Json, Tokenizer

VLLM_AVAILABLE = True
"""Tool parsing is available. The parsers are our own; the name is what callers test for."""


class FunctionCall(BaseModel):
    """A function's name, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call in OpenAI's form."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallTranslator:
    """Translates for one conversation; remembers the raw text behind every call id it gave out."""

    def __init__(self, tokenizer: Tokenizer, parser_name: str = "hermes") -> None:
        self.format = tool_format(parser_name)
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.call_id_to_raw_text: dict[str, str] = {}
        self._handed_out: dict[str, Message] = {}  # by call id
        self._own_ids: dict[str, str] = {}  # of ours, those that the model gave
        self._made: Counter[bytes] = Counter()  # equal generations, by their name

    def parse_model_output(
        self,
        raw_text: str,
        tool_choice: str | Mapping[str, Json] | None = None,
        tools: Sequence[Mapping[str, Json]] | None = None,
    ) -> tuple[str | None, list[ToolCall] | None, Literal["stop", "tool_calls"]]:
        """Content, calls and finish reason of one generation.

        Without `tools`, with `tool_choice="none"` or without a usable call: (raw_text, None, "stop"). The "stop" then
        says only that no tool was called; the engine's own reason is the one to report.
        """
        message, _ = self.messages_of(raw_text, tool_choice, tools)
        calls = [ToolCall.model_validate(call) for call in message.get("tool_calls", ())]
        return message["content"], calls or None, "tool_calls" if calls else "stop"

    def messages_of(
        self,
        text: str,
        tool_choice: str | Mapping[str, Json] | None,
        tools: Sequence[Mapping[str, Json]] | None,
        *,
        marks: str = "",
        is_cut: bool = False,
        prompt: str = "",
    ) -> tuple[Message, Message]:
        """Return the assistant's message of one generation in OpenAI's form, and as a record has it.

        A record has the raw text where there is some behind a call. The calls are dicts, absent where there are none,
        and named after the generation and its prompt.

        Args:
            marks: special tokens behind the text, by which a call may end.
        """
        plain, raw_text = {"role": "assistant", "content": text}, text + marks
        is_off = not tools or tool_choice == "none"
        parsed = None if is_off else find_calls(self.parser_name, raw_text, tools or (), is_cut=is_cut)
        if parsed is None:
            return plain, plain
        generation = self._name_of(prompt, raw_text)
        calls = [
            ToolCall(
                id=self._id_of(generation, number, call),
                function=FunctionCall(name=call.name, arguments=call.arguments),
            ).model_dump()
            for number, call in enumerate(parsed.calls)
        ]
        message = {"role": "assistant", "content": parsed.before + parsed.after or None, "tool_calls": calls}
        for call in calls:
            self.call_id_to_raw_text[call["id"]], self._handed_out[call["id"]] = raw_text, message
        return copied(message), {"role": "assistant", "content": raw_text} if parsed.after else copied(message)

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: Sequence[Mapping[str, Json]]) -> str:
        """Return what the model wrote for these calls, or write them now where their first id is unknown."""
        if not tool_calls:
            return ""
        return self.call_id_to_raw_text.get(tool_calls[0].get("id", "")) or self._written(tool_calls)

    def convert_messages_for_template(self, messages: Sequence[Mapping[str, Json]]) -> list[Message]:
        """The messages with every assistant's `tool_calls` turned into text; others as they are."""
        return [self._as_text(message) if message.get("tool_calls") else dict(message) for message in messages]

    def decode_with_tool_awareness(self, token_ids: list[int], has_tools: bool = False) -> str:
        """Text of the ids; with tools the special tokens stay, because some models mark calls with them."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=not has_tools)

    def handed_out(self, call_id: str) -> Message | None:
        """The message that was handed out with a call of this id."""
        return self._handed_out.get(call_id)

    def _name_of(self, prompt: str, raw_text: str) -> bytes:
        """Return what a generation is known by: what it was asked and said, and how many were equal before."""
        name = b"".join(hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest() for text in (prompt, raw_text))
        self._made[name] += 1
        return name + str(self._made[name]).encode()

    def _id_of(self, generation: bytes, number: int, call: WrittenCall) -> str:
        made = hashlib.blake2b(generation + f"/{number}".encode(), digest_size=16).hexdigest()
        given = f"call_{made}" if self.parser_name != "mistral" else made[:9]  # nine characters, say its templates
        if call.id is not None:
            self._own_ids[given] = call.id
        return given

    def _written(self, tool_calls: Sequence[Mapping[str, Json]]) -> str:
        calls = [call.get("function") or {} for call in tool_calls]
        return self.format.write(
            [
                WrittenCall(
                    str(function.get("name")),
                    _as_json(function.get("arguments")),
                    self._own_ids.get(str(call.get("id"))),
                )
                for call, function in zip(tool_calls, calls, strict=True)
            ]
        )

    def _as_text(self, message: Mapping[str, Json]) -> Message:
        calls = message["tool_calls"]
        first = str(calls[0].get("id", ""))
        given = self._handed_out.get(first)
        if given is not None and set(keys_of(given, is_generated=True)) & set(keys_of(dict(message))):
            return {"role": message["role"], "content": self.call_id_to_raw_text[first]}
        content = message.get("content")
        if isinstance(content, list):
            content = joined_text(content, "a message with tool calls")
        text = "\n".join(filter(None, [content, self._written(calls)]))
        return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _as_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)


def check_tools(parser_name: str | None, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where `tools=` cannot reach the model: no tool parser, or a template without place for them."""
    if not parser_name:
        raise ConfigError(
            "tools= would not reach the model: no tool parser is set; set tool_parser of the inference server "
            "(--openai.tool_parser hermes), or call managed_server(tool_parser='hermes')"
        )
    if not shows_tools(tokenizer):
        name = getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
        raise ConfigError(
            f"tools= would not reach the model: the chat template of {name} has no place for them; set "
            "tokenizer_name to one whose template has, or describe the tools in a message"
        )
