"""ManagedServer turn by turn; see test_managed_properties.py for the invariants on random conversations."""

import asyncio
import gc

import pytest

from atroposlib.envs.server_handling.conversation import ChatRequest, Turn
from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer, ManagedServerAdapter
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB
from tests import fakes
from tests.fakes import BOS, EOS, FakeServer, FakeTokenizer

USER = {"role": "user", "content": "hi"}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def managed_of(server: FakeServer, **options) -> ManagedServer:
    return ManagedServer(server, server.tokenizer, **options)


def written(node, tokenizer=None) -> str:
    """The text of all tokens that take loss."""
    return (tokenizer or FakeTokenizer()).decode([mask for mask in node.masked_tokens if mask != IGNORE_INDEX])


async def test_nodes_match_choices_in_order():
    server = FakeServer(["a", "b", "c"])
    managed = managed_of(server)

    reply = await managed.chat_completion(messages=[USER], n=3, max_tokens=9)

    nodes = managed.get_state()["nodes"]
    assert [choice.message.content for choice in reply.choices] == ["a", "b", "c"]
    assert [written(node) for node in nodes] == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert nodes[0].metadata == {"finish_reason": "stop"}
    assert server.requests[0]["max_tokens"] == 9
    assert "messages" not in server.requests[0]


async def test_the_end_token_is_not_doubled_in_the_next_turn():
    server = FakeServer(["one", "two"])
    managed = managed_of(server)
    await managed.chat_completion(messages=[USER])

    await managed.chat_completion(messages=[USER, said("one"), USER])

    (node,) = managed.get_state()["nodes"]
    assert node.tokens.count(EOS) == 4
    assert FakeTokenizer().decode(node.tokens) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert server.requests[1]["input_ids"] == node.tokens[: -len("two") - 1]


async def test_the_last_of_two_end_tokens_is_not_doubled_in_the_next_turn(monkeypatch):
    monkeypatch.setitem(fakes.SPECIALS, "<|calls_end|>", 259)
    managed = managed_of(FakeServer(["one<|calls_end|>", "two"]))
    await managed.chat_completion(messages=[USER])

    await managed.chat_completion(messages=[USER, said("one"), USER])

    (node,) = managed.get_state()["nodes"]
    assert "\none<|calls_end|><|im_end|>\n<|im_start|>user" in FakeTokenizer().decode(node.tokens)


async def test_completion_keeps_earlier_turns_trainable():
    managed = managed_of(FakeServer(["one", "two"], finish_reason="length"))
    await managed.completion(prompt="a:")

    await managed.completion(prompt="a:one b:")

    (node,) = managed.get_state()["nodes"]
    assert written(node) == "onetwo"
    assert node.full_text == "a:one b:two"
    assert node.logprobs.count(PROMPT_LOGPROB) == len("a: b:")


async def test_the_longest_prefix_is_extended():
    managed = managed_of(FakeServer(["b", "bc", "d"], finish_reason="length"))
    await managed.completion(prompt="a")
    await managed.completion(prompt="a")

    await managed.completion(prompt="abc")

    assert [node.full_text for node in managed.get_state()["nodes"]] == ["ab", "abcd"]


async def test_further_choices_of_an_extension_are_appended():
    managed = managed_of(FakeServer(["x", "y", "1", "2"]))
    await managed.chat_completion(messages=[USER], n=2)

    await managed.chat_completion(messages=[USER, said("x"), USER], n=2)

    assert [written(node) for node in managed.get_state()["nodes"]] == [
        "x<|im_end|>1<|im_end|>",
        "y<|im_end|>",
        "x<|im_end|>2<|im_end|>",
    ]


async def test_asking_the_same_twice_gives_two_sequences_even_after_an_empty_answer():
    managed = managed_of(FakeServer(["", "later"]))
    await managed.chat_completion(messages=[USER])

    await managed.chat_completion(messages=[USER])

    assert [written(node) for node in managed.get_state()["nodes"]] == ["<|im_end|>", "later<|im_end|>"]


async def test_equal_branches_are_each_extended_when_extended_at_the_same_time():
    managed = managed_of(FakeServer(["same", "same", "1", "2"]))
    await managed.chat_completion(messages=[USER], n=2)

    await asyncio.gather(*(managed.chat_completion(messages=[USER, said("same"), USER]) for _ in range(2)))

    assert sorted(written(node) for node in managed.get_state()["nodes"]) == [
        "same<|im_end|>1<|im_end|>",
        "same<|im_end|>2<|im_end|>",
    ]


