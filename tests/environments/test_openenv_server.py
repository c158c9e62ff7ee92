"""An environment of ours served to OpenEnv's clients: the wire, and the real client where it is installed."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from test_adapters import make, prompts
from test_served_environments import served

from atroposlib.environments import countdown_env
from atroposlib.environments.adapters.external import made
from atroposlib.environments.adapters.openenv_env import OpenEnvEnv
from atroposlib.environments.adapters.openenv_server import OpenEnvServer
from atroposlib.environments.multi_turn import MultiTurnEnv, Step, World
from atroposlib.errors import ConfigError, VerifierFault


class Adding(World):
    """Adds calls up to the goal; a text that is no call is no move, "crash" breaks it."""

    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)

    def __init__(self, goal):
        self.goal, self.total, self.closed = goal, 0, 0

    async def begin(self):
        return f"Reach {self.goal}."

    async def step(self, reply):
        if reply.text == "crash":
            raise RuntimeError("lost")
        if reply.text == "unsure":
            raise VerifierFault("nobody can tell")
        if not reply.calls:
            return Step("Call add.", is_invalid=True)
        self.total += reply.calls[0].arguments["n"]
        result = {"role": "tool", "tool_call_id": reply.calls[0].id, "content": str(self.total)}
        return Step([result], is_over=self.total >= self.goal, reward=1.0)

    async def close(self):
        self.closed += 1


class AddingEnv(MultiTurnEnv):
    """Sums by a tool."""

    name = "adding"
    system = "Add."
    uses_tools = True

    def make(self, rng, level):
        return {"goal": rng.randint(2, 9)}

    async def problem(self, part, index):
        return {"goal": index} if index < 100 else None

    async def open(self, item):
        self.world = Adding(item["goal"])
        return self.world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


def serving(name, folder, monkeypatch=None, flags=(), **options):
    if monkeypatch is not None:
        monkeypatch.setattr("atroposlib.envs.catalog.load", lambda name: AddingEnv)
    env = made(name, flags, folder)
    asyncio.run(env.setup())
    return OpenEnvServer(env, **options)


def said(socket, kind, **data):
    socket.send_json({"type": kind, **({"data": data} if data else {})})
    answer = socket.receive_json()
    return answer["type"], answer["data"]


def call(n):
    return f'<tool_call>\n{{"name": "add", "arguments": {{"n": {n}}}}}\n</tool_call>'


def wire_call(n):
    function = {"name": "add", "arguments": json.dumps({"n": n})}
    return {"text": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_a_right_reply_to_one_question_is_rewarded_and_ends_the_episode(folder):
    server = serving("countdown", folder)
    item = asyncio.run(server.env.problem("train", 3))
    with TestClient(server.app).websocket_connect("/ws") as socket:
        kind, data = said(socket, "reset", seed=3, something="ignored")
        assert (kind, data["reward"], data["done"]) == ("observation", None, False)
        assert data["observation"]["messages"] == asyncio.run(server.env.messages(item))
        _, ended = said(socket, "step", text=f"<think>so</think>{server.env.gold(item)}")
        assert (ended["reward"], ended["done"]) == (1.0, True)
        assert said(socket, "step", text="more")[1]["code"] == "EXECUTION_ERROR"
        said(socket, "reset", seed=3)
        assert said(socket, "step", text="no")[1]["reward"] == 0.0


def test_an_episode_of_several_turns_gives_rewards_that_add_up_to_its_score(folder, monkeypatch):
    server = serving("adding", folder, monkeypatch, ["--env.discount", "0.5"])
    with TestClient(server.app).websocket_connect("/ws") as socket:
        _, begun = said(socket, "reset", seed=3, episode_id="mine")
        assert [m["role"] for m in begun["observation"]["messages"]] == ["system", "user"]
        assert begun["observation"]["tools"] == list(Adding.tools)
        _, first = said(socket, "step", text=call(1))
        assert [m["content"] for m in first["observation"]["messages"]] == ["1"]
        _, wrong = said(socket, "step", text="two")
        assert (wrong["reward"], wrong["observation"]["messages"][0]["content"]) == (0.0, "Call add.")
        assert said(socket, "state")[1] == {"episode_id": "mine", "step_count": 2}
        _, last = said(socket, "step", **wire_call(2))
        assert (first["reward"], last["reward"], last["done"]) == (1.0, 0.25, True)
    assert server.env.world.closed == 1


REFUSED = {
    "no action": ([("reset", {"seed": 2})], ("step", {"move": "up"}), "VALIDATION_ERROR"),
    "a negative seed": ([], ("reset", {"seed": -1}), "VALIDATION_ERROR"),
    "another split": ([], ("reset", {"split": "secret"}), "VALIDATION_ERROR"),
    "an item that is not there": ([], ("reset", {"seed": 100}), "no item number 100"),
    "a step before a reset": ([], ("step", {"text": "x"}), "send a reset"),
    "another message": ([], ("mcp", {"x": 1}), "UNKNOWN_TYPE"),
    "a world that breaks": ([("reset", {"seed": 2})], ("step", {"text": "crash"}), "adding failed: RuntimeError: lost"),
    "a verifier that cannot tell": ([("reset", {"seed": 2})], ("step", {"text": "unsure"}), "nobody can tell"),
}


@pytest.mark.parametrize(("before", "message", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_said_and_costs_neither_session_nor_score(folder, monkeypatch, before, message, words):
    server = serving("adding", folder, monkeypatch)
    with TestClient(server.app).websocket_connect("/ws") as socket:
        for kind, data in before:
            said(socket, kind, **data)
        kind, error = said(socket, message[0], **message[1])
        assert kind == "error"
        assert words in json.dumps(error)
        assert "reward" not in error
        socket.send_text("{no json")
        assert socket.receive_json()["data"]["code"] == "INVALID_JSON"
        assert said(socket, "reset", seed=1)[0] == "observation"


def test_a_full_server_says_so_and_a_session_that_left_makes_room(folder, monkeypatch):
    server = serving("adding", folder, monkeypatch, sessions=1, idle_s=30)
    with TestClient(server.app) as client:
        with client.websocket_connect("/ws") as first:
            said(first, "reset", seed=5)
            with client.websocket_connect("/ws") as second:
                error = second.receive_json()["data"]
                assert (error["code"], error["max_sessions"]) == ("CAPACITY_REACHED", 1)
            first.send_json({"type": "close"})
            with pytest.raises(WebSocketDisconnect):
                first.receive_json()
        assert server.env.world.closed == 1
        with client.websocket_connect("/ws") as third:
            assert said(third, "reset")[0] == "observation"
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws", headers={"origin": "http://evil.com"}):
            pass


def test_a_silent_session_is_closed(folder, monkeypatch):
    server = serving("adding", folder, monkeypatch, idle_s=0.01)
    with TestClient(server.app).websocket_connect("/ws") as socket, pytest.raises(WebSocketDisconnect):
        socket.receive_json()


def test_http_tells_of_the_environment_and_keeps_no_episode(folder, monkeypatch):
    server = serving("adding", folder, monkeypatch)
    client = TestClient(server.app)
    assert client.get("/health").json() == {"status": "healthy"}
    assert client.get("/metadata").json()["description"] == "Sums by a tool."
    assert "tool_calls" in client.get("/schema").json()["action"]["properties"]
    assert client.post("/reset", json={"seed": 4}).json()["observation"]["messages"][1]["content"] == "Reach 4."
    assert client.post("/reset", json={"seed": -4}).status_code == 422
    assert "open a session at /ws" in client.post("/step", json={"action": {"text": "x"}}).json()["detail"]
    assert server.env.world.closed == 1


@pytest.mark.parametrize(("name", "words"), [("mixture", "rolls out by itself"), ("no_such", "no_such")])
def test_what_cannot_be_served_is_refused_with_a_sentence(folder, name, words):
    with pytest.raises(ConfigError, match=words):
        made(name, [], folder)


CLIENT = """
import asyncio, json, sys
from openenv.core.generic_client import GenericEnvClient

