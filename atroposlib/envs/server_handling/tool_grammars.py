"""Grammars that keep a model's tool calls to the schemas of the tools, in the form of XGrammar.

Source: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from collections.abc import Mapping

from atroposlib.envs.server_handling.conversation import Thoughts
from atroposlib.envs.server_handling.tool_formats import ToolFormat
from atroposlib.type_definitions import Json, JsonObject

MOST_BLANKS = 16
"""In one place of the arguments; a model that may writes blanks without end."""


def grammar_of_calls(
    calls: ToolFormat, schemas: Mapping[str, Json], wanted: str | None, thoughts: Thoughts, *, is_one: bool = False
) -> JsonObject | None:
    """Return the structural tag that keeps arguments to their schemas; None: there is none for this format.

    A call that must be made begins at once, or behind thoughts where there are any, and ends the reply: a model that
    may write another one need not end before its limit, and a cut reply calls nothing.

    Args:
        wanted: name of the tool that must be called; "" for any, None where there may be words and no call.
        is_one: a call that may be made ends the reply, too.
    """
    may = wanted is None
    if calls.opening is None or calls.closing is None or (may and not calls.is_marked):
        return None
    ends = is_one or not may
    head, foot = calls.section if ends else ("", "")
    tags: list[Json] = [
        {
            "type": "tag",
            "begin": head + calls.opening(name),
            "content": _arguments(calls, schema),
            "end": calls.closing + foot,
        }
        for name, schema in schemas.items()
        if wanted in (None, "", name)
    ]
    answer: JsonObject = {"type": "or", "elements": tags}
    if may:
        mark = head or calls.opening(None).partition("\n")[0]
        answer = {"type": "triggered_tags", "triggers": [mark], "tags": tags, "stop_after_first": is_one}
    return {"type": "structural_tag", "format": _behind(thoughts, answer) if ends else answer}


def _behind(thoughts: Thoughts, answer: JsonObject) -> JsonObject:
    if thoughts == "none":
        return answer
    begin = "" if thoughts == "opened" else "<think>"
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": "</think>"}
    nothing = {"type": "const_string", "value": ""}
    first = thought if thoughts == "opened" else {"type": "or", "elements": [nothing, thought]}
    return {"type": "sequence", "elements": [first, {"type": "regex", "pattern": r"\s{0,2}"}, answer]}


def _arguments(calls: ToolFormat, schema: Json) -> JsonObject:
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_BLANKS}
    if calls.style != "json":
        content["style"] = calls.style
    if not calls.number:
        return content
    return {"type": "sequence", "elements": [{"type": "regex", "pattern": calls.number}, content]}
