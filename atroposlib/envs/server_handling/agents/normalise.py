"""Rewritings of an agent program that count as none: a turn that comes back in its form is known by what it was.

Only the search for the turns that a request continues is told; what continues is the recorded ids. A turn that says
something else than what was handed out stays an edit.
"""

import ast
import re
from collections.abc import Callable, Sequence

from atroposlib.envs.server_handling.conversation import HandedOut, Message, Normalise
from atroposlib.errors import ConfigError

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
    """The rules of these names in one, None without any.

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
    """The text of a message whose content is a text, or parts that are texts; "" of any other."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))
