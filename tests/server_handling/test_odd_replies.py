"""What becomes of odd replies of engines that are well: how many requests they cost, and what comes of them."""

import json
import math
import time
from email.utils import formatdate

import pytest

from atroposlib.envs.server_handling.faults import EndpointUnavailable, OutOfQuota, fault_of_status
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import KilledFault, RequestFault
from atroposlib.rollouts.trace import tracing
from tests.fakes import EOS, FakeTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD, LAST = "so 7", {"finish_reason": "stop"}


def chat(*contents, **facts):
    """A chat reply; a content may also be a whole choice."""
    choices = [
        {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        if isinstance(content, str)
        else content
        for i, content in enumerate(contents)
    ]
    reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices, **facts}
    return 200, json.dumps(reply)  # half surrogate pairs and NaN as Python writes them


def said(content=GOOD, finish_reason="stop", **message):
    return {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": content, **message}}


SURROGATE = chat("look \ud83d so 7", GOOD)
QUOTA = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
FILTERED = {"error": {"message": "The response was filtered", "code": "content_filter"}}
ERRORS = json.dumps({"detail": [{"msg": "é" * 300}]}, ensure_ascii=False)
PROVIDER = {"error": {"message": "Provider returned error", "code": 502}}

# what comes first; n; requests; texts or what the fault says
CHAT = {
    "half a surrogate pair in one of two": ([SURROGATE], 2, 2, [GOOD, "hello"]),
    "half a surrogate pair for good": (
        [chat("\ud83d")] * 9,
        1,
        3,
        "1 choices? for n=1|gave 0 choices for n=1.*no text",
    ),
    "no choices": ([chat()] * 9, 2, 3, "gave 0 choices for n=2, asked 3 times; the last reply: it has too few"),
    "no choices once": ([chat()], 2, 2, ["hello", "hello"]),
    "one choice too few": ([chat(GOOD, GOOD)], 3, 2, [GOOD, GOOD, "hello"]),
    "a choice too many": ([chat(GOOD, GOOD)] * 9, 1, 3, "gave 2 choices for n=1"),
    "a choice that a router could not get": ([chat(GOOD, {"finish_reason": "error"})], 2, 2, [GOOD, "hello"]),
    "an error as if all were well": ([(200, PROVIDER)], 1, 2, ["hello"]),
    "an error with half a surrogate pair": ([(200, '{"error": {"message": "\\ud83d"}}')], 1, 2, ["hello"]),
    "an error whose 500th byte is in a character": ([(503, ERRORS)], 1, 2, ["hello"]),
    "brackets without end": ([(200, "[" * 100_000)], 1, 2, ["hello"]),
    "a gateway's page": ([(502, "<html>502 Bad Gateway</html>")], 1, 2, ["hello"]),
    "a limit": ([(429, {"error": {"message": "slow down"}})] * 3, 1, 4, ["hello"]),
    "a filtered prompt": ([(400, FILTERED)], 1, 1, "answered 400: The response was filtered"),
    "a filtered answer": ([chat(said(None, "content_filter"))], 1, 1, [""]),
    "no finish reason": ([chat(said(finish_reason=None))], 1, 1, [GOOD]),
    "no usage": ([chat(GOOD, usage=None)], 1, 1, [GOOD]),
    "usage that is a number": ([chat(GOOD, usage=1.5)], 1, 1, [GOOD]),
    "NaN where nobody reads": ([chat({**said(), "logprobs": {"content": [{"logprob": math.nan}]}})], 1, 1, [GOOD]),
    "a null character": ([chat("a\0b")], 1, 1, ["a\0b"]),
}


@pytest.mark.parametrize(("replies", "n", "requests", "verdict"), CHAT.values(), ids=CHAT)
async def test_an_odd_chat_reply(replies, n, requests, verdict, engine):
    server = OpenAIServer(APIServerConfig(base_url=f"{engine.url}/v1", model_name="m"))
    engine.scripted = list(replies)
    if isinstance(verdict, str):
        with pytest.raises(RequestFault, match=verdict):
            await server.chat_completion(messages=MESSAGES, n=n)
    else:
        reply = await server.chat_completion(messages=MESSAGES, n=n)
        assert [choice.message.content for choice in reply.choices] == verdict
        assert [choice.index for choice in reply.choices] == list(range(n))
    assert len(engine.requests) == requests
    assert server.server_healthy
    await server.close()


def generation(ids=(72, 105, EOS), finish_reason=None, **meta):
    logprobs = meta.pop("logprobs", [-0.25] * len(ids))
    return {
        "text": "",
        "output_ids": meta.pop("output_ids", list(ids)),
        "meta_info": {
            "finish_reason": finish_reason or {"type": "stop", "matched": EOS},
            "prompt_tokens": 2,
            "completion_tokens": len(ids),
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=False)],
            **meta,
        },
    }


