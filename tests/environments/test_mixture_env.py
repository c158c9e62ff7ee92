"""Mixtures of environments: by weight, by difficulty, by recent pass rate."""

import json
import re
from collections import Counter

import pytest

from atroposlib.environments.mixture_env import RARELY, MixtureEnv
from atroposlib.envs.base import APIServerConfig
from atroposlib.errors import ConfigError
from atroposlib.testing import roll_out
from tests.fakes import FakeServer, FakeTokenizer

SOURCES = [
    {"environment": "countdown", "weight": 3, "env": {"few_shot": 0}},
    {"environment": "letter_counting", "levels": [1, 2]},
]


class LocalEnv(MixtureEnv):
    def load_tokenizer(self):
        return FakeTokenizer()


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    monkeypatch.setattr("atroposlib.envs.base.BaseEnv.load_tokenizer", lambda self: FakeTokenizer())


async def make_env(sources=SOURCES, script="x", **settings):
    config = MixtureEnv.env_config_cls(sources=sources, group_size=2, use_wandb=False, **settings)
    env = LocalEnv(config, [APIServerConfig(base_url="http://fake/v1")])
    env.server.servers = [FakeServer(script)]
    await env.setup()
    return env


async def test_items_come_by_weight_and_depend_on_seed_and_index_alone():
    env, again = await make_env(), await make_env()
    items = [await env.get_item(index) for index in range(400)]
    counts = Counter(map(env.item_task, items))
    assert counts.keys() == {"countdown", "letter_counting@1", "letter_counting@2"}
    assert 270 <= counts["countdown"] <= 330
    assert [await again.get_item(index) for index in (399, 3)] == [items[399], items[3]]
    assert {item["item"]["level"] for item in items if item["source"] == "letter_counting@2"} == {2}
    of_one = [item["item"]["numbers"] for item in items if item["source"] == "countdown"]
    first = [(await env.children["countdown"].get_item(index))["numbers"] for index in range(len(of_one))]
    assert of_one == first


async def test_a_group_is_scored_by_its_environment_and_carries_its_source():
    env = await make_env()
    item = {"source": "countdown", "item": {"numbers": [1, 2], "target": 3, "solution": "1 + 2"}}
    env.server.servers[0].script = ["<answer>1 + 2</answer>", "no"]
    group, backlog = await env.collect_trajectories(item)
    assert (group["scores"], group["task"], backlog) == ([1.0, 0.0], "countdown", [])
    assert list(env.recent["countdown"]) == [0.5]


async def test_sources_that_are_too_easy_or_too_hard_are_drawn_rarely_until_that_changes():
    env = await make_env(curriculum=True, window=2)
    env.recent["countdown"].extend([1.0, 1.0])
    env.recent["letter_counting@1"].extend([0.5, 0.5])
    env.recent["letter_counting@2"].append(0.0)  # too few groups to say
    assert env.chances() == {"countdown": 3 * RARELY, "letter_counting@1": 0.5, "letter_counting@2": 0.5}
    assert not env.has_get_item
    counts = Counter([(await env.get_next_item())["source"] for _ in range(300)])
    assert counts["countdown"] < 60 < counts["letter_counting@1"]
    env.recent["countdown"].extend([0.5, 0.5])
    assert env.chances()["countdown"] == 3.0


async def test_statistics_are_those_of_each_source(monkeypatch):
    logged = []

    async def log(self, metrics=None):
        logged.append(metrics)

    env = await make_env()
    monkeypatch.setattr("atroposlib.envs.base.BaseEnv.wandb_log", log)
    env.recent["countdown"].append(0.5)
    await env.wandb_log({"step": 1})
    assert logged[0]["mixture/pass_rate_countdown"] == 0.5
    assert logged[0]["mixture/share_countdown"] == 0.75


async def test_a_source_that_has_ended_has_no_share(monkeypatch):
    logged = {}

    async def log(self, metrics=None):
        logged.update(metrics or {})

    env = await make_env(curriculum=True)
    monkeypatch.setattr("atroposlib.envs.base.BaseEnv.wandb_log", log)
    shares = {"countdown": 0.0, "letter_counting@1": 0.5, "letter_counting@2": 0.5}
    for source in shares:
        env.ended.add(source)
        await env.wandb_log()
        if source == "countdown":
            assert {name: logged[f"mixture/share_{name}"] for name in shares} == shares
    assert {logged[f"mixture/share_{name}"] for name in shares} == {0.0}


