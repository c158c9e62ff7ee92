"""Tasksets of verifiers as environments here: scored replies, and their environment run against a rollout's key."""

import sys
from types import ModuleType

import httpx
import pytest
from test_adapters import learned, make, prompts, runs_in_all_modes

from atroposlib.environments.adapters.verifiers_env import VerifiersEnv
from atroposlib.errors import ConfigError

vf = pytest.importorskip("verifiers.v1")


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def is_right(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)


class RuntimeTask(SumTask):
    @vf.reward
    async def needs_a_box(self, runtime) -> float:
        return 1.0


def sums(task_cls):
    class Sums(vf.Taskset[task_cls, vf.TasksetConfig]):
        def load(self):
            for n in range(5):
                data = SumData(prompt=f"{n} + 2?", answer=str(n + 2), system_prompt="Digits only.")
                yield task_cls(data, self.config.task)

    return Sums


class Endless(sums(SumTask)):
    INFINITE = True


class LoopConfig(vf.HarnessConfig):
    pass


class Loop(vf.Harness[LoopConfig]):
    """A program of one call in this process, by verifiers' rule through its interception server."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [m.model_dump() for m in prompt]
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        async with httpx.AsyncClient(base_url=endpoint, timeout=30) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            body = {"model": ctx.model, "messages": messages}
            (await client.post("/chat/completions", json=body, headers=headers)).raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class TwiceConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Twice(vf.Env[TwiceConfig]):
    """Asks whether the player is sure, and rewards a second answer."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Sure?")
        interaction.trace.record_reward("answered_twice", float(interaction.trace.num_turns == 2))


PLUGINS = {
    "sums_set": [sums(SumTask), Loop],
    "sums_twice": [sums(SumTask), Loop, Twice],
    "sums_boxed": [sums(RuntimeTask), Loop],
    "sums_endless": [Endless, Loop],
}


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    for name, classes in PLUGINS.items():
        module = ModuleType(name)
        module.__all__ = [one.__name__ for one in classes]
        vars(module).update({one.__name__: one for one in classes})
        monkeypatch.setitem(sys.modules, name, module)


async def rolled_out(script, **settings):
    env = make(VerifiersEnv, script, **{"group_size": 2, **settings})
    try:
        await env.setup()
        group, _ = await env.collect_trajectories(await env.get_item(1))
        return group, prompts(env)
    finally:
        await env.teardown()


RUNS = {
    "a reply scored": ({"id": "sums_set", "run": "task"}, ["3", "4"], [["3"], ["4"]], [2.0, 0.0]),
    "their agent": ({"id": "sums_set"}, ["3", "4"], [["3"], ["4"]], [2.0, 0.0]),
    "their environment of two turns": ({"id": "sums_twice"}, ["3"], [["3", "3"]] * 2, [3.0, 3.0]),
}


@pytest.mark.parametrize(("settings", "script", "said", "scores"), RUNS.values(), ids=RUNS)
async def test_the_reward_is_that_of_verifiers_and_the_tokens_are_ours(settings, script, said, scores):
    group, asked = await rolled_out(script, **settings)
    rows = [learned({"masks": row}) for row in group["masks"]]
    assert sorted(rows) == sorted("".join(f"{text}<|im_end|>" for text in one) for one in said)
    assert sorted(zip(rows, group["scores"], strict=True)) == sorted(zip(rows, scores, strict=True))
    assert all("Digits only." in prompt and "1 + 2?" in prompt for prompt in asked)


REFUSED = {
    "own environment": ({"id": "sums_twice", "run": "task"}, "has an environment of its own; use env.run: env"),
    "runtime": ({"id": "sums_boxed", "run": "task"}, "rewards that need a runtime"),
    "no end": ({"id": "sums_endless"}, "say with env.items"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
async def test_what_would_be_scored_wrongly_is_refused_at_the_start(settings, message):
    with pytest.raises(ConfigError, match=message):
        await make(VerifiersEnv, "3", **settings).setup()


def test_it_serves_evaluates_processes_and_resumes_in_the_middle(tmp_path, monkeypatch):
    runs_in_all_modes(VerifiersEnv, {"id": "sums_twice"}, "3", tmp_path, monkeypatch, stop_at=6)
