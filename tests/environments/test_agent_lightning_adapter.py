"""Agents of Agent-Lightning's contract in a process of their own: with urllib, and with the real package's client."""

import json
import os

import pytest
from test_adapters import learned, make, runs_in_all_modes

from atroposlib.environments.adapters.agent_lightning_env import AgentLightningEnv
from atroposlib.errors import ConfigError, EnvironmentFault, VerifierFault

AGENT = """
import json, os, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["AGL_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

class Asks:
    reward = {"event_type": "reward", "data": {"value": 0.5, "source": "agent"}}

    def run(self):
        messages = [{"role": "user", "content": os.environ["QUESTION"]}]
        for _ in range(2):
            reply = post(os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", {"model": "m", "messages": messages})
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        post(os.environ["AGL_EVENT_URL"], {"event_type": "note", "data": {"turns": 2}})
        if self.reward:
            post(os.environ["AGL_EVENT_URL"], self.reward)

class Silent(Asks):
    reward = None

class Cheating(Asks):
    def run(self):
        url = os.environ["AGL_OPENAI_BASE_URL"].removesuffix("/v1") + "/" + os.environ["AGL_KEY"] + "/events"
        post(url, self.reward)

class Infinite(Asks):
    reward = {"event_type": "reward", "data": {"value": "NaN"}}
"""
REAL = """
import os
from agentlightning.client import AgentLightningAsyncClient
from agentlightning.schemas import Event, EventCreate, RewardData

class Asks:
    async def run(self):
        async with AgentLightningAsyncClient(key=os.environ["AGL_KEY"], timeout=30) as client:
            messages = [{"role": "user", "content": os.environ["QUESTION"]}]
            for _ in range(2):
                body = {"model": "m", "messages": messages}
                reply = await client.post(os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", json=body)
                said = reply.raise_for_status().json()["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "sure?"}]
            event = EventCreate(event_type="reward", data=RewardData(value=0.25).model_dump())
            posted = await client.post(os.environ["AGL_EVENT_URL"], json=event.model_dump())
            assert Event.model_validate(posted.raise_for_status().json()).data["value"] == 0.25
"""


def settings(folder, agent=AGENT, **more):
    (folder / "asking.py").write_text(agent)
    rows = [{"input": {"question": f"item {n}"}} for n in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"rows": str(folder / "rows.jsonl"), "workdir": str(folder), "env_map": {"QUESTION": "input.question"}}
    return {"id": "asking:Asks", **given, **more}


async def rolled_out(script, **given):
    env = make(AgentLightningEnv, script, **{"group_size": 2, **given})
    try:
        await env.setup()
        group, _ = await env.collect_trajectories(await env.get_item(1))
        return group
    finally:
        await env.teardown()


@pytest.mark.parametrize("name", ["asking:Asks", "asking.Asks"])
async def test_the_reward_event_is_the_score_and_every_token_is_recorded(tmp_path, name):
    group = await rolled_out("yes", **settings(tmp_path, id=name))
    assert group["scores"] == [0.5, 0.5]
    assert [learned({"masks": row}) for row in group["masks"]] == ["yes<|im_end|>yes<|im_end|>"] * 2
    assert group["messages"][0][0]["content"] == "item 1"


FAULTS = {
    "no reward": ("asking:Silent", VerifierFault, "posted no reward event"),
    "no number": ("asking:Infinite", EnvironmentFault, "HTTP Error 400"),
    "a reward by the key of the model": ("asking:Cheating", EnvironmentFault, "HTTP Error 403"),
    "no class": ("asking:Nobody", EnvironmentFault, "has no attribute 'Nobody'"),
}


@pytest.mark.parametrize(("name", "fault", "message"), FAULTS.values(), ids=FAULTS)
async def test_what_gives_no_reward_has_no_score(tmp_path, name, fault, message):
    with pytest.raises(fault, match=message):
        await rolled_out("yes", **settings(tmp_path, id=name), group_size=1)


async def test_a_reward_after_the_last_allowed_call_counts(tmp_path):
    assert (await rolled_out("yes", **settings(tmp_path), max_calls=1))["scores"] == [0.5, 0.5]


async def test_a_variable_that_items_do_not_have_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"an item has no input\.answer"):
        await rolled_out("yes", **settings(tmp_path, env_map={"A": "input.answer"}))


REAL_PYTHON = os.environ.get("ATROPOS_AGENT_LIGHTNING_PYTHON", "")
with_the_real_package = pytest.mark.skipif(
    not REAL_PYTHON, reason="set ATROPOS_AGENT_LIGHTNING_PYTHON to a Python with agentlightning"
)


@with_the_real_package
async def test_the_client_of_the_real_package_reports_its_reward(tmp_path):
    group = await rolled_out("yes", **settings(tmp_path, REAL, python=REAL_PYTHON))
    assert group["scores"] == [0.25, 0.25]


@with_the_real_package
def test_it_serves_evaluates_processes_and_resumes_in_the_middle(tmp_path, monkeypatch):
    given = settings(tmp_path, REAL, python=REAL_PYTHON)
    runs_in_all_modes(AgentLightningEnv, given, "yes", tmp_path, monkeypatch, stop_at=6)
