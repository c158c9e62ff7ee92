"""A recorded conversation: who said what, everything that the model wrote, and which turns it generated.

A message has a `role`; its content is text, null, missing, or a list of parts. Every other key is kept as it is. Which
of the assistant's turns were generated, and are therefore trained, says the recorded mask: few-shot examples and turns
that an environment wrote are the assistant's, too. Where no ids were recorded, `weight: 0` marks such a turn.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from atroposlib.data.lazy_group import LazyGroup, Raw
from atroposlib.errors import RowError
from atroposlib.type_definitions import Json, JsonObject

Message: TypeAlias = Mapping[str, Json]
"""One message of a chat."""

ASSISTANT_ROLES = ("assistant", "agent")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
WEIGHT = "weight"
"""OpenAI's name for whether an assistant's message is trained: 0 or 1."""

_TURN_MARKS = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<\|begin_of_text\|>|<start_of_turn>|\[INST\]"
    r"|<\uff5c(?:User|Assistant)\uff5c>|<\|(?:user|assistant|system)\|>"
)
_TAGS = re.compile(r"<[^<>]*>|\[/?\w+\]")  # what ends a turn, and tags around thoughts
_BEHIND_A_TURN = 2  # positions without loss that may follow a last turn: what a template writes after its end
_TEXT_PARTS = ("text", "input_text", "output_text")
_NO_CONTENT = {"content": Raw(b"null")}
_kept_decoder = msgspec.json.Decoder(list[dict[str, Raw]])


@dataclass(frozen=True)
class RecordedChat:
    """One response's conversation."""

    where: str  # file:line[index]
    messages: list[JsonObject]
    kept: list[dict[str, Raw]]  # the same byte by byte, without `reward`; a content that is missing is null, and one
    # in parts is its text unless one of its group has an image or the like: templates for text drop a list in silence
    generated: list[int]  # positions of the turns that the model generated, ascending
    tools: Raw | None  # definitions of the tools that it was given


def chat_fault(messages: object) -> str | None:
    """The reason why `messages`, one response's conversation, is nothing to train on; None for a good one.

    >>> chat_fault([{"role": "user", "content": "2 + 2?"}])
    'no turn of the assistant'
    """
    if isinstance(messages, str):
        return "a transcript instead of messages"
    if messages is None:
        return "no messages were recorded"
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        return "messages that are not a list of {role, content}"
    if not messages:
        return "an empty conversation"
    if not all(isinstance(message.get("content"), str | list | None) for message in messages):
        return "content that is neither text, null nor a list of parts"
    turns = assistant_turns(messages)
    if not turns:
        return "no turn of the assistant"
    if len(messages) == 1 and any(_TURN_MARKS.search(text) for text in written(messages[0])):
        return "a transcript instead of messages"
    return None


def shared_prompt(conversations: Sequence[object]) -> int:
    """Return how many messages at the beginning are the same in all conversations, and are no answer of any.

    Few-shot turns of the assistant count where more follow; each conversation keeps at least one message.

    >>> shared_prompt([[{"role": "user", "content": "q"}, {"role": "assistant", "content": a}] for a in "ab"])
    1
    """
    chats = [chat for chat in conversations if isinstance(chat, list)]
    if not chats or len(chats) < len(conversations):
        return 0
    same = 0
    for messages in zip(*chats, strict=False):
        if any(message != messages[0] for message in messages):
            break
        same += 1
    same = min(same, *(len(chat) - 1 for chat in chats))
    asked = [at for at, message in enumerate(chats[0][:same]) if _role(message) not in ASSISTANT_ROLES]
    return asked[-1] + 1 if asked else 0


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [at for at, message in enumerate(messages) if message.get("role") in ASSISTANT_ROLES]


def messages_of(group: LazyGroup, index: int) -> list[JsonObject]:
    """The conversation of one response as dicts; [] when there is none, one user message when it is plain text."""
    value = msgspec.json.decode(group.messages[index]) if group.messages else None
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []


def tools_of(group: LazyGroup, index: int) -> Raw | None:
    """The tools that one response's model was given: the group's, or its own entry of a list of lists; None: none."""
    raw = group.tools
    tools = msgspec.json.decode(raw or b"null")
    if not isinstance(tools, list) or not tools:
        return None
    if all(isinstance(each, list | None) for each in tools):
        raw, tools = (msgspec.json.decode(raw, type=list[Raw])[index], tools[index])
    return raw if tools else None


def content_texts(content: object) -> list[str]:
    """The texts in a message's content, in order; parts that hold no text give none."""
    if isinstance(content, str):
        return [content] if content else []
    parts = content if isinstance(content, list) else []
    return [text for part in parts if (text := part_text(part))]


def part_text(part: object) -> str:
    """The text of one part of a content; "" for an image and the like."""
    if isinstance(part, Mapping):
        part = part.get("text") or part.get("thinking") or part.get("reasoning")
    return part if isinstance(part, str) else ""


