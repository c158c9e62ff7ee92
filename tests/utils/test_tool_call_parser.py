import logging

import pytest

from atroposlib.utils.tool_call_parser import extract_tool_call, parse_tool_call

TOOLS = [{"type": "function", "function": {"name": "move"}}, {"name": "look"}]
FAILED = ("-ERROR-", {}, True)

CALLS = {
    "json": ('{"name": "move", "arguments": {"to": "e4"}}', ("move", {"to": "e4"}, False)),
    "bare tool entry": ('{"name": "look"}', ("look", {}, False)),
    "apostrophe": ('{"name": "move", "arguments": {"to": "it\'s"}}', ("move", {"to": "it's"}, False)),
    "python dict": ("{'name': 'move', 'arguments': {'n': None}}", ("move", {"n": None}, False)),
    "single-quoted json": ("{'name': 'move', 'arguments': {'ok': true}}", ("move", {"ok": True}, False)),
    "newline in a string": ('{"name": "move", "arguments": {"to": "a\nb"}}', ("move", {"to": "a\nb"}, False)),
    "arguments as json text": ('{"name": "move", "arguments": "{\\"to\\": 1}"}', ("move", {"to": 1}, False)),
    "unknown tool keeps arguments": ('{"name": "fly", "arguments": {"to": 1}}', ("-ERROR-", {"to": 1}, True)),
    "unknown escape": ("{'name': 'move', 'arguments': {'to': '\\d'}}", ("move", {"to": "\\d"}, False)),
    "no name": ('{"arguments": {}}', FAILED),
    "arguments no object": ('{"name": "move", "arguments": [1]}', FAILED),
    "no object": ("[1, 2]", FAILED),
    "no json": ("move to e4", FAILED),
    "deeply nested": ("[" * 100_000, FAILED),
    "doubled braces": ('{{"name": "move", "arguments": {"to": 1}}}', FAILED),
    "a list as a key": ("{['name']: 'move'}", FAILED),
    "a number of 5000 digits": ('{"name": "move", "arguments": {"to": ' + "1" * 5000 + "}}", FAILED),
    "a hundred thousand signs": ("-" * 100_000 + "1", FAILED),
}


@pytest.mark.parametrize(("content", "expected"), CALLS.values(), ids=CALLS)
def test_a_tool_call_is_parsed(content, expected):
    assert parse_tool_call(f"thinking <tool_call>{content}</tool_call>", TOOLS) == expected


def test_any_tool_is_allowed_when_none_are_named():
    assert parse_tool_call('<tool_call>{"name": "fly"}</tool_call>') == ("fly", {}, False)


def test_text_without_tags_is_a_failure():
    assert parse_tool_call("no call here") == FAILED


def test_the_first_match_of_the_first_preferred_tag_counts():
    text = "<b> two </b><a> one </a><a>three</a>"
    assert extract_tool_call(text, ["a", "b"]) == "one"
    assert extract_tool_call(text, ["c", "b"]) == "two"
    assert extract_tool_call(text) is None


def test_parsing_says_nothing_at_warning_level(caplog):
    with caplog.at_level(logging.INFO):
        parse_tool_call("none")
        parse_tool_call('<tool_call>{"name": "fly"}</tool_call>')
    assert caplog.records == []
