import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from atroposlib.environments.intern_bootcamp.bootcamp_config import InternBootcampEnvConfig
from atroposlib.environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv
from atroposlib.envs.base import APIServerConfig
from atroposlib.errors import EnvironmentFault, VerifierFault
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB
from tests.fakes import FakeServer, FakeTokenizer

FOLDER = Path(__file__).parents[2] / "environments" / "intern_bootcamp"
CHECKOUT = str(Path(__file__).parent / "fake_checkout")


class LocalEnv(InternBootcampEnv):
    def load_tokenizer(self):
        return FakeTokenizer()


def make_env(script, **settings):
    settings = {"group_size": 4, "require_reasoning": False, "use_wandb": False, **settings}
    env = LocalEnv(InternBootcampEnvConfig(**settings), [APIServerConfig(base_url="http://fake/v1")])
    env.server.servers = [FakeServer(script)]
    return env


def sum_of(prompt):
    left, right = re.findall(r"What is (\d+) \+ (\d+)\?", prompt)[-1]
    return f"<answer>{int(left) + int(right)}</answer>"


async def test_a_group_holds_tokens_masks_logprobs_scores_messages_and_its_task():
    answers = iter(["right", "<answer>nonsense</answer>", "no tags", "right"])
    env = make_env(lambda prompt: sum_of(prompt) if (text := next(answers)) == "right" else text, task_name="addition")
    await env.setup()
    item = await env.get_item(3)
    group, backlog = await env.collect_trajectories(item)

    assert backlog == []
    assert group["overrides"] is None
    assert group["task"] == env.item_task(item) == "addition"
    assert group["scores"] == pytest.approx([1.0, -0.3, -0.5, 1.0])
    for tokens, masks, logprobs, messages in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], group["messages"], strict=True
    ):
        assert messages[:-1] == item[0]
        assert messages[-1]["role"] == "assistant"
        reply = len(messages[-1]["content"]) + 1  # one token per byte, and the end
        assert masks == [IGNORE_INDEX] * (len(tokens) - reply) + tokens[-reply:]
        assert logprobs == [PROMPT_LOGPROB] * (len(tokens) - reply) + [-0.5] * reply


async def test_a_response_that_was_cut_off_does_not_count_as_a_mistake_unless_it_is_right():
    answers = iter(["right", "<answer>1", "right", "I think"])
    env = make_env(lambda prompt: sum_of(prompt) if (text := next(answers)) == "right" else text, task_name="addition")
    env.server.servers[0].finish_reason = "length"
    await env.setup()
    group, _ = await env.collect_trajectories(await env.get_item(0))
    assert group["scores"] == [1.0, -0.5, 1.0, -0.5]
    assert group["overrides"] == [{}, {"set_advantage_to_zero": True}, {}, {"set_advantage_to_zero": True}]


