"""Responses asked for one by one: only what the journal lacks is asked, on every route, and streams continue."""

import asyncio
import re
from contextlib import contextmanager

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.one_by_one import OneByOne, digest_of
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_baseline import MAX_TRIES
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import is_resumable
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import EngineFault, RequestFault
from atroposlib.rollouts import journal as journal_module
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.rollouts.source import Work, current_work
from atroposlib.rollouts.trace import tracing
from tests.fakes import EOS, FakeTokenizer

PROMPT = {"input_ids": [10, 11, 12], "max_tokens": 64, "temperature": 1.0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.0}


@contextmanager
def rollout(key="7"):
    """The context in which the pool runs an item."""
    token = current_work.set(Work(item=None, key=key, task="t"))
    try:
        with tracing() as trace:
            yield trace
    finally:
        current_work.reset(token)


def keep(server, folder, *, streams=False, seed=None, done=()):
    """As a process that starts: its journal knows what the files say."""
    journal = ResponseJournal(folder / "run.journal", set(done))
    server.one_by_one = OneByOne(journal, streams=streams, seed=seed)
    return journal


def asked(engine):
    return [body for _, body in engine.requests]


async def test_a_request_for_n_becomes_n_requests_with_one_reply_in_order(engine, sglang, tmp_path):
    keep(sglang, tmp_path)
    with rollout() as trace:
        prompt_ids, outputs, logprobs, reasons = await sglang.tokens_and_logprobs_completion(**PROMPT, n=3)
    assert [body["sampling_params"].get("n", 1) for body in asked(engine)] == [1, 1, 1]
    ids = [*FakeTokenizer().encode("hello"), EOS]
    assert (prompt_ids, outputs, reasons) == ([10, 11, 12], [ids] * 3, ["stop"] * 3)
    assert logprobs == [[-0.25] * len(ids)] * 3
    assert trace.finish_reasons == ["stop"] * 3
    assert trace.usage == {"prompt_tokens": 3, "completion_tokens": 3 * len(ids)}


async def test_outside_of_a_rollout_and_for_evaluations_nothing_is_split(engine, sglang, tmp_path):
    keep(sglang, tmp_path)
    await sglang.tokens_and_logprobs_completion(**PROMPT, n=2)
    with rollout():
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=2, split="eval")
    assert [body["sampling_params"]["n"] for body in asked(engine)] == [2, 2]


@pytest.mark.parametrize(("before", "after", "missing"), [(3, 3, 0), (2, 5, 3), (5, 2, 0)])
async def test_after_a_restart_only_the_missing_responses_are_asked_for(
    engine, sglang, tmp_path, before, after, missing
):
    keep(sglang, tmp_path)
    with rollout():
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=before)
    journal = keep(sglang, tmp_path)
    engine.requests.clear()
    with rollout() as trace:
        _, outputs, _, _ = await sglang.tokens_and_logprobs_completion(**PROMPT, n=after)
    assert (len(outputs), len(asked(engine)), journal.reused_responses) == (after, missing, after - missing)
    assert trace.usage["prompt_tokens"] == 3


async def test_other_sampling_another_item_and_a_recorded_group_are_asked_again(engine, sglang, tmp_path):
    keep(sglang, tmp_path)
    with rollout():
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=1)
    for key, change, done in (("7", {"temperature": 0.5}, ()), ("8", {}, ()), ("7", {}, ("7",))):
        keep(sglang, tmp_path, done=done)
        engine.requests.clear()
        with rollout(key):
            await sglang.tokens_and_logprobs_completion(**{**PROMPT, **change}, n=1)
        assert len(asked(engine)) == 1


