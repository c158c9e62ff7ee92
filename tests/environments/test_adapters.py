"""Environments of other frameworks, with scripted replies; a framework that is not installed skips its tests."""

import json
import re
from pathlib import Path

import pytest
from fakes import FakeServer, FakeTokenizer

from atroposlib.environments.adapters.episode import EpisodeEnv, Step
from atroposlib.environments.adapters.gymnasium_env import GymnasiumEnv
from atroposlib.environments.adapters.skyrl_gym_env import SkyRLEnv
from atroposlib.environments.adapters.textarena_env import TextArenaEnv
from atroposlib.envs.base import ServerBaseline
from atroposlib.errors import ConfigError, EnvironmentFault
from atroposlib.launch.load import load_config
from atroposlib.type_definitions import IGNORE_INDEX


def make(env_cls, script, **settings):
    class Env(env_cls):
        def load_tokenizer(self):
            return FakeTokenizer()

    settings = {"group_size": 1, "use_wandb": False, "ensure_scores_are_not_same": False, **settings}
    env = Env(env_cls.env_config_cls(**settings), ServerBaseline(), False, True)
    env.server.servers = [FakeServer(script)]
    return env


async def rolled_out(env, index=0):
    await env.setup()
    row, _ = await env.collect_trajectory(await env.get_item(index))
    return row


def learned(row):
    return FakeTokenizer().decode([token for token in row["masks"] if token != IGNORE_INDEX])


def prompts(env):
    return [FakeTokenizer().decode(request["input_ids"]) for request in env.server.servers[0].requests]


async def test_frozen_lake_is_walked_to_its_goal_in_one_sequence():
    pytest.importorskip("gymnasium")
    path = ["right: 2", "2", "nowhere", "1", "1", "1", "2"]
    env = make(GymnasiumEnv, path, id="FrozenLake-v1", arguments={"is_slippery": False})
    row = await rolled_out(env)
    assert row["scores"] == 1.0
    assert learned(row) == "".join(f"{action}<|im_end|>" for action in path)
    assert "SFFF\nFHFH" in prompts(env)[0]
    assert "0 = left" in prompts(env)[0]
    assert "That is no action" in prompts(env)[3]


@pytest.mark.parametrize("name", ["Blackjack-v1", "CliffWalking-v1", "Taxi-v4"])
async def test_other_environments_of_gymnasium_begin_and_are_cut_after_the_turns_allowed(name):
    pytest.importorskip("gymnasium")
    row = await rolled_out(make(GymnasiumEnv, "0", id=name, max_turns=3))
    assert 1 <= learned(row).count("<|im_end|>") <= 3


WRONG = {
    "unknown": ("NoSuch-v0", "NoSuch"),
    "continuous": ("Pendulum-v1", "numbered ones only"),
    "none": ("", "env.id is empty"),
}


@pytest.mark.parametrize(("name", "message"), WRONG.values(), ids=WRONG)
async def test_what_gymnasium_cannot_do_is_said_at_the_start(name, message):
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=message):
        await make(GymnasiumEnv, "0", id=name).setup()


async def test_a_game_of_textarena_is_played_to_its_end_and_only_news_are_said():
    pytest.importorskip("textarena")
    env = make(TextArenaEnv, [f"[{n}]" for n in range(1, 21)], id="GuessTheNumber-v0", max_turns=20)
    row = await rolled_out(env, 3)
    turns = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompts(env)[-1], re.DOTALL)
    assert "Guess The Number" in turns[0]
    assert all("Guess The Number" not in turn and "[1]" not in turn for turn in turns[1:])
    assert 0.0 <= row["scores"] <= 1.0
    again = make(TextArenaEnv, "[1]", id="GuessTheNumber-v0", max_turns=1)
    await rolled_out(again, 3)
    assert prompts(again)[0] == prompts(env)[0]


async def test_rows_of_skyrl_gym_are_scored_by_their_environment(tmp_path):
    pytest.importorskip("skyrl_gym")
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "reward_spec": {"method": "rule", "ground_truth": "4"}}
    rows.write_text(json.dumps(row) + "\n")
    env = make(SkyRLEnv, ["so #### 4", "so #### 5"], id="gsm8k", rows=str(rows))
    assert [(await rolled_out(env))["scores"] for _ in range(2)] == [1.0, 0.0]


ADAPTED = {
    "by file": ("textarena", "Sudoku-v0", "textarena_env.py", {"id": "Sudoku-v0", "max_turns": 9}),
    "ours by name": ("reasoning_gym", "sudoku", "reasoning_gym", {"tasks": ["sudoku"], "max_turns": 9}),
}


@pytest.mark.parametrize(("adapter", "name", "file", "env"), ADAPTED.values(), ids=ADAPTED)
def test_a_datagen_file_names_an_adapter_and_an_environment_of_its_framework(tmp_path, adapter, name, file, env):
    path = tmp_path / "run.yaml"
    section = f"environment: {{adapter: {adapter}, id: {name}, env: {{max_turns: 9}}}}"
    path.write_text(
        f"name: t\nrun_dir: {tmp_path}/run\nproblems: 3\nresponses: 2\nengine: {{kind: embedded}}\n{section}\n"
    )
    config = load_config(path).environment
    assert (Path(config.script).name.startswith(file), config.env) == (True, env)
    path.write_text(path.read_text().replace(adapter, "nobody"))
    with pytest.raises(ConfigError, match=r"no adapter 'nobody'; there are .*textarena"):
        load_config(path)


class Broken(EpisodeEnv):
    framework = "no-such-framework"

    def open(self, index):
        self.closed = 0
        return self

    def begin(self):
        return [{"role": "user", "content": "hi"}]

    def step(self, reply):
        if self.config.id == "breaks":
            raise RuntimeError("lost")
        return Step("on", is_over=False)

    def score(self):
        return 0.5

    def close(self):
        self.closed += 1


async def test_an_episode_that_breaks_is_a_fault_of_the_environment_and_is_closed():
    env = make(Broken, "ok", id="breaks")
    with pytest.raises(EnvironmentFault, match="breaks failed: RuntimeError: lost"):
        await rolled_out(env)
    assert env.closed == 1
    assert (await rolled_out(make(Broken, "ok", id="x", max_turns=2)))["scores"] == 0.5


async def test_a_framework_that_is_missing_is_named():
    class Missing(Broken):
        def prepare(self):
            import no_such_framework  # noqa: F401

    with pytest.raises(ConfigError, match="pip install no-such-framework"):
        await make(Missing, "ok", id="x").setup()