def generated(*generations):
    return 200, json.dumps(list(generations) if len(generations) > 1 else generations[0])


FINE, DEFAULT = [72, 105, EOS], [*b"hello", EOS]
TOO_LONG = {"type": "abort", "message": "Input length too long", "status_code": 400}
SHORT = generation(logprobs=[-0.25])
NAN, NEG_INF, NULL = (generation(logprobs=[-0.25, value, -0.5]) for value in (math.nan, -math.inf, None))

TOKENS = {
    "an abort with a status of refusal": (
        [generated(generation((), TOO_LONG), generation())],
        2,
        1,
        "Input length too",
    ),
    "no tokens": ([generated(generation(()), generation())], 2, 1, [[], FINE]),
    "nothing but the end": ([generated(generation((EOS,)), generation())], 2, 1, [[EOS], FINE]),
    "tokens without ids": ([generated(generation((), completion_tokens=3), generation())], 2, 2, [DEFAULT, DEFAULT]),
    "too few log-probabilities in one of two": ([generated(SHORT, generation())], 2, 2, [DEFAULT, DEFAULT]),
    "too few log-probabilities for good": ([generated(SHORT)] * 9, 1, 3, "3 tokens, but output_token_logprobs has 1"),
    "log-probabilities of other tokens": (
        [generated(generation(output_ids=[72, EOS]), generation())],
        2,
        2,
        [DEFAULT, DEFAULT],
    ),
    "half a surrogate pair in place of a number": ([generated(generation(logprobs=["\ud83d"] * 3))], 1, 2, [DEFAULT]),
    "NaN takes no loss": ([generated(NAN, generation())], 2, 1, [FINE, FINE]),
    "minus infinity takes no loss": ([generated(NEG_INF)], 1, 1, [FINE]),
    "null takes no loss": ([generated(NULL)], 1, 1, [FINE]),
    "a very small number": ([generated(generation(logprobs=[-1e30] * 3))], 1, 1, [FINE]),
    "pairs without text": (
        [generated(generation(output_token_logprobs=[[-1.0, token] for token in FINE]))],
        1,
        1,
        [FINE],
    ),
    "more counted than given": ([generated(generation(completion_tokens=6))], 1, 1, [FINE]),
    "one too few": ([generated(generation())], 2, 2, [DEFAULT, DEFAULT]),
    "another shape": ([(200, {"meta_info": "?"})] * 9, 1, 3, "not a /generate reply"),
    "an error of a router as if all were well": ([(200, PROVIDER)] * 4, 1, 5, [DEFAULT]),
    "the server fails": ([(500, "Internal Server Error")] * 2, 1, 3, [DEFAULT]),
}


@pytest.mark.parametrize(("replies", "n", "requests", "verdict"), TOKENS.values(), ids=TOKENS)
async def test_an_odd_reply_of_sglang(replies, n, requests, verdict, engine, sglang):
    engine.scripted = list(replies)
    with tracing() as trace:
        if isinstance(verdict, str):
            with pytest.raises(RequestFault, match=verdict):
                await sglang.tokens_and_logprobs_completion(input_ids=[1, 2], n=n)
        else:
            _, outputs, logprobs, reasons = await sglang.tokens_and_logprobs_completion(input_ids=[1, 2], n=n)
            assert outputs == verdict
            assert [len(values) for values in logprobs] == [len(ids) for ids in outputs]
            assert reasons == trace.finish_reasons == ["stop"] * n
            assert trace.usage["prompt_tokens"] == 2
    assert len(engine.requests) == requests
    assert sglang.server_healthy


@pytest.mark.parametrize("reply", [NAN, NEG_INF, NULL])
async def test_a_token_without_a_usable_log_probability_is_masked(reply, engine, sglang):
    engine.scripted = [generated(reply)]
    managed = ManagedServer(sglang, FakeTokenizer())
    await managed.chat_completion(messages=MESSAGES)
    (node,) = managed.get_state()["nodes"]
    assert node.masked_tokens[-3:] == [72, -100, EOS]
    assert node.logprobs[-3:] == [-0.25, 1.0, -0.5]


async def test_an_abort_without_a_status_is_a_kill(engine, sglang):
    engine.scripted = [generated(generation((), {"type": "abort", "message": "Aborted"}))]
    with pytest.raises(KilledFault, match="aborted 1 of 1"):
        await sglang.tokens_and_logprobs_completion(input_ids=[1, 2])