async def test_another_system_prompt_starts_new_sequences():
    managed = managed_of(FakeServer("x"))
    await managed.chat_completion(messages=[USER])

    await managed.chat_completion(messages=[{"role": "system", "content": "s"}, USER, said("x"), USER])

    assert [written(node) for node in managed.get_state()["nodes"]] == ["x<|im_end|>", "x<|im_end|>"]


class ThoughtStripping(FakeTokenizer):
    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False):
        kept = [{**turn, "content": turn["content"].split("</think>")[-1]} for turn in conversation]
        return super().apply_chat_template(kept, tokenize, add_generation_prompt)


async def test_thoughts_generated_here_stay_where_the_template_would_strip_them():
    tokenizer = ThoughtStripping()
    managed = managed_of(FakeServer(["<think>hm</think>x", "y"], tokenizer=tokenizer))
    await managed.chat_completion(messages=[USER])

    await managed.chat_completion(messages=[USER, said("<think>hm</think>x"), USER])

    (node,) = managed.get_state()["nodes"]
    assert written(node) == "<think>hm</think>x<|im_end|>y<|im_end|>"


@pytest.mark.parametrize(("preserve", "kept"), [(False, False), (True, True)])
async def test_thoughts_of_others_stay_only_with_preserve_think_blocks(preserve, kept):
    server = FakeServer("y", tokenizer=ThoughtStripping())
    managed = managed_of(server, preserve_think_blocks=preserve)

    await managed.chat_completion(messages=[USER, said("<think>hm</think>x"), USER])

    assert ("<think>hm</think>" in server.requests[0]["prompt"]) is kept


async def test_a_generated_token_without_a_logprob_takes_no_loss():
    server = ServerHarness()
    server.set_tokens_and_logprobs_response("p", [112], [[97, 98]], [[-0.5]], ["stop"])
    managed = ManagedServer(server, FakeTokenizer())

    await managed.completion(prompt="p")

    (node,) = managed.get_state()["nodes"]
    assert node.masked_tokens == [IGNORE_INDEX, 97, IGNORE_INDEX]
    assert node.logprobs == [PROMPT_LOGPROB, -0.5, PROMPT_LOGPROB]


async def test_logprobs_beyond_the_tokens_are_cut():
    server = ServerHarness()
    server.set_tokens_and_logprobs_response("p", [112], [[97]], [[-0.5, -0.6]], [{"type": "length", "length": 1}])
    managed = ManagedServer(server, FakeTokenizer())

    reply = await managed.completion(prompt="p")

    assert managed.get_state()["nodes"][0].logprobs == [PROMPT_LOGPROB, -0.5]
    assert reply.choices[0].finish_reason == "length"


async def test_a_bos_of_template_and_tokenizer_is_sent_once():
    server = FakeServer(tokenizer=FakeTokenizer(add_bos=True))
    managed = managed_of(server)

    await managed.completion(prompt="<bos>x")

    assert server.requests[0]["input_ids"] == [BOS, 120]


async def test_tree_mode_keeps_every_step():
    managed = managed_of(FakeServer(["one", "two"]), track_tree=True)
    await managed.chat_completion(messages=[USER])
    await managed.chat_completion(messages=[USER, said("one"), USER])

    state = managed.get_state()

    assert [written(node) for node in state["sequences"].values()] == ["one<|im_end|>", "one<|im_end|>two<|im_end|>"]
    assert state["tree"] == state["sequences"]
    managed.reset()
    assert managed.get_state() == {"sequences": {}, "tree": {}}


async def test_a_reset_lets_go_of_what_was_said():
    managed = managed_of(FakeServer(["one"]))
    await managed.chat_completion(messages=[{"role": "user", "content": "of the first rollout alone"}])

    managed.reset()
    gc.collect()

    turns = (one for one in gc.get_objects() if type(one) is Turn)  # isinstance asks odd objects, which may warn
    assert not [turn for turn in turns if turn.said.get("content") == "of the first rollout alone"]


