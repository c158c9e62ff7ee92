"""Any chat through the managed server: the record says who said what, and its masks mark what the model wrote."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.rollouts.groups import fill_messages, make_rows_plain
from atroposlib.rollouts.trace import Chat, tracing
from atroposlib.type_definitions import IGNORE_INDEX
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from tests.fakes import FakeServer, FakeTokenizer

words = st.text(alphabet=" \nabäß☃👍\u2028<think>/{}\"'", max_size=10)
names = st.sampled_from(["look", "add_two"])
parts = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": words}),
    min_size=1,
    max_size=2,
)
calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["call_a", "call_b"]),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": names, "arguments": st.just('{"at": 1}')}),
        }
    ),
    min_size=1,
    max_size=2,
)
asked = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool", "critic"]), "content": words | parts},
    optional={"name": words, "tool_call_id": st.just("call_a"), "seen": st.none() | st.integers()},
)
answered = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={"content": st.none() | words, "reasoning_content": words, "tool_calls": calls},
)
openings = st.lists(asked | answered, max_size=4)
call = '<tool_call>{"name": "look", "arguments": {"at": "ß"}}</tool_call>'
replies = st.lists(
    st.tuples(words, st.sampled_from(["", "</think>", call, f"{call}\n{call}", f"{call} so"])).map("".join),
    min_size=1,
    max_size=5,
)
echoes = st.sampled_from(["as given", "as recorded", "with empty keys"])
steps = st.lists(st.tuples(st.integers(0, 5), openings, asked, st.integers(1, 3), echoes), min_size=1, max_size=5)
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


class EveryKey(FakeTokenizer):
    """A template that shows every key of every message, and opens the thought when asked to."""

    def __init__(self, opening: str) -> None:
        super().__init__()
        self.opening = opening

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None):
        def turn(message):
            rest = {key: value for key, value in message.items() if key not in ("role", "content")}
            content = message["content"] if isinstance(message["content"], str) else json.dumps(message["content"])
            return {"role": message["role"], "content": (json.dumps(rest) if rest else "") + content}

        text = super().apply_chat_template([turn(message) for message in conversation], False, add_generation_prompt)
        return json.dumps(tools) + text + (self.opening if add_generation_prompt else "")


class Writer(FakeServer):
    """Numbers its answers, so that no two are equal, and knows what it wrote last."""

    def _answer(self, prompt, kwargs):
        self.wrote = super()._answer(prompt, kwargs)
        return self.wrote

    def _next_text(self, prompt):
        text, call, rest = super()._next_text(prompt).partition("<tool_call>")
        return f"{text}{self.answered}{call}{rest}"


def recorded(message, text, opening):
    """The assistant message that a record should hold for a reply: OpenAI's form, with the thought it opens with."""
    said = {"role": "assistant", "content": message.content}
    if message.tool_calls and text.endswith(" so"):
        said["content"] = text  # `tool_calls` have no place for what stands behind them
    elif message.tool_calls:
        said["tool_calls"] = message.tool_calls
    if opening and not (said["content"] or "").lstrip().startswith("<think>"):
        said["content"] = opening + (said["content"] or "")
    return said


def echoed(message, said, style):
    if style == "as recorded":
        return said
    given = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        given["tool_calls"] = message.tool_calls
    return {**given, "refusal": None, "annotations": []} if style == "with empty keys" else given


async def converse(plan, texts, opening, tools):
    """Run the plan; nodes, the chats they should be, and how many ids were written for each."""
    server = Writer(texts, tokenizer=EveryKey(opening))
    managed = ManagedServer(server, server.tokenizer, tool_parser="hermes" if tools else None)
    branches = []  # (messages to send, messages recorded, ids written)
    for number, (branch, start, question, n, style) in enumerate(plan):
        old = branches[branch - 1] if 0 < branch <= len(branches) else None
        question = {**question, "number": number}  # so that no two branches hold the same conversation
        sent, kept, count = old or ([*start], [*start], 0)
        sent, kept = [*sent, question], [*kept, question]
        before = json.dumps(sent)
        reply = await managed.chat_completion(messages=sent, n=n, **({"tools": TOOLS} if tools else {}))
        assert json.dumps(sent) == before
        grown = []
        for choice, text in zip(reply.choices, server.wrote, strict=True):
            wants_reply = question["role"] != "assistant"
            said = recorded(choice.message, text, opening if wants_reply else "")
            ids = len(FakeTokenizer().encode(text)) + 1
            grown.append(([*sent, echoed(choice.message, said, style)], [*kept, said], count + ids))
        if old is not None:
            branches[branch - 1] = grown.pop(0)
        branches += grown
    return managed.get_state()["nodes"], branches


