import pytest

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import RequestFault
from atroposlib.rollouts.trace import tracing
from atroposlib.type_definitions import PROMPT_LOGPROB
from tests.fake_engine import FakeEngine
from tests.fakes import FakeTokenizer


@pytest.fixture
def server(engine):
    server = VLLMServer(APIServerConfig(base_url=f"{engine.url}/v1", model_name="m", api_key="k"))
    server.tokenizer = FakeTokenizer(add_bos=True)
    return server


async def test_choices_are_read_from_the_logprobs_of_each_position(server, engine):
    logprobs = [[{"65": -0.5}, {"66": -0.25}], [{"67": -1.0}]]
    engine.scripted = [(200, {"text": ["AB", "C"], "logprobs": logprobs, "finish_reasons": ["length", "stop"]})]

    with tracing() as trace:
        result = await server.tokens_and_logprobs_completion(prompt="x", n=2, max_completion_tokens=2, temperature=1.0)

    assert result == ([256, 120], [[65, 66], [67]], [[-0.5, -0.25], [-1.0]], ["length", "stop"])
    assert engine.requests == [
        (
            "/generate",
            {"prompt": {"prompt_token_ids": [256, 120]}, "n": 2, "max_tokens": 2, "temperature": 1.0, "logprobs": 0},
        )
    ]
    assert trace.usage == {"prompt_tokens": 2, "completion_tokens": 3}


async def test_ids_are_sent_as_given(server, engine):
    engine.scripted = [(200, {"logprobs": [[{"65": -0.5}]], "finish_reasons": ["stop"]})]

    prompt, *_ = await server.tokens_and_logprobs_completion(prompt="ignored", input_ids=[9, 9], max_tokens=1)

    assert prompt == [9, 9]
    assert engine.requests[0][1]["prompt"] == {"prompt_token_ids": [9, 9]}


async def test_without_a_limit_the_rest_of_the_context_is_asked_for(server, engine):
    engine.scripted = [(200, {"logprobs": [[{"65": -0.5}]], "finish_reasons": ["stop"]})]

    await server.tokens_and_logprobs_completion(input_ids=[1] * 10)

    assert engine.requests[0][1]["max_tokens"] == 4096 - 10 - 1


PROMPT_LOGPROBS = {
    "per position": [None, {"7": -0.5, "8": {"logprob": -0.1}}],
    "per sequence": [[None, [{"7": -0.5}, {"8": -0.1}]]],
}


@pytest.mark.parametrize("logprobs", PROMPT_LOGPROBS.values(), ids=PROMPT_LOGPROBS)
async def test_prompt_logprobs_come_best_first(logprobs, server, engine):
    engine.scripted = [(200, {"prompt_logprobs": logprobs})]

    result = await server.get_logprobs(input_ids=[5, 8], top_k=2)

    assert result == {
        "prompt_tokens": [5, 8],
        "prompt_logprobs": [None, -0.1],
        "prompt_topk_token_ids": [[], [8, 7]],
        "prompt_topk_logprobs": [[], [-0.1, -0.5]],
    }
    assert engine.requests[0][1] == {
        "prompt": {"prompt_token_ids": [5, 8]},
        "max_tokens": 1,
        "prompt_logprobs": 2,
        "n": 1,
        "temperature": 0.0,
        "top_p": 1.0,
    }


@pytest.mark.parametrize("logprobs", [[None], [None, 5], [None, {"A": -0.5}], ["A", "B"]])
async def test_prompt_logprobs_of_another_form_are_asked_for_again(logprobs, server, engine):
    engine.scripted = [(200, {"prompt_logprobs": logprobs}), (200, {"prompt_logprobs": [None, {"8": -0.1}]})]

    result = await server.get_logprobs(input_ids=[5, 8])

    assert result["prompt_logprobs"] == [None, -0.1]