async def test_a_turn_that_was_generated_during_a_reset_continues_nothing_of_before():
    server = FakeServer(["one", "two", "three"])
    managed = managed_of(server)
    first = [USER, said("one"), {"role": "user", "content": "more"}]
    await managed.chat_completion(messages=first[:1])
    running = asyncio.create_task(managed.chat_completion(messages=first))
    await asyncio.sleep(0)
    managed.reset()
    await running

    later = [first[-1], said("two"), {"role": "user", "content": "and?"}]
    await managed.chat_completion(messages=later)

    asked = FakeTokenizer().apply_chat_template(later, tokenize=False, add_generation_prompt=True)
    assert FakeTokenizer().decode(server.requests[-1]["input_ids"]) == asked


async def test_an_authors_own_client_of_an_engine_gets_the_ids_of_an_agents_prompt_as_a_list(engine):
    given = []

    class Own(SGLangServer):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs):
            given.append(kwargs["input_ids"])
            return await super()._tokens_and_logprobs_completion_wrapper(**kwargs)

    server = Own(APIServerConfig(server_type="sglang", model_name="fake", base_url=f"{engine.url}/v1"))
    server.tokenizer = FakeTokenizer()
    managed = ManagedServer(server, for_agents=True)
    (first,) = await managed.answer(ChatRequest([USER]))
    await managed.answer(ChatRequest([USER, first.message, USER]))
    await server.close()
    assert [type(ids) for ids in given] == [list, list]
    assert given[1][: len(given[0])] == given[0]


class TrimmingServer(FakeServer):
    """Drops the second id of a prompt, so that no prompt begins with what was there before."""

    async def tokens_and_logprobs_completion(self, **kwargs):
        ids, *rest = await super().tokens_and_logprobs_completion(**kwargs)
        return [ids[0], *ids[2:]], *rest


async def test_a_conversation_goes_further_behind_a_prompt_that_the_engine_changed():
    managed = managed_of(TrimmingServer(["one", "two", "three"]))
    messages = [USER]
    for text in ("one", "two", "three"):
        reply = await managed.chat_completion(messages=messages)
        assert reply.choices[0].message.content == text
        messages = [*messages, said(text), {"role": "user", "content": "more"}]
    assert managed.get_state()["nodes"][-1].messages == messages[:-1]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda managed: managed.current_nodes.clear(), ["two"]),
        (lambda managed: setattr(managed, "current_nodes", []), ["two"]),
        (lambda managed: managed.current_nodes.insert(0, managed.current_nodes[0].model_copy()), ["one", "two"]),
    ],
    ids=["cleared", "replaced", "moved"],
)
async def test_a_sequence_takes_the_place_of_the_one_it_extends_where_an_author_has_changed_the_list(change, kept):
    managed = managed_of(FakeServer(["one", "two"]))
    await managed.chat_completion(messages=[USER])
    change(managed)
    await managed.chat_completion(messages=[USER, said("one"), USER])
    assert [node.messages[-1]["content"] for node in managed.get_state()["nodes"]] == kept


async def test_an_author_can_empty_the_sequences_of_a_tree():
    managed = managed_of(FakeServer(["one", "two"]), track_tree=True)
    await managed.chat_completion(messages=[USER])
    managed.sequences.clear()
    await managed.chat_completion(messages=[USER, said("one"), USER])
    assert [node.messages[-1]["content"] for node in managed.get_state()["sequences"].values()] == ["two"]


async def test_what_an_author_writes_into_a_node_reaches_no_later_request():
    server = FakeServer(["one", "two"])
    managed = managed_of(server)
    await managed.chat_completion(messages=[USER])

    managed.get_state()["nodes"][0].messages[0]["content"] = "something else"
    await managed.chat_completion(messages=[USER])

    assert server.requests[0]["input_ids"] == server.requests[1]["input_ids"]


def test_the_translator_of_calls_is_had_by_upstreams_name():
    managed = ManagedServer(FakeServer("x"), FakeTokenizer(), tool_parser="hermes")
    [said] = managed._get_translator().convert_messages_for_template([{"role": "user", "content": "hi"}])
    assert said == {"role": "user", "content": "hi"}


async def test_messages_without_a_template_become_lines():
    class Plain(FakeTokenizer):
        chat_template = None

    server = FakeServer(tokenizer=Plain())

    await managed_of(server).chat_completion(messages=[USER])

    assert server.requests[0]["prompt"] == "user: hi"


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "it\'s"}}</tool_call>'


class ToolTokenizer(FakeTokenizer):
    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None):
        rest = super().apply_chat_template(conversation, False, add_generation_prompt)
        return f"{tools}{rest}" if tools else rest