@given(steps, replies, st.sampled_from(["", "<think>\n"]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_record_without_messages_gets_exactly_the_chat_and_masks_mark_what_was_written(plan, texts, opening, tools):
    with tracing() as trace:
        nodes, branches = asyncio.run(converse(plan, texts, opening, tools))
        group = {
            "tokens": [list(node.tokens) for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "scores": [0.0] * len(nodes),
        }
        assert make_rows_plain(group) == {}
        missing = fill_messages(group, trace.chats)

    assert missing == 0
    assert group.get("tools") == (TOOLS if tools else None)
    assert group["messages"] == [messages for _, messages, _ in branches] == [node.messages for node in nodes]
    assert [len(mask) - mask.count(IGNORE_INDEX) for mask in group["masks"]] == [count for _, _, count in branches]


async def test_a_message_changed_later_does_not_change_the_record():
    managed = ManagedServer(FakeServer("ok"), FakeTokenizer())
    messages = [{"role": "user", "content": "hi", "meta": {"deep": [1]}}]

    await managed.chat_completion(messages=messages)
    messages[0]["meta"]["deep"].append(2)
    messages.append({"role": "user", "content": "more"})

    (node,) = managed.get_state()["nodes"]
    assert node.messages == [
        {"role": "user", "content": "hi", "meta": {"deep": [1]}},
        {"role": "assistant", "content": "ok"},
    ]


async def test_messages_may_be_the_objects_that_a_reply_holds():
    managed = ManagedServer(FakeServer(["one", "two"]), FakeTokenizer())
    first = await managed.chat_completion(messages=[USER])

    await managed.chat_completion(messages=[USER, first.choices[0].message, USER])

    (node,) = managed.get_state()["nodes"]
    assert [message["content"] for message in node.messages] == ["hi", "one", "hi", "two"]


async def test_a_turn_that_ended_a_row_of_its_own_keeps_its_chat_after_the_conversation_went_on():
    managed = ManagedServer(FakeServer(["one", "two"]), FakeTokenizer())
    with tracing() as trace:
        await managed.chat_completion(messages=[USER])
        (early,) = managed.get_state()["nodes"]
        await managed.chat_completion(messages=[USER, {"role": "assistant", "content": "one"}, USER])

    (chat,) = trace.chats.of([early.tokens])
    assert chat is not None
    assert chat.messages == [USER, {"role": "assistant", "content": "one"}]


async def test_an_edited_history_is_recorded_as_it_was_edited():
    managed = ManagedServer(FakeServer(["one", "two"]), FakeTokenizer())
    await managed.chat_completion(messages=[USER])
    edited = [USER, {"role": "assistant", "content": "ONE"}, USER]

    await managed.chat_completion(messages=edited)

    assert managed.get_state()["nodes"][1].messages == [*edited, {"role": "assistant", "content": "two"}]


async def test_text_completions_have_no_messages():
    managed = ManagedServer(FakeServer("b"), FakeTokenizer())
    with tracing() as trace:
        await managed.completion(prompt="a")

    (node,) = managed.get_state()["nodes"]
    assert (node.messages, trace.chats.of([node.tokens])) == (None, [None])


MADE_UP = {"as many rows as answers": (2, ["a", "b"]), "a row was left out": (1, [None])}


@pytest.mark.parametrize(("rows", "answers"), MADE_UP.values(), ids=MADE_UP)
async def test_made_up_ids_name_a_chat_only_while_the_order_does(rows, answers):
    managed = DummyManagedServer(FakeServer(["a", "b"]))
    with tracing() as trace:
        await managed.chat_completion(messages=[USER], n=2)

    nodes = managed.get_state()["nodes"]
    chats = trace.chats.of([node.tokens for node in nodes][:rows])
    assert [chat and chat.messages[-1]["content"] for chat in chats] == answers


def test_a_chat_rendered_for_the_trainer_is_known_by_its_ids():
    chat = [USER, {"role": "assistant", "content": "ok"}]
    with tracing() as trace:
        row = tokenize_for_trainer(FakeTokenizer(), chat)["tokens"]

    assert trace.chats.of([row, row[1:]]) == [Chat(chat), None]


@pytest.mark.parametrize("rows", [1, 2])
def test_tools_stand_once_for_a_group_unless_its_rows_had_different_ones(rows):
    with tracing() as trace:
        trace.chats.note([1], Chat([USER], TOOLS))
        trace.chats.note([2], Chat([USER]))
    group = {"tokens": [[1], [2]][:rows]}
    fill_messages(group, trace.chats)
    assert group["tools"] == ([TOOLS, None] if rows == 2 else TOOLS)


@pytest.mark.parametrize(
    ("question", "opening"), [("why <think>", ""), ("why <think>", "<think>\n"), ("", "<think>\n")]
)
async def test_a_thought_is_opened_by_the_template_only_where_the_template_does_it(question, opening):
    managed = ManagedServer(FakeServer("so</think>1", tokenizer=EveryKey(opening)), EveryKey(opening))

    await managed.chat_completion(messages=[{"role": "user", "content": question}])

    (node,) = managed.get_state()["nodes"]
    assert node.messages[-1]["content"] == f"{opening}so</think>1"
