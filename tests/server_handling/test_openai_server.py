import json

import msgspec
import numpy as np
import openai
import pytest

from atroposlib.envs.server_handling.openai_server import OpenAIServer, endpoint_urls
from atroposlib.envs.server_handling.openai_wire import parse_chat
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_config import ReasoningConfig
from atroposlib.envs.server_handling.server_manager import ServerManager, missing_engine, server_at
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.token_server import EngineIdentity
from atroposlib.errors import RequestFault
from atroposlib.rollouts.trace import tracing
from tests.server_handling.test_transport import scripted

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server(engine):
    return OpenAIServer(APIServerConfig(base_url=f"{engine.url}/v1", model_name="m", api_key="k"))


async def test_chat_gives_n_choices_and_tells_the_trace(server, engine):
    with tracing() as trace:
        reply = await server.chat_completion(messages=MESSAGES, n=3, temperature=0.5)

    assert [choice.message.content for choice in reply.choices] == ["hello"] * 3
    assert engine.requests == [
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "temperature": 0.5, "model": "m"})
    ]
    assert trace.usage == {"prompt_tokens": 7, "completion_tokens": 6}
    assert trace.finish_reasons == ["stop"] * 3
    assert trace.sampling == {"n": 3, "temperature": 0.5}
    assert trace.engine["weight_version_end"] == "default"


async def test_a_server_that_ignores_n_is_noticed_once(server, engine, caplog):
    engine.ignores_n = True

    with tracing() as trace:
        first = await server.chat_completion(messages=MESSAGES, n=3)
    second = await server.chat_completion(messages=MESSAGES, n=3)

    assert [choice.index for choice in first.choices] == [choice.index for choice in second.choices] == [0, 1, 2]
    assert server.config.n_kwarg_is_ignored
    assert len(engine.requests) == 6
    assert sum("ignores n" in record.message for record in caplog.records) == 1
    assert trace.usage == {"prompt_tokens": 7, "completion_tokens": 6}


async def test_parts_that_are_asked_for_choice_by_choice_count_their_prompt_once(server, engine):
    engine.ignores_n = server.config.n_kwarg_is_ignored = True
    manager = ServerManager([server.config], max_n_completions=2)
    manager.servers = [server]

    with tracing() as trace:
        await manager.chat_completion(messages=MESSAGES, n=4)

    assert len(engine.requests) == 4
    assert trace.usage == {"prompt_tokens": 7, "completion_tokens": 8}


async def test_one_choice_is_one_request_even_where_n_is_ignored(server, engine):
    server.config.n_kwarg_is_ignored = True

    await server.completion(prompt="x", n=1)

    assert len(engine.requests) == 1


async def test_client_options_are_not_sent(server, engine):
    await server.completion(prompt="x", timeout=5, stop=None, extra_body={"min_p": 0.1}, split="eval")

    assert engine.requests == [("/v1/completions", {"prompt": "x", "model": "m", "min_p": 0.1})]
    assert len(server.eval_request_timings) == 1


async def test_a_reply_of_the_model_goes_back_in_as_it_came(server, engine):
    reply = await server.chat_completion(messages=MESSAGES)

    await server.chat_completion(messages=[*MESSAGES, reply.choices[0].message])

    assert engine.requests[1][1]["messages"] == [*MESSAGES, {"role": "assistant", "content": "hello"}]


TAKEN = {
    "numpy float": ({"temperature": np.linspace(0, 1, 3)[1]}, {"temperature": 0.5}),
    "numpy int": ({"n": np.int64(1)}, {"n": 1}),
    "numpy array": ({"stop_token_ids": np.array([1, 2])}, {"stop_token_ids": [1, 2]}),
    "ids as keys": ({"logit_bias": {50256: -100}}, {"logit_bias": {"50256": -100}}),
    "not given": ({"tools": openai.NOT_GIVEN, "stop": getattr(openai, "omit", openai.NOT_GIVEN)}, {}),
}


@pytest.mark.parametrize(("given", "sent"), TAKEN.values(), ids=TAKEN)
async def test_what_openais_own_client_takes_is_sent(given, sent, server, engine):
    with tracing() as trace:
        await server.chat_completion(messages=MESSAGES, **given)

    assert engine.requests == [("/v1/chat/completions", {"messages": MESSAGES, "model": "m", **sent})]
    assert msgspec.msgpack.encode(list(trace.sampling.values()))  # as the journal writes them


UNWRITABLE = {
    "half a surrogate pair": "\ud83d",
    "an object": object(),
    "no number with a long one": [1 << 70, float("nan")],
}


PROMPT = {"input_ids": [1], "max_tokens": 1}


async def test_the_login_of_an_address_is_sent_and_never_shown(engine):
    refusal = b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno"
    async with scripted([refusal]) as gateway:
        url = gateway.url.replace("//", "//user:pass%20word@")
        server = SGLangServer(APIServerConfig(server_type="sglang", base_url=f"{url}/v1", api_key="x"))
        server.identity = EngineIdentity(vocabulary=10)
        with pytest.raises(RequestFault) as refused:
            await server.tokens_and_logprobs_completion(**PROMPT)
        await server.close()
    assert b"Authorization: Basic dXNlcjpwYXNzIHdvcmQ=\r\n" in gateway.requests[0][0]
    server.server_healthy = False
    shown = f"{refused.value} {missing_engine([server])}"
    assert gateway.url in shown
    assert "pass" not in shown


LOGINS = {
    "with an @": ("user:p@ss", "dXNlcjpwQHNz"),
    "without a password": ("token", "dG9rZW46"),
    "with a colon": ("u%3A:p", "dTo6cA=="),
}