async def test_a_route_that_cannot_give_prompt_logprobs_is_a_value_error(server, engine):
    engine.scripted = [(200, {"text": ["a"]})]

    with pytest.raises(ValueError, match="no 'prompt_logprobs' list"):
        await server.get_logprobs(input_ids=[5, 8])


async def test_unknown_sampling_keys_are_not_sent(server, engine):
    with pytest.raises(RequestFault, match="vLLM does not know the sampling parameter 'temprature'"):
        await server.tokens_and_logprobs_completion(input_ids=[1], temprature=1)

    assert engine.requests == []


@pytest.fixture
async def stock():
    """A vLLM without `/generate`, and its client."""
    engine = FakeEngine()
    engine.has_generate = False
    await engine.start()
    server = VLLMServer(APIServerConfig(base_url=f"{engine.url}/v1", model_name="policy", api_key="k"))
    server.tokenizer = FakeTokenizer(add_bos=True)
    yield engine, server
    await server.close()
    await engine.stop()


def completion(ids, logprobs, reason="stop", **extra):
    return {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason, **extra}


async def test_stock_vllm_is_asked_with_ids_and_answers_with_ids(stock):
    engine, server = stock
    span = {"version": "7", "start": 0, "end": 2}
    choices = [
        completion([65, 66], [-0.5, -0.25], "length", weight_versions=[span, {**span, "version": "8"}]),
        completion([67], [-1.0]),
    ]
    engine.scripted = [(200, {"choices": choices})]

    with tracing() as trace:
        result = await server.tokens_and_logprobs_completion(prompt="x", n=2, max_tokens=2, temperature=0.7)

    assert result == ([256, 120], [[65, 66], [67]], [[-0.5, -0.25], [-1.0]], ["length", "stop"])
    path, body = engine.requests[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "policy", "prompt": [256, 120], "n": 2, "max_tokens": 2, "temperature": 0.7, "logprobs": 0,
        "return_token_ids": True, "return_weight_versions": True,
    }  # fmt: skip
    assert trace.engine["weight_version_start"] == "7"


async def test_a_gateway_that_is_not_ready_does_not_tell_what_kind_of_vllm_is_behind_it(stock, monkeypatch):
    engine, server = stock
    real_get, not_ready = server.transport.get, [502, 503]

    async def get(url, **options):
        is_route = url.endswith("/generate")
        return (not_ready.pop(), b"") if is_route and not_ready else await real_get(url, **options)

    monkeypatch.setattr(server.transport, "get", get)
    engine.scripted = [(200, {"choices": [completion([65], [-0.5])]})]

    _, outputs, _, _ = await server.tokens_and_logprobs_completion(input_ids=[5], max_tokens=1)

    assert outputs == [[65]]
    assert not not_ready


async def test_a_404_of_a_gateway_that_starts_does_not_make_a_server_stock(server, engine, monkeypatch):
    real_get, starting = server.transport.get, [404]

    async def get(url, **options):
        return (starting.pop(), b"") if starting else await real_get(url, **options)

    monkeypatch.setattr(server.transport, "get", get)
    engine.scripted = [(404, "not found"), (200, {"logprobs": [[{"65": -0.5}]], "finish_reasons": ["stop"]})]

    with pytest.raises(RequestFault, match="404"):
        await server.tokens_and_logprobs_completion(input_ids=[5], max_tokens=1)
    _, outputs, _, _ = await server.tokens_and_logprobs_completion(input_ids=[5], max_tokens=1)

    assert outputs == [[65]]
    assert [path for path, _ in engine.requests] == ["/v1/completions", "/generate"]


MODELS = {
    "a page": b"<html>",
    "null": b"null",
    "no list": b"{}",
    "an empty list": b'{"data": []}',
    "no length": b'{"data": [{}]}',
    "a length in words": b'{"data": [{"max_model_len": "4k"}]}',
}


