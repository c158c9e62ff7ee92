"""A rollout's key: what it opens, how dialects are recorded, budgets, ends, retries, and the rows that come of it."""

import asyncio
import errno
import json
import shutil
import threading
import time
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import httpx
import openai
import pytest
from starlette.applications import Starlette

from atroposlib.envs.server_handling.agents import gateway as gateway_module
from atroposlib.envs.server_handling.agents import record as record_module
from atroposlib.envs.server_handling.agents import rollouts as rollouts_module
from atroposlib.envs.server_handling.agents.gateway import Gateway
from atroposlib.envs.server_handling.agents.record import CallLog, RolloutLog
from atroposlib.envs.server_handling.agents.rollouts import BUDGET_TEXT, Rollouts, managed_for
from atroposlib.envs.server_handling.agents.rows import advantages, ending, group_of, rows_of
from atroposlib.envs.server_handling.agents.settings import RolloutSettings
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.managed_server_proxy import choose_server, create_app
from atroposlib.errors import EngineFault, GroupError, KilledFault, PathError, RequestFault
from atroposlib.type_definitions import IGNORE_INDEX
from tests.fakes import FakeServer, FakeTokenizer

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
FUNCTION = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
HELLO = [{"role": "user", "content": "hi"}]
ADMIN = {"Authorization": "Bearer admin"}


class Tokenizer(FakeTokenizer):
    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None):
        turns = [{**turn, "content": turn.get("content") or ""} for turn in conversation]
        return f"{tools or ''}" + super().apply_chat_template(turns, False, add_generation_prompt)


