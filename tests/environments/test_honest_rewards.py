"""Rewards that the check of the catalogue does not try: see `atroposlib.environments.policies`."""

import re

import pytest

from atroposlib.environments.answer_format_environment.answer_format_environment import AnswerFormatEnv
from atroposlib.environments.countdown_env import CountdownEnv
from atroposlib.environments.graph_coloring_env import GraphColoringEnv
from atroposlib.environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv
from atroposlib.environments.intern_bootcamp.own import OWN_BOOTCAMPS
from atroposlib.environments.intern_bootcamp.set_aside import SET_ASIDE
from atroposlib.environments.letter_counting_environment.letter_counting_environment import LetterCountingEnv
from atroposlib.environments.policies import measure
from atroposlib.environments.pydantic_schema_following_environment.pydantic_schema_following_environment import (
    PydanticSchemaFollowingEnv,
)
from atroposlib.environments.rows import write_rows
from atroposlib.envs.base import APIServerConfig
from atroposlib.example_trainer.dataset_env import DatasetEnv, Source
from tests.fakes import FakeServer, FakeTokenizer

CASES = {
    "all levels of letter counting": (LetterCountingEnv, {"levels": list(range(1, 11))}),
    "problem sets without thoughts": (DatasetEnv, {"require_think": False}),
    "bootcamp with thoughts": (InternBootcampEnv, {"task_name": "capitals", "format_bonus": 0}),
    **{
        f"bootcamp {name}": (InternBootcampEnv, {"task_name": name, "format_bonus": 0, "require_reasoning": False})
        for name in OWN_BOOTCAMPS
        if name not in SET_ASIDE
    },
}


@pytest.fixture
async def make_env(tmp_path):
    made = []

    async def make(env_cls, script="x", **settings):
        if env_cls is DatasetEnv:
            settings["datasets"] = [Source(id=write_rows(tmp_path / "rows.jsonl", env_cls.sample_rows()))]
        local = type(env_cls.__name__, (env_cls,), {"load_tokenizer": lambda self: FakeTokenizer()})
        defaults = env_cls.config_init()[0]
        config = type(defaults)(**{**defaults.model_dump(exclude_unset=True), "use_wandb": False, **settings})
        env = local(config, [APIServerConfig(base_url="http://fake/v1")])
        env.server.servers = [FakeServer(script)]
        made.append(env)
        await env.setup()
        return env

    yield make
    for env in made:
        await env.teardown()


@pytest.mark.parametrize(("env_cls", "settings"), CASES.values(), ids=CASES)
async def test_only_replies_that_solve_the_problem_score(make_env, env_cls, settings):
    env = await make_env(env_cls, **settings)
    rates = await measure(env, problems=16)
    assert rates.problems == 16
    assert rates.faults(guessing=env.guessing) == []


def first_key(gold):
    return re.search(r'"(\w+)":', gold)[1]


TWICE = {  # what says two things, where the second is right
    "a count": (LetterCountingEnv, {}, lambda gold: gold.replace("{", f'{{"{first_key(gold)}": 99, ', 1)),
    "a count by a capital": (
        LetterCountingEnv,
        {},
        lambda gold: gold.replace("{", f'{{"{first_key(gold).upper()}": 9, '),
    ),
    "a colour": (GraphColoringEnv, {}, lambda gold: gold.replace("{", '{"1": "red", ')),
    "a colour by a space": (GraphColoringEnv, {}, lambda gold: gold.replace("{", '{"1 ": "red", ')),
    **{
        f"an answer in {form}": (AnswerFormatEnv, {"supported_formats": [form]}, change)
        for form, change in {
            "JSON": lambda gold: gold.replace("{", '{"answer": "7", '),
            "YAML": lambda gold: f"answer: 7\n{gold}",
            "TOML": lambda gold: f'answer = "7"\n{gold}',
            "XML": lambda gold: f"<answer>7</answer>{gold}",
            "NESTED_RESPONSE_ANSWER": lambda gold: gold.replace("<answer>", "<answer>7</answer><answer>"),
            "LATEX_BOXED": lambda gold: f"\\boxed{{7}} or {gold}",
        }.items()
    },
    **{
        f"a field in {language}": (
            PydanticSchemaFollowingEnv,
            {"allowed_structured_formats": [language], "allowed_container_formats": ["none"]},
            change,
        )
        for language, change in {
            "json": lambda gold: gold.replace("{", f'{{"{first_key(gold)}": 7, '),
            "yaml": lambda gold: f"{gold.partition(':')[0]}: 7\n{gold}",
        }.items()
    },
}


@pytest.mark.parametrize(("env_cls", "settings", "change"), TWICE.values(), ids=TWICE)
async def test_a_reply_that_says_two_things_is_wrong(make_env, env_cls, settings, change):
    env = await make_env(env_cls, **settings)
    for number in range(4):
        item = await env.problem("train", number)
        gold = env.gold(item)
        assert await env.grades([gold, change(gold)], item) == [1.0, 0.0]


@pytest.mark.parametrize("fences", [("\n```json\n", "\n```\n"), ("```json ", "```"), ("```json\r\n", "\r\n```")])
@pytest.mark.parametrize("env_cls", [GraphColoringEnv, LetterCountingEnv])
async def test_an_answer_in_a_code_fence_is_right(make_env, env_cls, fences):
    env = await make_env(env_cls)
    item = await env.problem("train", 0)
    fenced = env.gold(item).replace("<answer>", "<answer>" + fences[0]).replace("</answer>", fences[1] + "</answer>")
    assert await env.grades([fenced], item) == [1.0]


UNSHOWN = {
    "countdown": (CountdownEnv, {"few_shot": 0}, "<answer>"),
    "bootcamp": (InternBootcampEnv, {"task_name": "capitals"}, "<answer>"),
    "problem sets": (DatasetEnv, {}, "<answer>"),
    "problem sets with thoughts": (DatasetEnv, {}, "<think>"),
    "problem sets in mathematics": (DatasetEnv, {"reward": "math"}, "\\boxed{}"),
}


@pytest.mark.parametrize(("env_cls", "settings", "form"), UNSHOWN.values(), ids=UNSHOWN)
async def test_without_solved_problems_the_prompt_says_in_which_form_an_answer_is_looked_for(
    make_env, env_cls, settings, form
):
    env = await make_env(env_cls, **settings)
    messages = await env.messages(await env.problem("train", 0))
    assert form in "\n".join(message["content"] for message in messages)


async def test_a_task_that_rewards_a_constant_is_found(make_env):
    env = await make_env(InternBootcampEnv, task_name="letter_count", require_reasoning=False)
    assert any("the constant reply" in fault for fault in (await measure(env)).faults(guessing=env.guessing))