@pytest.mark.parametrize("body", MODELS.values(), ids=MODELS)
async def test_a_server_that_does_not_tell_its_context_is_sent_no_limit(body, server, engine, monkeypatch):
    real_get = server.transport.get

    async def get(url, **options):
        return (200, body) if url.endswith("/models") else await real_get(url, **options)

    monkeypatch.setattr(server.transport, "get", get)
    engine.scripted = [(200, {"logprobs": [[{"65": -0.5}]], "finish_reasons": ["stop"]})]

    await server.tokens_and_logprobs_completion(input_ids=[5])

    assert "max_tokens" not in engine.requests[0][1]


GOOD = {"choices": [completion([65], [-0.5]), completion([66], [-0.5])]}
NO_REPLIES = {
    "null": None,
    "an error object": {"object": "error", "message": "engine restarting", "code": 500},
    "an error inside": {"error": {"message": "engine restarting"}},
    "ids that are none": {"choices": [completion([[65]], [-0.5]), completion([66], [-0.5])]},
    "a null choice": {"choices": [None, None]},
    "fewer choices than n": {"choices": [completion([65], [-0.5])]},
    "fewer log-probabilities than tokens": {"choices": [completion([65, 66], [-0.5]), completion([66], [-0.5])]},
}


@pytest.mark.parametrize("reply", NO_REPLIES.values(), ids=NO_REPLIES)
async def test_what_is_no_reply_is_asked_for_again(reply, stock):
    engine, server = stock
    engine.scripted = [(200, reply), (200, GOOD)]

    _, outputs, _, _ = await server.tokens_and_logprobs_completion(input_ids=[5], max_tokens=1, n=2)

    assert outputs == [[65], [66]]


@pytest.mark.parametrize("position", [None, {}, "A", {"A": -0.5}, {"65": "A"}])
async def test_a_position_without_its_token_is_asked_for_again(position, server, engine):
    good = {"logprobs": [[{"65": -0.5}]], "finish_reasons": ["stop"]}
    engine.scripted = [(200, {**good, "logprobs": [[position]]}), (200, good)]

    _, outputs, _, _ = await server.tokens_and_logprobs_completion(input_ids=[5], max_tokens=1)

    assert outputs == [[65]]


async def test_a_null_log_probability_marks_a_token_that_takes_no_loss(stock):
    engine, server = stock
    engine.scripted = [(200, {"choices": [completion([65, 66], [-0.5, None])]})]

    _, _, logprobs, _ = await server.tokens_and_logprobs_completion(input_ids=[5], max_tokens=2)

    assert logprobs == [[-0.5, PROMPT_LOGPROB]]


async def test_the_oldest_weights_of_all_choices_count(stock):
    engine, server = stock
    versions = [[{"version": version}] for version in ("10", "9")]
    engine.scripted = [(200, {"choices": [completion([65], [-0.5], weight_versions=each) for each in versions]})]

    with tracing() as trace:
        await server.tokens_and_logprobs_completion(input_ids=[5], max_tokens=1, n=2)

    assert trace.engine["weight_version_start"] == "9"


async def test_stock_vllm_gives_prompt_logprobs(stock):
    engine, server = stock
    positions = [None, {"7": {"logprob": -0.5, "rank": 2}, "8": {"logprob": -0.1, "rank": 1}}]
    engine.scripted = [(200, {"choices": [{"prompt_logprobs": positions}]})]

    result = await server.get_logprobs(input_ids=[5, 8], top_k=1)

    assert (result["prompt_topk_token_ids"], result["prompt_topk_logprobs"]) == ([[], [8]], [[], [-0.1]])


async def test_a_vllm_too_old_to_return_ids_is_a_value_error(stock):
    engine, server = stock
    engine.scripted = [(200, {"choices": [{"text": "a", "logprobs": {"token_logprobs": [-1.0]}}]})]

    with pytest.raises(ValueError, match="no 'token_ids' list"):
        await server.tokens_and_logprobs_completion(input_ids=[5], max_tokens=1)
