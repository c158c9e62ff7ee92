"""Which conversations can be trained on, and which of their turns the model generated."""

import json

import msgspec
import pytest

from atroposlib.data.chats import chat_fault, read_chat, written
from atroposlib.data.lazy_group import LazyGroup
from atroposlib.errors import RowError


def user(text="2 + 2?"):
    return {"role": "user", "content": text}


def said(content="4", **keys):
    return {"role": "assistant", "content": content, **keys}


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
RENDERED = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
FAULTS = {
    "a good one": ([user(), said()], None),
    "a call without content": ([user(), {"role": "assistant", "tool_calls": [CALL]}], None),
    "content null": ([user(), said(None, tool_calls=[CALL])], None),
    "parts": (
        [user([{"type": "image_url", "image_url": {"url": "data:"}}]), said([{"type": "text", "text": "a"}])],
        None,
    ),
    "an agent": ([user(), {"role": "agent", "content": "4"}], None),
    "an answer alone": ([said("a poem")], None),
    "text": (RENDERED, "a transcript instead of messages"),
    "a transcript as the user's turn": ([user(RENDERED)], "no turn of the assistant"),
    "a transcript as the assistant's turn": ([said(RENDERED)], "a transcript instead of messages"),
    "null": (None, "no messages were recorded"),
    "a question": ([user()], "no turn of the assistant"),
    "empty": ([], "an empty conversation"),
    "text in a list": (["hi"], "messages that are not a list of {role, content}"),
    "no role": ([{"content": "hi"}], "messages that are not a list of {role, content}"),
    "a number": ([user(), said(4)], "content that is neither text, null nor a list of parts"),
}


@pytest.mark.parametrize(("messages", "expected"), FAULTS.values(), ids=FAULTS)
def test_conversations_that_are_nothing_to_train_on_are_named(messages, expected):
    assert chat_fault(messages) == expected


def test_all_that_the_model_wrote_is_its_reasoning_its_text_and_its_calls():
    message = said(
        [{"type": "text", "text": "let me"}, "see"], reasoning_content="hm", reasoning="hm", tool_calls=[CALL]
    )
    assert written(message) == ["hm", "let me", "see", "weather", '{"city": "Bonn"}']
    as_dict = {"function": {"name": "f", "arguments": {"x": -7}}}
    assert written({"role": "assistant", "tool_calls": [as_dict]}) == ["f", '{"x": -7}']


FEW_SHOT = [user("1 + 1?"), said("2"), user(), said("4")]
EDITED = [user(), said("4"), user("sure?"), said("yes, I am"), user("and now?"), said("not any more")]
WEIGHTED = [user("1 + 1?"), said("2", weight=0), user(), said("4")]
GENERATED = {
    "one turn": ([user(), said()], (1, 0), None, [1]),
    "as many runs as turns": (FEW_SHOT, (2, 0), None, [1, 3]),
    "a run at the end is the last turn": (FEW_SHOT, (1, 1), None, [3]),
    "a turn that was edited": (EDITED, (2, 0), ["4<|im_end|>", "not any more<|im_end|>"], [1, 5]),
    "the first turn only": (EDITED, (1, 30), [" 4</s>"], [1]),
    "equal turns: the later one": ([user(), said("4"), user(), said("4"), user()], (1, 9), ["4"], [3]),
    "a call": (
        [user(), said(None, tool_calls=[CALL]), user(), said("x"), user()],
        (1, 9),
        ["[weather(city=Bonn)]"],
        [1],
    ),
    "an opened thought": ([user(), said("<think>a</think>b"), said("c"), user()], (1, 9), ["a</think>b<|end|>"], [1]),
    "no ids: every turn": (FEW_SHOT, (0, 0), None, [1, 3]),
    "no ids: but those of no weight": (WEIGHTED, (0, 0), None, [3]),
}


def group_of(messages, runs):
    """One response whose mask trains `runs[0]` runs, with `runs[1]` positions after the last."""
    mask = [-100, 5] * runs[0] + [-100] * runs[1]
    return msgspec.json.decode(json.dumps({"scores": [1.0], "messages": [messages], "masks": [mask]}), type=LazyGroup)


@pytest.mark.parametrize(("messages", "runs", "texts", "expected"), GENERATED.values(), ids=GENERATED)
def test_the_mask_tells_which_turns_were_generated(messages, runs, texts, expected):
    decode = (lambda: texts) if texts else None
    assert read_chat(group_of(messages, runs), 0, "a:1[0]", decode).generated == expected


UNKNOWN = {
    "no tokenizer": (EDITED, (2, 0), None, "give --tokenizer"),
    "a part of a turn": ([user(), said()], (2, 0), None, "leaves out parts of a turn"),
    "another text": (EDITED, (1, 30), ["five"], "is no turn of the assistant in its messages"),
    "more than the turn": (EDITED, (1, 30), ["4 and five"], "is no turn of the assistant in its messages"),
    "nothing of weight": ([user(), said("2", weight=0)], (0, 0), None, "no turn that the model generated"),
}


@pytest.mark.parametrize(("messages", "runs", "texts", "sentence"), UNKNOWN.values(), ids=UNKNOWN)
def test_where_it_is_not_known_who_wrote_a_turn_the_row_is_refused(messages, runs, texts, sentence):
    with pytest.raises(RowError, match=sentence):
        read_chat(group_of(messages, runs), 0, "a:1[0]", (lambda: texts) if texts else None)


def test_tools_are_the_groups_or_each_responses_own():
    tools = [[{"type": "function", "function": {"name": "f"}}], None]
    record = {"scores": [1.0, 0.0], "messages": [[user(), said()]] * 2}
    own = msgspec.json.decode(json.dumps({**record, "tools": tools}), type=LazyGroup)
    shared = msgspec.json.decode(json.dumps({**record, "tools": tools[0]}), type=LazyGroup)
    first, second = (read_chat(own, index, "a").tools for index in (0, 1))
    assert (bytes(first or b""), second) == (json.dumps(tools[0]).encode(), None)
    assert bytes(read_chat(shared, 1, "a").tools or b"") == json.dumps(tools[0]).encode()
