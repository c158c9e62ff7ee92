"""Episodes with a local MCP server: both transports, servers that hang or end, sessions that are used again."""

import asyncio
import sys
from pathlib import Path

import pytest

from atroposlib.environments.mcp_env import INVENTORY, McpEnv, make_task, to_task
from atroposlib.environments.multi_turn import Reply, ToolCall
from atroposlib.environments.policies import scripted
from atroposlib.environments.rows import write_rows
from atroposlib.environments.tool_calling_server import written
from atroposlib.environments.tool_use.mcp_session import Session
from atroposlib.errors import ConfigError, EnvironmentFault, VerifierFault
from atroposlib.launch.services import free_ports
from tests.environments.test_multi_turn import make_env

HTTP = [*INVENTORY, "--port", "{port}"]
LAMPS = {
    "prompt": "Ship 2 lamps. How many are left?",
    "answer": "3",
    "before": [{"name": "receive", "arguments": {"article": "lamps", "pieces": 5}}],
    "checks": [{"name": "count", "arguments": {"article": "lamps"}, "result": "3"}],
}
SHIP = written([{"name": "ship", "arguments": {"article": "lamps", "pieces": 2}}])
TOO_MANY = written([{"name": "ship", "arguments": {"article": "lamps", "pieces": 9}}])

SERVER = """
import os, subprocess, sys, time, asyncio
from mcp.server.mcpserver import MCPServer

server = MCPServer("odd", log_level="ERROR")

@server.tool()
async def wait() -> str:
    await asyncio.sleep(999)

@server.tool()
def leave() -> str:
    os._exit(3)

@server.tool()
def number() -> str:
    return str(os.getpid())

@server.tool()
async def block() -> str:
    time.sleep(999)

@server.tool()
def detach() -> str:
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return str(subprocess.Popen(["sleep", "600"], start_new_session=True, **streams).pid)

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
server.run("stdio")
"""


@pytest.fixture
async def env_of():
    pytest.importorskip("mcp")
    made = []

    async def make(**settings):
        env = make_env(McpEnv, "", **settings)
        made.append(env)
        await env.setup()
        return env

    yield make
    for env in made:
        await env.teardown()


