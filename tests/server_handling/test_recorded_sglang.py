"""Our client against replies of a real SGLang 0.5.11 server."""

import json
from pathlib import Path

import pytest

from atroposlib.envs.server_handling import openai_server
from atroposlib.envs.server_handling.openai_server import EngineLoad, engine_load
from atroposlib.envs.server_handling.openai_wire import parse_chat, parse_completion
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import KilledFault, RequestFault
from atroposlib.rollouts.trace import tracing

FIXTURES = Path(__file__).parent / "fixtures"


def recorded(name: str) -> dict:
    """A recorded exchange; the words that mark where a long list was cut are taken out."""
    text = (FIXTURES / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text, object_hook=lambda found: {key: _uncut(value) for key, value in found.items()})


def _uncut(value):
    cut = isinstance(value, list) and value and isinstance(value[-1], str) and value[-1].startswith("... ")
    return value[:-1] if cut else value


def asked(exchange: dict) -> dict:
    """The recorded request as keyword arguments of a token request."""
    request = exchange["request"].get("json", exchange["request"])
    return {"input_ids": request["input_ids"], **request["sampling_params"]}


@pytest.fixture
def client(sglang):
    """Its tokenizer cannot say how large the recorded model's vocabulary is."""
    sglang.tokenizer = object()
    return sglang


async def replay(client, engine, name, **options):
    exchange = recorded(name)
    engine.scripted = [(exchange.get("status", 200), exchange["body"])]
    return exchange, await client.tokens_and_logprobs_completion(**{**asked(exchange), **options})


@pytest.mark.parametrize("name", ["generate_logprob", "generate_eos", "update_weights_while_running_generate"])
async def test_ids_and_logprobs_are_those_of_the_reply(name, client, engine):
    exchange, (prompt, outputs, logprobs, reasons) = await replay(client, engine, name)

    meta = exchange["body"]["meta_info"]
    assert prompt == asked(exchange)["input_ids"]
    assert outputs == [exchange["body"]["output_ids"]]
    assert logprobs == [[entry[0] for entry in meta["output_token_logprobs"]]]
    assert reasons == [meta["finish_reason"]["type"]]


async def test_without_output_ids_the_ids_beside_the_log_probabilities_are_taken(client, engine):
    exchange = recorded("generate_logprob")
    ids = exchange["body"].pop("output_ids")
    engine.scripted = [(200, exchange["body"])]
    _, outputs, logprobs, _ = await client.tokens_and_logprobs_completion(**asked(exchange))
    assert outputs == [ids]
    assert len(logprobs[0]) == len(ids)


async def test_the_end_token_stays_in_the_ids(client, engine):
    _, (_, outputs, logprobs, reasons) = await replay(client, engine, "generate_eos")

    assert outputs[0][-1] == 2
    assert len(logprobs[0]) == len(outputs[0])
    assert reasons == ["stop"]


async def test_a_stop_string_stays_in_the_ids(client, engine):
    exchange = recorded("generate_stop_string")
    engine.scripted = [(200, exchange["body"])]

    _, outputs, _, reasons = await client.tokens_and_logprobs_completion(input_ids=[1], max_tokens=30, stop=[" 7"])

    assert outputs == [exchange["body"]["output_ids"]]
    assert reasons == ["stop"]


async def test_n_choices_come_as_one_flat_list(client, engine):
    exchange, (_, outputs, logprobs, reasons) = await replay(client, engine, "generate_n2")

    assert outputs == [choice["output_ids"] for choice in exchange["body"]]
    assert [len(values) for values in logprobs] == [4, 4]
    assert reasons == ["length", "length"]


async def test_more_generations_than_asked_for_are_refused(client, engine, monkeypatch):
    engine.scripted = [(200, recorded("generate_batch2_n2")["body"])] * 3

    with pytest.raises(RequestFault, match="4 generations for n=2"):
        await client.tokens_and_logprobs_completion(input_ids=[1], n=2, max_tokens=3)


async def test_a_reply_without_logprobs_keeps_its_ids(client, engine):
    engine.scripted = [(200, recorded("generate_text")["body"])]

    _, outputs, logprobs, _ = await client.tokens_and_logprobs_completion(input_ids=[1], max_tokens=5)

    assert outputs == [[7042, 30, 198, 198, 504]]
    assert logprobs == [[]]


