"""Environments of other frameworks, with scripted replies; a framework that is not installed skips its tests."""

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import FakeServer, FakeTokenizer

from atroposlib.environments.adapters.episode import EpisodeEnv, Step
from atroposlib.environments.adapters.gymnasium_env import GymnasiumEnv, GymnasiumEpisode
from atroposlib.environments.adapters.skyrl_gym_env import SkyRLEnv
from atroposlib.environments.adapters.textarena_env import Game, TextArenaEnv
from atroposlib.environments.check import check
from atroposlib.envs.base import ServerBaseline
from atroposlib.envs.cli import main as run_environment
from atroposlib.errors import ConfigError, EnvironmentFault
from atroposlib.launch.config import load_config
from atroposlib.testing import ScriptedEngine, write_tokenizer
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


@pytest.mark.parametrize(
    ("start", "listed", "replies", "refused", "actions"),
    [
        (1, "1 to 3: 1 = a, 2 = b, 3 = c.", ["0", "1", "3", "4", "2-3"], [1, 0, 0, 1, 0], [1, 3, 3]),
        (-1, "-1 to 1: -1 = a, 0 = b, 1 = c.", ["-1", "So 1", "-2", "2"], [0, 0, 1, 1], [-1, 1]),
    ],
)
async def test_actions_of_gymnasium_have_the_numbers_that_its_space_has(start, listed, replies, refused, actions):
    taken = []

    class Counted(SimpleNamespace):
        def reset(self, seed):
            return 0, {}

        def step(self, action):
            taken.append(action)
            return 0, 1.0, False, False, {}

    env = Counted(action_space=SimpleNamespace(n=3, start=start), render_mode=None)
    episode = GymnasiumEpisode(env, 0, "a, b, c")
    (asked,) = episode.begin()
    assert listed in asked["content"]
    assert ["That is no action" in episode.step(reply).observation for reply in replies] == refused
    assert (taken, episode.score()) == (actions, len(actions))


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


MOVES = {0: ["[0]", "[1]", "[2]"], 1: ["[3]", "[4]"]}
"""Of a game of tic-tac-toe that player 0 wins."""


def player_of(prompt):
    return int(re.search(r"You are Player (\d)", prompt)[1])


def moves(prompt):
    return MOVES[player_of(prompt)][prompt.count("<|im_start|>assistant") - 1]


async def test_a_policy_that_plays_itself_gives_a_group_for_each_side():
    pytest.importorskip("textarena")
    env = make(TextArenaEnv, moves, id="TicTacToe-v0", players=2, group_size=2)
    await env.setup()
    groups, _ = await env.collect_trajectories(await env.get_item(0))
    assert [group["scores"] for group in groups] == [[1.0, 1.0], [-1.0, -1.0]]
    for group, said in zip(groups, MOVES.values(), strict=True):
        assert [learned({"masks": row}) for row in group["masks"]] == ["".join(f"{x}<|im_end|>" for x in said)] * 2
    last = max((prompt for prompt in prompts(env) if player_of(prompt) == 1), key=len)
    assert last.count("You are Player") == 1
    assert last.count("[1]") - last.count("'[1]'") >= 1  # what the other one did


@pytest.mark.parametrize(("number", "score"), [(0, 1.0), (1, -1.0)])
async def test_a_fixed_engine_plays_the_other_side_and_is_no_part_of_the_row(number, score):
    pytest.importorskip("textarena")
    env = make(TextArenaEnv, moves, id="TicTacToe-v0", players=2, group_size=2, opponent={"base_url": "http://x/v1"})
    await env.setup()
    env.rivals.servers = [FakeServer(moves)]
    group, _ = await env.collect_trajectories(await env.get_item(number))
    assert group["scores"] == [score] * 2
    assert {player_of(prompt) for prompt in prompts(env)} == {number}
    assert {player_of(request["messages"][0]["content"]) for request in env.rivals.servers[0].requests} == {1 - number}


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
        if self.config.id == "does not close":
            raise RuntimeError("stuck")


async def test_an_episode_that_breaks_is_a_fault_of_the_environment_and_is_closed():
    env = make(Broken, "ok", id="breaks")
    with pytest.raises(EnvironmentFault, match="breaks failed: RuntimeError: lost"):
        await rolled_out(env)
    assert env.closed == 1
    assert (await rolled_out(make(Broken, "ok", id="x", max_turns=2)))["scores"] == 0.5


async def test_a_finished_episode_that_does_not_close_keeps_its_score(caplog):
    assert (await rolled_out(make(Broken, "ok", id="does not close", max_turns=2)))["scores"] == 0.5
    assert "stuck" in caplog.text