@pytest.fixture
def odd(tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(SERVER)
    return [sys.executable, str(file)]


async def played(env, said, task=None):
    replies = iter(said)
    return await scripted(env, task or to_task(LAMPS), lambda world, player: next(replies))


COURSES = {
    "right": ([SHIP, "So it is\n3"], 1.0),
    "the answer without the deed": (["3"], 0.0),
    "the deed without the answer": ([SHIP, "4"], 0.0),
    "a call that is refused, then right": ([TOO_MANY, SHIP, "**3**"], 1.0),
    "nothing": (["", "", ""], 0.0),
}


@pytest.mark.parametrize("command", [INVENTORY, HTTP], ids=["stdio", "streamable HTTP"])
async def test_the_answer_and_what_the_server_then_tells_decide(env_of, command):
    env = await env_of(server_command=command, reset_tool="clear")
    found = {name: (await played(env, said)).score for name, (said, _) in COURSES.items()}
    assert found == {name: score for name, (_, score) in COURSES.items()}


async def test_made_tasks_are_solved_by_their_solutions_and_the_reset_tool_is_hidden(env_of):
    env = await env_of(levels=[1, 4])
    players = [await scripted(env, await env.get_item(n), lambda world, player: world.gold()) for n in range(4)]
    assert [player.score for player in players] == [1.0] * 4
    assert {tool["function"]["name"] for tool in players[0].tools} == {"articles", "count", "receive", "ship"}


NUMBER = {"prompt": "?", "answer": "1"}


async def test_a_tool_that_hangs_costs_its_call_and_its_server_is_not_used_again(env_of, odd):
    env = await env_of(server_command=odd, tool_timeout_s=1, reset_tool="number")
    player = await played(env, [written([{"name": "wait", "arguments": {}}]), "1"], NUMBER)
    assert (player.score, player.messages[-2]["content"]) == (1.0, "Error: no result after 1 s")
    assert env.pool._idle == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize("words", [[], ["{port}"]], ids=["stdio", "streamable HTTP"])
async def test_what_a_server_detached_from_itself_ends_with_its_session(odd, words):
    pytest.importorskip("mcp")
    async with await Session.of(url=None, command=[*odd, *words], timeout_s=10) as session:
        pid = int(await session.call("detach", {}))
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize("words", [[], ["{port}"]], ids=["stdio", "streamable HTTP"])
async def test_a_server_whose_session_is_cancelled_while_it_starts_ends(tmp_path, words):
    pytest.importorskip("mcp")

    async def start():
        script = f"echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; exec sleep 600"
        async with await Session.of(url=None, command=["sh", "-c", script, *words], timeout_s=10):
            pass

    starting = asyncio.create_task(start())
    while not (tmp_path / "pid").exists():
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait([starting])
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names without files")
async def test_two_sessions_that_find_the_same_port_free_have_a_server_each(odd, monkeypatch):
    pytest.importorskip("mcp")
    ports = free_ports(2)
    found = iter([ports[:1], ports[:1], ports[1:], ports[:1]])
    monkeypatch.setattr("atroposlib.launch.services.free_ports", lambda count: next(found))
    one, other = [await Session.of(url=None, command=[*odd, "{port}"], timeout_s=10) for _ in range(2)]
    async with one, other:
        pids = [await session.call("number", {}) for session in (one, other)]
    assert (len({*pids}), one.where, other.where) == (2, *(f"http://127.0.0.1:{port}/mcp" for port in ports))
    async with await Session.of(url=None, command=[*odd, "{port}"], timeout_s=10) as again:
        assert again.where == one.where


async def test_a_check_that_hangs_is_no_score(env_of, odd):
    env = await env_of(server_command=odd, tool_timeout_s=1)
    with pytest.raises(VerifierFault, match=r"wait should check the task, but gives Error: no result after 1 s"):
        await played(env, ["1"], {**NUMBER, "checks": [{"name": "wait", "arguments": {}, "result": "1"}]})


@pytest.mark.parametrize("words", [[], ["{port}"]], ids=["stdio", "streamable HTTP"])
@pytest.mark.parametrize("tool", ["leave", "block"])
async def test_a_server_that_ends_or_is_stuck_is_a_fault_of_the_episode(env_of, odd, words, tool):
    env = await env_of(server_command=[*odd, *words], tool_timeout_s=1)
    with pytest.raises(EnvironmentFault, match=r"the MCP server .* failed: "):
        await env.play(NUMBER, [env.player(saying([written([{"name": tool, "arguments": {}}])]))])
    assert env.pool._at_once._value == env.config.servers_at_once


def saying(texts):
    replies = iter(texts)

    async def ask(messages, tools):
        from atroposlib.environments.multi_turn import message_of

        return message_of(next(replies), tools), "stop"

    return ask


async def test_a_session_that_was_killed_between_two_episodes_is_replaced(env_of):
    env = await env_of()
    assert (await played(env, [SHIP, "3"])).score == 1.0
    (session,) = env.pool._idle
    session._task.cancel()
    assert (await played(env, [SHIP, "3"])).score == 1.0
    assert env.pool._idle != [session]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-program"], "the MCP server no-such-program failed: .*No such file"),
        ([sys.executable, "-c", "print('no MCP')"], "the MCP server .* failed: "),
        ([sys.executable, "-c", "pass", "{port}"], "no server listens at port .* see what this prints: .*python"),
    ],
)
async def test_a_server_that_does_not_start_is_a_fault_that_says_what_was_run(env_of, command, message):
    env = await env_of(server_command=command)
    with pytest.raises(EnvironmentFault, match=message):
        await env.play(NUMBER, [env.player(saying(["1"]))])


async def test_rows_are_tasks(env_of, tmp_path):
    rows = write_rows(tmp_path / "tasks.jsonl", [{**LAMPS, "prompt": f"{n}"} for n in range(10)])
    env = await env_of(dataset=rows)
    assert (await env.problem("test", 0))["prompt"] == "9"
    with pytest.raises(ValueError, match="a task needs an answer or checks"):
        to_task({"prompt": "x"})


def test_made_tasks_have_other_answers_and_more_articles_with_the_level():
    import random

    tasks = [make_task(random.Random(n), 1 + n % 4) for n in range(20)]
    assert len({task["answer"] for task in tasks}) > 15
    assert [len(task["checks"]) for task in tasks[:4]] == [3, 4, 5, 6]


async def test_without_the_sdk_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"run: pip install 'atroposlib\[mcp\]'"):
        await make_env(McpEnv, "").setup()


async def test_a_reply_with_arguments_that_are_no_object_is_answered(env_of):
    env = await env_of()
    world = await env.open(to_task(LAMPS))
    await world.begin()
    step = await world.step(Reply("", (ToolCall("1", "count", None),)))
    await world.close()
    assert step.observation[0]["content"] == "Error: the arguments are no JSON object"


async def test_a_session_names_the_tools_in_the_form_of_chat_completions():
    pytest.importorskip("mcp")
    session = await Session.of(url=None, command=INVENTORY, timeout_s=10)
    async with session:
        count = next(tool for tool in session.tools if tool["function"]["name"] == "count")
    assert count["type"] == "function"
    assert count["function"]["parameters"]["required"] == ["article"]
