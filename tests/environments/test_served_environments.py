"""Environments behind HTTP: servers of OpenEnv and NeMo-Gym, the real ones where they are installed."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import threading

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from test_adapters import learned, make, prompts, runs_in_all_modes

from atroposlib.environments.adapters.nemo_gym_env import NemoGymEnv
from atroposlib.environments.adapters.openenv_env import OpenEnvConfig, OpenEnvEnv, OpenEnvEpisode, action_of
from atroposlib.errors import ConfigError, EnvironmentFault, VerifierFault


@contextlib.contextmanager
def served(app, **settings):
    """Serve an ASGI app from a thread; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", **settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


# -- NeMo-Gym --------------------------------------------------------------------------------------------------------


def counter_server():
    """A server with NeMo-Gym's routes: a counter for each session, two tools, and a verifier that reads the answer."""
    app, counts = FastAPI(), {}

    @app.post("/seed_session")
    async def seed(request: Request, response: Response):
        session = str(len(counts))
        counts[session] = (await request.json())["initial_count"]
        response.set_cookie("session", session)
        return {}

    @app.post("/increment_counter")
    async def increment(request: Request):
        counts[request.cookies["session"]] += (await request.json())["count"]
        return {"success": True}

    @app.post("/verify")
    async def verify(request: Request):
        body = await request.json()
        kinds = [item["type"] for item in body["response"]["output"]]
        if "message" not in kinds:
            return Response("no answer to verify", status_code=422)
        return {"reward": float(counts[request.cookies["session"]] == body["expected_count"]), "kinds": kinds}

    return app


def guessing_server():
    """A server with NeMo-Gym's routes for steps: 0.25 for each reply, until one says stop."""
    app = FastAPI()

    @app.post("/reset")
    async def reset(request: Request):
        return {"observation": "Begin.", "info": {}}

    @app.post("/step")
    async def step(request: Request):
        (said,) = [item for item in (await request.json())["response"]["output"] if item["type"] == "message"]
        is_over = "stop" in said["content"][0]["text"]
        return {"observation": "And now?", "reward": 0.25, "terminated": is_over, "truncated": False, "info": {}}

    return app


TOOL = {"type": "function", "name": "increment_counter", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "increment_counter", "arguments": {"count": 2}}\n</tool_call>'