def completion(ids=(72, EOS), logprobs=(-0.5, -0.25)):
    choice = {"token_ids": list(ids), "logprobs": {"token_logprobs": list(logprobs)}, **LAST}
    return 200, json.dumps({"choices": [choice]})


VLLM = {
    "too few": ([completion(logprobs=(-0.5,))] * 9, 3, "2 token ids and 1 logprobs in choice 0"),
    "no choices": ([(200, {"choices": []})] * 9, 3, "0 choices for n=1"),
    "an error as if all were well": ([(200, {"error": {"message": "bad", "code": 400}})], 1, "answered 400: bad"),
    "NaN takes no loss": ([completion(logprobs=(-0.5, math.nan))], 1, None),
}


@pytest.mark.parametrize(("replies", "requests", "verdict"), VLLM.values(), ids=VLLM)
async def test_an_odd_reply_of_vllm(replies, requests, verdict, engine):
    server = VLLMServer(APIServerConfig(server_type="vllm", base_url=f"{engine.url}/v1", model_name="m"))
    server.tokenizer, server._is_stock = FakeTokenizer(), True
    engine.scripted = list(replies)
    if verdict is None:
        assert (await server.tokens_and_logprobs_completion(input_ids=[1]))[1] == [[72, EOS]]
    else:
        with pytest.raises(RequestFault, match=verdict):
            await server.tokens_and_logprobs_completion(input_ids=[1])
    assert len(engine.requests) == requests
    await server.close()


@pytest.mark.parametrize(
    "reply", [(429, QUOTA), (402, {"error": "Insufficient Balance"}), (200, {"error": {**QUOTA["error"], "code": 402}})]
)
async def test_without_quota_a_run_says_at_once_what_it_waits_for_and_continues_when_there_is_some(
    reply, engine, caplog
):
    server = OpenAIServer(APIServerConfig(base_url=f"{engine.url}/v1", model_name="m"))
    waiting_for = []
    engine.on_request = lambda: waiting_for.append(server.waits_for)
    engine.scripted = [reply] * 3
    await server.chat_completion(messages=MESSAGES)
    assert len(engine.requests) == 4
    assert [bool(said) for said in waiting_for] == [False, True, True, True]
    assert waiting_for[1].startswith("quota: POST ")
    assert server.waits_for is None
    assert sum("out of quota; requests wait at most 3600 s" in record.message for record in caplog.records) == 1
    await server.close()


async def test_a_limit_that_lasts_is_named_after_a_while(engine, sglang, monkeypatch):
    sglang._note_refusal(EndpointUnavailable("answered 429: slow down"))
    assert sglang.waits_for is None
    sglang._refused_at = time.monotonic() - 11
    sglang._note_refusal(EndpointUnavailable("answered 429: slower"))
    assert sglang.waits_for == "an inference server that takes no requests: answered 429: slow down"
    await sglang.tokens_and_logprobs_completion(input_ids=[1])
    assert sglang.waits_for is None


def test_a_wait_until_a_date_is_one_of_seconds():
    date = formatdate(time.time() + 60, usegmt=True)
    fault = fault_of_status("http://e", 429, b"{}", date)
    assert isinstance(fault, EndpointUnavailable)
    assert not isinstance(fault, OutOfQuota)
    assert 50 < fault.retry_after_s <= 60


@pytest.mark.parametrize("given", ["soon", "²", "nan", "-5", "Mon, 01 Jan 99999 00:00:00 GMT"])
def test_a_wait_that_is_none_is_not_taken_for_one(given):
    assert fault_of_status("http://e", 429, b"{}", given).retry_after_s is None


FIRST_TWO = chat(
    GOOD, said(finish_reason="length"), usage={"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
)


@pytest.mark.parametrize("ignores_n", [False, True])
async def test_a_request_that_fails_in_between_counts_its_choices_once(ignores_n, engine):
    config = APIServerConfig(base_url=f"{engine.url}/v1", model_name="m", n_kwarg_is_ignored=ignores_n)
    server = OpenAIServer(config)
    engine.scripted = [chat(GOOD), chat(GOOD), (500, "busy")] if ignores_n else [FIRST_TWO, (500, "busy")]
    with tracing() as trace:
        reply = await server.chat_completion(messages=MESSAGES, n=3)
    assert [choice.finish_reason for choice in reply.choices] == trace.finish_reasons == ["stop"] * 3
    assert trace.usage == {"prompt_tokens": 7, "completion_tokens": 6}
    await server.close()
