import contextlib

import pytest
from aiohttp import web

from atroposlib.envs.server_handling import trl_vllm_server
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.errors import EngineFault, RequestFault
from atroposlib.rollouts.trace import tracing
from tests.fakes import EOS, FakeTokenizer


class Trl:
    """TRL's one route over HTTP."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.reply = web.json_response({"completion_ids": [[104, 105, EOS], [104]]})

    async def generate(self, request: web.Request) -> web.Response:
        self.requests.append({**await request.json(), "key": request.headers.get("Authorization")})
        return self.reply


@pytest.fixture
def trl():
    return Trl()


@pytest.fixture
async def server(trl, monkeypatch):
    app = web.Application()
    app.router.add_post("/generate/", trl.generate)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(trl_vllm_server.AutoTokenizer, "from_pretrained", lambda name: FakeTokenizer())
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield TrlVllmServer(APIServerConfig(base_url=url, model_name="m", api_key="k"))
    await runner.cleanup()


async def test_a_chat_is_rendered_and_stops_where_the_end_token_is(server, trl):
    reply = await server.chat_completion(messages=[{"role": "user", "content": "x"}], n=2, max_tokens=3, top_p=0.9)

    assert [(choice.message.content, choice.finish_reason) for choice in reply.choices] == [
        ("hi", "stop"),
        ("h", "length"),
    ]
    prompt = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert trl.requests == [{"prompts": [prompt], "n": 2, "max_tokens": 3, "top_p": 0.9, "key": "Bearer k"}]


async def test_a_completion_has_text_and_tells_the_trace(server):
    with tracing() as trace:
        reply = await server.completion(prompt="x")

    assert [choice.text for choice in reply.choices] == ["hi", "h"]
    assert trace.finish_reasons == ["stop", "length"]
    assert trace.usage == {"prompt_tokens": 0, "completion_tokens": 4}


async def test_a_refusal_is_a_request_fault(server, trl):
    trl.reply = web.json_response({"detail": "too long"}, status=422)

    with pytest.raises(RequestFault, match="answered 422: too long"):
        await server.completion(prompt="x")


async def test_a_reply_without_json_is_an_engine_fault(server, trl):
    trl.reply = web.Response(text="{", content_type="application/json")

    with pytest.raises(EngineFault, match="is not JSON"):
        await server._completion_wrapper(prompt="x")


async def test_a_stand_in_of_upstreams_tests_gives_replies_with_nothing_but_json(server, monkeypatch):
    class Reply(contextlib.nullcontext):
        async def json(self):
            return {"completion_ids": [[104, EOS]]}

    class Session(contextlib.nullcontext):
        def post(self, *_, **__):
            reply = Reply()
            reply.enter_result = reply
            return reply

    monkeypatch.setattr(trl_vllm_server.aiohttp, "ClientSession", lambda **_: Session(Session()))
    assert (await server._completion_wrapper(prompt="x")).choices[0].text == "h"


async def test_token_requests_say_what_to_use_instead(server):
    with pytest.raises(NotImplementedError, match="Token-level logprobs are not supported"):
        await server.tokens_and_logprobs_completion(prompt="x")