def counter_rows(folder):
    asked = {"input": [{"role": "user", "content": "Add 2."}], "tools": [TOOL]}
    rows = [{"responses_create_params": asked, "initial_count": n, "expected_count": 2 + n % 2 * 2} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


async def nemo_rolled_out(url, rows, script, number, **settings):
    env = make(NemoGymEnv, script, id=url, rows=rows, group_size=1, **settings)
    try:
        await env.setup()
        group, _ = await env.collect_trajectories(await env.get_item(number))
        return group
    finally:
        await env.teardown()


@pytest.mark.parametrize(("number", "score"), [(0, 1.0), (1, 0.0)])
async def test_tools_of_a_nemo_gym_server_are_called_and_its_verifier_gives_the_reward(tmp_path, number, score):
    with served(counter_server()) as url:
        group = await nemo_rolled_out(url, counter_rows(tmp_path), [CALL, "done"], number)
    assert group["scores"] == [score]
    assert learned({"masks": group["masks"][0]}) == f"{CALL}<|im_end|>done<|im_end|>"
    assert [message["role"] for message in group["messages"][0]] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("route", ["verify", "seed_session", "openapi.json"])
async def test_routes_of_a_nemo_gym_server_that_are_no_offered_tools_are_out_of_the_models_reach(tmp_path, route):
    call = CALL.replace("increment_counter", route)
    with served(counter_server()) as url:
        group = await nemo_rolled_out(url, counter_rows(tmp_path), [call, CALL, "done"], 0)
    (said, _) = [message["content"] for message in group["messages"][0] if message["role"] == "tool"]
    assert (group["scores"], json.loads(said)) == ([1.0], {"error": f"there is no tool {route!r}"})


async def test_a_verifier_that_refuses_is_no_score(tmp_path):
    with served(counter_server()) as url, pytest.raises(VerifierFault, match="no answer to verify"):
        await nemo_rolled_out(url, counter_rows(tmp_path), [CALL], 0, max_turns=1)


@pytest.mark.parametrize(("script", "score"), [(["go", "stop"], 0.5), (["go"], 0.75)], ids=["ended", "cut"])
async def test_steps_of_a_nemo_gym_server_add_up(tmp_path, script, score):
    with served(guessing_server()) as url:
        group = await nemo_rolled_out(url, counter_rows(tmp_path), script, 0, max_turns=3)
    assert group["scores"] == [score]
    assert [m["content"] for m in group["messages"][0] if m["role"] == "user"][:3] == ["Add 2.", "Begin.", "And now?"]


@pytest.mark.parametrize("row", ["{}", '{"responses_create_params": {"tools": []}}'])
async def test_a_first_row_without_a_request_is_said_at_the_start(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(ConfigError, match=r"row 0 of .* has no responses_create_params with an input"):
        await nemo_rolled_out("http://127.0.0.1:1", str(tmp_path / "rows.jsonl"), "x", 0)


async def test_what_is_no_server_of_nemo_gym_is_said_at_the_start(tmp_path):
    with served(FastAPI()) as url, pytest.raises(ConfigError, match="neither /verify nor /step"):
        await nemo_rolled_out(url, counter_rows(tmp_path), "x", 0)
    with pytest.raises(ConfigError, match="no NeMo-Gym server answers"):
        await nemo_rolled_out("http://127.0.0.1:1", counter_rows(tmp_path), "x", 0)


REAL_NEMO = """
import importlib, json, pathlib, socket, sys, uvicorn
from unittest.mock import MagicMock
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.server_utils import ServerClient
module = importlib.import_module(f"resources_servers.{sys.argv[1]}.app")
config = BaseResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="served")
server_cls = getattr(module, sys.argv[2])
config = server_cls.model_fields["config"].annotation.model_validate(config.model_dump())
app = server_cls(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()
listener = socket.create_server(("127.0.0.1", 0))
rows = pathlib.Path(module.__file__).with_name("data") / "example.jsonl"
print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}", "rows": str(rows)}), flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
"""
REAL = {
    "tools": (
        ("example_session_state_mgmt", "StatefulCounterResourcesServer"),
        [CALL.replace("2}", "1}"), CALL, "6"],
        [1.0],
    ),
    "steps": (("blackjack", "BlackjackEnv"), ["<action>stand</action>"], [-1.0, 0.0, 1.0]),
}


NEMO_PYTHON = os.environ.get("ATROPOS_NEMO_GYM_PYTHON", "")
with_the_real_nemo = pytest.mark.skipif(not NEMO_PYTHON, reason="set ATROPOS_NEMO_GYM_PYTHON to one with nemo-gym")


@contextlib.contextmanager
def real_nemo(server):
    with subprocess.Popen([NEMO_PYTHON, "-c", REAL_NEMO, *server], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


@with_the_real_nemo
@pytest.mark.parametrize(("server", "script", "scores"), REAL.values(), ids=REAL)
async def test_servers_of_the_real_nemo_gym(server, script, scores):
    with real_nemo(server) as told:
        group = await nemo_rolled_out(told["url"], told["rows"], script, 0)
    assert group["scores"][0] in scores
    assert learned({"masks": group["masks"][0]}).startswith(script[0])


@with_the_real_nemo
def test_nemo_gym_serves_evaluates_processes_and_resumes_in_the_middle(tmp_path, monkeypatch):
    server, script, _ = REAL["tools"]

    def says(prompt):
        return script[prompt.count("<|im_start|>assistant") - 1]

    with real_nemo(server) as told:
        runs_in_all_modes(NemoGymEnv, {"id": told["url"], "rows": told["rows"]}, says, tmp_path, monkeypatch)


# -- OpenEnv ---------------------------------------------------------------------------------------------------------


def adding_server(**settings):
    """A server of the real package: the sum so far is to reach the seed; three steps at most."""
    http_server = pytest.importorskip("openenv.core.env_server.http_server")
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Add(Action):
        number: int

    class Sum(Observation):
        text: str

    class Adding(Environment[Add, Sum, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.goal, self.total, self.steps = seed, 0, 0
            return Sum(text=f"Reach {seed}.")

        def step(self, action, timeout_s=None, **kwargs):
            self.total, self.steps = self.total + action.number, self.steps + 1
            is_over = self.total == self.goal or self.steps == 3
            return Sum(text=f"{self.total} so far.", reward=float(self.total == self.goal), done=is_over)

        @property
        def state(self):
            return State(step_count=self.steps)

    return http_server.create_fastapi_app(Adding, Add, Sum, max_concurrent_envs=settings.pop("sessions", 8))


async def openenv_rolled_out(url, script, number, **settings):
    env = make(OpenEnvEnv, script, id=url, **{"group_size": 1, **settings})
    try:
        await env.setup()
        group, _ = await env.collect_trajectories(await env.get_item(number))
        return group, prompts(env)
    finally:
        await env.teardown()


EPISODES = {
    "reached": (["I add 2", '{"number": 1}'], 3, {}, 1.0),
    "missed": (["1"], 9, {}, 0.0),
    "no action first": (["well", '{"number": "x"}', "4"], 4, {}, 1.0),
    "no action at all": (["well"], 9, {"max_turns": 2}, 0.0),
    "no action, priced": (["well"], 9, {"max_turns": 2, "no_action": -1.0}, -1.0),
    "last reward": (["1"], 9, {"reward": "last", "max_turns": 2}, 0.0),
}


@pytest.mark.parametrize(("script", "number", "settings", "score"), EPISODES.values(), ids=EPISODES)
async def test_an_episode_of_an_openenv_server_is_played(script, number, settings, score):
    with served(adding_server()) as url:
        group, asked = await openenv_rolled_out(url, script, number, **settings)
    assert group["scores"] == [score]
    assert f"Reach {number}." in asked[0]
    assert "so far" in asked[1] or "no action" in asked[1]


async def test_a_full_openenv_server_is_waited_for(monkeypatch):
    monkeypatch.setattr("atroposlib.environments.adapters.openenv_env.WAIT_S", 0.01)
    with served(adding_server(sessions=1)) as url:
        group, _ = await openenv_rolled_out(url, "1", 1, group_size=3)
    assert group["scores"] == [1.0] * 3


async def test_what_is_no_openenv_server_is_said_at_the_start():
    with served(FastAPI()) as url, pytest.raises(ConfigError, match="no OpenEnv server answers"):
        await openenv_rolled_out(url, "x", 0)


async def test_pings_are_answered_while_the_model_writes():
    with served(adding_server(), ws_ping_interval=0.05, ws_ping_timeout=0.6) as url:
        env = make(OpenEnvEnv, "1", id=url, max_turns=2)
        engine = env.server.servers[0]
        answer = engine.tokens_and_logprobs_completion

        async def slow(**asked):
            await asyncio.sleep(0.8)
            return await answer(**asked)

        engine.tokens_and_logprobs_completion = slow
        await env.setup()
        try:
            row, _ = await env.collect_trajectory(await env.get_item(2))
        finally:
            await env.teardown()
    assert row["scores"] == 1.0


class Line:
    """A connection that nothing comes from."""

    closed = True

    async def ws_connect(self, *_, **__):
        return self

    async def receive(self):
        await asyncio.Event().wait()


@pytest.mark.parametrize("at_reset", [None, 0.0, 1.0])
async def test_what_an_openenv_server_gives_at_reset_is_no_reward(at_reset):
    class Told(OpenEnvEpisode):
        async def _asked(self, kind, data):
            reward = at_reset if kind == "reset" else None
            return {"type": "observation", "data": {"observation": {"text": "x"}, "reward": reward, "done": True}}

    schema = {"properties": {"move": {"type": "string"}}}
    episode = Told(OpenEnvConfig(id="http://x", no_action=-1.0), Line(), schema, {})
    await episode.begin()
    assert episode.score() == -1.0
    await episode.step("up")
    with pytest.raises(EnvironmentFault, match="gave no reward"):
        episode.score()
    await episode.close()


async def test_rows_are_the_items_of_an_openenv_server(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"seed": 1}\n{"seed": 2}\n')
    with served(adding_server()) as url:
        group, asked = await openenv_rolled_out(url, "1", 1, rows=str(tmp_path / "rows.jsonl"))
        env = make(OpenEnvEnv, "1", id=url, rows=str(tmp_path / "rows.jsonl"))
        await env.setup()
        assert await env.get_item(2) is None
        await env.teardown()
    assert group["scores"] == [1.0]
    assert "Reach 2." in asked[0]


def test_openenv_serves_evaluates_processes_and_resumes_in_the_middle(tmp_path, monkeypatch):
    with served(adding_server(sessions=32)) as url:
        runs_in_all_modes(OpenEnvEnv, {"id": url, "max_turns": 3, "seed": 50}, "1", tmp_path, monkeypatch)


ACTIONS = {
    "JSON in a sentence": ('I go {"move": "up"}.', {"move": "up"}),
    "another field": ('{"step": 1}', None),
    "no JSON": ("up", None),
    "two objects, the first that fits": ('{"a": 1} {"move": "x", "n": 2}', {"move": "x", "n": 2}),
}


@pytest.mark.parametrize(("reply", "action"), ACTIONS.values(), ids=ACTIONS)
def test_a_reply_is_read_by_the_schema(reply, action):
    two = {"properties": {"move": {"type": "string"}, "n": {"type": "integer"}, "metadata": {}}}
    assert action_of(reply, two) == action
    assert action_of(reply, {"properties": {"text": {"type": "string"}}}) == {"text": reply}
