"""Tool calls written as JSON between tags, as Hermes-style models do: `<tool_call>{"name": ...}</tool_call>`."""

import ast
import json
import logging
import re
import warnings
from collections.abc import Mapping, Sequence

from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

ERROR_NAME = "-ERROR-"
"""The tool name that stands for a call that could not be used."""

DEFAULT_TAGS = ("tool_call",)


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """Return what is between the first pair of tags, stripped; tags are tried in the order given. None without any."""
    for tag in preferred_tags or DEFAULT_TAGS:
        name = re.escape(tag)
        if match := re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL):
            return match[1].strip()
    return None


def parse_tool_call(
    response: str,
    available_tools: Sequence[Mapping[str, Json]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> tuple[str, JsonObject, bool]:
    """The first tool call of a response.

    Args:
        response: text of the model.
        available_tools: OpenAI tools, or bare `{"name": ...}`; a call of any other tool is an error. None allows all.
        preferred_tags: tags around the call.

    Returns:
        name, arguments, is_error. A failure gives (ERROR_NAME, {}, True); for an unknown tool the arguments are kept.
    """
    content = extract_tool_call(response, preferred_tags)
    call = parse_lenient_object(content) if content else None
    if call is None:
        logger.debug("no usable tool call: characters=%d tagged=%s", len(response), bool(content))
        return ERROR_NAME, {}, True
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI style: arguments are JSON text
        arguments = parse_lenient_object(arguments)
    if not isinstance(arguments, dict):
        return ERROR_NAME, {}, True
    tools = [tool if "name" in tool else tool.get("function", {}) for tool in available_tools or ()]
    known = isinstance(name, str) and bool(name) and (not tools or name in {tool.get("name") for tool in tools})
    return (str(name), arguments, False) if known else (ERROR_NAME, arguments, True)


def parse_lenient_object(text: str) -> JsonObject | None:
    """A JSON object, also one written with Python's or only single quotes. None when it is neither.

    Strict JSON comes first, so an apostrophe inside a proper string is kept.
    """
    for read, attempt in ((_json, text), (_python_literal, text), (_json, text.replace("'", '"'))):
        if isinstance(value := read(attempt), dict):
            return value
    return None


def _json(text: str) -> Json:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):  # ValueError also: a number of more digits than Python converts
        return None


def _python_literal(text: str) -> Json:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes in what the model wrote
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # TypeError: {{...}}, an unhashable key
        return None
