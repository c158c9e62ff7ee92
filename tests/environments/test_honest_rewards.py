"""Every verifiable environment, and four scripted policies: see `atroposlib.environments.policies`."""

import json

import pytest

from atroposlib.environments.answer_format_environment.answer_format_environment import AnswerFormatEnv
from atroposlib.environments.countdown_env import CountdownEnv
from atroposlib.environments.graph_coloring_env import GraphColoringEnv
from atroposlib.environments.gsm8k_server import GSM8kEnv
from atroposlib.environments.instruction_following_algorithm_environment import InstructionFollowingEnv
from atroposlib.environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv
from atroposlib.environments.intern_bootcamp.own import OWN_BOOTCAMPS
from atroposlib.environments.intern_bootcamp.set_aside import SET_ASIDE
from atroposlib.environments.letter_counting_environment.letter_counting_environment import LetterCountingEnv
from atroposlib.environments.math_server import MathEnv
from atroposlib.environments.mcqa_thinking_env import MCQAThinkingEnv
from atroposlib.environments.policies import measure
from atroposlib.environments.pydantic_schema_following_environment.pydantic_schema_following_environment import (
    PydanticSchemaFollowingEnv,
)
from atroposlib.environments.reasoning_gym_environment.reasoning_gym_environment import ReasoningGymEnv
from atroposlib.environments.text_reversal_environment import TextReversalEnv
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.reward_fns.math_judge import MathJudge
from atroposlib.example_trainer.dataset_env import DatasetEnv
from atroposlib.example_trainer.mixture import Source
from tests.fakes import FakeServer, FakeTokenizer

SUMS = [
    {"question": f"What is {1000 + n} + {3 * n}?", "problem": f"{1000 + n} + {3 * n}", "answer": str(1000 + 4 * n)}
    for n in range(80)
]
QUESTIONS = [
    {"question": f"Which is {n} doubled?", "choices": [str(3 * n), str(2 * n), str(n + 1), str(n)], "answer": "B"}
    for n in range(5, 85)
]
CASES = {
    "answer format": (AnswerFormatEnv, {}),
    "countdown": (CountdownEnv, {}),
    "graph colouring": (GraphColoringEnv, {}),
    "gsm8k": (GSM8kEnv, {"dataset": SUMS}),
    "instruction following": (InstructionFollowingEnv, {}),
    "letter counting": (LetterCountingEnv, {"levels": list(range(1, 11))}),
    "math": (MathEnv, {"dataset": SUMS, "eval_dataset": None}),
    "multiple choice": (MCQAThinkingEnv, {"dataset": QUESTIONS}),
    "schema following": (PydanticSchemaFollowingEnv, {}),
    "text reversal": (TextReversalEnv, {}),
    "problem sets of the trainer": (DatasetEnv, {"datasets": SUMS}),
    "problem sets without thoughts": (DatasetEnv, {"datasets": SUMS, "require_think": False}),
    "reasoning-gym": (ReasoningGymEnv, {"tasks": ["products"], "levels": [2], "verifier_workers": 1}),
    **{
        f"bootcamp {name}": (InternBootcampEnv, {"task_name": name, "format_bonus": 0, "require_reasoning": False})
        for name in OWN_BOOTCAMPS
        if name not in SET_ASIDE
    },
    "bootcamp with thoughts": (InternBootcampEnv, {"task_name": "capitals", "format_bonus": 0}),
}


@pytest.fixture(scope="module")
def judge():
    """Of all environments here: it imports math-verify once."""
    made = MathJudge(workers=1)
    yield made
    made.close()


@pytest.fixture
async def make_env(tmp_path, judge):
    made = []

    async def make(env_cls, script="x", **settings):
        for key in ("dataset", "datasets"):
            if isinstance(settings.get(key), list):
                path = tmp_path / "rows.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in settings[key]))
                settings[key] = [Source(id=str(path))] if key == "datasets" else str(path)
        local = type(env_cls.__name__, (env_cls,), {"load_tokenizer": lambda self: FakeTokenizer()})
        defaults = env_cls.config_init()[0]
        config = type(defaults)(**{**defaults.model_dump(exclude_unset=True), "use_wandb": False, **settings})
        env = local(config, [APIServerConfig(base_url="http://fake/v1")])
        env.server.servers = [FakeServer(script)]
        made.append(env)
        await env.setup()
        if isinstance(env, MathEnv):
            env.judge = judge
        return env

    yield make
    for env in made:
        if getattr(env, "judge", None) is judge:
            env.judge = None
        await env.teardown()


@pytest.mark.parametrize(("env_cls", "settings"), CASES.values(), ids=CASES)
async def test_only_replies_that_solve_the_problem_score(make_env, env_cls, settings):
    env = await make_env(env_cls, **settings)
    rates = await measure(env, problems=16)
    assert rates.problems == 16
    assert rates.faults(guessing=env.guessing) == []


async def test_a_task_that_rewards_a_constant_is_found(make_env):
    env = await make_env(InternBootcampEnv, task_name="letter_count", require_reasoning=False)
    assert any("the constant reply" in fault for fault in (await measure(env)).faults(guessing=env.guessing))