async def test_tool_calls_are_parsed_and_the_sequence_continues_from_their_text():
    server = FakeServer([CALL, "done"], tokenizer=ToolTokenizer())
    managed = managed_of(server, tool_parser="hermes")
    first = (await managed.chat_completion(messages=[USER], tools=TOOLS)).choices[0]
    answer = {"role": "assistant", "content": first.message.content, "tool_calls": first.message.tool_calls}
    found = {"role": "tool", "content": "seen", "tool_call_id": first.message.tool_calls[0]["id"]}

    last = (await managed.chat_completion(messages=[USER, answer, found], tools=TOOLS)).choices[0]

    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls[0]["function"]["name"] == "look"
    assert last.message.content == "done"
    assert last.finish_reason == "stop"
    (node,) = managed.get_state()["nodes"]
    assert written(node) == f"{CALL}<|im_end|>done<|im_end|>"
    assert "tools" not in server.requests[0]


async def test_tools_that_would_not_reach_the_model_are_an_error_that_names_the_setting():
    with pytest.raises(ConfigError, match=r"no tool parser is set; set tool_parser .*--openai.tool_parser hermes"):
        await managed_of(FakeServer(tokenizer=ToolTokenizer())).chat_completion(messages=[USER], tools=TOOLS)

    server = FakeServer(tokenizer=ToolTokenizer())
    server.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="the chat template of ToolTokenizer has no place for them"):
        await managed_of(server, tool_parser="hermes").chat_completion(messages=[USER], tools=TOOLS)
    assert server.requests == []


async def test_a_malformed_tool_call_stays_text_and_the_other_responses_stay():
    malformed = '<tool_call>{{"name": "look", "arguments": {"at": 1}}}</tool_call>'
    managed = managed_of(FakeServer([malformed, CALL], tokenizer=ToolTokenizer()), tool_parser="hermes")

    reply = await managed.chat_completion(messages=[USER], tools=TOOLS, n=2)

    assert [choice.finish_reason for choice in reply.choices] == ["stop", "tool_calls"]
    assert reply.choices[0].message.content == malformed


async def test_a_text_cut_by_length_stays_a_length_stop_with_tools():
    managed = managed_of(FakeServer("so", finish_reason="length", tokenizer=ToolTokenizer()), tool_parser="hermes")

    reply = await managed.chat_completion(messages=[USER], tools=TOOLS)

    assert reply.choices[0].finish_reason == "length"


async def test_tool_choice_none_gives_the_raw_text():
    managed = managed_of(FakeServer(CALL, tokenizer=ToolTokenizer()), tool_parser="hermes")

    reply = await managed.chat_completion(messages=[USER], tools=TOOLS, tool_choice="none")

    assert reply.choices[0].message.content == CALL
    assert reply.choices[0].message.tool_calls is None


async def test_get_logprobs_takes_messages():
    server = FakeServer()

    await managed_of(server).get_logprobs(messages=[USER], top_k=2)

    assert server.requests == [{"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "top_k": 2}]


async def test_get_logprobs_of_a_server_without_them_says_so():
    with pytest.raises(NotImplementedError, match="does not implement get_logprobs"):
        await ManagedServer(ServerHarness(), FakeTokenizer()).get_logprobs(prompt="x")


async def test_dummy_tokens_are_marked_and_match_choices():
    managed = DummyManagedServer(FakeServer(["a", "b"]))

    await managed.chat_completion(messages=[USER], n=2)

    nodes = managed.get_state()["nodes"]
    assert [node.full_text for node in nodes] == ["user:hi\n\nassistant:a", "user:hi\n\nassistant:b"]
    assert nodes[0].metadata["dummy_tokens"] is True
    assert nodes[0].masked_tokens[:2] == [IGNORE_INDEX, 1]
    with pytest.raises(NotImplementedError):
        await managed.get_logprobs(prompt="x")


async def test_the_adapter_looks_like_an_openai_client():
    server = FakeServer("a")
    adapter = ManagedServerAdapter(managed_of(server), base_url="http://x/v1")

    chat = await adapter.chat.completions.create(model="any", messages=[USER])
    text = await adapter.completions.create(model="any", prompt="p")

    assert (chat.choices[0].message.content, text.choices[0].text) == ("a", "a")
    assert adapter.base_url == "http://x/v1"
    with pytest.raises(NotImplementedError):
        adapter.copy(timeout=1)
    with pytest.raises(NotImplementedError):
        await adapter.post("/x", {}, dict)
