"""From messages to the text of a prompt, without letting a chat template rewrite what a model wrote."""

import re
from collections.abc import Sequence
from typing import Literal

from atroposlib.envs.server_handling.conversation import Conversation
from atroposlib.type_definitions import JsonObject, Tokenizer

TURN_MARK = "ATROPOSxTURNxMARK"
"""Stands in for a whole assistant turn while the template runs."""

Thoughts = Literal["opened", "allowed", "none"]
"""Of an answer: the prompt has opened them, the model may open them, or it has none."""

_THOUGHT_OPENS = re.compile(r"<think>\s*\Z")
_THINK_MARKS = {"<think>": "ATROPOSxTHINKxOPEN", "</think>": "ATROPOSxTHINKxCLOSE"}


def render(tokenizer: Tokenizer, messages: Sequence[JsonObject], tools: object = None) -> str:
    """Return the chat template's text; "role: content" lines when there is no template.

    The generation prompt is added unless the last turn is the assistant's.
    """
    if _has_no_template(tokenizer):
        return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
    extra = {"tools": tools} if tools else {}
    shown = [_with_content(message) for message in messages]
    return tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=_wants_reply(messages), **extra)


def shows_tools(tokenizer: object) -> bool:
    """Return whether the chat template has a place for `tools`; True where it cannot be read."""
    template = getattr(tokenizer, "chat_template", "tools")
    is_jinja = isinstance(template, str) and "{" in template  # several templates by name are a dict
    return not _has_no_template(tokenizer) and not (is_jinja and "tools" not in template)


def knows_developer(tokenizer: object) -> bool:
    """Return whether the chat template has a place for messages of a developer."""
    template = getattr(tokenizer, "chat_template", None)
    return isinstance(template, str) and "developer" in template


def opened_thought(tokenizer: Tokenizer, chat: Conversation, prompt: str) -> str:
    """Return the `<think>` and white space that the template put before the answer to a conversation, else ""."""
    if not prompt.rstrip().endswith("<think>") or _has_no_template(tokenizer) or not _wants_reply(chat.shown):
        return ""
    messages = chat.shown
    opening = _THOUGHT_OPENS.search(prompt)
    last = messages[-1].get("content") if messages else ""
    if isinstance(last, str) and _THOUGHT_OPENS.search(last):  # maybe it is only the question that ends so
        shown = [_with_content(message) for message in messages]
        question, asked = (
            tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=add) for add in (False, True)
        )
        opening = _THOUGHT_OPENS.search(asked.removeprefix(question))
    return opening[0] if opening else ""


def thoughts_before_answer(tokenizer: Tokenizer, chat: Conversation, prompt: str) -> Thoughts:
    """Tell if thoughts come before the answer to a conversation, whose prompt is given, by the chat template."""
    if opened_thought(tokenizer, chat, prompt):
        return "opened"
    return "allowed" if "<think>" in str(getattr(tokenizer, "chat_template", None)) else "none"


def render_keeping_thoughts(tokenizer: object, messages: Sequence[JsonObject], tools: object = None) -> str:
    """As `render`, but think blocks of earlier assistant turns stay: the template sees other words for the tags."""
    text = render(tokenizer, [_swap(message, _THINK_MARKS) for message in messages], tools)
    for tag, mark in _THINK_MARKS.items():
        text = text.replace(mark, tag)
    return text


def render_after_turn(tokenizer: object, messages: Sequence[JsonObject], turn: int, tools: object = None) -> str | None:
    """Return the template's text behind the content of `messages[turn]`; None unless the template shows it once."""
    marked = [*messages[:turn], {**messages[turn], "content": TURN_MARK}, *messages[turn + 1 :]]
    _, mark, after = render(tokenizer, marked, tools).partition(TURN_MARK)
    return after if mark and TURN_MARK not in after else None


def _has_no_template(tokenizer: Tokenizer) -> bool:
    if tokenizer is None or not hasattr(tokenizer, "apply_chat_template"):
        return True
    return hasattr(tokenizer, "chat_template") and tokenizer.chat_template is None


def _wants_reply(messages: Sequence[JsonObject]) -> bool:
    return not messages or messages[-1]["role"] != "assistant"


def _with_content(message: JsonObject) -> JsonObject:
    """Assistant messages with tool calls may lack `content`, for which many templates have no word."""
    is_empty = message.get("role") == "assistant" and message.get("content") is None
    return {**message, "content": ""} if is_empty else message


def _swap(message: JsonObject, words: dict[str, str]) -> JsonObject:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    for word, other in words.items():
        content = content.replace(word, other)
    return {**message, "content": content}
