"""A turn of the model as environments take it: text without thoughts, calls of tools, the move that it ends with.

Some chat templates open the thought in the prompt (DeepSeek-R1, Qwen3-Thinking), and some engines take it out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.envs.server_handling.tool_formats import find_calls
from atroposlib.type_definitions import Json, JsonObject

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessage

Message = JsonObject
THINK = "<think>"
_MARKED = re.compile(r"\\boxed\{([^{}]*)\}|<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    arguments: JsonObject | None  # None: they are no JSON object


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the model."""

    text: str  # without thoughts and calls, stripped
    calls: tuple[ToolCall, ...] = ()
    whole: str = ""  # everything that was written except for calls


def opening_of(prompt: str) -> str:
    r"""Return the tag that opens a thought, and the white space after it, when a prompt ends in them, else "".

    >>> opening_of("<|User|>6 times 7?<|Assistant|><think>\n")
    '<think>\n'
    """
    return prompt[prompt.rfind(THINK) :] if prompt.rstrip().endswith(THINK) else ""


def text_of(message: "ChatCompletionMessage", opening: str) -> str:
    """Return a whole reply with its thoughts, also where a parser of the engine has taken them out."""
    return _whole(message.content or "", (message.model_extra or {}).get("reasoning_content"), opening)


def _whole(content: str, thoughts: str | None, opening: str) -> str:
    if thoughts:
        return f"{THINK}{thoughts}</think>{content}"
    return content if content.lstrip().startswith(THINK) else opening + content


def reply_of(message: Mapping[str, Json], opening: str = "") -> Reply:
    """Return a message of the model as worlds take it; a thought that never ends leaves no text and no calls."""
    whole = _whole(str(message.get("content") or ""), message.get("reasoning_content"), opening)
    said = after_thinking(whole)
    if said is None:
        return Reply("", (), whole)
    return Reply(said.strip(), tuple(map(_call_of, message.get("tool_calls") or ())), whole)


def last_move(text: str) -> str:
    r"""Return the move that a reply ends with: what the last box or answer tag holds, or else the last line of words.

    >>> last_move("I could hit, but\n**Stick.**")
    'Stick'
    """
    marked = _MARKED.findall(text)
    lines = [line for line in text.splitlines() if line.replace("`", "").strip()]  # a fence alone is none
    said = "".join(marked[-1]) if marked else (lines or [""])[-1]
    return said.strip(" \t\n*_`'\".,!")


def message_of(text: str, tools: Sequence[Message], parser: str = "hermes", *, is_cut: bool = False) -> Message:
    """Return the text of a reply as the message that a managed server makes of it."""
    parsed = find_calls(parser, text, tools, is_cut=is_cut) if tools else None
    if parsed is None:
        return {"role": "assistant", "content": text}
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(parsed.calls)
    ]
    return {"role": "assistant", "content": parsed.before + parsed.after, "tool_calls": calls}


def _call_of(call: Mapping[str, Json]) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError):
        arguments = None
    return ToolCall(str(call.get("id")), function["name"], arguments if isinstance(arguments, dict) else None)