REFUSED = {
    "nothing": ([], "env.sources is empty"),
    "the same twice": ([{"environment": "countdown"}] * 2, "'countdown' twice"),
    "an unknown setting": ([{"environment": "countdown", "env": {"numberz": 3}}], "no setting 'numberz'"),
    "levels where there are none": ([{"environment": "mixture", "levels": [1]}], "no setting 'levels'"),
    "an unknown environment": ([{"environment": "countdwon"}], "did you mean 'countdown'"),
}


@pytest.mark.parametrize(("sources", "said"), REFUSED.values(), ids=REFUSED)
async def test_a_mixture_that_cannot_be_is_refused(sources, said):
    with pytest.raises(ConfigError, match=said):
        await make_env(sources)


SAYS = '''"""Asks for a word."""

from atroposlib.environments.single_turn import SingleTurnEnv


class {0}Env(SingleTurnEnv):
    """1 for the word."""

    name = "{0}"

    def make(self, rng, level):
        return {{"question": f"{0} {{rng.random()}}"}}

    def grade(self, said, item):
        return float(said == "right")
'''


def test_a_curriculum_that_resumes_knows_which_sources_are_too_hard(tmp_path, monkeypatch):
    monkeypatch.undo()  # with the tokenizer of the scripted engine
    files = {name: tmp_path / f"{name}.py" for name in ("Fair", "Hard")}
    for name, file in files.items():
        file.write_text(SAYS.format(name))
    sources = json.dumps([{"environment": str(file), "name": name} for name, file in files.items()])
    flags = ["--env.sources", sources, "--env.curriculum", "true", "--env.window", "2", "--env.group_size", "2"]

    def roll(groups):
        answer = lambda prompt: ["right" if "Fair" in prompt else "wrong", "wrong"]  # noqa: E731
        return [line["task"] for line in roll_out(MixtureEnv, answer, tmp_path, groups=groups, settings=flags)]

    first, (kept,) = roll(12), tmp_path.glob("*pass_rates")
    kept.write_text(json.dumps({"Fair": [0.5, 0.5], "Hard": [0.0, 0.0], "of another run": [1.0]}))  # as of its end
    tasks = roll(32)
    assert tasks[:12] == first
    assert tasks[12:].count("Hard") <= 3  # 10 on average where nothing is known


@pytest.mark.parametrize("curriculum", ["false", "true"])
def test_what_is_logged_of_a_source_is_what_the_rollout_files_say_of_it(curriculum, tmp_path, monkeypatch):
    monkeypatch.undo()  # with the tokenizer of the scripted engine
    logged = {}

    async def log(self, metrics=None):
        logged.update(metrics or {})

    monkeypatch.setattr("atroposlib.envs.base.BaseEnv.wandb_log", log)
    weights = {"Easy": 1, "Fair": 2, "Hard": 1}
    for name in weights:
        (tmp_path / f"{name}.py").write_text(SAYS.format(name))
    sources = [
        {"environment": str(tmp_path / f"{name}.py"), "name": name, "weight": weight}
        for name, weight in weights.items()
    ]

    def answer(prompt):
        name, number = re.findall(r"(Easy|Fair|Hard) 0\.(\d)", prompt)[-1]
        rights = {"Easy": 4, "Fair": int(number) % 5, "Hard": 0}[name]
        return ["right"] * rights + ["wrong"] * (4 - rights)

    flags = ["--env.sources", json.dumps(sources), "--env.curriculum", curriculum, "--env.window", "8"]
    flags += ["--env.group_size", "4", "--env.max_num_workers", "1"]
    groups = roll_out(MixtureEnv, answer, tmp_path, groups=60, settings=flags)
    weighed = dict(weights)
    for name, weight in weights.items():
        scores = [group["scores"] for group in groups if group["task"] == name]
        rates = [sum(of_group) / len(of_group) for of_group in scores][-8:]
        assert logged[f"mixture/pass_rate_{name}"] == pytest.approx(sum(rates) / len(rates))
        assert all(f"{name} 0." in group["messages"][0][0]["content"] for group in groups if group["task"] == name)
        if curriculum == "true" and len(rates) == 8 and not 0.2 <= sum(rates) / 8 <= 0.8:
            weighed[name] = weight * RARELY
    for name, weight in weighed.items():
        assert logged[f"mixture/share_{name}"] == pytest.approx(weight / sum(weighed.values()))