INCOMPLETE = {
    "neither ids nor log-probabilities": {"output_ids": None, "output_token_logprobs": None},
    "no ids": {"output_ids": [], "output_token_logprobs": None},
    "more ids than log-probabilities": {"output_token_logprobs": [[-0.5, 1, None]]},
}


@pytest.mark.parametrize("left_out", INCOMPLETE.values(), ids=INCOMPLETE)
async def test_a_reply_of_which_a_part_is_missing_is_asked_for_again(left_out, client, engine):
    exchange = recorded("generate_logprob")
    body = exchange["body"]
    part = {**body, **left_out, "meta_info": {**body["meta_info"], **left_out}}
    engine.scripted = [(200, part), (200, body)]

    _, outputs, _, _ = await client.tokens_and_logprobs_completion(**asked(exchange))

    assert outputs == [body["output_ids"]]
    assert len(engine.requests) == 2


async def test_choices_of_different_weights_span_the_trace_from_the_oldest_to_the_newest(client, engine):
    exchange = recorded("generate_n2")
    for choice, version in zip(exchange["body"], ("10", "9"), strict=True):
        choice["meta_info"]["weight_version"] = version
    engine.scripted = [(200, exchange["body"])]

    with tracing() as trace:
        await client.tokens_and_logprobs_completion(**asked(exchange))
    await client.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1)

    assert (trace.engine["weight_version_start"], trace.engine["weight_version_end"]) == ("9", "10")
    assert trace.usage["prompt_tokens"] == exchange["body"][0]["meta_info"]["prompt_tokens"]
    assert engine.requests[1][1]["extra_key"] == " weights 10"  # prefixes of the newest are shared


async def test_openai_routes_share_prefixes_of_the_newest_weights_only(client, engine):
    chat = recorded("chat_n2_logprobs")["body"]
    chat["metadata"] = {"weight_version": "7"}
    engine.scripted = [(200, chat)] * 3
    for extra in ({}, {"extra_body": {"extra_key": "mine"}}, {}):
        await client.chat_completion(messages=[{"role": "user", "content": "Hi"}], n=2, **extra)
    assert [body.get("extra_key") for _, body in engine.requests] == [None, "mine weights 7", " weights 7"]


@pytest.mark.parametrize("text", [None, ""])
async def test_ids_count_when_a_reasoning_parser_leaves_no_text(text, client, engine):
    exchange = recorded("generate_logprob")
    engine.scripted = [(200, {**exchange["body"], "text": text})]

    _, outputs, _, _ = await client.tokens_and_logprobs_completion(**asked(exchange))

    assert outputs == [exchange["body"]["output_ids"]]


async def test_the_weight_version_is_recorded_in_the_trace(client, engine):
    with tracing() as trace:
        await replay(client, engine, "generate_logprob")
        await replay(client, engine, "update_weights_while_running_generate")

    assert trace.engine == {
        "model": "fake",
        "base_url": engine.url,
        "weight_version_start": "default",
        "weight_version_end": "step-3",
    }
    assert trace.usage == {"prompt_tokens": 74, "completion_tokens": 3006}
    assert trace.finish_reasons == ["length", "length"]


@pytest.mark.parametrize("name", ["abort_request_generate", "pause_abort_generate"])
async def test_an_aborted_generation_is_a_killed_rollout_and_recorded(name, client, engine):
    with tracing() as trace, pytest.raises(KilledFault, match="aborted 1 of 1"):
        await replay(client, engine, name)

    assert trace.finish_reasons == ["abort"]


REFUSALS = {
    "error_too_long": "longer than the model's context length",
    "error_over_context": "You requested a total of 12000 tokens",
    "error_bad_temperature": "temperature must be non-negative, got -1",
}


@pytest.mark.parametrize(("name", "words"), REFUSALS.items(), ids=REFUSALS)
async def test_a_refusal_is_a_request_fault_with_the_servers_words(name, words, client, engine):
    exchange = recorded(name)
    engine.scripted = [(exchange["status"], exchange["body"])]

    with pytest.raises(RequestFault, match=words):
        await client.tokens_and_logprobs_completion(input_ids=[5], max_tokens=1)

    assert len(engine.requests) == 1