@pytest.mark.parametrize("by", ["config", "variable"])
@pytest.mark.parametrize(("login", "sent"), LOGINS.values(), ids=LOGINS)
async def test_any_login_is_sent_from_wherever_the_address_comes(login, sent, by, monkeypatch):
    refusal = b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno"
    async with scripted([refusal], [refusal]) as gateway:
        address = gateway.url.replace("//", f"//{login}@") + "/v1"
        monkeypatch.setenv("OPENAI_API_KEY", "x")
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        server = OpenAIServer(APIServerConfig(base_url=address if by == "config" else None, health_check=False))
        with pytest.raises(RequestFault) as refused:
            await server.chat_completion(messages=MESSAGES)
        with pytest.raises(openai.BadRequestError):
            await server.openai.chat.completions.create(model="m", messages=MESSAGES)
        await server.openai.close()
        await server.close()
    assert [f": Basic {sent}\r\n".encode() in head for head, _ in gateway.requests] == [True, True]
    assert gateway.url in str(refused.value)
    assert "@" not in str(refused.value)


async def test_the_login_of_an_address_is_not_recorded(engine):
    url = engine.url.replace("//", "//user:password@")
    server = SGLangServer(APIServerConfig(server_type="sglang", base_url=f"{url}/v1"))
    server.identity = EngineIdentity(vocabulary=10)
    with tracing() as trace:
        await server.tokens_and_logprobs_completion(**PROMPT)
    assert trace.engine["base_url"] == engine.url
    assert server_at([server], f"{engine.url}/v1") is server
    await server.close()


@pytest.mark.parametrize("content", UNWRITABLE.values(), ids=UNWRITABLE)
async def test_what_is_no_json_is_refused(content, server, engine):
    with pytest.raises(RequestFault, match="cannot be written as JSON"):
        await server.chat_completion(messages=[{"role": "user", "content": content}])

    assert engine.requests == []


async def test_streaming_is_refused(server):
    with pytest.raises(RequestFault, match="stream=True is not supported"):
        await server.completion(prompt="x", stream=True)


async def test_token_requests_say_what_to_use_instead(server):
    with pytest.raises(NotImplementedError, match="server_type sglang or vllm"):
        await server.tokens_and_logprobs_completion(prompt="x")


async def test_reasoning_options_reach_chat_requests_only(engine):
    config = APIServerConfig(base_url=f"{engine.url}/v1", model_name="m")
    server = OpenAIServer(config, ReasoningConfig(effort="low"))

    await server.chat_completion(messages=MESSAGES, extra_body={"reasoning": "mine", "min_p": 0.1})
    await server.chat_completion(messages=MESSAGES, skip_reasoning=True)
    await server.completion(prompt="x")

    reasoning = [body.get("reasoning") for _, body in engine.requests]
    assert reasoning == [{"enabled": True, "effort": "low"}, None, None]
    assert engine.requests[0][1]["min_p"] == 0.1


def test_official_reasoning_models_get_the_only_options_they_take():
    server = OpenAIServer(APIServerConfig(model_name="o", api_key="k"), ReasoningConfig(effort="high"))

    kwargs = server._inject_reasoning_kwargs({"temperature": 0.2, "max_tokens": 9})

    assert kwargs == {
        "temperature": 1.0,
        "max_completion_tokens": 9,
        "extra_body": {"reasoning_effort": "high"},
    }


@pytest.mark.parametrize("base_url", [None, ""])
def test_no_address_means_the_official_one_and_no_health(base_url, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    config = APIServerConfig(base_url=base_url, api_key="k")

    assert endpoint_urls(config) == ("https://api.openai.com", "https://api.openai.com/v1")
    assert OpenAIServer(config).health is None


@pytest.mark.parametrize("message", [{"content": None, "reasoning_content": "hm"}, {"content": ""}, {}])
def test_content_that_a_reasoning_parser_took_is_an_empty_text(message):
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
    body["choices"] = [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}]

    assert parse_chat(json.dumps(body).encode()).result.choices[0].message.content == ""


FAILED_CHOICES = {
    "null": None,
    "no message": {"index": 0, "finish_reason": "stop"},
    "a null message": {"index": 0, "finish_reason": "stop", "message": None},
    "an error behind a router": {
        "finish_reason": "error",
        "error": {"code": 502, "message": "Upstream error"},
        "message": {"role": "assistant", "content": ""},
    },
}


@pytest.mark.parametrize("choice", FAILED_CHOICES.values(), ids=FAILED_CHOICES)
async def test_a_choice_that_is_none_is_asked_for_again(choice, server, engine):
    engine.scripted = [(200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})]

    reply = await server.chat_completion(messages=MESSAGES)

    assert [choice.message.content for choice in reply.choices] == ["hello"]
    assert len(engine.requests) == 2


async def test_usage_without_numbers_counts_nothing(server, engine):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
    usage = {"prompt_tokens": None, "completion_tokens": None}
    engine.scripted = [(200, {"id": "x", "choices": [choice], "usage": usage})]

    with tracing() as trace:
        await server.chat_completion(messages=MESSAGES)

    assert trace.usage == {"prompt_tokens": 0, "completion_tokens": 0}


def test_finish_reasons_that_openai_does_not_know_are_kept():
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
    body["choices"] = [{"index": 0, "finish_reason": "abort", "message": {"role": "assistant", "content": "a"}}]

    reply = parse_chat(json.dumps(body).encode()).result

    assert reply.choices[0].finish_reason == "abort"
    assert reply.choices[0].message.content == "a"