class OpeningTokenizer(FakeTokenizer):
    """Ends the prompt as DeepSeek-R1's template does: the thought is open, and the reply only closes it."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, **_):
        text = super().apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)
        text += "<think>\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


async def test_a_thought_that_the_chat_template_opened_counts_as_one():
    env = make_env(
        lambda prompt: f"One by one.</think>\n{sum_of(prompt)}", task_name="addition", require_reasoning=True
    )
    env.config.min_reasoning_length = 0
    env.tokenizer = OpeningTokenizer()
    env.server.servers[0].tokenizer = env.tokenizer
    await env.setup()
    group, _ = await env.collect_trajectories(await env.get_item(0))
    assert group["scores"] == [1.0] * 4
    assert group["messages"][0][-1]["content"].startswith("<think>\nOne by one.</think>\n<answer>")
    assert (await env.evaluate_one(await env.problem("test", 0), asyncio.Semaphore(1)))["grades"] == [1.0]


async def test_requests_carry_the_configured_sampling():
    env = make_env(sum_of, task_name="addition", temperature=0.6, top_p=0.95, max_token_length=24)
    await env.setup()
    await env.collect_trajectories(await env.get_item(0))
    (request,) = env.server.servers[0].requests
    assert request["n"] == 4
    assert request["temperature"] == 0.6
    assert request["top_p"] == 0.95
    assert request["max_tokens"] == 24


async def test_an_item_that_went_through_json_is_rolled_out_just_the_same():
    env = make_env(sum_of, task_name="addition")
    await env.setup()
    group, _ = await env.collect_trajectories(json.loads(json.dumps(await env.get_item(0))))
    assert group["scores"] == [1.0] * 4


async def test_concurrent_items_are_judged_each_by_its_own_task():
    env = make_env(sum_of, task_weights={"addition": 1, "capitals": 1})
    env.server.servers[0].script = lambda prompt: sum_of(prompt) if "What is" in prompt else "<answer>X</answer>"
    await env.setup()
    items = [await env.get_item(index) for index in range(10)]
    groups = [(await env.collect_trajectories(item))[0] for item in reversed(items)]
    scores = {group["task"]: group["scores"] for group in groups}
    assert scores == {"addition": [1.0] * 4, "capitals": [pytest.approx(-0.3)] * 4}


async def test_a_verifier_that_dies_fails_the_rollout_and_gives_no_score():
    env = make_env("anything", task_name="Exitswhilejudgingbootcamp", internbootcamp_path=CHECKOUT)
    await env.setup()
    group, _ = await env.collect_trajectories(await env.get_item(0))
    with pytest.raises(VerifierFault, match="exit code 3"):
        await env.handle_send_to_api(group)
    await env.wandb_log({})
    await env.problems.close()


async def test_a_generator_that_fails_fails_the_rollout_of_its_own_task():
    env = make_env("anything", task_name="Raisesonimportbootcamp", internbootcamp_path=CHECKOUT)
    await env.setup()
    item = await env.get_item(0)
    assert env.item_task(item) == "Raisesonimportbootcamp"
    with pytest.raises(EnvironmentFault, match="a_package_that_nobody_has"):
        await env.collect_trajectories(item)
    await env.problems.close()


async def test_process_writes_all_groups_although_some_tasks_of_the_mixture_are_broken(tmp_path):
    env = make_env(
        lambda prompt: sum_of(prompt) if "What is" in prompt else "anything",
        task_weights={"addition": 1, "Raisesonimportbootcamp": 1, "Exitswhilejudgingbootcamp": 1},
        internbootcamp_path=CHECKOUT,
        task_failure_limit=2,
        max_num_workers=1,
        total_steps=12,
        ensure_scores_are_not_same=False,
        rollouts_dir=str(tmp_path),
    )
    await env.process_manager()

    (shard,) = tmp_path.glob("intern_bootcamp_rollouts_main_*.jsonl")
    records = [json.loads(line) for line in shard.read_text().splitlines()]
    assert [record["task"] for record in records] == ["addition"] * 12
    assert len({record["item_key"] for record in records}) == 12
    progress = json.loads((tmp_path / "intern_bootcamp_progress_main.json").read_text())
    assert progress["state"] == "done"
    assert progress["tasks"]["addition"]["responses"] == 48
    assert "a_package_that_nobody_has" in progress["tasks"]["Raisesonimportbootcamp"]["set_aside"]
    assert "exit code 3" in progress["tasks"]["Exitswhilejudgingbootcamp"]["set_aside"]
    assert progress["failures"] == {"environment": 2, "verifier": 2}


async def test_evaluation_is_greedy_and_writes_its_metrics(tmp_path):
    env = make_env(sum_of, task_name="addition", eval_problems=3, data_dir_to_save_evals=str(tmp_path))
    await env.setup()
    await env.evaluate()
    assert {request["temperature"] for request in env.server.servers[0].requests} == {0.0}
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    found = metrics["results"]["all"]
    assert [found[f"eval/{name}"] for name in ("percent_correct", "mean@1", "pass@1_ci_low", "failed")] == [1, 1, 1, 0]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 3


async def test_problems_that_fail_are_left_out_of_an_evaluation_and_counted(tmp_path):
    env = make_env(
        lambda prompt: sum_of(prompt) if "What is" in prompt else "anything",
        task_weights={"addition": 1, "Exitswhilejudgingbootcamp": 1},
        internbootcamp_path=CHECKOUT,
        eval_problems=6,
        data_dir_to_save_evals=str(tmp_path),
    )
    await env.setup()
    await env.evaluate()
    env.sandbox.close()
    tasks = [(await env.problems.problem(index, "eval"))[1]["task_name"] for index in range(6)]
    env.sandbox.close()
    metrics = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    assert 0 < tasks.count("addition") < 6
    assert metrics["eval/percent_correct"] == 1.0
    assert metrics["eval/failed"] == tasks.count("Exitswhilejudgingbootcamp")


async def test_metrics_count_each_task_apart_and_start_again_after_a_log(monkeypatch):
    logged = []

    async def log(self, metrics=None):
        logged.append(metrics)

    monkeypatch.setattr("atroposlib.envs.base.BaseEnv.wandb_log", log)
    env = make_env("x", task_name="addition")
    await env.setup()
    env.count("addition", [1.0, 0.2])
    env.count("capitals", [1.0, 1.0])
    await env.wandb_log({"step": 1})
    await env.wandb_log()
    assert logged == [
        {
            "step": 1,
            "train/percent_correct": 0.75,
            "train/percent_correct_addition": 0.5,
            "train/percent_correct_capitals": 1.0,
        },
        {},
    ]


@pytest.mark.parametrize("name", ["config_serve.yaml", "config_process.yaml"])
def test_the_shipped_settings_are_valid(name):
    settings = yaml.safe_load((FOLDER / name).read_text())
    assert settings.keys() <= {"env", "openai", "slurm", "testing"}
    assert settings["env"].keys() <= InternBootcampEnvConfig.model_fields.keys()
    assert InternBootcampEnvConfig.model_validate(settings["env"]).task_name == "RandomTask"
    assert settings["openai"][0].keys() <= APIServerConfig.model_fields.keys()


ENTRY_POINTS = {
    "the environment": [str(FOLDER / "intern_bootcamp_env.py")],
    "upstream's script": [str(FOLDER / "run_intern_bootcamp.py")],
    "the package": ["-m", "atroposlib.environments.intern_bootcamp"],
}


@pytest.mark.parametrize("command", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_it_can_be_started_from_any_folder(command, tmp_path):
    done = subprocess.run(
        [sys.executable, *command, "process", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "task_weights" in done.stdout
