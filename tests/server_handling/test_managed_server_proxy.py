import asyncio
import socket
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from jinja2 import TemplateError

from atroposlib.envs.server_handling import managed_server_proxy as proxy_module
from atroposlib.envs.server_handling import proxy_client
from atroposlib.envs.server_handling.managed_server_proxy import Sessions, choose_server, create_app
from atroposlib.envs.server_handling.openai_server import HttpServer
from atroposlib.envs.server_handling.proxy_client import UnknownSessionError, create_proxy_session
from atroposlib.envs.server_handling.sampling import _note_ignored
from atroposlib.envs.server_handling.server_config import APIServerConfig, load_config
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError, EngineFault, KilledFault, RequestFault
from atroposlib.rollouts.trace import Chat, tracing
from tests.fakes import FakeServer, FakeTokenizer

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]
HELLO = [{"role": "user", "content": "hi"}]


def manager_of(*servers):
    manager = object.__new__(ServerManager)
    manager.max_n_completions = 8
    manager.servers = list(servers)
    return manager


@asynccontextmanager
async def client_of(server, tokenizer=None, **options):
    app = create_app(manager_of(server), tokenizer or FakeTokenizer(), "fake", **options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        yield client


async def created(client, **body):
    return (await client.post("/sessions/create", json=body)).json()["uuid"]


async def test_a_chat_is_answered_in_openai_form_and_tracked():
    server = FakeServer("hello")
    async with client_of(server) as client:
        session = await created(client)
        reply = (await client.post(f"/{session}/v1/chat/completions", json={"messages": HELLO, "n": 2})).json()
        nodes = (await client.get(f"/{session}/nodes")).json()["nodes"]
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake"
    assert reply["id"].startswith("chatcmpl-")
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["hello", "hello"]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "stop"]
    assert len(nodes) == 2
    prompt = nodes[0]["masked_tokens"].count(-100)
    assert nodes[0]["logprobs"][:prompt] == [1.0] * prompt
    assert FakeTokenizer().decode(nodes[0]["tokens"][prompt:], skip_special_tokens=True).strip() == "hello"


async def test_a_server_whose_config_has_a_model_name_only_has_sessions():
    server = FakeServer("hello")
    server.config = SimpleNamespace(model_name="m")
    async with client_of(server) as client:
        made = (await client.post("/sessions/create", json={})).json()
        assert (await client.get("/sessions")).json()["sessions"][0]["base_url"] is None
    assert made["base_url"] is None


async def test_every_sampling_option_reaches_the_engine():
    server = FakeServer("hello")
    async with client_of(server) as client:
        session = await created(client)
        body = {"messages": HELLO, "top_p": 0.9, "min_p": 0.1, "stop": ["x"], "model": "m", "max_completion_tokens": 7}
        await client.post(f"/{session}/v1/chat/completions", json=body)
    [request] = server.requests
    assert {key: request[key] for key in ("top_p", "min_p", "stop", "max_tokens", "temperature")} == {
        "top_p": 0.9,
        "min_p": 0.1,
        "stop": ["x"],
        "max_tokens": 7,
        "temperature": 1.0,
    }
    assert "model" not in request
    assert "stream" not in request


MEANT_FOR_OPENAI = {
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "store": False,
    "metadata": {"a": "b"},
    "reasoning_effort": "low",
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "top_logprobs": 0,
}