async def test_equal_requests_of_one_rollout_are_different_samples(engine, sglang, tmp_path):
    keep(sglang, tmp_path)
    with rollout():
        await asyncio.gather(*(sglang.tokens_and_logprobs_completion(**PROMPT, n=1) for _ in range(3)))
    journal = keep(sglang, tmp_path)
    engine.requests.clear()
    with rollout():
        await asyncio.gather(*(sglang.tokens_and_logprobs_completion(**PROMPT, n=1) for _ in range(4)))
    assert (len(asked(engine)), journal.reused_responses) == (1, 3)


@pytest.mark.parametrize("server_type", ["openai", "vllm"])
async def test_chats_and_completions_are_kept_for_every_kind_of_server(engine, tmp_path, server_type):
    config = APIServerConfig(server_type=server_type, model_name="fake", base_url=f"{engine.url}/v1")
    server = {"openai": OpenAIServer, "vllm": VLLMServer}[server_type](config)
    replies = []
    for _ in range(2):
        keep(server, tmp_path)
        with rollout() as trace:
            chat = await server.chat_completion(**CHAT, n=2)
            text = await server.completion(prompt="hi", n=2)
        replies.append((chat.model_dump(), text.model_dump(), trace.finish_reasons, dict(trace.usage)))
    assert len(asked(engine)) == 4
    assert replies[0] == replies[1]
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert {choice.message.content for choice in chat.choices} == {"hello"}
    await server.close()


async def test_the_failure_of_one_response_leaves_the_others_for_the_next_try(engine, sglang, tmp_path):
    keep(sglang, tmp_path)
    engine.scripted = [(400, {"error": {"message": "too long"}})]
    with rollout(), pytest.raises(RequestFault, match="too long"):
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=3)
    engine.requests.clear()
    with rollout():
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=3)
    assert len(asked(engine)) == 1


async def test_every_response_has_its_own_seed_which_a_restart_repeats(engine, sglang, tmp_path):
    seeds = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        keep(sglang, folder, seed=3)
        engine.requests.clear()
        for key in ("7", "8"):
            with rollout(key):
                await sglang.tokens_and_logprobs_completion(**PROMPT, n=2)
        seeds.append(sorted(body["sampling_params"]["sampling_seed"] for body in asked(engine)))
    assert len(set(seeds[0])) == 4
    assert seeds[0] == seeds[1]


async def test_a_broken_stream_continues_where_it_stopped(engine, sglang, tmp_path):
    keep(sglang, tmp_path, streams=True)
    engine.text = "one two three four"
    engine.break_stream_after = 5
    with rollout() as trace:
        _, outputs, logprobs, reasons = await sglang.tokens_and_logprobs_completion(**PROMPT, n=1)
    whole = [*FakeTokenizer().encode(engine.text), EOS]
    first, second = asked(engine)
    assert (first["input_ids"], second["input_ids"]) == ([10, 11, 12], [10, 11, 12, *whole[:5]])
    assert second["sampling_params"]["max_new_tokens"] == 64 - 5
    assert (outputs, reasons) == ([whole], ["stop"])
    assert logprobs == [[-0.25] * len(whole)]
    assert trace.usage == {"prompt_tokens": 3, "completion_tokens": len(whole)}


async def test_a_stream_that_breaks_behind_the_end_token_is_whole(engine, sglang, tmp_path):
    keep(sglang, tmp_path, streams=True)
    whole = [*FakeTokenizer().encode(engine.text), EOS]
    engine.break_stream_after = len(whole)
    with rollout():
        _, outputs, _, reasons = await sglang.tokens_and_logprobs_completion(**PROMPT, n=1)
    assert (outputs, reasons, len(asked(engine))) == ([whole], ["stop"], 1)


ERRORS_IN_STREAMS = {
    "older": ('{"error": {"message": "too long"}}', RequestFault, 1),
    "newer": ('{"error":{"message":"too long","code":400}}', RequestFault, 1),
    "not the request's": ('{"error":{"message":"too long","code":500}}', EngineFault, MAX_TRIES),
}