@pytest.mark.parametrize("rewards", [None, {}, {1: 1}], ids=str)
def test_a_game_that_is_over_without_a_reward_for_a_player_is_no_score_of_0(rewards):
    game = object.__new__(Game)
    game.rewards, game.is_over = rewards, True
    with pytest.raises(EnvironmentFault, match="gave player 0 no reward"):
        game.score(0)


async def test_a_framework_that_is_missing_is_named():
    class Missing(Broken):
        def prepare(self):
            import no_such_framework  # noqa: F401

    with pytest.raises(ConfigError, match="pip install no-such-framework"):
        await make(Missing, "ok", id="x").setup()


def skyrl_rows(folder):
    spec = {"reward_spec": {"ground_truth": "4"}, "extra_info": {}}
    rows = [{"prompt": [{"role": "user", "content": f"{n}+2?"}], **spec} for n in range(9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"rows": str(folder / "rows.jsonl")}


@dataclass
class Ran:
    codes: list[int]
    asked: list[str]
    groups: list[dict]


def run(env_cls, folder, flags, says, *, stop_at=None):
    """Run `process` to its end, over a signal with request number `stop_at`."""
    asked = []

    def answer(prompt):
        asked.append(prompt)
        if len(asked) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return says(prompt) if callable(says) else says

    rollouts = folder / "rollouts.jsonl"
    flags = [*flags, "--env.total_steps", str(ITEMS), "--env.data_path_to_save_groups", str(rollouts)]
    with ScriptedEngine(answer, write_tokenizer(folder / "tokenizer")) as engine:
        codes = [run_environment(env_cls, ["process", *engine.flags, *flags]) for _ in range(2 if stop_at else 1)]
    lines = [json.loads(line) for line in rollouts.read_text("utf-8").splitlines()]
    kept = [{key: line[key] for key in ("item_key", "part", "tokens", "masks", "scores")} for line in lines]
    return Ran(codes, asked, sorted(kept, key=lambda line: (line["item_key"], line["part"])))


EVERY = {
    "gymnasium": (GymnasiumEnv, {"id": "FrozenLake-v1"}, "1"),
    "textarena": (TextArenaEnv, {"id": "GuessTheNumber-v0"}, "[1]"),
    "textarena against itself": (TextArenaEnv, {"id": "KuhnPoker-v0", "players": 2}, "[check]"),
    "skyrl_gym": (SkyRLEnv, skyrl_rows, "1"),
}
ITEMS, IN_FLIGHT = 2, 4


@pytest.mark.parametrize(("env_cls", "settings", "says"), EVERY.values(), ids=EVERY)
def test_every_adapter_serves_evaluates_processes_and_resumes_in_the_middle(
    tmp_path, monkeypatch, env_cls, settings, says
):
    pytest.importorskip(env_cls.framework.replace("-", "_"))
    settings = {"id": "gsm8k_multi_turn", **settings(tmp_path)} if callable(settings) else settings
    runs_in_all_modes(env_cls, {"max_turns": 3, **settings}, says, tmp_path, monkeypatch)


def runs_in_all_modes(env_cls, settings, says, folder, monkeypatch, *, stop_at=9):
    """Assert: serve, evaluate, and process over a signal with request number `stop_at`, compared with one without."""
    monkeypatch.setattr("atroposlib.envs.cli.leave_soon", lambda code: None)  # the process is that of the tests
    settings = {"items": ITEMS, "eval_items": 2, **settings}
    flags = [text for key, value in settings.items() for text in (f"--env.{key}", as_flag(value))]
    findings = list(check(env_cls, folder, flags, modes=["serve", "evaluate"]))
    assert not [str(finding) for finding in findings if finding.fault]
    assert "eval/items 2" in findings[-2].note
    rest = {"group_size": 2, "ensure_scores_are_not_same": "false", "response_journal": "responses"}
    flags += [text for key, value in rest.items() for text in (f"--env.{key}", str(value))]
    whole = run(env_cls, folder / "whole", flags, says)
    cut = run(env_cls, folder / "cut", flags, says, stop_at=stop_at)
    assert (whole.codes, cut.codes) == ([0], [75, 0])
    assert whole.groups == cut.groups
    assert len(whole.groups) == ITEMS
    assert len(whole.asked) <= len(cut.asked) <= len(whole.asked) + IN_FLIGHT < len(whole.asked) + stop_at


def as_flag(value):
    return value if isinstance(value, str) else json.dumps(value)
