import json

import pytest

from atroposlib.envs.server_handling.tool_call_translator import VLLM_AVAILABLE, ToolCallTranslator
from atroposlib.errors import ConfigError

TOOLS = [{"type": "function", "function": {"name": "search"}}]
CALL = '<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>'
WRITTEN = CALL.replace("<tool_call>", "<tool_call>\n").replace("</tool_call>", "\n</tool_call>")


class Characters:
    """Ids are code points; 3 is special."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(chr(i) if i != 3 else "<eos>" for i in token_ids if not (skip_special_tokens and i == 3))


@pytest.fixture
def translator():
    return ToolCallTranslator(Characters())


def parsed(translator, raw, tool_choice="auto", tools=TOOLS):
    content, calls, finish = translator.parse_model_output(raw, tool_choice, tools)
    return content, [(c.function.name, json.loads(c.function.arguments)) for c in calls or []], finish


CATS = ("search", {"query": "cats"})
UNORDERED = "<tool_call>{'name': 'search', 'arguments': {'query': {'cats'}}}</tool_call>"
OUTPUTS = {
    "one call": (CALL, (None, [CATS], "tool_calls")),
    "two calls": (f"{CALL}\n{CALL}", (None, [CATS, CATS], "tool_calls")),
    "text before": (f"Looking.\n{CALL}", ("Looking.\n", [CATS], "tool_calls")),
    "thoughts before": (f"<think>so</think>{CALL}", ("<think>so</think>", [CATS], "tool_calls")),
    "unclosed": (CALL.removesuffix("</tool_call>"), (None, [CATS], "tool_calls")),
    "no arguments": ('<tool_call>{"name": "search"}</tool_call>', (None, [("search", {})], "tool_calls")),
    "single quotes": (CALL.replace('"', "'"), (None, [CATS], "tool_calls")),
    "only text": ("It rains.", ("It rains.", [], "stop")),
    "no json": ("<tool_call>search cats</tool_call>", ("<tool_call>search cats</tool_call>", [], "stop")),
    "one of two broken": (f"{CALL}<tool_call>{{", (f"{CALL}<tool_call>{{", [], "stop")),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [], "stop")),
    "half a surrogate pair": (CALL.replace("cats", "\\ud83d"), (None, [("search", {"query": "\ud83d"})], "tool_calls")),
    "no json in a python literal": (UNORDERED, (UNORDERED, [], "stop")),
    "only thought of": (f"<think>{CALL}</think>no", (f"<think>{CALL}</think>no", [], "stop")),
}


@pytest.mark.parametrize(("raw", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_model_output_becomes_content_calls_and_finish_reason(translator, raw, expected):
    assert parsed(translator, raw) == expected


@pytest.mark.parametrize(("tool_choice", "tools"), [("none", TOOLS), ("auto", None), ("auto", [])])
def test_nothing_is_parsed_when_tools_are_off(translator, tool_choice, tools):
    assert parsed(translator, CALL, tool_choice, tools) == (CALL, [], "stop")


def test_a_named_tool_choice_is_parsed_like_auto(translator):
    assert parsed(translator, CALL, {"type": "function", "function": {"name": "search"}})[1] == [CATS]


def test_text_that_is_no_ascii_stays_readable_in_the_arguments(translator):
    _, calls, _ = translator.parse_model_output(CALL.replace("cats", "猫"), "auto", TOOLS)
    assert calls[0].function.arguments == '{"query": "猫"}'


def test_the_raw_text_behind_every_call_is_remembered(translator):
    raw = f"<think>so</think>{CALL}\n{CALL}"
    _, calls, _ = translator.parse_model_output(raw, "auto", TOOLS)
    assert translator.call_id_to_raw_text == {calls[0].id: raw, calls[1].id: raw}
    assert translator.reconstruct_raw_text_from_tool_calls([call.model_dump() for call in calls]) == raw
    message = {"role": "assistant", "content": "<think>so</think>", "tool_calls": [c.model_dump() for c in calls]}
    assert translator.convert_messages_for_template([message]) == [{"role": "assistant", "content": raw}]


def unknown_call(name, arguments):
    return {"id": "elsewhere", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_from_elsewhere_are_written_afresh(translator):
    calls = [unknown_call("search", '{"query": "cats"}'), unknown_call("stop", "now")]
    written = f'{WRITTEN}\n<tool_call>\n{{"name": "stop", "arguments": "now"}}\n</tool_call>'
    assert translator.reconstruct_raw_text_from_tool_calls(calls) == written
    assert translator.reconstruct_raw_text_from_tool_calls([]) == ""


@pytest.mark.parametrize(("content", "text"), [("Looking.", f"Looking.\n{WRITTEN}"), (None, WRITTEN), ("", WRITTEN)])
def test_content_of_a_call_from_elsewhere_comes_before_it(translator, content, text):
    message = {"role": "assistant", "content": content, "tool_calls": [unknown_call("search", '{"query": "cats"}')]}
    assert translator.convert_messages_for_template([message]) == [{"role": "assistant", "content": text}]


def test_messages_without_calls_pass_unchanged(translator):
    messages = [
        {"role": "user", "content": "hi", "name": "x"},
        {"role": "assistant", "content": "yes", "tool_calls": None},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    assert translator.convert_messages_for_template(messages) == messages


def test_special_tokens_are_kept_only_with_tools(translator):
    ids = [97, 3]
    assert translator.decode_with_tool_awareness(ids) == "a"
    assert translator.decode_with_tool_awareness(ids, has_tools=True) == "a<eos>"


def test_an_unknown_parser_is_refused_by_name():
    assert VLLM_AVAILABLE is True
    with pytest.raises(ConfigError, match=r"'nobody'; known parsers: .*hermes"):
        ToolCallTranslator(Characters(), "nobody")