@pytest.mark.parametrize(("event", "fault", "requests"), ERRORS_IN_STREAMS.values(), ids=ERRORS_IN_STREAMS)
async def test_an_error_inside_a_stream_is_what_it_would_be_as_a_reply(
    engine, sglang, tmp_path, event, fault, requests
):
    keep(sglang, tmp_path, streams=True)
    engine.scripted = [(200, f"data: {event}\n\ndata: [DONE]\n\n")] * MAX_TRIES
    with rollout(), pytest.raises(fault, match="too long"):
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=1)
    assert len(asked(engine)) == requests


async def test_a_response_counts_as_generated_by_its_oldest_weights(engine, sglang, tmp_path):
    keep(sglang, tmp_path, streams=True)
    engine.text, engine.weight_version = "one two three four", "9"
    engine.break_stream_after = 5
    with rollout() as trace:
        asking = asyncio.create_task(sglang.tokens_and_logprobs_completion(**PROMPT, n=1))
        while not engine.requests or engine.running:
            await asyncio.sleep(0)
        engine.weight_version = "10"
        await asking
    assert len(asked(engine)) == 2
    assert trace.engine["weight_version_start"] == "9"


async def test_the_weight_versions_of_a_group_are_its_oldest_and_its_newest(engine, sglang, tmp_path):
    keep(sglang, tmp_path)
    engine.weight_version, engine.scripted = "9", [(400, {"error": {"message": "no"}})]
    with rollout(), pytest.raises(RequestFault):
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=3)
    engine.weight_version = "10"
    with rollout() as trace:  # the response that is missing is the first of the three
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=3)
    assert (trace.engine["weight_version_start"], trace.engine["weight_version_end"]) == ("9", "10")


async def test_a_killed_process_loses_less_than_a_piece_of_a_stream(engine, sglang, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "PIECE_TOKENS", 4)
    monkeypatch.setattr("atroposlib.envs.server_handling.sglang_server.PIECE_TOKENS", 4)
    monkeypatch.setattr("atroposlib.envs.server_handling.sglang_server._TOKEN_BYTES", 1)
    keep(sglang, tmp_path, streams=True)
    engine.text = "one two three four"
    whole = [*FakeTokenizer().encode(engine.text), EOS]
    with rollout():
        await sglang.tokens_and_logprobs_completion(**PROMPT, n=1)
    (path,) = tmp_path.glob("run.journal.*")
    path.write_bytes(path.read_bytes()[:-30])  # what a kill before the last write leaves

    journal = keep(sglang, tmp_path, streams=True)
    engine.requests.clear()
    with rollout():
        _, outputs, _, _ = await sglang.tokens_and_logprobs_completion(**PROMPT, n=1)
    (again,) = asked(engine)
    known = len(again["input_ids"]) - 3
    assert len(whole) - 8 <= known == journal.reused_tokens
    assert outputs == [whole]


async def test_a_stream_that_had_all_its_tokens_is_not_asked_again(engine, sglang, tmp_path):
    journal = keep(sglang, tmp_path, streams=True)
    limited = {**PROMPT, "max_tokens": 4}
    engine.text = "one two three four"
    with rollout():
        await sglang.tokens_and_logprobs_completion(**limited, n=1)
        draft = journal.open("7", digest_of("tokens", "fake", {**limited, "input_ids": [1]}) + bytes(4))
        draft.grow([1, 2, 3, 4], [-1.0] * 4, base=0, version=None)
        draft.save(None)
    keep(sglang, tmp_path, streams=True)
    engine.requests.clear()
    with rollout():
        _, outputs, _, reasons = await sglang.tokens_and_logprobs_completion(**{**limited, "input_ids": [1]}, n=1)
    assert (outputs, reasons, asked(engine)) == ([[1, 2, 3, 4]], ["length"], [])


