"""What agents send back: unchanged turns continue their sequence, changed ones are honoured, nothing trains twice."""

import asyncio
import json
import random

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.errors import RequestFault
from atroposlib.type_definitions import IGNORE_INDEX
from tests.fakes import FakeServer, FakeTokenizer

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SUB = ADD.replace("add", "sub")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub")]


class Tokenizer(FakeTokenizer):
    """A template that shows system, user, assistant and tool, drops every other role, and strips thoughts."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None):
        kept = [turn for turn in conversation if turn["role"] in ("system", "user", "assistant", "tool")]
        turns = [{**turn, "content": (turn["content"] or "").split("</think>")[-1]} for turn in kept]
        return f"{tools or ''}" + super().apply_chat_template(turns, False, add_generation_prompt)


def managed_of(*texts, **options):
    server = FakeServer(list(texts), tokenizer=Tokenizer())
    return server, ManagedServer(server, server.tokenizer, tool_parser="hermes", **options)


async def ask(managed, messages, **options):
    return (await managed.chat_completion(messages=messages, **options)).choices[0]


def said(choice):
    calls = {"tool_calls": choice.message.tool_calls} if choice.message.tool_calls else {}
    return {"role": "assistant", "content": choice.message.content, **calls}


def seen(server):
    return Tokenizer().decode(server.requests[-1]["input_ids"])


def trained(managed):
    """Of each node, the text that takes loss."""
    return [
        Tokenizer().decode([token for token in node.masked_tokens if token != IGNORE_INDEX])
        for node in managed.get_state()["nodes"]
    ]


async def test_a_call_that_the_agent_dropped_is_not_shown_to_the_model():
    server, managed = managed_of(ADD + SUB, "done")
    first = said(await ask(managed, [USER], tools=TOOLS))
    first["tool_calls"] = first["tool_calls"][:1]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}

    await ask(managed, [USER, first, result], tools=TOOLS)

    assert ADD in seen(server)
    assert SUB not in seen(server)
    assert trained(managed) == [f"{ADD}{SUB}<|im_end|>", "done<|im_end|>"]


async def test_arguments_that_the_agent_changed_reach_the_model():
    server, managed = managed_of(ADD, "done")
    first = said(await ask(managed, [USER], tools=TOOLS))
    first["tool_calls"][0]["function"]["arguments"] = '{"a": 7}'

    await ask(managed, [USER, first, MORE], tools=TOOLS)

    assert '{"a": 7}' in seen(server)
    assert '"b": 2' not in seen(server)


REWRITTEN = {
    "spacing": '{"a":1,"b":2}',
    "key order": '{"b": 2, "a": 1}',
    "as an object": {"a": 1, "b": 2},
}


@pytest.mark.parametrize("arguments", REWRITTEN.values(), ids=REWRITTEN)
@pytest.mark.parametrize("call_id", [None, "another"], ids=["own id", "another id"])
async def test_calls_whose_json_was_written_again_continue_their_sequence(arguments, call_id):
    _, managed = managed_of(ADD, "done")
    first = said(await ask(managed, [USER], tools=TOOLS))
    call = first["tool_calls"][0]
    call["function"]["arguments"] = arguments
    call["id"] = call_id or call["id"]

    await ask(managed, [USER, first, {"role": "tool", "tool_call_id": call["id"], "content": "3"}], tools=TOOLS)

    assert trained(managed) == [f"{ADD}<|im_end|>done<|im_end|>"]


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]], ids=["alone", "with a system"])
async def test_a_message_of_the_developer_reaches_the_model_as_the_systems(before):
    server, managed = managed_of("ok")

    await ask(managed, [*before, {"role": "developer", "content": "Speak French."}, USER])

    assert "Speak French.<|im_end|>" in seen(server)
    assert seen(server).count("<|im_start|>system") == 1
    assert "developer" not in seen(server)


async def test_text_in_parts_reaches_the_model_and_is_the_same_as_text_in_one():
    server, managed = managed_of("one", "two")
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    await ask(managed, [{"role": "user", "content": parts}])
    assert "user\nhi<|im_end|>" in seen(server)

    answer = {"role": "assistant", "content": [{"type": "text", "text": "one"}]}
    await ask(managed, [USER, answer, {"role": "user", "content": [{"type": "text", "text": "more"}]}])

    assert trained(managed) == ["one<|im_end|>two<|im_end|>"]


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, 7], ids=str
)
async def test_a_part_that_is_no_text_is_refused(part):
    server, managed = managed_of("ok")

    with pytest.raises(RequestFault, match=r"messages\[1\] has a part of type .*text only"):
        await ask(managed, [USER, {"role": "user", "content": [{"type": "text", "text": "x"}, part]}])

    assert server.requests == []


@pytest.mark.parametrize(("choice", "begun"), [("required", '{"name": "'), ("add", '{"name": "add", "arguments": ')])
async def test_a_tool_that_must_be_called_is_called_and_what_was_not_generated_takes_no_loss(choice, begun):
    wanted = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    rest = ADD.partition(begun)[2]
    _, managed = managed_of("I would rather talk. ", rest)

    answer = await ask(managed, [USER], tools=TOOLS, tool_choice=wanted)

    assert answer.finish_reason == "tool_calls"
    assert [call["function"]["name"] for call in answer.message.tool_calls] == ["add"]
    assert answer.message.content == "I would rather talk. "
    assert trained(managed) == [f"I would rather talk. {rest}<|im_end|>"]


async def test_a_tool_that_the_model_calls_by_itself_needs_no_force():
    server, managed = managed_of(SUB)
    await ask(managed, [USER], tools=TOOLS, tool_choice="required")
    assert len(server.requests) == 1


REFUSED = {"another tool": (SUB, {"function": {"name": "add"}}), "no call": ("talk", "required")}


@pytest.mark.parametrize(("text", "choice"), REFUSED.values(), ids=REFUSED)
async def test_a_tool_choice_that_cannot_be_met_is_refused_not_ignored(text, choice):
    _, managed = managed_of(text)
    with pytest.raises(RequestFault, match="tool_choice says that the model must call"):
        await ask(managed, [USER], tools=TOOLS, tool_choice=choice)


async def test_text_behind_a_call_stays_in_the_content():
    _, managed = managed_of(f"Before {ADD}\n{SUB} behind.")
    answer = await ask(managed, [USER], tools=TOOLS)
    assert answer.message.content == "Before  behind."
    assert len(answer.message.tool_calls) == 2


async def test_a_call_that_was_cut_is_none():
    server, managed = managed_of(ADD.removesuffix("</tool_call>"))
    server.finish_reason = "length"
    answer = await ask(managed, [USER], tools=TOOLS)
    assert answer.message.tool_calls is None
    assert answer.finish_reason == "length"


async def test_a_call_drafted_in_thoughts_is_none_even_while_they_go_on():
    _, managed = managed_of(f"<think>maybe {ADD}")
    assert (await ask(managed, [USER], tools=TOOLS)).message.tool_calls is None


ECHOES = {
    "as given": {"content": "four", "reasoning_content": "two and two"},
    "without thoughts": {"content": "four"},
    "with thoughts inside": {"content": "<think>two and two</think>four"},
    "with space around": {"content": " four\n"},
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
async def test_thoughts_are_taken_out_and_a_turn_without_them_continues_its_sequence(echo):
    _, managed = managed_of("<think>two and two</think>four", "done", reasoning_parser="qwen3")
    answer = await ask(managed, [USER])
    assert answer.message.content == "four"
    assert answer.message.reasoning_content == "two and two"

    await ask(managed, [USER, {"role": "assistant", **echo}, MORE])

    assert trained(managed) == ["<think>two and two</think>four<|im_end|>done<|im_end|>"]


@pytest.mark.parametrize("chosen", [0, 1])
async def test_the_ids_of_calls_tell_which_of_two_equal_calls_is_continued_also_without_thoughts(chosen):
    thoughts = ["<think>first</think>", "<think>second</think>"]
    server, managed = managed_of(*(thought + ADD for thought in thoughts), "done", reasoning_parser="think")
    first = [said(await ask(managed, [USER], tools=TOOLS)) for _ in thoughts][chosen]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}

    await ask(managed, [USER, first, result], tools=TOOLS)

    assert thoughts[chosen] in seen(server)
    assert thoughts[1 - chosen] not in seen(server)


async def test_other_thoughts_are_an_edit():
    _, managed = managed_of("<think>two and two</think>four", "done")
    await ask(managed, [USER])

    await ask(managed, [USER, {"role": "assistant", "content": "<think>guess</think>four"}, MORE])

    assert len(trained(managed)) == 2


async def test_dropped_thoughts_are_an_edit_where_the_template_shall_decide():
    server, managed = managed_of("<think>two and two</think>four", "done", keeps_thoughts=False)
    await ask(managed, [USER])

    await ask(managed, [USER, {"role": "assistant", "content": "four"}, MORE])

    assert "two and two" not in seen(server)
    assert len(trained(managed)) == 2


async def test_usage_counts_the_ids_of_prompt_and_choices():
    server, managed = managed_of("four")
    reply = await managed.chat_completion(messages=[USER], n=2)
    prompt = len(server.requests[0]["input_ids"])
    assert reply.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt,
        "completion_tokens": 10,
        "total_tokens": prompt + 10,
    }


async def test_an_edit_of_the_last_turn_keeps_the_ids_before_it_and_trains_them_once():
    server, managed = managed_of("one", "two", "three")
    await ask(managed, [USER])
    history = [USER, {"role": "assistant", "content": "one"}, MORE]
    await ask(managed, history)
    before = server.requests[-1]["input_ids"]

    await ask(managed, [*history, {"role": "assistant", "content": "TWO"}, USER])

    assert server.requests[-1]["input_ids"][: len(before)] == before
    assert trained(managed) == ["one<|im_end|>two<|im_end|>", "three<|im_end|>"]


class Counting(Tokenizer):
    """Remembers how many messages the template was shown; `numbered` ones say where in the history they stand."""

    def __init__(self, numbered):
        super().__init__()
        self.numbered, self.shown = numbered, []

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None):
        self.shown.append(len(conversation))
        turns = conversation
        if self.numbered:
            turns = [{**turn, "content": f"{place} {turn['content']}"} for place, turn in enumerate(conversation)]
        return super().apply_chat_template(turns, tokenize, add_generation_prompt, tools)


@pytest.mark.parametrize("numbered", [False, True], ids=["a template as any", "a template that numbers its turns"])
async def test_old_messages_are_rendered_again_only_where_the_new_ones_depend_on_them(numbered):
    server = FakeServer([f"a{turn}" for turn in range(20)], tokenizer=Counting(numbered))
    managed = ManagedServer(server, server.tokenizer)
    history = []
    for turn in range(20):
        history.append({"role": "user", "content": f"u{turn}"})
        history.append(said(await ask(managed, history)))
        place = f"{2 * turn} " if numbered else ""
        assert seen(server).endswith(f"<|im_start|>user\n{place}u{turn}<|im_end|>\n<|im_start|>assistant\n")

    assert (server.tokenizer.shown.count(3) > 10) is not numbered  # first question, last answer, and what is new
    assert trained(managed) == ["".join(f"a{turn}<|im_end|>" for turn in range(20))]


async def test_helpers_that_ask_in_between_leave_the_others_their_place():
    _, managed = managed_of(*(f"a{turn}" for turn in range(12)))
    histories = [[{"role": "system", "content": name}, USER] for name in ("main", "helper", "main")]
    for turn in range(12):
        history = histories[turn % 3]
        history += [said(await ask(managed, history)), {"role": "user", "content": f"u{turn}"}]
    assert sorted(trained(managed)) == [
        "".join(f"a{turn}<|im_end|>" for turn in range(first, 12, 3)) for first in range(3)
    ]


def text_of(message):
    return message["content"] if isinstance(message["content"], str | None) else message["content"][0]["text"]


def edited(history, rng):
    """A history as careless clients send it back: turns dropped, rewritten, stripped or put in another order."""
    history = [{**message, "content": text_of(message)} for message in json.loads(json.dumps(history))]
    for _ in range(rng.randrange(3)):
        index = rng.randrange(len(history))
        kind = rng.choice(["drop", "rewrite", "strip", "swap", "parts"])
        if kind == "drop" and len(history) > 1:
            del history[index]
        elif kind == "rewrite":
            history[index]["content"] = f"{text_of(history[index])} (edited {rng.randrange(9)})"
        elif kind == "strip":
            history[index]["content"] = (text_of(history[index]) or "").strip() + "\n"
        elif kind == "swap":
            history[index], history[-1] = history[-1], history[index]
        elif kind == "parts":
            history[index]["content"] = [{"type": "text", "text": text_of(history[index]) or ""}]
    return history


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_sent_back_every_generated_token_is_stored_and_trains_once(seed):
    rng, generated = random.Random(seed), 0

    async def converse():
        nonlocal generated
        texts = [f"<think>t{i}</think>a{i}" if i % 2 else f"a{i}{ADD if i % 3 == 0 else ''}" for i in range(40)]
        server, managed = managed_of(*texts)
        histories = [[USER]]
        for turn in range(12):
            history = edited(rng.choice(histories), rng)
            answer = await ask(managed, history, tools=TOOLS)
            generated += len(Tokenizer().encode(texts[server.answered - 1])) + 1
            for message in history:
                assert (text_of(message) or "").split("</think>")[-1].strip() in seen(server)
            histories.append([*history, said(answer), {"role": "user", "content": f"u{turn}"}])
        return managed.get_state()["nodes"]

    nodes = asyncio.run(converse())
    assert sum(len(node.masked_tokens) - node.masked_tokens.count(IGNORE_INDEX) for node in nodes) == generated
