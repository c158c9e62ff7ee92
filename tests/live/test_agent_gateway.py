"""Agents' requests to a server that really generates: token truth in each API, grammars, and aborted generations."""

import asyncio
import copy
import json
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from atroposlib.envs.agent_env import GatewayService
from atroposlib.envs.server_handling.agents import rollouts as rollouts_module
from atroposlib.envs.server_handling.agents.rollouts import Rollout, Rollouts, managed_for
from atroposlib.envs.server_handling.agents.rows import rows_of
from atroposlib.envs.server_handling.agents.settings import RolloutSettings
from atroposlib.envs.server_handling.openai_server import engine_load
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB
from tests.live.live_server import LiveServer
from tests.live.test_token_truth import MEAN_APART, P99_APART

FIRST, SECOND = "Name a colour and a fruit.", "And a tree?"


@pytest.fixture(scope="module")
def tokenizer(live_server: LiveServer) -> Any:
    return AutoTokenizer.from_pretrained(live_server.model)


@asynccontextmanager
async def rollout_of(
    live_server: LiveServer, tokenizer: Any, **settings: Any
) -> AsyncIterator[tuple[Rollout, httpx.AsyncClient]]:
    """A rollout on the server, and a client that has its key."""
    manager = ServerManager([live_server.client_config()])
    manager.servers[0].tokenizer = tokenizer
    service = GatewayService(Rollouts(lambda each: managed_for(manager.servers[0], tokenizer, each)), "127.0.0.1")
    await service.start()
    rollout = service.rollouts.create(RolloutSettings(**settings))
    headers = {"Authorization": f"Bearer {rollout.key}"}
    try:
        async with (
            asyncio.timeout(300),
            httpx.AsyncClient(base_url=service.url, headers=headers, timeout=300) as client,
        ):
            yield rollout, client
    finally:
        await rollout.end()
        await service.stop()
        await manager.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def chat(client: httpx.AsyncClient, history: list, is_stream: bool) -> list:
    body = {"model": "m", "messages": history, "stream": is_stream}
    reply = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
    if not is_stream:
        return [reply.json()["choices"][0]["message"]]
    deltas = [event["choices"][0]["delta"] for event in events(reply) if event.get("choices")]
    return [{"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}]


async def responses(client: httpx.AsyncClient, history: list, is_stream: bool) -> list:
    body = {"model": "m", "input": history, "stream": is_stream}
    reply = (await client.post("/v1/responses", json=body)).raise_for_status()
    return (events(reply)[-1]["response"] if is_stream else reply.json())["output"]


async def messages(client: httpx.AsyncClient, history: list, is_stream: bool) -> list:
    body = {"model": "m", "max_tokens": 24, "messages": history, "stream": is_stream}
    reply = (await client.post("/v1/messages", json=body)).raise_for_status()
    if not is_stream:
        return [{"role": "assistant", "content": reply.json()["content"]}]
    texts = [event["delta"]["text"] for event in events(reply) if event.get("delta", {}).get("type") == "text_delta"]
    return [{"role": "assistant", "content": "".join(texts)}]


def events(reply: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("ask", "is_stream"), [(chat, False), (responses, True), (messages, True)])
async def test_two_turns_in_any_api_are_one_row_of_the_ids_and_logprobs_that_the_server_gives(
    live_server, tokenizer, ask, is_stream
):
    async with rollout_of(live_server, tokenizer, sampling={"max_tokens": 12, "temperature": 1.0}) as (rollout, client):
        history = [user(FIRST)]
        history += [*await ask(client, history, is_stream), user(SECOND)]
        await ask(client, history, is_stream)
        (row,) = rows_of(rollout)
    outputs = [call.output for exchange in rollout.exchanges for call in exchange.calls]
    learned = [token for token in row.masks if token != IGNORE_INDEX]
    assert learned == [token for output in outputs for token in output]
    assert [value == PROMPT_LOGPROB for value in row.logprobs] == [mask == IGNORE_INDEX for mask in row.masks]
    assert [text in tokenizer.decode(row.tokens) for text in (FIRST, SECOND)] == [True, True]
    again = live_server.score(row.tokens)
    apart = [abs(a - b) for a, b, mask in zip(row.logprobs, again, row.masks, strict=True) if mask != IGNORE_INDEX]
    assert statistics.fmean(apart) < 3 * MEAN_APART  # of some 20 tokens; a token beside its place is nats apart
    assert max(apart) < 2 * P99_APART


SCHEMA = {"type": "object", "properties": {"n": {"enum": [3, 7]}}, "required": ["n"], "additionalProperties": False}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
OBJECTS = ['{"n":3}', '{"n":7}']
GRAMMARS = {
    "json_schema": ({"response_format": NAMED}, OBJECTS),
    "regex": ({"regex": "(ab){3}c"}, ["abababc"]),
    "guided_choice": ({"guided_choice": ["pear.", "fig"]}, ["pear.", "fig"]),
    "ebnf": ({"ebnf": 'root ::= "x" [0-1] [0-1] "y"'}, ["x00y", "x01y", "x10y", "x11y"]),
}


def follows(text: str, finish_reason: str, wanted: list[str]) -> bool:
    """Tell if a text is one of those that are wanted, up to white space, or cut in one: models may write blanks."""
    said = "".join(text.split())
    return said in wanted or (finish_reason == "length" and any(one.startswith(said) for one in wanted))


@pytest.mark.parametrize(("asked", "wanted"), GRAMMARS.values(), ids=GRAMMARS)
async def test_a_grammar_binds_the_reply_or_is_refused_where_the_engine_has_none(live_server, tokenizer, asked, wanted):
    async with rollout_of(live_server, tokenizer, grammars=True, sampling={"max_tokens": 64}) as (_, client):
        reply = await client.post("/v1/chat/completions", json={"messages": [user(FIRST)], **asked})
    if live_server.kind == "embedded":
        assert reply.status_code == 400
        assert "is not supported by the embedded engine" in reply.json()["error"]["message"]
        return
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert follows(choice["message"]["content"], choice["finish_reason"], wanted)


async def test_a_strict_tool_is_taken_by_an_engine_that_has_grammars_and_refused_by_another(live_server, tokenizer):
    """Arguments of a call follow their schema, where the small model happens to begin one."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + tokenizer.chat_template
    function = {"name": "pick", "description": "Pick a number.", "parameters": SCHEMA, "strict": True}
    body = {"messages": [user(FIRST)], "tools": [{"type": "function", "function": function}]}
    async with rollout_of(live_server, tokenizer, grammars=True, sampling={"max_tokens": 32}) as (rollout, client):
        reply = await client.post("/v1/chat/completions", json=body)
    if live_server.kind == "embedded":
        assert reply.status_code == 400
        assert "is not supported by the embedded engine" in reply.json()["error"]["message"]
        return
    assert reply.status_code == 200, reply.text
    (call,) = rollout.exchanges[0].calls
    arguments = call.text.partition('"arguments": ')[2].partition("}")
    assert call.finish_reason == "length" or not arguments[0] or follows("".join(arguments[:2]), "stop", OBJECTS)


def chat_function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA, "strict": True}}


FORCED = {
    "chat": ("chat/completions", {"messages": [user(FIRST)]}, chat_function),
    "responses": (
        "responses",
        {"input": [user(FIRST)]},
        lambda name: {"type": "function", **chat_function(name)["function"]},
    ),
    "messages": (
        "messages",
        {"messages": [user(FIRST)], "max_tokens": 800},
        lambda name: {"name": name, "input_schema": SCHEMA, "strict": True},
    ),
}
CHOICES = {
    ("chat", "named"): {"type": "function", "function": {"name": "pick"}},
    ("responses", "named"): {"type": "function", "name": "pick"},
    ("messages", "named"): {"type": "tool", "name": "pick"},
    ("messages", "required"): {"type": "any"},
}


def called(api: str, reply: Any) -> list[tuple[str, Any]]:
    """Names and arguments of the calls of a reply."""
    if api == "chat":
        calls = [call["function"] for call in reply["choices"][0]["message"].get("tool_calls", [])]
        return [(call["name"], json.loads(call["arguments"])) for call in calls]
    if api == "responses":
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        return [(call["name"], json.loads(call["arguments"])) for call in calls]
    return [(part["name"], part["input"]) for part in reply["content"] if part["type"] == "tool_use"]


async def strict_reply(live_server, tokenizer, api, more, **sampling) -> tuple[str, list[tuple[str, Any]]] | None:
    """The text of a reply to a request with two strict tools, and its calls; None: the engine has no grammars."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + tokenizer.chat_template
    path, body, function = FORCED[api]
    body = {**body, "tools": [function("pick"), function("choose")], **more}
    sampling = {"max_tokens": 800, **sampling}
    async with rollout_of(live_server, tokenizer, grammars=True, sampling=sampling) as (rollout, client):
        reply = await client.post(f"/v1/{path}", json=body)
        if live_server.kind == "embedded":
            assert reply.status_code == 400
            assert "is not supported by the embedded engine" in reply.text
            return None
        assert reply.status_code == 200, reply.text
        text = rollout.exchanges[0].calls[0].text
        return text, called(api, reply.json()) or [("", text)]


@pytest.mark.parametrize("wanted", ["named", "required"])
@pytest.mark.parametrize("api", FORCED)
async def test_a_strict_tool_that_must_be_called_is_called_by_its_schema_whatever_the_weights(
    live_server, tokenizer, api, wanted
):
    choice = {"tool_choice": CHOICES.get((api, wanted), wanted)}
    for seed in range(20):
        if (found := await strict_reply(live_server, tokenizer, api, choice, seed=seed)) is None:
            return
        text, ((name, arguments),) = found
        assert name in (["pick"] if wanted == "named" else ["pick", "choose"]), text
        assert arguments in ({"n": 3}, {"n": 7})


ONE_CALL = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@pytest.mark.parametrize("api", FORCED)
async def test_a_reply_ends_at_its_first_call_where_that_is_asked_whatever_the_weights(live_server, tokenizer, api):
    """`logit_bias` lets any weights begin one call after the other, as far as the grammar allows."""
    mark = tokenizer.encode("<tool_call>", add_special_tokens=False)
    if live_server.kind != "embedded" and len(mark) != 1:
        pytest.skip("the model has no token for the beginning of a call")
    bias = {str(mark[0]): 100}
    for seed in range(10):
        found = await strict_reply(live_server, tokenizer, api, ONE_CALL[api], seed=seed, logit_bias=bias)
        if found is None:
            return
        text, ((_, arguments),) = found
        assert (text.count("<tool_call>"), arguments in ({"n": 3}, {"n": 7})) == (1, True), text


@pytest.mark.parametrize(("how", "is_stream"), [("its client goes away", True), ("its rollout ends", False)])
async def test_a_generation_that_nobody_waits_for_is_aborted_at_the_engine(
    live_server, tokenizer, monkeypatch, how, is_stream
):
    monkeypatch.setattr(rollouts_module, "KEPT_FOR_RETRY_S", 0.01)
    sampling = {"max_tokens": 400, "ignore_eos": True}
    async with rollout_of(live_server, tokenizer, sampling=sampling) as (rollout, client):
        body = {"messages": [user(FIRST)], "stream": is_stream}
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await running(rollout, 1)
        if how == "its client goes away":
            asked.cancel()
        else:
            await rollout.end()
            assert (await asked).status_code == 409
        await running(rollout, 0)
        record = rollout.record()
    assert (record["calls"], record["running"], record["faults"]) == ([], 0, {"abandoned": 1})


async def running(rollout: Rollout, wanted: int) -> None:
    """Wait until the engine says that this number of requests runs."""
    engine = rollout.managed.server
    while (await engine_load(engine.transport, engine.root_url)).running != wanted:
        await asyncio.sleep(0.02)