@pytest.mark.parametrize(
    ("path", "asked"), [("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "p"})]
)
async def test_fields_that_no_engine_knows_are_ignored_and_logged_once(path, asked, caplog):
    _note_ignored.cache_clear()
    server = FakeServer("hello")
    async with client_of(server) as client:
        session = await created(client)
        for _ in range(2):
            reply = await client.post(f"/{session}/v1/{path}", json={**asked, **MEANT_FOR_OPENAI, "top_p": 0.5})
            assert reply.status_code == 200
    assert not server.requests[0].keys() & MEANT_FOR_OPENAI.keys()
    assert server.requests[0]["top_p"] == 0.5
    assert caplog.text.count("no engine knows it: store") == 1


@pytest.mark.parametrize("wrong", [{"max_tokens": -1}, {"temperature": "hot"}, {"n": 0}], ids=str)
async def test_wrong_values_of_known_fields_are_refused(wrong):
    server = FakeServer("hello")
    async with client_of(server) as client:
        session = await created(client)
        reply = await client.post(f"/{session}/v1/chat/completions", json={"messages": HELLO, **wrong})
    assert reply.status_code == 400
    assert server.requests == []


async def test_tool_calls_come_out_parsed_and_go_back_in_as_written():
    server = FakeServer([CALL, "The sum is 1."])
    async with client_of(server) as client:
        session = await created(client)
        chat = f"/{session}/v1/chat/completions"
        first = (await client.post(chat, json={"messages": HELLO, "tools": TOOLS})).json()["choices"][0]
        result = {"role": "tool", "tool_call_id": first["message"]["tool_calls"][0]["id"], "content": "1"}
        turns = [*HELLO, first["message"], result]
        second = (await client.post(chat, json={"messages": turns, "tools": TOOLS})).json()["choices"][0]
        nodes = (await client.get(f"/{session}/nodes")).json()["nodes"]
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert second["message"]["content"] == "The sum is 1."
    assert len(nodes) == 1
    assert CALL in nodes[0]["full_text"]


async def test_half_a_surrogate_pair_in_a_tool_call_is_answered_escaped():
    async with client_of(FakeServer(CALL.replace('"a": 1', '"a": "\\ud83d"'))) as client:
        session = await created(client)
        reply = await client.post(f"/{session}/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS})
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "\\ud83d"}'


async def test_rendering_shows_the_prompt_and_tracks_nothing():
    async with client_of(FakeServer()) as client:
        session = await created(client)
        shown = (await client.post(f"/{session}/v1/chat/completions/render", json={"messages": HELLO})).json()
        nodes = (await client.get(f"/{session}/nodes")).json()["nodes"]
    assert shown["prompt_text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown["token_ids"] == FakeTokenizer().encode(shown["prompt_text"])
    assert shown["num_tokens"] == len(shown["token_ids"])
    assert nodes == []


async def test_a_text_completion_is_tracked_too():
    async with client_of(FakeServer("world")) as client:
        session = await created(client)
        reply = (await client.post(f"/{session}/v1/completions", json={"prompt": "hello "})).json()
        nodes = (await client.get(f"/{session}/nodes")).json()["nodes"]
    assert reply["choices"][0]["text"] == "world"
    assert reply["id"].startswith("cmpl-")
    assert nodes[0]["full_text"].startswith("hello world")


async def test_sessions_are_listed_reset_and_deleted():
    async with client_of(FakeServer()) as client:
        first, second = await created(client), await created(client)
        await client.post(f"/{first}/v1/chat/completions", json={"messages": HELLO})
        listed = (await client.get("/sessions")).json()["sessions"]
        assert {entry["uuid"]: entry["num_nodes"] for entry in listed} == {first: 1, second: 0}
        await client.post(f"/{first}/reset")
        assert (await client.get(f"/{first}/nodes")).json() == {"nodes": []}
        assert (await client.delete(f"/{first}")).json() == {"status": "deleted", "uuid": first}
        assert (await client.get("/health")).json() == {
            "status": "ok",
            "model": "fake",
            "sessions": 1,
            "servers": 1,
            "healthy_servers": 1,
        }


async def test_models_and_servers_are_shown():
    async with client_of(FakeServer()) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
        assert (await client.get("/servers")).json()["servers"] == [
            {
                "index": 0,
                "base_url": "http://fake/v1",
                "healthy": True,
                "model_name": "fake",
                "server_type": "openai",
            }
        ]


class WithoutSystemRole(FakeTokenizer):
    def apply_chat_template(self, conversation, **options):
        if conversation[0]["role"] == "system":
            raise TemplateError("no system role")
        if conversation[0]["content"] == "fall":
            raise KeyError("content")
        return super().apply_chat_template(conversation, **options)


REFUSALS = {
    "unknown session": ("nobody", {"messages": HELLO}, 404, "no session nobody"),
    "no messages": (None, {"messages": []}, 400, "must not be empty"),
    "no role": (None, {"messages": [*HELLO, {"content": "x"}]}, 400, "messages[1] has no role"),
    "refused by the template": (None, {"messages": [{"role": "system", "content": ""}]}, 400, "no system role"),
    "no content": (
        None,
        {"messages": [{"role": "user", "text": "x"}]},
        400,
        "messages[0] has no content; its keys are",
    ),
    "broken by the template": (None, {"messages": [{"role": "user", "content": "fall"}]}, 500, "KeyError"),
}


@pytest.mark.parametrize(("session", "body", "status", "message"), REFUSALS.values(), ids=REFUSALS)
async def test_refusals_have_openai_form(session, body, status, message):
    async with client_of(FakeServer(), tokenizer=WithoutSystemRole()) as client:
        session = session or await created(client)
        reply = await client.post(f"/{session}/v1/chat/completions", json=body)
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == status
    assert message in reply.json()["error"]["message"]


FAULTS = {"refused": (RequestFault("too long"), 400), "down": (EngineFault("x"), 500), "abort": (KilledFault("x"), 500)}


@pytest.mark.parametrize(("fault", "status"), FAULTS.values(), ids=FAULTS)
async def test_faults_of_the_engine_keep_their_kind(fault, status):
    async with client_of(FakeServer(faults=[fault])) as client:
        session = await created(client)
        reply = await client.post(f"/{session}/v1/chat/completions", json={"messages": HELLO})
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == (
        "invalid_request_error" if status == 400 else f"{fault.failure_class}_error"
    )


async def test_a_session_stays_on_the_server_it_asked_for():
    first, second = FakeServer("one"), FakeServer("two")
    second.config = second.config.model_copy(update={"base_url": "http://second:9001/v1"})
    app = create_app(manager_of(first, second), FakeTokenizer(), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy") as client:
        session = await created(client, base_url="http://second:9001")
        reply = await client.post(f"/{session}/v1/chat/completions", json={"messages": HELLO})
        wrong = await client.post("/sessions/create", json={"base_url": "http://third"})
        unknown = await client.post("/sessions/create", json={"tool_parser": "none such"})
    assert reply.json()["choices"][0]["message"]["content"] == "two"
    assert (wrong.status_code, unknown.status_code) == (400, 400)
    assert "no server at http://third" in wrong.json()["error"]["message"]


async def test_setup_replaces_the_servers():
    manager = manager_of()
    app = create_app(manager, FakeTokenizer(), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy") as client:
        assert (await client.post("/sessions/create", json={})).status_code == 400
        config = {"model_name": "fake", "servers": [{"base_url": "http://one/v1", "server_type": "sglang"}]}
        reply = (await client.post("/setup", json=config)).json()
    assert reply == {"status": "ok", "servers": 1, "model_name": "fake"}
    assert manager.servers[0].config.base_url == "http://one/v1"


async def test_servers_that_were_replaced_are_closed_once_nobody_uses_them(monkeypatch):
    closed = []

    async def close(server):
        closed.append(server.config.base_url)

    monkeypatch.setattr(HttpServer, "close", close)
    manager = manager_of()
    app = create_app(manager, FakeTokenizer(), "fake")

    async def set_up(*urls):
        servers = [{"base_url": url, "server_type": "sglang"} for url in urls]
        reply = await client.post("/setup", json={"model_name": "fake", "servers": servers})
        assert reply.status_code == 200, reply.text

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy") as client:
        await set_up("http://one/v1", "http://two/v1", "http://three/v1")
        session = await created(client, base_url="http://one/v1")
        rollout = (await client.post("/rollouts", json={"base_url": "http://two/v1"})).json()
        await set_up("http://four/v1")
        assert closed == ["http://three/v1"]
        await client.delete(f"/{session}")
        await client.post(f"/rollouts/{rollout['id']}/end")
        await set_up("http://five/v1")
    assert sorted(closed) == ["http://four/v1", "http://one/v1", "http://three/v1", "http://two/v1"]


async def test_a_token_is_asked_for_when_one_is_set():
    async with client_of(FakeServer(), token="secret") as client:
        assert (await client.get("/health")).status_code == 401
        assert (await client.get("/health", headers={"Authorization": "Bearer secret"})).status_code == 200


@pytest.mark.parametrize("body", ['{"model_name": NaN}', '{"model_name": "\\ud800", "servers": Infinity}', "[NaN]"])
async def test_a_setup_that_does_not_fit_is_refused_whatever_is_in_it(body):
    async with client_of(FakeServer([])) as client:
        reply = await client.post("/setup", content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 422
        assert reply.json()["detail"][0]["loc"][0] == "body"


def new_session(sessions):
    return sessions.create(FakeServer(), FakeTokenizer(), model_name="m", tool_parser="hermes", track_tree=False)


def test_sessions_created_together_spread_over_the_servers_until_they_end():
    urls = [f"http://127.0.0.1:{port}/v1" for port in (1, 2)]
    servers = ServerManager([APIServerConfig(server_type="sglang", base_url=url) for url in urls]).servers
    sessions = Sessions()
    options = {"model_name": "fake", "tool_parser": "hermes", "track_tree": False}
    made = [sessions.create(choose_server(servers, None), FakeTokenizer(), **options) for _ in range(4)]
    assert [server.leases.get("train", 0) for server in servers] == [2, 2]
    for session in made:
        sessions.delete(session.id)
    assert [server.leases.get("train", 0) for server in servers] == [0, 0]


@pytest.mark.parametrize("jump_s", [1e6, -1e6], ids=["forward", "back"])
def test_a_clock_that_is_set_ends_no_session_and_keeps_none(monkeypatch, jump_s):
    wall, steady = [1e9], [0.0]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    monkeypatch.setattr(time, "monotonic", lambda: steady[0])
    sessions = Sessions(timeout_s=10)
    sessions.create(FakeServer(), FakeTokenizer(), model_name="m", tool_parser="hermes", track_tree=False)
    wall[0] += jump_s
    assert len(sessions.all()) == 1
    steady[0] = 11.0
    assert sessions.all() == []


def test_sessions_expire_when_unused_but_not_while_a_request_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sessions = Sessions(timeout_s=10)
    busy, idle, used = (new_session(sessions) for _ in range(3))
    monkeypatch.setattr(type(busy), "is_busy", property(lambda session: session is busy))
    now[0] = 8
    sessions.find(used.id)
    now[0] = 15
    assert sessions.all() == [busy, used]
    with pytest.raises(UnknownSessionError, match="unused for 10 s"):
        sessions.find(idle.id)


@asynccontextmanager
async def serving(app):
    """The app on a free port of loopback; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


async def test_a_proxy_session_is_used_like_a_managed_server():
    server = FakeServer([CALL, "done", "more"])
    async with serving(create_app(manager_of(server), FakeTokenizer(), "fake")) as url:
        session = await create_proxy_session(url, base_url="http://fake/v1")
        async with session:
            first = await session.chat_completion(messages=HELLO, tools=TOOLS, top_p=0.5)
            assert first.choices[0].message.tool_calls[0]["function"]["name"] == "add"
            assert len(session.get_state()["nodes"]) == 1
            await session.completion(prompt="once upon")
            nodes = session.get_state()["nodes"]
            assert [node.full_text.startswith("once") for node in nodes] == [False, True]
            session.reset()
            assert session.get_state() == {"nodes": []}
            await session.chat_completion(messages=HELLO)
        assert len(session.get_state()["nodes"]) == 1
        assert session.get_url() == f"{url}/{session.session_uuid}/v1"
        with pytest.raises(KilledFault, match="404"):
            await session.fetch_state()
    assert server.requests[0]["top_p"] == 0.5


async def test_the_rollout_that_uses_a_proxy_session_knows_whose_ids_its_nodes_are():
    async with serving(create_app(manager_of(FakeServer(CALL)), FakeTokenizer(), "fake")) as url:
        with tracing() as trace:
            async with await create_proxy_session(url) as session:
                reply = await session.chat_completion(messages=HELLO, tools=TOOLS)
                (node,) = session.get_state()["nodes"]
    (chat,) = trace.chats.of([node.tokens])
    answer = {"role": "assistant", "content": None, "tool_calls": reply.choices[0].message.tool_calls}
    assert chat == Chat([*HELLO, answer], TOOLS)


async def test_a_reset_of_a_proxy_session_reaches_the_proxy_once_and_before_anything_else(monkeypatch):
    resets = []
    call = proxy_client.call_proxy

    async def slow_resets(method, url, **options):
        if url.endswith("/reset"):
            resets.append(url)
            await asyncio.sleep(0.1 * (len(resets) - 1))  # a second one would come after the first generation
        return await call(method, url, **options)

    monkeypatch.setattr(proxy_client, "call_proxy", slow_resets)
    async with serving(create_app(manager_of(FakeServer("hello")), FakeTokenizer(), "fake")) as url:
        session = await create_proxy_session(url)
        async with session:
            await session.completion(prompt="first")
            session.reset()
            await asyncio.gather(*(session.completion(prompt=f"{i}") for i in range(3)))
            assert len((await session.fetch_state())["nodes"]) == 3
            session.reset()
        assert session.get_state() == {"nodes": []}
    assert len(resets) == 2


@pytest.mark.parametrize("fault", [EngineFault("down"), KilledFault("weights updated")], ids=["failed", "killed"])
async def test_a_fault_behind_the_proxy_keeps_its_class(fault):
    async with serving(create_app(manager_of(FakeServer(faults=[fault])), FakeTokenizer())) as url:
        session = await create_proxy_session(url)
        with pytest.raises(type(fault), match="answered 500"):
            await session.chat_completion(messages=HELLO)


async def test_a_session_that_a_restart_of_the_proxy_forgot_is_a_kill(caplog):
    async with serving(create_app(manager_of(FakeServer()), FakeTokenizer())) as url:
        session = await create_proxy_session(url)
        await session.chat_completion(messages=HELLO)
    async with serving(create_app(manager_of(FakeServer()), FakeTokenizer())) as session.proxy_url:
        with pytest.raises(KilledFault, match="no session"):
            await session.chat_completion(messages=HELLO)
        await session.cleanup()
    assert "proxy session not deleted" in caplog.text


async def test_another_address_of_the_proxy_is_no_kill():
    async with serving(create_app(manager_of(FakeServer()), FakeTokenizer())) as url:
        with pytest.raises(RequestFault, match="404"):
            await create_proxy_session(f"{url}/elsewhere")


async def test_the_server_manager_uses_the_proxy():
    async with serving(create_app(manager_of(FakeServer("hello")), FakeTokenizer(), "fake")) as url:
        manager = manager_of()
        manager.proxy_url, manager.use_proxy = url, True
        async with manager.managed_server() as managed:
            reply = await managed.chat_completion(messages=HELLO, n=2)
            nodes = managed.get_state()["nodes"]
    assert [choice.message.content for choice in reply.choices] == ["hello", "hello"]
    assert len(nodes) == 2


async def test_a_proxy_that_is_down_is_an_engine_fault():
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    with pytest.raises(EngineFault, match="is the proxy up"):
        await create_proxy_session(url)


def test_a_config_file_is_checked(tmp_path):
    file = tmp_path / "servers.json"
    file.write_text('{"model_name": "m", "servers": [{"base_url": "http://one/v1"}]}')
    [config] = load_config(str(file)).server_configs()
    assert (config.server_type, config.base_url, config.model_name) == ("vllm", "http://one/v1", "m")
    file.write_text('{"model_name": "m", "servers": []}')
    with pytest.raises(ConfigError, match="cannot be used"):
        load_config(str(file))


def test_other_machines_need_a_token(monkeypatch):
    monkeypatch.delenv("ATROPOS_API_TOKEN", raising=False)
    monkeypatch.setattr("sys.argv", ["proxy", "--config", "x.json", "--host", "0.0.0.0"])
    with pytest.raises(SystemExit, match="--insecure"):
        proxy_module.main()


FILES = {
    "the default": ([], "gateway_records/9.jsonl"),
    "another": (["--records", "my/file.jsonl"], "my/file.jsonl"),
    "none": (["--no-records"], None),
    "an empty name": (["--records", ""], None),
}


@pytest.mark.parametrize(("flags", "file"), FILES.values(), ids=FILES)
def test_records_are_kept_unless_refused_and_the_first_line_says_where(tmp_path, monkeypatch, caplog, flags, file):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["proxy", "--config", "missing.json", "--port", "9", *flags])
    with caplog.at_level("INFO"), pytest.raises(SystemExit, match=r"missing\.json"):
        proxy_module.main()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl")] == ([file] if file else [])
    assert (str(tmp_path / file) if file else "in memory only") in caplog.messages[0]


def test_records_that_cannot_be_kept_stop_the_gateway_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gateway_records").write_text("a file")
    monkeypatch.setattr("sys.argv", ["proxy", "--config", "missing.json"])
    with pytest.raises(SystemExit, match="--no-records"):
        proxy_module.main()