class SlowServer(FakeServer):
    """Answers when it is told to."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.may_answer = asyncio.Event()

    async def tokens_and_logprobs_completion(self, **kwargs):
        await self.may_answer.wait()
        return await super().tokens_and_logprobs_completion(**kwargs)


def app_of(server, **options):
    from tests.server_handling.test_managed_server_proxy import manager_of

    return create_app(manager_of(server), server.tokenizer, "fake", token="admin", **options)


@asynccontextmanager
async def client_of(*texts, server=None, **options):
    server = server or FakeServer(list(texts), tokenizer=Tokenizer())
    transport = httpx.ASGITransport(app=app_of(server, **options), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        client.engine = server
        yield client


async def new_rollout(client, **settings):
    reply = await client.post("/rollouts", json=settings, headers=ADMIN)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def ask(client, made, path="chat/completions", headers=None, **body):
    body = {"model": "any", **({"messages": HELLO} if "completions" in path and "prompt" not in body else {}), **body}
    sent = {"Authorization": f"Bearer {made['key']}", **(headers or {})}
    return await client.post(f"/v1/{path}", json=body, headers=sent)


async def record_of(client, made):
    return (await client.get(f"/rollouts/{made['id']}", headers=ADMIN)).json()


BODIES = {
    "chat": ("/v1/chat/completions", "key"),
    "completions": ("/v1/completions", "key"),
    "responses": ("/v1/responses", "key"),
    "messages": ("/v1/messages", "key"),
    "count_tokens": ("/v1/messages/count_tokens", "key"),
    "new rollout": ("/rollouts", None),
    "end": ("/rollouts/{id}/end", None),
    "score": ("/rollouts/{id}/score", "score_key"),
    "new session": ("/sessions/create", None),
    "a session's prompt": ("/{id}/v1/chat/completions/render", None),
    "servers": ("/setup", None),
}


@pytest.mark.parametrize("length", [1001, 5000], ids=["read to its end", "cut"])
@pytest.mark.parametrize(("path", "key"), BODIES.values(), ids=BODIES)
async def test_a_body_that_is_too_long_is_refused_with_a_sentence_and_changes_nothing(monkeypatch, path, key, length):
    monkeypatch.setattr(gateway_module, "MAX_BODY_BYTES", 1000)

    async def chunks():
        for _ in range(length // 100):
            yield b" " * 100
        yield b"{" * (length % 100)

    async with client_of("ok") as client:
        made = await new_rollout(client)
        headers = {"Authorization": f"Bearer {made[key]}"} if key else ADMIN
        reply = await client.post(path.format(**made), content=chunks(), headers=headers)
        assert (reply.status_code, reply.headers["connection"]) == (413, "close")
        assert "above the 1000 bytes" in reply.json()["error"]["message"]
        record = await record_of(client, made)
        assert (record["calls"], record["scores"], record["end_reason"]) == ([], [], None)


async def test_a_body_of_just_the_limit_is_taken(monkeypatch):
    body = json.dumps({"model": "any", "messages": HELLO}).encode()
    monkeypatch.setattr(gateway_module, "MAX_BODY_BYTES", len(body))
    async with client_of("ok") as client:
        headers = {"Authorization": f"Bearer {(await new_rollout(client))['key']}"}
        assert (await client.post("/v1/chat/completions", content=body, headers=headers)).status_code == 200
        assert (await client.post("/v1/chat/completions", content=body + b" ", headers=headers)).status_code == 413


# -- the key ------------------------------------------------------------------------------------------------------

PLACES = {
    "bearer": lambda key: ("/v1/chat/completions", {"Authorization": f"Bearer {key}"}),
    "anthropic's header": lambda key: ("/v1/chat/completions", {"x-api-key": key}),
    "google's header": lambda key: ("/v1/chat/completions", {"x-goog-api-key": key}),
    "path": lambda key: (f"/{key}/v1/chat/completions", {"Authorization": "Bearer whatever"}),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
async def test_the_key_of_a_rollout_is_known_wherever_a_client_can_put_it(place):
    async with client_of("ok") as client:
        path, headers = place((await new_rollout(client))["key"])
        reply = await client.post(path, json={"messages": HELLO}, headers=headers)
    assert reply.json()["choices"][0]["message"]["content"] == "ok"


CONTROL = [
    ("POST", "/rollouts"),
    ("GET", "/rollouts/{id}"),
    ("POST", "/rollouts/{id}/end"),
    ("POST", "/rollouts/{id}/score"),
    ("DELETE", "/rollouts/{id}"),
    ("GET", "/sessions"),
    ("POST", "/sessions/create"),
    ("POST", "/setup"),
    ("GET", "/servers"),
]


@pytest.mark.parametrize(("method", "path"), CONTROL, ids=str)
@pytest.mark.parametrize("token", ["admin", None], ids=["with a token", "without a token"])
async def test_the_key_of_a_rollout_opens_no_route_of_the_environment(method, path, token):
    server = FakeServer(tokenizer=Tokenizer())
    from tests.server_handling.test_managed_server_proxy import manager_of

    app = create_app(manager_of(server), server.tokenizer, "fake", token=token)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
        made = await new_rollout(client)
        headers = {"Authorization": f"Bearer {made['key']}"}
        reply = await client.request(method, path.format(id=made["id"]), json={}, headers=headers)
        other = await client.get("/sk-rollout-nobody/v1/models")
    assert reply.status_code in (401, 403)
    assert other.status_code == 404


MODEL = [
    (route.path.replace("model:path", "model"), min(route.methods - {"HEAD"}))
    for route in Gateway(Rollouts(None)).model_routes()
]
STRANGERS = {
    "nobody's key": lambda made: "sk-rollout-nobody",
    "no key": lambda made: "",
    "the key for scores": lambda made: made["score_key"],
    "the rollout's id": lambda made: made["id"],
    "half of the key": lambda made: made["key"][:30],
    "the gateway's token": lambda made: "admin",
}


@pytest.mark.parametrize("key", STRANGERS.values(), ids=STRANGERS)
async def test_no_route_of_the_model_opens_to_a_key_that_is_not_a_rollouts(key):
    async with client_of("ok") as client:
        made = await new_rollout(client)
        for path, method in MODEL:
            url = path.format(key=key(made) or "x", model="m")
            headers = {} if "{key}" in path else {"Authorization": f"Bearer {key(made)}"}
            reply = await client.request(method, url, json={"model": "m", "messages": HELLO}, headers=headers)
            if path.startswith("/v1/models") and key(made) == "admin":  # of the gateway, as a control route
                assert reply.status_code == 200
                continue
            assert reply.status_code in (401, 404), (path, reply.text)
            assert reply.json()["error"]["message"], path
            assert ("type" in reply.json()) == ("messages" in path), path
        record = await record_of(client, made)
    assert (record["calls"], record["faults"], client.engine.requests) == ([], {}, [])


BEGUN = {
    "chat": ("chat/completions", {"messages": HELLO}),
    "completions": ("completions", {"prompt": "p"}),
    "responses": ("responses", {"input": "hi"}),
    "messages": ("messages", {"messages": HELLO, "max_tokens": 9}),
}


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize(("path", "body"), BEGUN.values(), ids=BEGUN)
async def test_an_engine_that_dies_after_a_reply_has_begun_is_no_whole_reply_and_no_call(
    monkeypatch, path, body, is_stream
):
    begun, kept_awake = asyncio.Event(), gateway_module._kept_awake

    async def noted(*given):
        begun.set()
        async for part in kept_awake(*given):
            yield part

    monkeypatch.setattr(gateway_module, "_kept_awake", noted)
    for name in ("QUIET_S", "QUIET_JSON_S", "AWAKE_S"):
        monkeypatch.setattr(gateway_module, name, 0.001)
    server = SlowServer("ok", tokenizer=Tokenizer(), faults=[EngineFault("the engine is gone")])
    async with client_of(server=server) as client:
        made = await new_rollout(client)
        asked = asyncio.create_task(ask(client, made, path, stream=is_stream, **body))
        await begun.wait()
        server.may_answer.set()
        reply = await asked
        record = await record_of(client, made)
        again = await ask(client, made, path, headers={"x-stainless-retry-count": "1"}, **body)
    (*_, last) = [line for line in reply.text.splitlines() if line.strip()] or [""]
    if is_stream:
        assert "the engine is gone" in json.loads(last.removeprefix("data: "))["error"]["message"]
    else:
        assert last == ""  # blanks, and then the connection is cut
    assert (record["calls"], record["faults"]) == ([], {"engine": 1})
    assert again.status_code == 200


async def test_the_same_rollout_is_given_for_the_same_id():
    async with client_of("ok") as client:
        assert await new_rollout(client, rollout_id="r") == await new_rollout(client, rollout_id="r")
        one, other = await new_rollout(client), await new_rollout(client)
        assert one["key"] != other["key"]
        assert await new_rollout(client, rollout_id=one["id"]) == one


async def test_an_id_that_is_taken_is_not_given_for_other_settings():
    async with client_of("ok") as client:
        await new_rollout(client, rollout_id="r", item_id="1")
        reply = await client.post("/rollouts", json={"rollout_id": "r", "item_id": "2"}, headers=ADMIN)
        assert reply.status_code == 400
        assert "is there with other settings (item_id: '1', not '2')" in reply.json()["error"]["message"]


@pytest.mark.parametrize("in_path", [True, False])
async def test_a_request_with_the_keys_of_two_rollouts_is_none_of_either(in_path):
    async with client_of("ok") as client:
        one, other = await new_rollout(client), await new_rollout(client)
        headers = {"x-api-key": other["key"]} | ({} if in_path else {"Authorization": f"Bearer {one['key']}"})
        path = f"/{one['key']}/v1/chat/completions" if in_path else "/v1/chat/completions"
        reply = await client.post(path, json={"messages": HELLO}, headers=headers)
        assert (reply.status_code, "two rollouts" in reply.text) == (401, True)
        assert [(await record_of(client, made))["calls"] for made in (one, other)] == [[], []]


async def test_what_is_said_of_a_rollout_while_it_is_deleted_does_not_keep_the_gateway_from_its_next_start(tmp_path):
    log = CallLog(tmp_path / "records.jsonl")
    async with client_of("ok", log=log) as client:
        made = await new_rollout(client, rollout_id="r")
        deleted = asyncio.Event()

        async def slowly():
            yield b'{"score": '
            await deleted.wait()
            yield b"1}"

        score = asyncio.create_task(client.post("/rollouts/r/score", content=slowly(), headers=ADMIN))
        await asyncio.sleep(0)
        assert (await client.delete("/rollouts/r", headers=ADMIN)).status_code == 200
        deleted.set()
        assert (await score).status_code == 404
    log.append({"score": 1, "rollout": "r"})  # as an earlier version left it
    log.close()
    log = CallLog(tmp_path / "records.jsonl")
    async with client_of("ok", log=log) as client:
        assert (await new_rollout(client, rollout_id="r"))["key"] != made["key"]
    log.close()


# -- the dialects -------------------------------------------------------------------------------------------------

SAID = f"<think>so</think>Let me.{ADD}"


async def test_chat_completions_answer_with_thoughts_calls_and_usage():
    async with client_of(SAID) as client:
        reply = (await ask(client, await new_rollout(client), tools=TOOLS)).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "so"
    assert choice["message"]["content"] == "Let me."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert reply["usage"]["completion_tokens"] == len(SAID) + 1


@asynccontextmanager
async def sdk_of(*texts):
    from tests.server_handling.test_managed_server_proxy import serving

    server = FakeServer(list(texts), tokenizer=Tokenizer())
    async with serving(app_of(server)) as url, httpx.AsyncClient(base_url=url) as client:
        made = await new_rollout(client)
        async with openai.AsyncOpenAI(base_url=made["openai_base_url"], api_key=made["key"], max_retries=0) as sdk:
            yield sdk, client, made


async def test_a_stream_of_chat_chunks_adds_up_to_the_whole_reply_in_openais_client():
    async with sdk_of(SAID, "done") as (sdk, client, made):
        chunks = await sdk.chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        parts = [chunk async for chunk in chunks]
        deltas = [chunk.choices[0].delta for chunk in parts if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert "".join(delta.content or "" for delta in deltas) == "Let me."
        assert calls[0].function.name == "add"
        assert json.loads("".join(call.function.arguments for call in calls)) == {"a": 1, "b": 2}
        assert parts[-1].usage.completion_tokens == len(SAID) + 1
        echo = {
            "role": "assistant",
            "content": "Let me.",
            "tool_calls": [
                {"id": calls[0].id, "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
            ],
        }
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}
        last = await sdk.chat.completions.create(model="m", messages=[*HELLO, echo, result], tools=TOOLS)
        assert last.choices[0].message.content == "done"
        (row,) = [call["parent"] for call in (await record_of(client, made))["calls"][1]["calls"]]
    assert row == [0, 0]


@pytest.mark.parametrize("is_stream", [False, True], ids=["json", "stream"])
async def test_responses_are_read_by_openais_client_and_their_items_continue_the_sequence(is_stream):
    async with sdk_of(SAID, "done") as (sdk, client, made):
        tools = [{"type": "function", **FUNCTION, "strict": False}]
        asked = {"model": "m", "instructions": "Add.", "tools": tools}
        given = [{"role": "user", "content": "hi"}]
        if is_stream:
            async with sdk.responses.stream(input=given, **asked) as stream:
                kinds = [event.type async for event in stream]
                first = await stream.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
        else:
            first = await sdk.responses.create(input=given, **asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "3"}
        items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        last = await sdk.responses.create(input=[*given, *items, output], **asked)
        chained = await sdk.responses.create(input="more", previous_response_id=last.id, **asked)
        calls = (await record_of(client, made))["calls"]
        with pytest.raises(openai.BadRequestError, match="no response of this rollout"):
            await sdk.responses.create(input="x", previous_response_id="resp_nobody", **asked)
    assert last.output_text == "done"
    assert chained.status == "completed"
    assert [call["calls"][0]["parent"] for call in calls] == [None, [0, 0], [1, 0]]


async def test_custom_and_namespaced_tools_of_responses_come_back_as_such_and_hosted_ones_are_noted():
    call = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    custom = {"type": "custom", "name": "apply_patch"}
    namespace = {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read", "parameters": {}}]}
    async with client_of(call) as client:
        made = await new_rollout(client)
        tools = [custom, namespace, {"type": "web_search"}]
        reply = (await ask(client, made, "responses", input="hi", tools=tools)).json()
        prompt = client.engine.tokenizer.decode(client.engine.requests[0]["input_ids"])
        (entry,) = (await record_of(client, made))["calls"]
    assert reply["output"][0]["type"] == "custom_tool_call"
    assert reply["output"][0]["input"] == "*** Begin"
    assert "fs.read" in prompt
    assert entry["notes"] == ["the tool 'web_search' was left out: it would run at OpenAI"]


async def test_messages_answer_in_blocks_and_their_echo_continues_the_sequence():
    tools = [{"name": "add", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"}]
    async with client_of(SAID, "done") as client:
        made = await new_rollout(client)
        asked = {"max_tokens": 99, "system": [{"type": "text", "text": "Add."}], "tools": tools}
        first = (await ask(client, made, "messages", messages=HELLO, **asked)).json()
        result = {
            "type": "tool_result",
            "tool_use_id": first["content"][2]["id"],
            "content": [{"type": "text", "text": "3"}],
        }
        history = [*HELLO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        counted = (await ask(client, made, "messages/count_tokens", messages=history, **asked)).json()
        last = (await ask(client, made, "messages", messages=history, **asked)).json()
        calls = (await record_of(client, made))["calls"]
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert first["content"][2]["input"] == {"a": 1, "b": 2}
    assert (first["stop_reason"], last["stop_reason"]) == ("tool_use", "end_turn")
    assert last["usage"]["input_tokens"] == counted["input_tokens"]
    assert [call["calls"][0]["parent"] for call in calls] == [None, [0, 0]]


async def test_a_prompt_that_is_only_asked_about_counts_no_difference():
    async with client_of("said", "done") as client:
        made = await new_rollout(client)
        await ask(client, made, "messages", messages=HELLO, max_tokens=9)
        history = [*HELLO, {"role": "assistant", "content": "said \n"}, {"role": "user", "content": "more"}]
        differences = []
        for path in ("messages/count_tokens", "messages/count_tokens", "messages"):
            reply = await ask(client, made, path, messages=history, max_tokens=9)
            assert reply.status_code == 200, reply.text
            differences.append((await record_of(client, made))["differences"])
    assert differences == [0, 0, 1]


async def test_messages_stream_every_block_as_deltas_that_add_up():
    async with client_of(SAID) as client:
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        reply = await ask(
            client, await new_rollout(client), "messages", messages=HELLO, max_tokens=9, tools=tools, stream=True
        )
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta.get("thinking") or delta.get("text") for delta in deltas if "signature" not in delta][:2] == [
        "so",
        "Let me.",
    ]
    assert json.loads(deltas[-1]["partial_json"]) == {"a": 1, "b": 2}


async def test_a_text_completion_is_answered_at_once_and_as_a_stream():
    async with client_of("world") as client:
        made = await new_rollout(client)
        whole = (await ask(client, made, "completions", prompt="hello ")).json()
        stream = await ask(client, made, "completions", prompt="hello ", stream=True)
    assert whole["choices"][0]["text"] == "world"
    assert '"text":"world"' in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")


async def test_models_tell_the_one_model_and_take_any_name():
    async with client_of("ok") as client:
        headers = {"x-api-key": (await new_rollout(client))["key"]}
        listed = (await client.get("/v1/models", headers=headers)).json()
        one = (await client.get("/v1/models/openai/any-name", headers=headers)).json()
    assert [model["id"] for model in listed["data"]] == ["fake"]
    assert one["id"] == "openai/any-name"


# -- time, retries, budgets, ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_stream", "alive"), [(True, ": still generating"), (False, "  {")], ids=["stream", "json"])
async def test_an_agent_that_waits_long_is_kept_awake(monkeypatch, is_stream, alive):
    for name in ("QUIET_S", "QUIET_JSON_S", "AWAKE_S"):
        monkeypatch.setattr(gateway_module, name, 0.001)
    server = SlowServer("slow", tokenizer=Tokenizer())
    kept_awake = gateway_module._kept_awake

    async def answered_after_two_signs(*given):
        signs = 0
        async for piece in kept_awake(*given):
            yield piece
            signs += 1
            if signs == 2:
                server.may_answer.set()

    monkeypatch.setattr(gateway_module, "_kept_awake", answered_after_two_signs)
    async with client_of(server=server) as client:
        reply = await ask(client, await new_rollout(client), stream=is_stream)
    assert alive in reply.text
    assert "slow" in reply.text


FAULTS = {
    "engine": (EngineFault("down"), 503),
    "killed": (KilledFault("weights"), 429),
    "refused": (RequestFault("x"), 400),
}


@pytest.mark.parametrize(("fault", "status"), FAULTS.values(), ids=FAULTS)
async def test_a_fault_keeps_its_class_and_is_counted_but_is_no_call(fault, status):
    async with client_of(server=FakeServer("ok", tokenizer=Tokenizer(), faults=[fault])) as client:
        made = await new_rollout(client)
        reply = await ask(client, made, stream=True)
        record = await record_of(client, made)
        again = await ask(client, made, headers={"x-stainless-retry-count": "1"}, stream=True)
    assert reply.status_code == status
    assert ("retry-after" in reply.headers) == (status == 429)
    assert record["calls"] == []
    assert record["faults"] == {fault.failure_class: 1}
    assert again.status_code == 200


RETRIES = {"retry count": ({}, {"x-stainless-retry-count": "1"}), "idempotency key": ({"idempotency-key": "k"},) * 2}


@pytest.mark.parametrize(("first", "second"), RETRIES.values(), ids=RETRIES)
async def test_a_retry_gets_the_reply_of_the_first_request(first, second):
    async with client_of("one", "two") as client:
        made = await new_rollout(client)
        replies = [(await ask(client, made, headers=headers)).json() for headers in (first, second)]
    assert replies[0] == replies[1]
    assert client.engine.answered == 1


async def test_a_retry_joins_the_request_that_runs_after_its_client_went_away():
    server = SlowServer(["one", "two"], tokenizer=Tokenizer())
    async with client_of(server=server) as client:
        made = await new_rollout(client)
        lost = asyncio.create_task(ask(client, made))
        await asyncio.sleep(0.01)
        retry = asyncio.create_task(ask(client, made, headers={"x-stainless-retry-count": "1"}))
        await asyncio.sleep(0.01)
        lost.cancel()
        server.may_answer.set()
        reply = await retry
    assert reply.json()["choices"][0]["message"]["content"] == "one"
    assert server.answered == 1


async def test_equal_requests_without_a_sign_of_a_retry_are_new_samples():
    async with client_of("one", "two") as client:
        made = await new_rollout(client)
        texts = [(await ask(client, made)).json()["choices"][0]["message"]["content"] for _ in range(2)]
    assert texts == ["one", "two"]


BUDGETS = {"calls": {"max_calls": 1}, "tokens": {"max_tokens": 3}, "seconds": {"timeout_s": 1e-9}}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
async def test_a_used_up_budget_ends_with_one_normal_reply_and_then_409(budget):
    async with client_of("one") as client:
        made = await new_rollout(client, **budget)
        replies = [await ask(client, made) for _ in range(3)]
        record = await record_of(client, made)
    texts = [reply.json()["choices"][0]["message"]["content"] for reply in replies if reply.status_code == 200]
    assert texts[-1] == BUDGET_TEXT
    assert replies[-1].status_code == 409
    assert record["end_reason"].startswith("budget")
    assert [bool(call["calls"]) for call in record["calls"]][-1] is False


@pytest.mark.parametrize("jump_s", [1e6, -1e6], ids=["forward", "back"])
async def test_a_clock_that_is_set_changes_no_age_of_a_rollout_that_runs(monkeypatch, jump_s):
    wall, steady = [1e9], [0.0]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    monkeypatch.setattr(time, "monotonic", lambda: steady[0])
    rollout = Rollouts(lambda _: managed_for(FakeServer(), Tokenizer(), _)).create(RolloutSettings(timeout_s=10))
    wall[0] += jump_s
    assert rollout.spent() is None
    steady[0] = 10.0
    assert rollout.spent() == "10 of 10 s"


@pytest.mark.parametrize(("later_s", "spent"), [(4, None), (10, "10 of 10 s"), (-1e6, None)])
async def test_a_restarted_gateway_knows_the_age_of_a_rollout_by_the_date_only(tmp_path, monkeypatch, later_s, spent):
    wall, steady = [1e9], [0.0]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    monkeypatch.setattr(time, "monotonic", lambda: steady[0])
    for _ in range(2):
        log = CallLog(tmp_path / "records.jsonl")
        rollouts = Rollouts(lambda settings: managed_for(FakeServer(), Tokenizer(), settings), log)
        rollout = rollouts.create(RolloutSettings(rollout_id="r", timeout_s=10))
        log.close()
        wall[0] += later_s
    wall[0] -= later_s
    assert rollout.spent() == spent
    steady[0] += 10
    assert rollout.spent() == f"{10 + max(0, later_s)} of 10 s"


async def test_what_is_left_of_the_token_budget_limits_each_request():
    async with client_of("a") as client:
        made = await new_rollout(client, max_tokens=20, sampling={"max_tokens": 19})
        await ask(client, made, max_tokens=64000)
        await ask(client, made)
    assert [request["max_tokens"] for request in client.engine.requests] == [19, 18]


async def test_locked_sampling_overrides_the_agents_and_says_so():
    async with client_of("a") as client:
        locked, free = [await new_rollout(client, sampling={"top_p": 0.9}, locked=lock) for lock in (True, False)]
        for made in (locked, free):
            await ask(client, made, temperature=0.1, stop=["x"])
        (entry,) = (await record_of(client, locked))["calls"]
    used = [{key: request.get(key) for key in ("temperature", "top_p", "stop")} for request in client.engine.requests]
    assert used == [
        {"temperature": 1.0, "top_p": 0.9, "stop": ["x"]},
        {"temperature": 0.1, "top_p": 0.9, "stop": ["x"]},
    ]
    assert entry["notes"] == ["sampling is locked: temperature=0.1 was not used"]
    assert entry["asked"]["temperature"] == 0.1


async def test_an_ended_rollout_is_sealed_and_running_requests_get_their_grace():
    server = SlowServer("late", tokenizer=Tokenizer())
    async with client_of(server=server) as client:
        made = await new_rollout(client)
        running = asyncio.create_task(ask(client, made))
        await asyncio.sleep(0.01)
        ended = (await client.post(f"/rollouts/{made['id']}/end", json={"reason": "done"}, headers=ADMIN)).json()
        late, aborted = await ask(client, made), await running
        again = (await client.post(f"/rollouts/{made['id']}/end", json={"reason": "x"}, headers=ADMIN)).json()
        record = await record_of(client, made)
    assert ended == again == {"id": made["id"], "end_reason": "done"}
    assert (late.status_code, aborted.status_code) == (409, 409)
    assert record["calls"] == []
    assert record["faults"] == {"abandoned": 1}


async def test_scores_come_from_the_environment_or_the_rollouts_verifier_and_are_only_added():
    async with client_of("ok") as client:
        made = await new_rollout(client)
        path, verifier = f"/rollouts/{made['id']}/score", {"Authorization": f"Bearer {made['score_key']}"}
        assert (await client.post(path, json={"score": 0.5}, headers=verifier)).status_code == 200
        assert (await client.post(path, json={"score": 1, "final": True}, headers=ADMIN)).json()["score"] == 1.0
        assert (await client.post(path, json={"score": 0.2}, headers=verifier)).json()["score"] == 1.0
        for wrong in ('"x"', '"nan"', '"-Infinity"', "1e999", "NaN"):
            sent = await client.post(path, content=f'{{"score": {wrong}}}', headers=ADMIN)
            assert sent.status_code == 400, wrong
        assert (await client.get(f"/rollouts/{made['id']}", headers=verifier)).status_code == 401
        assert len((await record_of(client, made))["scores"]) == 3


async def test_a_stop_string_ends_the_text_but_its_tokens_stay():
    async with client_of("Thought.\nObservation: x") as client:
        made = await new_rollout(client)
        reply = (await ask(client, made, stop=["Observation:"])).json()
        (entry,) = (await record_of(client, made))["calls"]
    assert reply["choices"][0]["message"]["content"] == "Thought.\n"
    assert len(entry["calls"][0]["output"]) == len("Thought.\nObservation: x") + 1


@pytest.mark.parametrize(
    ("text", "told"),
    [("Thought.\nObservation: x", ["stop_sequence", "Observation:"]), ("Thought.", ["end_turn", None])],
    ids=["stopped", "ended"],
)
async def test_anthropics_agents_are_told_which_stop_sequence_ended_a_reply(text, told):
    async with client_of(text) as client:
        made = await new_rollout(client)
        stops = ["x", "Observation:"]
        reply = (await ask(client, made, "messages", messages=HELLO, max_tokens=99, stop_sequences=stops)).json()
    assert [reply["stop_reason"], reply["stop_sequence"]] == told
    assert reply["content"][0]["text"].strip() == "Thought."


async def test_rollouts_at_the_same_time_never_see_each_others_conversations():
    def answer(prompt):
        return prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]

    async with client_of(server=FakeServer(answer, tokenizer=Tokenizer())) as client:
        made = [await new_rollout(client) for _ in range(64)]

        async def converse(one, name):
            history = []
            for turn in range(3):
                history.append({"role": "user", "content": f"{name}/{turn}"})
                reply = (await ask(client, one, messages=history)).json()["choices"][0]["message"]
                assert reply["content"] == f"{name}/{turn}"
                history.append(reply)

        await asyncio.gather(*(converse(one, f"r{index}") for index, one in enumerate(made)))
        records = [await record_of(client, one) for one in made]
    for index, record in enumerate(records):
        assert [entry["answers"][0]["message"]["content"] for entry in record["calls"]] == [
            f"r{index}/{t}" for t in range(3)
        ]


REWARD = {"event_type": "reward", "data": {"value": 0.5, "source": "agent"}}
SCORE = {"score": 0.5}
EVENT, CONTROL_SCORE = "/{}/events", "/rollouts/r/score"
SCORINGS = {  # route, whose key, body, what happened before; status, words, scores afterwards
    "a reward event": (EVENT, "score_key", REWARD, None, 200, "", [0.5]),
    "another event": (EVENT, "score_key", {"event_type": "note"}, None, 200, "", []),
    "a reward after the last call": (EVENT, "score_key", REWARD, "spent", 200, "", [0.5]),
    "a reward after the end": (EVENT, "score_key", REWARD, "sealed", 409, "can add no score", []),
    "a reward after both": (EVENT, "score_key", REWARD, "spent, sealed", 409, "can add no score", []),
    "an infinite reward": (EVENT, "score_key", {**REWARD, "data": {"value": "inf"}}, None, 400, "finite number", []),
    "a reward without a value": (EVENT, "score_key", {**REWARD, "data": {}}, None, 400, "value", []),
    "a list as event": (EVENT, "score_key", [REWARD], None, 400, "must be a JSON object", []),
    "a reward by the rollout's key": (EVENT, "key", REWARD, None, 403, "routes of its model only", []),
    "a reward by the token": (EVENT, "admin", REWARD, None, 401, "no rollout has this key", []),
    "a reward by nobody": (EVENT, "nobody", REWARD, None, 401, "no rollout has this key", []),
    "a reward by another's": (EVENT, "another", REWARD, None, 200, "", []),
    "a score": (CONTROL_SCORE, "score_key", SCORE, None, 200, "", [0.5]),
    "a score after the last call": (CONTROL_SCORE, "score_key", SCORE, "spent", 200, "", [0.5]),
    "a score after the end": (CONTROL_SCORE, "score_key", SCORE, "sealed", 409, "can add no score", []),
    "the environment's after the end": (CONTROL_SCORE, "admin", SCORE, "sealed", 200, "", [0.5]),
    "a score by the rollout's key": (CONTROL_SCORE, "key", SCORE, None, 403, "routes of its model only", []),
    "a score by another's": (CONTROL_SCORE, "another", SCORE, None, 401, "needs the gateway's token", []),
    "a score by nobody": (CONTROL_SCORE, "nobody", SCORE, None, 401, "needs the gateway's token", []),
}


@pytest.mark.parametrize(
    ("route", "key", "body", "before", "status", "words", "scores"), SCORINGS.values(), ids=SCORINGS
)
async def test_only_who_may_adds_a_score_and_only_while_it_counts(route, key, body, before, status, words, scores):
    rollouts = Rollouts(lambda settings: managed_for(FakeServer("ok", tokenizer=Tokenizer()), Tokenizer(), settings))
    gateway = Gateway(rollouts, token="admin")
    app = Starlette(routes=[*gateway.event_routes(), *gateway.model_routes(), *gateway.control_routes()])
    rollout, other = (rollouts.create(RolloutSettings(rollout_id=name, max_calls=1)) for name in "ro")
    keys = {"key": rollout.key, "score_key": rollout.score_key, "another": other.score_key}
    sent = keys.get(key, key)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
        for _ in range(2 if before and "spent" in before else 0):
            await ask(client, {"key": rollout.key})
        if before and "sealed" in before:
            await rollout.end("done")
        headers = {"Authorization": f"Bearer {rollout.key if route == EVENT else sent}"}
        reply = await client.post(route.format(sent), json=body, headers=headers)
    assert (reply.status_code, [entry["score"] for entry in rollout.scores]) == (status, scores), reply.text
    assert words in reply.text


@pytest.mark.parametrize(("sealed", "status"), [(False, 200), (True, 409)], ids=["budget only", "and ended"])
async def test_after_a_restart_it_is_still_known_who_may_add_a_score(tmp_path, sealed, status):
    log = CallLog(tmp_path / "records.jsonl")
    async with client_of("ok", log=log) as client:
        made = await new_rollout(client, rollout_id="r", max_calls=1)
        for _ in range(2):
            await ask(client, made)
        if sealed:
            await client.post("/rollouts/r/end", json={}, headers=ADMIN)
    log.close()
    async with client_of("ok", log=CallLog(tmp_path / "records.jsonl")) as client:
        headers = {"Authorization": f"Bearer {made['score_key']}"}
        assert (await client.post("/rollouts/r/score", json=SCORE, headers=headers)).status_code == status
        assert (await record_of(client, made))["end_reason"].startswith("budget")


async def test_a_rollout_whose_server_is_gone_is_set_aside_and_continues_once_that_is_back(tmp_path, caplog):
    here, gone = FakeServer(["here"], tokenizer=Tokenizer()), FakeServer(["first", "again"], tokenizer=Tokenizer())
    gone.config = gone.config.model_copy(update={"base_url": "http://gone:1/v1"})

    @asynccontextmanager
    async def gateway(*servers):
        log = CallLog(tmp_path / "records.jsonl")
        rollouts = Rollouts(
            lambda settings: managed_for(choose_server(servers, settings.base_url), Tokenizer(), settings), log
        )
        gateway = Gateway(rollouts)
        app = Starlette(routes=[*gateway.model_routes(), *gateway.control_routes()])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
            yield client
        log.close()

    async with gateway(here, gone) as client:
        made = await new_rollout(client, rollout_id="r", base_url="http://gone:1")
        other = await new_rollout(client)
        first = (await ask(client, made)).json()
        before = await record_of(client, made)
    async with gateway(here) as client:
        assert (await ask(client, other)).json()["choices"][0]["message"]["content"] == "here"
        assert (await ask(client, made, headers={"x-stainless-retry-count": "1"})).json() == first
        refused = await ask(client, made, messages=[*HELLO, *HELLO])
        assert (refused.status_code, "set aside: no server at http://gone:1" in refused.text) == (409, True)
        aside = await record_of(client, made)
        assert aside == {**before, "end_reason": aside["end_reason"]}
    assert "rollout r is set aside" in caplog.text
    async with gateway(here, gone) as client:
        assert await record_of(client, made) == before
        assert (await ask(client, made)).json()["choices"][0]["message"]["content"] == "again"


async def test_a_gateway_as_a_process_takes_no_events():
    async with client_of("ok") as client:
        made = await new_rollout(client)
        reply = await client.post(f"/{made['score_key']}/events", json=REWARD, headers=ADMIN)
        assert (reply.status_code, (await record_of(client, made))["scores"]) == (404, [])


# -- the record on disk ---------------------------------------------------------------------------------------------


async def test_after_a_kill_a_retry_gets_the_recorded_reply_and_the_conversation_continues_its_ids(tmp_path):
    log = CallLog(tmp_path / "records.jsonl")
    async with client_of(SAID, "lost", log=log) as client:
        made = await new_rollout(client, rollout_id="r", sampling={"max_tokens": 500})
        first = (await ask(client, made, tools=TOOLS)).json()
        await client.post("/rollouts/r/score", json={"score": 0.5}, headers=ADMIN)
        before = await record_of(client, made)
    log.close()
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"exchange": {"torn')

    log = CallLog(tmp_path / "records.jsonl")
    async with client_of("done", log=log) as client:
        assert await record_of(client, made) == before
        retry = await ask(client, made, tools=TOOLS, headers={"x-stainless-retry-count": "1"})
        assert retry.json() == first
        assert client.engine.answered == 0
        history = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "more"}]
        await ask(client, made, messages=history, tools=TOOLS)
        calls = (await record_of(client, made))["calls"]
    log.close()
    sent = client.engine.requests[0]["input_ids"]
    known = calls[0]["calls"][0]["inserted"] + calls[0]["calls"][0]["output"]
    assert sent[: len(known)] == known
    assert calls[1]["calls"][0]["parent"] == [0, 0]


def full_disk(data):
    raise OSError(errno.ENOSPC, "no space")


async def test_a_reply_is_kept_back_until_its_record_is_written_and_a_retry_gets_it_then(tmp_path, monkeypatch):
    again = {"x-stainless-retry-count": "1"}
    log = CallLog(tmp_path / "records.jsonl")
    async with client_of("one", "two", log=log) as client:
        made = await new_rollout(client, rollout_id="r")
        with monkeypatch.context() as patch:
            patch.setattr(log._file, "write", full_disk)
            replies = [await ask(client, made, headers=headers) for headers in ({}, again)]
            replies.append(await client.post("/rollouts/r/score", json={"score": 1}, headers=ADMIN))
        assert [(reply.status_code, "free space" in reply.text) for reply in replies] == [(503, True)] * 3
        first = (await ask(client, made, headers=again)).json()["choices"][0]["message"]
        await ask(client, made, messages=[*HELLO, first, {"role": "user", "content": "more"}])
        before = await record_of(client, made)
        assert client.engine.answered == 2
    log.close()

    log = CallLog(tmp_path / "records.jsonl")
    async with client_of("lost", log=log) as client:
        assert await record_of(client, made) == before
    log.close()
    assert [call["calls"][0]["parent"] for call in before["calls"]] == [None, [0, 0]]


def idle_app(log, texts, idle_s):
    server = FakeServer(list(texts), tokenizer=Tokenizer())
    rollouts = Rollouts(lambda settings: managed_for(server, server.tokenizer, settings), log, idle_s=idle_s)
    gateway = Gateway(rollouts, token="admin")
    app = Starlette(routes=[*gateway.model_routes(), *gateway.control_routes()])
    return rollouts, httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


IDLE = {  # idle_s of the rollout and of the gateway, seconds of silence, reason of the end
    "the rollout's own": (50, 1000, 100, "idle: no request for 50 s"),
    "the gateway's": (None, 50, 100, "idle: no request for 50 s"),
    "not long enough": (200, 50, 100, None),
    "no limit": (None, None, 1e6, None),
}


@pytest.mark.parametrize("rests", [False, True], ids=["in memory", "on disk only"])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_a_score_of_a_call_names_a_reply_of_its_rollout(tmp_path, path, rests):
    fields = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}, "messages": {"messages": HELLO}}.get(
        path, {}
    )
    rollouts, client = idle_app(CallLog(tmp_path / "calls.jsonl"), ["ok"], 50)
    async with client:
        made, other = await new_rollout(client, rollout_id="r", max_calls=1), await new_rollout(client)
        own, foreign = [(await ask(client, one, path, **fields)).json()["id"] for one in (made, other)]
        harness = (await ask(client, made, path, **fields)).json()["id"]  # the budget's last words are no call

        async def score(rollout, call_id):
            sent = {"score": 0.5, "call_id": call_id}
            return await client.post(f"/rollouts/{rollout}/score", json=sent, headers=ADMIN)

        rollouts.of_id("r").last_used -= 100 if rests else 0
        for unknown in ("nonsense", "", foreign, harness):
            reply = await score("r", unknown)
            assert (reply.status_code, f"has no call {unknown!r}" in reply.text) == (404, True), reply.text
        assert (await score("nobody", own)).status_code == 404
        assert [(await score("r", own)).json()["score"] for _ in range(2)] == [None, None]
        record = await record_of(client, made)
        assert (rollouts.of_id("r").exchanges == []) is rests
    assert [call["id"] for call in record["calls"]] == [own, harness]
    assert [entry["call_id"] for entry in record["scores"]] == [own, own]  # only added: a retry changes nothing
    assert record["score"] is None


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked late", "looked for"])
@pytest.mark.parametrize("has_log", [True, False], ids=["on disk", "in memory"])
@pytest.mark.parametrize(("own", "gateways", "silence_s", "reason"), IDLE.values(), ids=IDLE)
async def test_a_rollout_without_requests_ends_and_keeps_its_record_on_disk_only(
    tmp_path, monkeypatch, has_log, own, gateways, silence_s, reason, is_asked
):
    monkeypatch.setattr(rollouts_module, "LOOK_S", 0)
    log = CallLog(tmp_path / "records.jsonl") if has_log else None
    rollouts, client = idle_app(log, [SAID, "late"], gateways)
    async with client:
        made, other = await new_rollout(client, rollout_id="r", idle_s=own), await new_rollout(client, idle_s=1e9)
        await ask(client, made, tools=TOOLS)
        before, rollout = await record_of(client, made), rollouts.of_id("r")
        await client.post("/rollouts/r/score", json={"score": 0.5}, headers=ADMIN)
        rollout.last_used -= silence_s
        if is_asked:
            reply = await ask(client, made, tools=TOOLS, headers={"x-stainless-retry-count": "1"} if reason else {})
            assert reply.status_code == (409 if reason and has_log else 200)  # in memory the retry has its reply
            late = await ask(client, made)
            assert (late.status_code, str(reason) in late.text) == ((409, True) if reason else (200, False))
        else:
            await record_of(client, other)
        is_freed = bool(reason) and has_log
        assert (rollout.end_reason, rollout.exchanges == []) == (reason, is_freed)
        if reason:
            after = await record_of(client, made)
            assert after.pop("scores")[0]["score"] == after.pop("score") == 0.5
            assert after == {**{key: before[key] for key in after}, "end_reason": reason}
        assert rollouts.of_id(other["id"]).end_reason is None
    if log is not None:
        log.close()
        log = CallLog(tmp_path / "records.jsonl")
        _, client = idle_app(log, "x", gateways)
        async with client:
            restarted = await record_of(client, made)
        log.close()
        assert restarted["end_reason"] == reason
        assert restarted["calls"][0] == before["calls"][0]


async def test_a_response_of_a_rollout_that_rests_is_no_unknown_one(tmp_path):
    rollouts, client = idle_app(CallLog(tmp_path / "records.jsonl"), ["a"], 50)
    async with client:
        made = await new_rollout(client)
        before = (await ask(client, made, "responses", input="hi")).json()["id"]
        rollouts.of_id(made["id"]).last_used -= 60
        reply = await ask(client, made, "responses", input="and?", previous_response_id=before)
    assert (reply.status_code, "has ended (idle" in reply.text) == (409, True), reply.text


async def test_a_rollout_is_not_idle_while_a_request_runs():
    server = SlowServer("slow", tokenizer=Tokenizer())
    rollouts = Rollouts(lambda settings: managed_for(server, server.tokenizer, settings), idle_s=50)
    rollout = rollouts.create(RolloutSettings())
    talking = asyncio.ensure_future(talk(rollout, HELLO))
    while not rollout.is_busy:
        await asyncio.sleep(0)
    rollout.last_used -= 100
    assert rollouts.of_id(rollout.id).end_reason is None
    server.may_answer.set()
    await talking
    assert rollouts.of_id(rollout.id).end_reason is None


async def test_two_gateways_do_not_write_one_file(tmp_path):
    log = CallLog(tmp_path / "records.jsonl")
    with pytest.raises(PathError, match="give every gateway a file of its own"):
        CallLog(tmp_path / "records.jsonl")
    log.close()


async def test_the_record_of_a_rested_rollout_is_read_without_the_lines_of_others(tmp_path):
    path, texts = tmp_path / "records.jsonl", [SAID, "other", "one more"]
    log = CallLog(path)
    rollouts, client = idle_app(log, texts, 50)
    async with client:
        made, other = await new_rollout(client, rollout_id="r"), await new_rollout(client, rollout_id="other")
        for asked in (other, made, other):
            await ask(client, asked, tools=TOOLS)
        before = await record_of(client, made)
        rollouts.of_id("r").last_used -= 100
        await record_of(client, made)
        lines = path.read_bytes().splitlines(keepends=True)
        hidden = [line if b'"rollout":"r"' in line else b"?" * len(line) for line in lines]
        path.write_bytes(b"".join(hidden))
        assert hidden != lines
        assert (await record_of(client, made))["calls"] == before["calls"]
    log.close()


async def test_a_deleted_rollout_is_gone_after_a_restart_and_its_name_can_be_used_again(tmp_path):
    log = CallLog(tmp_path / "records.jsonl")
    async with client_of("one", "two", "three", log=log) as client:
        made, kept = [await new_rollout(client, rollout_id=name) for name in ("r", "kept")]
        for one in (made, kept):
            await ask(client, one)
        before = await record_of(client, kept)
        assert (await client.delete("/rollouts/r", headers=ADMIN)).status_code == 200
    log.close()
    log = CallLog(tmp_path / "records.jsonl")
    async with client_of("again", log=log) as client:
        assert (await client.get("/rollouts/r", headers=ADMIN)).status_code == 404
        assert (await ask(client, made)).status_code == 401
        assert await record_of(client, kept) == before
        again = await new_rollout(client, rollout_id="r")
        assert again["key"] != made["key"]
        await ask(client, again)
        assert len((await record_of(client, again))["calls"]) == 1
    log.close()


def test_a_file_without_its_deleted_rollouts_takes_the_place_of_the_old_one_while_more_is_written(
    tmp_path, monkeypatch
):
    told, real = threading.Event(), record_module.os.fsync
    monkeypatch.setattr(record_module, "LEFT_OUT_BYTES", 0)
    monkeypatch.setattr(record_module.os, "fsync", lambda file: told.wait(60) and real(file))
    path = tmp_path / "records.jsonl"
    log = CallLog(path)
    for number in range(20):
        log.append({"score": number, "rollout": "kept"})
        log.append({"text": "x" * 1000, "rollout": "big"})
    log.forget("big")
    log.append({"score": 20, "rollout": "kept"})
    assert path.stat().st_size > 20_000  # a thread copies it, and nobody waits
    told.set()
    log._copy.thread.join()
    log.append({"score": 21, "rollout": "kept"})
    assert path.stat().st_size < 2000
    for _ in range(2):
        assert [event["score"] for event in log.events("kept")] == list(range(22))
        assert list(log.events()) == list(log.events("kept"))
        log.close()
        log = CallLog(path)
    log.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["records.jsonl", "records.lock"]


@pytest.mark.parametrize("failing", [None, "fsync", "replace"])
def test_a_kill_at_any_moment_while_a_file_is_written_again_loses_and_doubles_nothing(tmp_path, monkeypatch, failing):
    told, moments, number = {}, [], count()  # what was said to be written, by rollout
    (tmp_path / "run").mkdir()
    log = CallLog(tmp_path / "run" / "records.jsonl")

    def append(rollout, text=""):
        event = {"score": next(number), "rollout": rollout, "text": text}
        log.append(event)
        told.setdefault(rollout, []).append(event)

    def forget(rollout):
        told.pop(rollout)
        log.forget(rollout)

    def as_a_kill_leaves_it(name):
        moments.append(name)
        left = tmp_path / f"killed{len(moments)}"
        shutil.copytree(tmp_path / "run", left)
        after = CallLog(left / "records.jsonl")
        assert {rollout: list(after.events(rollout)) for rollout in told} == told
        assert sorted(event["score"] for event in after.events()) == sorted(
            event["score"] for events in told.values() for event in events
        )
        after.close()

    class Inline(threading.Thread):
        def start(self):
            self.run()

        def join(self, timeout=None):
            pass

    class Pause(threading.Event):
        def wait(self, timeout=None):
            as_a_kill_leaves_it("piece")
            if len(moments) < 6:
                append("kept")
                append("late")
                if len(moments) == 3:
                    forget("soon gone")
                    forget("again")
                    append("again")
            return False

    def at(name):
        real = getattr(record_module.os, name)

        def step(*args):
            as_a_kill_leaves_it(name)
            if name == failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(*args)
            as_a_kill_leaves_it(f"{name} done")

        monkeypatch.setattr(record_module.os, name, step)

    for rollout in ["big", "kept", "soon gone", "again"] * 5:
        append(rollout, "x" * 1000 if rollout == "big" else "")
    for name, value in {"LEFT_OUT_BYTES": 0, "PIECE_BYTES": 200}.items():
        monkeypatch.setattr(record_module, name, value)
    monkeypatch.setattr(record_module.threading, "Thread", Inline)
    monkeypatch.setattr(record_module.threading, "Event", Pause)
    at("fsync")
    at("replace")
    forget("big")
    as_a_kill_leaves_it("copied")
    append("kept")
    steps = ["fsync", "fsync done", "replace", "replace done"]
    wanted = steps[: steps.index(failing) + 1] if failing else steps
    assert [name for name in moments if name in steps] == wanted
    assert moments.count("piece") >= 3
    assert (log._file.size < 5000) == (failing is None)
    append("again")
    as_a_kill_leaves_it("end")
    assert {rollout: list(log.events(rollout)) for rollout in told} == told
    log.close()


@pytest.mark.parametrize("broken", ["fsync", "replace", "close"])
def test_a_copy_that_cannot_be_removed_and_a_file_that_cannot_be_closed_make_no_event_twice(
    tmp_path, monkeypatch, broken
):
    monkeypatch.setattr(record_module, "LEFT_OUT_BYTES", 0)
    log = CallLog(tmp_path / "records.jsonl")
    log.append({"score": 0, "rollout": "kept"})
    log.append({"text": "x" * 1000, "rollout": "big"})

    def fails(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "unlink", fails)
    if broken == "close":
        monkeypatch.setattr(log._file, "close", fails)
    else:
        monkeypatch.setattr(record_module.os, broken, fails)
    log.forget("big")
    log._copy.thread.join()
    kept = RolloutLog(log, "kept")
    for score in (1, 2):
        kept.write({"score": score})
    monkeypatch.undo()
    assert [event["score"] for event in log.events("kept")] == [0, 1, 2]
    log.close()


@pytest.mark.parametrize("failing", [None, "fsync"])
def test_a_copy_that_took_the_last_room_on_the_disk_ends_no_gateway(tmp_path, monkeypatch, failing):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_module, "LEFT_OUT_BYTES", 0)
    path = tmp_path / "records.jsonl"
    log = CallLog(path)
    log.append({"score": 0, "rollout": "kept"})
    log.append({"text": "x" * 1000, "rollout": "big"})
    if failing is not None:
        monkeypatch.setattr(record_module.os, failing, full)
    log.forget("big")
    log._copy.thread.join()
    write = record_module.os.write
    old, copy = log._file.descriptor, tmp_path / "records.jsonl.new"
    monkeypatch.setattr(
        record_module.os, "write", lambda to, data: full() if to == old and copy.exists() else write(to, data)
    )
    log.append({"score": 1, "rollout": "kept"})
    assert [event["score"] for event in log.events()] == [0, 1]
    assert not copy.exists()
    log.close()


def test_what_a_kill_left_of_a_copy_is_removed_and_no_records_are_taken_for_one(tmp_path):
    path = tmp_path / "records.new"
    log = CallLog(path)
    log.append({"score": 1, "rollout": "r"})
    log.close()
    (tmp_path / "records.new.new").write_bytes(b"half of")
    log = CallLog(path)
    assert len(list(log.events())) == 1
    log.close()
    assert not (tmp_path / "records.new.new").exists()


def test_a_line_that_is_no_record_is_named(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(b'{"end": "done", "rollout": "r"}\n[1]\n')
    with pytest.raises(PathError, match="has a line at byte 32 that is no record"):
        CallLog(tmp_path / "records.jsonl")
    (tmp_path / "records.jsonl").write_bytes(b"")
    CallLog(tmp_path / "records.jsonl").close()


# -- rows -----------------------------------------------------------------------------------------------------------


def rollouts_of(*texts):
    server = FakeServer(list(texts), tokenizer=Tokenizer())

    def make(settings):
        return ManagedServer(server, server.tokenizer, tool_parser="hermes", reasoning_parser="think", for_agents=True)

    return Rollouts(make)


async def talk(rollout, messages, tools=TOOLS):
    from atroposlib.envs.server_handling.agents.dialect import CHAT

    body = {"messages": messages, "tools": tools}
    asked = CHAT.parse(body, rollout)
    exchange = await rollout.exchange(asked, json.dumps(body).encode())
    return exchange.answers[0].message


def learned(row):
    return Tokenizer().decode([token for token in row.masks if token != IGNORE_INDEX])


async def test_branches_of_a_rollout_train_each_generated_token_once():
    rollout = rollouts_of("one", "two", "three", "four").create(RolloutSettings())
    first = await talk(rollout, HELLO)
    more = {"role": "user", "content": "more"}
    second = await talk(rollout, [*HELLO, first, more])
    await talk(rollout, [*HELLO, first, {"role": "user", "content": "else"}])
    await talk(rollout, [*HELLO, first, more, {**second, "content": "edited"}, more])

    rows = rows_of(rollout)

    assert sorted(learned(row) for row in rows) == ["four<|im_end|>", "one<|im_end|>two<|im_end|>", "three<|im_end|>"]
    assert all(len(row.tokens) == len(row.masks) == len(row.logprobs) for row in rows)
    assert {row.role for row in rows} == {"main"}


async def test_a_row_ends_with_what_was_generated_where_the_context_had_no_room_for_more(monkeypatch):
    async def context_length(managed):
        return 60

    monkeypatch.setattr(ManagedServer, "context_length", context_length)
    rollout = rollouts_of("one", "two").create(RolloutSettings())
    said = await talk(rollout, HELLO, tools=None)
    history = [*HELLO, said, {"role": "user", "content": "much " * 60}]
    for _ in range(2):  # the second continues the first, which has no room either
        history += [await talk(rollout, history, tools=None), *HELLO]
    assert [len(exchange.calls[0].output) for exchange in rollout.exchanges] == [len("one") + 1, 0, 0]
    (row,) = rows_of(rollout)
    assert (learned(row), row.role, len(row.tokens) < 60) == ("one<|im_end|>", "main", True)
    assert row.messages == [*HELLO, {"role": "assistant", "content": "one"}]
    assert (ending(rollout, row).message["content"], ending(rollout, row).finish_reason) == ("", "length")


async def test_a_row_behind_which_the_engine_changed_the_prompt_ends_with_its_own_answer():
    class Trimming(FakeServer):
        async def tokens_and_logprobs_completion(self, **kwargs):
            ids, *rest = await super().tokens_and_logprobs_completion(**kwargs)
            return [ids[0], *ids[2:]], *rest

    server = Trimming(["one", "two"], tokenizer=Tokenizer())
    rollout = Rollouts(lambda settings: managed_for(server, server.tokenizer, settings)).create(RolloutSettings())
    said = await talk(rollout, HELLO, tools=None)
    await talk(rollout, [*HELLO, said, *HELLO], tools=None)
    ends = [ending(rollout, row) for row in rows_of(rollout)]
    assert [(end.message["content"], end.finish_reason) for end in ends] == [("one", "stop"), ("two", "stop")]


async def test_paths_get_their_roles_by_their_form_and_only_some_take_loss():
    texts = ["title", "main 1", "sub 1", "retried", "main 2", "again"]
    rollout = rollouts_of(*texts).create(RolloutSettings())
    system = {"role": "system", "content": "You are the main agent."}
    helper = {"role": "system", "content": "You search."}
    await talk(rollout, [{"role": "user", "content": "Give a title."}], tools=None)
    first = await talk(rollout, [system, *HELLO])
    await talk(rollout, [helper, *HELLO])
    await talk(rollout, [system, *HELLO, first, {"role": "user", "content": "more"}])
    await talk(rollout, [system, *HELLO, first, {"role": "user", "content": "more"}])
    await talk(rollout, [system, {"role": "user", "content": "Summary so far: hi"}])

    roles = {row.messages[-1]["content"]: (row.role, bool(learned(row))) for row in rows_of(rollout)}

    assert roles == {
        "title": ("auxiliary", False),
        "sub 1": ("subagent", True),
        "retried": ("retry", False),
        "main 2": ("compaction", True),
        "again": ("main", True),
    }


async def test_a_group_compares_rollouts_not_rows():
    rollouts = rollouts_of("one", "two", "three")
    good, bad = rollouts.create(RolloutSettings()), rollouts.create(RolloutSettings())
    first = await talk(good, HELLO)
    await talk(good, [*HELLO, {**first, "content": "edited"}, *HELLO])
    await talk(bad, HELLO)
    with pytest.raises(GroupError, match="2 of 2 rollouts have no score"):
        group_of([good, bad])

    group = group_of([good, bad], [1.0, 0.0])

    assert group["scores"] == [1.0, 1.0, 0.0]
    assert [row[0] for row in group["advantages"]] == [1.0, 1.0, -1.0]
    assert group["group_overrides"] == {"group_size": 3}
    assert advantages([2.0, 2.0]) == [0.0, 0.0]