async def test_a_refusal_of_the_openai_route_has_the_servers_words_too(client, engine):
    exchange = recorded("error_chat_empty")
    engine.scripted = [(exchange["status"], exchange["body"])]

    with pytest.raises(RequestFault, match="Messages cannot be empty"):
        await client.chat_completion(messages=[])


async def test_the_misspelt_key_that_real_sglang_answers_with_500_is_never_sent(client, engine):
    assert recorded("error_bad_param")["status"] == 500

    with pytest.raises(RequestFault, match="'temprature'; did you mean 'temperature'"):
        await client.tokens_and_logprobs_completion(input_ids=[1], temprature=1)

    assert engine.requests == []


async def test_prompt_logprobs_have_one_entry_per_position_and_none_at_the_first(client, engine):
    exchange = recorded("generate_logprob_text_top2")
    engine.scripted = [(200, exchange["body"])]

    result = await client.get_logprobs(input_ids=[520, 9531, 198], top_k=2)

    assert result["prompt_tokens"] == [520, 9531, 198]
    assert result["prompt_topk_token_ids"] == [[], [9531, 2495], [198, 1116]]
    assert result["prompt_topk_logprobs"][1] == [-1.311301275563892e-06, -14.500000953674316]
    _, sent = engine.requests[0]
    assert (sent["logprob_start_len"], sent["top_logprobs_num"]) == (0, 2)


def test_chat_and_completion_replies_become_openai_types():
    chat = parse_chat(json.dumps(recorded("chat_n2_logprobs")["body"]).encode()).result
    completion = parse_completion(json.dumps(recorded("completions_n2_logprobs")["body"]).encode()).result

    assert [choice.message.content for choice in chat.choices] == ["2 + 3", "The answer 2"]
    assert chat.choices[0].logprobs.content[0].logprob == -1.715789556503296
    assert [choice.text for choice in completion.choices] == ["Ornithosaur", "The Standard Mathematical Pu"]


async def test_loads_are_read_from_the_load_route(sglang, engine):
    engine.loads = recorded("v1_loads")["body"]

    load = await engine_load(sglang.transport, engine.url)

    assert (load.running, load.queued, load.token_usage, load.retracted) == (0, 0, 0.0, 0)


@pytest.mark.parametrize("change", [{"queues": 1}, {"token_usage": None}, {"num_running_reqs": "2"}])
async def test_a_load_route_of_another_form_says_nothing(change, sglang, engine):
    (rank,) = recorded("v1_loads")["body"]["loads"]
    engine.loads = {"loads": [{**rank, **change}]}

    assert not (await engine_load(sglang.transport, engine.url)).is_known


async def test_a_rank_without_queues_has_retracted_none(sglang, engine):
    (rank,) = recorded("v1_loads")["body"]["loads"]
    engine.loads = {"loads": [{**rank, "queues": None, "num_running_reqs": 3}]}

    assert (await engine_load(sglang.transport, engine.url)).running == 3


async def test_loads_are_read_from_the_metrics_where_there_is_no_load_route(engine):
    engine.metrics = (
        "\n".join(recorded("metrics_names")["samples"])
        + """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",dp_rank="0"} 12.0
sglang:num_running_reqs{model_name="m",dp_rank="1"} 4.0
sglang:num_queue_reqs{model_name="m",dp_rank="0"} 3.0
sglang:num_retracted_reqs{model_name="m",dp_rank="0"} 1.0
sglang:token_usage{model_name="m",dp_rank="0"} 0.25
sglang:token_usage{model_name="m",dp_rank="1"} 0.75
sglang:token_usage{model_name="m",dp_rank="2"} NaN
sglang:num_queue_reqs{model_name="m",dp_rank="2"} +Inf
"""
    )
    manager = ServerManager(APIServerConfig(server_type="sglang", base_url=f"{engine.url}/v1"))

    assert await manager.engine_loads() == [EngineLoad(engine.url, running=16, queued=3, token_usage=0.75, retracted=1)]


def test_sglang_has_every_gauge_that_is_read():
    types = recorded("metrics_names")["types"]
    names = [name for names in openai_server._GAUGES.values() for name in names if name.startswith("sglang")]
    assert {types.get(name) for name in names} == {"gauge"}


async def test_an_engine_that_says_nothing_has_an_unknown_load(engine):
    manager = ServerManager(APIServerConfig(server_type="sglang", base_url=f"{engine.url}/v1"))

    (load,) = await manager.engine_loads()

    assert not load.is_known