def _is_text(message: object) -> bool:
    """True when a content is text, also where that is given in parts, or missing."""
    content = message.get("content") if isinstance(message, dict) else None
    return not isinstance(content, list) or all(
        isinstance(part, str)
        or (isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") in _TEXT_PARTS)
        for part in content
    )


def _has_text_alone(group: LazyGroup) -> bool:
    """False when some conversation has an image: then all are for templates that take parts, and prompts stay alike."""
    if group.is_text is None:
        group.is_text = True
        for raw in group.messages or []:
            with suppress(msgspec.DecodeError):  # an odd response
                chat = msgspec.json.decode(raw)
                group.is_text &= not isinstance(chat, list) or all(map(_is_text, chat))
    return group.is_text


def reasoning_of(message: Message) -> str:
    """Return the model's thoughts before its answer, of whichever key holds it; "" when none does."""
    return next((text for key in REASONING_KEYS if isinstance(text := message.get(key), str) and text), "")


def calls_of(message: Message) -> list[tuple[str, object]]:
    """Name and arguments (text or a dict) of each tool call of a message."""
    calls = [*(message.get("tool_calls") or []), message.get("function_call")]
    functions = [call.get("function") or call for call in calls if isinstance(call, dict)]
    return [(str(function.get("name") or ""), function.get("arguments")) for function in functions]


def parsed_arguments(arguments: object) -> object:
    """The arguments of a call as JSON, where they are text that holds an object; else as they are."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def in_tags(thoughts: str) -> str:
    """A model's thoughts as they stand before its answer."""
    return f"<think>\n{thoughts.strip()}\n</think>\n\n"


def written(message: Message) -> list[str]:
    """Everything the model wrote in one turn: its reasoning, its text, and each call's name and arguments."""
    reasoning = dict.fromkeys(text for key in REASONING_KEYS if isinstance(text := message.get(key), str) and text)
    calls = [
        text
        for name, arguments in calls_of(message)
        for text in (name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
    ]
    return [*reasoning, *content_texts(message.get("content")), *calls]


def read_chat(
    group: LazyGroup, index: int, where: str, decode_runs: Callable[[], list[str]] | None = None
) -> RecordedChat:
    """The conversation of one response and which of its turns were generated.

    Args:
        where: `file:line[index]`.
        decode_runs: gives the text of each run, asked where their number does not tell; None: there is no tokenizer.

    Raises:
        RowError: there is none, nothing in it was written by the model, or it is not known what was.
    """
    raw = group.messages[index] if group.messages else Raw(b"null")
    try:
        messages = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise RowError(where, "messages that are not JSON", f"'messages' cannot be read: {error}") from error
    if fault := chat_fault(messages):
        hint = "use --format prefix or tokens, which need only ids, or set include_messages: true in the environment"
        raise RowError(where, fault, f"{fault}; {hint}" if messages is None else "")
    generated = _generated(messages, where, group.stretches(index), decode_runs)
    kept = [
        {**({} if "content" in each else _NO_CONTENT), **{key: each[key] for key in each if key != "reward"}}
        for each in _kept_decoder.decode(raw)
    ]
    for message, own in zip(messages, kept, strict=True):
        if isinstance(message.get("content"), list) and _has_text_alone(group):
            message["content"] = "".join(content_texts(message["content"]))
            own["content"] = Raw(msgspec.json.encode(message["content"]))
    return RecordedChat(where, messages, kept, generated, tools_of(group, index))


def _generated(
    messages: list[JsonObject], where: str, runs: tuple[int, int], decode_runs: Callable[[], list[str]] | None
) -> list[int]:
    turns, (count, behind) = assistant_turns(messages), runs
    if not count:
        generated = [at for at in turns if messages[at].get(WEIGHT) != 0]
        if not generated:
            raise RowError(where, "no turn that the model generated")
        return generated
    if count == len(turns):
        return turns
    if count == 1 and behind <= _BEHIND_A_TURN and turns[-1] == len(messages) - 1:
        return turns[-1:]
    if count > len(turns):
        raise RowError(
            where,
            "turns of which only a part is trained",
            f"the mask trains {count} stretches, the assistant has {len(turns)} turns: it leaves out parts of a turn, "
            "which only the formats tokens and prefix can tell",
        )
    if decode_runs is None:
        raise RowError(
            where,
            "turns of which only the tokenizer tells who wrote them",
            f"the mask trains {count} of the assistant's {len(turns)} turns; give --tokenizer, which tells which",
        )
    return _matched(messages, turns, decode_runs(), where)


def _matched(messages: list[JsonObject], turns: list[int], texts: list[str], where: str) -> list[int]:
    """The turns whose text was generated, found from the last to the first."""
    found: list[int] = []
    for text in reversed(texts):
        earlier = [at for at in turns if not found or at < found[-1]]
        at = next((at for at in reversed(earlier) if _is_turn(text, messages[at])), None)
        if at is None:
            raise RowError(
                where,
                "trained ids that are no turn of the assistant",
                f"what the mask trains, {text[:60]!r}, is no turn of the assistant in its messages",
            )
        found.append(at)
    return found[::-1]


def _is_turn(text: str, message: Message) -> bool:
    """True when `text`, decoded, is what `message` says; calls are written in the model's own way, so names must do."""
    rest = squash(text)
    pieces = [reasoning_of(message), *content_texts(message.get("content")), *(name for name, _ in calls_of(message))]
    for piece in map(squash, pieces):
        said = piece.removeprefix("<think>")  # a generation prompt may hold it
        if said not in rest:
            return False
        rest = rest.replace(said, "", 1)
    return any(pieces) and (bool(calls_of(message)) or not _TAGS.sub("", rest))


def squash(text: str) -> str:
    """`text` without white space."""
    return "".join(text.split())
