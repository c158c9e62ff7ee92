"""The agent programs of `environments/agents` against a scripted engine; one that is not installed skips its rows."""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from test_adapters import IN_FLIGHT, run

from atroposlib.environments.agents.command_env import CommandConfig, CommandEnv
from atroposlib.environments.agents.sums import question, sum_number
from atroposlib.environments.check import check
from atroposlib.envs.server_handling.server_config import ServersConfig
from atroposlib.testing import roll_out
from atroposlib.type_definitions import IGNORE_INDEX

NUMBERS = re.compile(r"What is (\d+) times (\d+), plus (\d+)\?")


def call(name, **arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def turns_of(prompt):
    """The turns of a model that uses both tools, for one sum."""
    left, right, rest = map(int, NUMBERS.search(prompt).groups())
    total = left * right + rest
    last = call("final_answer", answer=total) if "final_answer" in prompt else f"It is {total}."
    return [call("multiply", a=left, b=right), call("add", a=left * right, b=rest), last]


def says(prompt):
    return turns_of(prompt)[prompt.count("<|im_start|>assistant") - 1]


def learned(tokenizer, masks):
    from tokenizers import Tokenizer

    ids = [token for token in masks if token != IGNORE_INDEX]
    return Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(ids, skip_special_tokens=False)


PROGRAMS = {
    "openai-agents, Responses": ("agents", "openai_agents_env", "OpenAIAgentsEnv", ()),
    "openai-agents, Responses, streamed": ("agents", "openai_agents_env", "OpenAIAgentsEnv", ("stream", "true")),
    "openai-agents, chat": ("agents", "openai_agents_env", "OpenAIAgentsEnv", ("api", "chat")),
    "openai-agents, chat, streamed": (
        "agents",
        "openai_agents_env",
        "OpenAIAgentsEnv",
        ("api", "chat", "stream", "true"),
    ),
    "langgraph, chat": ("langgraph", "langgraph_env", "LangGraphEnv", ()),
    "langgraph, chat, streamed": ("langgraph", "langgraph_env", "LangGraphEnv", ("stream", "true")),
    "langgraph, Responses": ("langgraph", "langgraph_env", "LangGraphEnv", ("api", "responses")),
    "langgraph, Responses, streamed": (
        "langgraph",
        "langgraph_env",
        "LangGraphEnv",
        ("api", "responses", "stream", "true"),
    ),
    "smolagents": ("smolagents", "smolagents_env", "SmolagentsEnv", ()),
}


@pytest.mark.parametrize(("package", "module", "name", "given"), PROGRAMS.values(), ids=PROGRAMS)
def test_an_agent_of_a_library_is_one_row_in_which_each_generated_token_is_learned(
    package, module, name, given, tmp_path
):
    pytest.importorskip(package)
    env_cls = getattr(importlib.import_module(f"atroposlib.environments.agents.{module}"), name)
    pairs = zip(given[::2], given[1::2], strict=True)
    settings = [word for key, value in pairs for word in (f"--env.{key}", value)]
    settings += ["--env.group_size", "2", "--env.ensure_scores_are_not_same", "false"]
    (group,) = roll_out(env_cls, says, tmp_path, settings=settings)
    assert group["scores"] == [1.0, 1.0]
    wanted = "".join(
        f"{text}<|im_end|>"
        for text in turns_of(question(sum_number(0)) + ("final_answer" if package == "smolagents" else ""))
    )
    assert [learned(tmp_path / "tokenizer", masks) for masks in group["masks"]] == [wanted] * 2


STOPPED = {
    name: PROGRAMS[name]
    for name in ("openai-agents, Responses", "openai-agents, chat, streamed", "langgraph, chat", "smolagents")
}


@pytest.mark.parametrize(("package", "module", "name", "given"), STOPPED.values(), ids=STOPPED)
def test_an_agent_of_a_library_that_is_stopped_half_way_continues_with_the_replies_it_had(
    package, module, name, given, tmp_path, monkeypatch
):
    pytest.importorskip(package)
    monkeypatch.setattr("atroposlib.envs.cli.leave_soon", lambda code: None)  # the process is that of the tests
    env_cls = getattr(importlib.import_module(f"atroposlib.environments.agents.{module}"), name)
    flags = ["--env.group_size", "2", "--env.ensure_scores_are_not_same", "false"]
    flags += [word for key, value in zip(given[::2], given[1::2], strict=True) for word in (f"--env.{key}", value)]
    whole = run(env_cls, tmp_path / "whole", flags, says)
    cut = run(env_cls, tmp_path / "cut", flags, says, stop_at=5)
    assert (whole.codes, cut.codes) == ([0], [75, 0])
    assert whole.groups == cut.groups
    assert len(whole.asked) <= len(cut.asked) <= len(whole.asked) + IN_FLIGHT


AGENT = """
import json, os, subprocess, sys, urllib.request
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
messages, calls = [{"role": "user", "content": sys.argv[-1]}], True
while calls:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [BASH]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    reply = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
    messages.append(json.load(reply)["choices"][0]["message"])
    calls = messages[-1].get("tool_calls") or []
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
"""
MINI = ["-m", "openai/any", "--yolo", "--exit-immediately", "-c", "mini.yaml", "-t"]
COMMANDS = {
    "a script": (None, lambda folder: [sys.executable, str(folder / "agent.py")]),
    "mini-swe-agent": (
        "minisweagent",
        lambda _: [
            "env",
            "MSWEA_CONFIGURED=1",
            "MSWEA_COST_TRACKING=ignore_errors",
            sys.executable,
            "-m",
            "minisweagent.run.mini",
            *MINI,
        ],
    ),
}


def command_of(name, folder, *, tasks):
    """Package, flags of the environment, and the turns of the model, for an agent of `COMMANDS`."""
    package, command = COMMANDS[name]
    if package:
        pytest.importorskip(package)
    (folder / "agent.py").write_text(AGENT)
    task = {"check": 'test "$(cat sum.txt)" = 42', "files": {"in.txt": "40 2"}}
    lines = [json.dumps({"prompt": f"Sum up {number}.", **task}) for number in range(tasks)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if package else "true"
    turns = [call("bash", command=line) for line in ("cat in.txt", "echo 42 > sum.txt", submit)]
    turns += [] if package else ["Done."]
    settings = {"command": json.dumps(command(folder)), "tasks": str(folder / "tasks.jsonl")}
    settings["check_in"] = "host"  # also where there is no bubblewrap
    return [word for key, value in settings.items() for word in (f"--env.{key}", value)], turns


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_agent_finds_its_model_by_its_environment_and_is_one_row(name, tmp_path):
    flags, turns = command_of(name, tmp_path, tasks=1)
    flags += ["--env.group_size", "1", "--env.ensure_scores_are_not_same", "false"]
    (group,) = roll_out(
        CommandEnv, lambda prompt: turns[prompt.count("<|im_start|>assistant") - 1], tmp_path, settings=flags
    )
    assert group["scores"] == [1.0]
    (masks,) = group["masks"]
    assert learned(tmp_path / "tokenizer", masks) == "".join(f"{text}<|im_end|>" for text in turns)
    assert "40 2" in json.dumps(group["messages"])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_agent_serves_and_continues_when_it_is_stopped_half_way(name, tmp_path, monkeypatch):
    monkeypatch.setattr("atroposlib.envs.cli.leave_soon", lambda code: None)  # the process is that of the tests
    flags, turns = command_of(name, tmp_path, tasks=2)

    def says(prompt):
        return turns[prompt.count("<|im_start|>assistant") - 1]

    monkeypatch.setattr("atroposlib.environments.check.knowing", lambda env_cls: (env_cls, says))
    findings = list(check(CommandEnv, tmp_path, flags, modes=["serve"]))
    assert [finding.note for finding in findings if finding.what == "serve"] == ["2 groups reached a trainer"]
    flags += ["--env.group_size", "2", "--env.ensure_scores_are_not_same", "false"]
    whole, cut = (
        run(CommandEnv, tmp_path / "whole", flags, says),
        run(CommandEnv, tmp_path / "cut", flags, says, stop_at=5),
    )
    assert (whole.codes, cut.codes) == ([0], [75, 0])
    assert whole.groups == cut.groups
    assert len(whole.asked) <= len(cut.asked) <= len(whole.asked) + IN_FLIGHT


def test_the_environment_of_the_page_on_agents_runs_as_it_is_shown(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = tmp_path / "my-agent"
    program.write_text(f"#!{sys.executable}\n{AGENT}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shown = {"__name__": "page"}
    exec(block, shown)
    (group,) = roll_out(shown["MyEnv"], lambda _: "It is 7.", tmp_path)
    assert set(group["scores"]) == {1.0}
    assert group["messages"][0][0]["content"] == "What is 0 + 7?"


def test_the_settings_of_the_page_on_agents_are_those_of_a_command():
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (shown,) = re.findall(r"^    (env: \{command.*?\})$", page, re.DOTALL | re.MULTILINE)
    settings = yaml.safe_load(shown)["env"]
    assert CommandConfig(**settings).model_dump(include=set(settings)) == settings


def test_the_servers_of_the_page_on_agents_are_those_of_a_gateway():
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (shown,) = re.findall(r"^cat > servers.json <<'EOF'\n(.*?)^EOF$", page, re.DOTALL | re.MULTILINE)
    (server,) = ServersConfig(**json.loads(shown)).server_configs()
    assert (server.model_name, server.server_type) == ("smollm2-135m", "sglang")