async def play(url, right):
    async with GenericEnvClient(base_url=url) as client:
        results = [await client.reset(seed=5)]
        results += [await client.step({"text": said}) for said in ("no word", right)]
        return [[one.reward, one.done, one.observation["messages"]] for one in results], await client.state()

print(json.dumps(asyncio.run(play(*sys.argv[1:]))))
"""


@pytest.mark.skipif("ATROPOS_OPENENV_PYTHON" not in os.environ, reason="set ATROPOS_OPENENV_PYTHON to one with openenv")
def test_the_real_client_plays_an_environment_that_the_command_serves(folder):
    env = made("word_guess", ["--env.seed", "7"], folder)

    async def right():
        await env.setup()
        world = await env.open(await env.problem("train", 5))
        await world.begin()
        return world.gold()

    command = [sys.executable, "-m", "atroposlib.cli.main", "serve-env", "word_guess", "--port", "0", "--env.seed", "7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://\S+", process.stdout.readline())[0]
            client = [os.environ["ATROPOS_OPENENV_PYTHON"], "-c", CLIENT, url, asyncio.run(right())]
            results, state = json.loads(subprocess.run(client, stdout=subprocess.PIPE, check=True).stdout)
        finally:
            process.send_signal(signal.SIGTERM)
    assert [(reward, done) for reward, done, _ in results] == [(None, False), (0.0, False), (1.0, True)]
    assert [message["role"] for _, _, messages in results for message in messages] == ["user", "user"]
    assert state["step_count"] == 2


async def test_the_adapter_for_openenv_plays_what_is_served(folder):
    pytest.importorskip("websockets")
    env = made(countdown_env.__file__, [], folder)
    await env.setup()
    right = env.gold(await env.problem("train", 4))
    with served(OpenEnvServer(env).app) as url:
        player = make(OpenEnvEnv, right, id=url)
        try:
            await player.setup()
            row, _ = await player.collect_trajectory(await player.get_item(4))
        finally:
            await player.teardown()
    assert row["scores"] == 1.0
    assert "<|im_start|>assistant" in prompts(player)[0].partition(env.question(await env.problem("train", 4)))[0]
