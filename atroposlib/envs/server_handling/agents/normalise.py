"""Rewritings of an agent program that count as none: a turn that comes back in its form is known by what it was.

Only the search for the turns that a request continues is told; what continues is the recorded ids. A turn that says
something else than what was handed out stays an edit.
"""

import ast
import logging
import os
import re
from collections.abc import Callable, Sequence

from atroposlib.envs.server_handling.conversation import HandedOut, Message, Normalise, canonical
from atroposlib.envs.server_handling.managed_server import ChatRequest
from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

CALLING = "Calling tools:\n"
MOST_CHARACTERS = 200_000
"""Longer lists of calls are not read."""


def _smolagents(message: Message, handed_out: HandedOut) -> Message:
    """Take the calls out of the text where smolagents (1.26) writes them, as Python's repr.

    Calls of its tool-calling agent have the ids under which they were handed out; it sorts them by id. Its code agent
    adds a call of `python_interpreter`, which nobody made.
    """
    text = _text_of(message)
    before, mark, written = text.rpartition(CALLING)
    if not mark or message.get("role") != "assistant" or len(written) > MOST_CHARACTERS:
        return message
    try:
        given = ast.literal_eval(written.strip())
        calls = [
            {
                "id": str(call["id"]),
                "type": "function",
                "function": {"name": str(call["function"]["name"]), "arguments": call["function"]["arguments"]},
            }
            for call in given
        ]
    except (ValueError, SyntaxError, LookupError, TypeError, MemoryError, RecursionError):
        return message
    plain: Message = {"role": "assistant", "content": before.removesuffix("\n")}
    if [call["function"]["name"] for call in calls] == ["python_interpreter"] and handed_out(calls[0]["id"]) is None:
        return plain
    whole = handed_out(calls[0]["id"]) if calls else None
    order = [call["id"] for call in (whole or {}).get("tool_calls") or ()]
    return {
        **plain,
        "tool_calls": sorted(calls, key=lambda call: order.index(call["id"]) if call["id"] in order else 0),
    }


RULES: dict[str, Callable[[Message, HandedOut], Message]] = {"smolagents": _smolagents}
"""By the name of the agent program."""


def normaliser(names: Sequence[str]) -> Normalise | None:
    """Return the rules of these names in one, None without any.

    Args:
        names: of `RULES`; or a regular expression between slashes: what it matches in a message that is not the
            assistant's is not compared, such as the date in a system prompt.

    Raises:
        ConfigError: there is no such rule, or the expression is none.
    """
    patterns, rules = [], []
    for name in names:
        if len(name) > 2 and name.startswith("/") and name.endswith("/"):
            try:
                patterns.append(re.compile(name[1:-1]))
            except re.error as error:
                raise ConfigError(f"normalise: {name} is no regular expression: {error}") from error
        elif name in RULES:
            rules.append(RULES[name])
        else:
            raise ConfigError(f"normalise: there is no rule {name!r}; there are {', '.join(RULES)}, or write /PATTERN/")

    def normalise(message: Message, handed_out: HandedOut) -> Message:
        for rule in rules:
            message = rule(message, handed_out)
        if patterns and message.get("role") != "assistant" and (text := _text_of(message)):
            for pattern in patterns:
                text = pattern.sub("", text)
            message = {**message, "content": text}
        return message

    return normalise if names else None


def _text_of(message: Message) -> str:
    """Return the text of a message whose content is a text, or parts that are texts; "" of any other."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


class SystemPrompts:
    """The system prompts of one rollout, to notice one that changes and so begins another row."""

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}  # by the turn behind them
        self._is_told = False

    def notes_of(self, chat: ChatRequest) -> list[str]:
        """Say once what differs, where a conversation begins again with another system prompt."""
        first, *others = chat.messages
        if first.get("role") not in ("system", "developer"):
            return []
        text = str(first.get("content"))
        before = self._texts.setdefault(canonical([others[:1], chat.tools]), text)
        if before == text or self._is_told:
            return []
        self._is_told = True
        old, new = _differing(before, text)
        said = f"the system prompt of the same conversation said {old!r:.120} before and says {new!r:.120} now"
        note = f"{said}, which begins another row; name it in normalise as /PATTERN/ where it means nothing"
        _warn_of_prompt(text[:40], note)
        return [note]


def _differing(one: str, other: str) -> tuple[str, str]:
    """Return the parts of two texts between their common beginning and end.

    >>> _differing("Today is Monday.", "Today is Sunday.")
    ('Mon', 'Sun')
    """
    start = len(os.path.commonprefix([one, other]))  # noqa: RUF071 (characters are meant)
    end = len(os.path.commonprefix([one[start:][::-1], other[start:][::-1]]))  # noqa: RUF071
    return one[start : len(one) - end], other[start : len(other) - end]


_warned: set[str] = set()


def _warn_of_prompt(beginning: str, note: str) -> None:
    """Log a note, once for the beginning of a system prompt; a hundred of them at most."""
    if beginning not in _warned and len(_warned) < 100:
        _warned.add(beginning)
        logger.warning("%s", note)