RESUMABLE = {
    "plain": ({"temperature": 1.0, "top_p": 0.9}, {}, True),
    "neutral values": ({"repetition_penalty": 1.0, "stop": [], "frequency_penalty": 0}, {}, True),
    "stop strings": ({"stop": ["</s>"]}, {}, False),
    "a grammar": ({"regex": "a+"}, {}, False),
    "a penalty": ({"presence_penalty": 0.5}, {}, False),
    "prompt log-probabilities": ({}, {"logprob_start_len": 0}, False),
}


@pytest.mark.parametrize(("sampling", "more", "expected"), RESUMABLE.values(), ids=RESUMABLE)
def test_only_what_does_not_look_back_is_continued(sampling, more, expected):
    assert is_resumable({"input_ids": [1], "sampling_params": sampling, "return_logprob": True, **more}) is expected


async def conversations(sglang, count):
    """`count` conversations of two turns at the same time, as an environment has them; their token ids."""

    async def one():
        managed = ManagedServer(sglang, FakeTokenizer())
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            reply = await managed.chat_completion(messages=messages, n=1, max_tokens=64)
            said = {"role": "assistant", "content": reply.choices[0].message.content}
            messages = [*messages, said, {"role": "user", "content": "go on"}]
        return managed.get_state()["nodes"][0].tokens

    return await asyncio.gather(*(one() for _ in range(count)))


async def test_conversations_of_several_turns_continue_turn_by_turn(engine, sglang, tmp_path):
    keep(sglang, tmp_path)
    with rollout():
        before = await conversations(sglang, 2)
    assert len(asked(engine)) == 4

    journal = keep(sglang, tmp_path)
    engine.requests.clear()
    with rollout():
        after = await conversations(sglang, 3)
    assert after[:2] == before
    assert (len(asked(engine)), journal.reused_responses) == (2, 4)  # both turns of the third one


class ShowingIds(FakeTokenizer):
    """A template that shows the ids of calls, as those of Mistral's models do."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None):
        turns = [
            {**turn, "content": f"{turn.get('tool_call_id', '')} {turn['content'] or ''}"} for turn in conversation
        ]
        return f"{tools or ''}" + super().apply_chat_template(turns, tokenize, add_generation_prompt)


async def with_tools(sglang, parser):
    """Two equal conversations at the same time in which a tool is called twice; the ids of their calls."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    async def one():
        managed = ManagedServer(sglang, ShowingIds(), tool_parser=parser)
        messages, ids = [{"role": "user", "content": "hi"}], []
        for _ in range(2):
            reply = await managed.chat_completion(messages=messages, tools=tools, max_tokens=64)
            calls = reply.choices[0].message.tool_calls
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "3"}
            messages = [*messages, {"role": "assistant", "content": None, "tool_calls": calls}, result]
            ids += [call["id"] for call in calls]
        return ids

    return await asyncio.gather(one(), one())


@pytest.mark.parametrize(
    ("parser", "text", "form"),
    [
        ("hermes", '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' * 2, r"call_[0-9a-f]{32}"),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"name": "look", "arguments": {}}]',
            r"[0-9a-f]{9}",
        ),
    ],
)
async def test_an_agent_with_tools_that_is_run_again_asks_nothing_a_second_time(
    engine, sglang, tmp_path, parser, text, form
):
    engine.text = text
    keep(sglang, tmp_path)
    with rollout():
        before = await with_tools(sglang, parser)
    assert len(asked(engine)) == 4
    for ids in before:
        assert len(set(ids)) == 4
        assert all(re.fullmatch(form, made) for made in ids)

    keep(sglang, tmp_path)
    engine.requests.clear()
    with rollout():
        assert await with_tools(sglang, parser) == before
    assert asked(engine) == []


async def test_equal_generations_of_one_prompt_have_calls_of_their_own(engine, sglang):
    engine.text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    managed = ManagedServer(sglang, FakeTokenizer(), tool_parser="hermes")
    reply = await managed.chat_completion(messages=CHAT["messages"], tools=tools, n=3, max_tokens=64)
    assert len({choice.message.tool_calls[0]["id"] for choice in reply.choices}) == 3
