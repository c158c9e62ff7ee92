import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletionMessage

from atroposlib.environments.gsm8k_server import GSM8kConfig, GSM8kEnv
from atroposlib.environments.math_server import to_question
from atroposlib.environments.replies import text_of
from atroposlib.environments.rows import load_split
from atroposlib.envs.base import APIServerConfig
from atroposlib.errors import ConfigError, DataError, EnvironmentFault, RequestFault
from tests.fakes import FakeServer, FakeTokenizer

SCRIPT = Path(__file__).parents[2] / "environments" / "gsm8k_server.py"


class LocalEnv(GSM8kEnv):
    def load_tokenizer(self):
        return FakeTokenizer()


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [
        {"question": f"What is {i} + 1?", "answer": f"One more is {i + 1}.\n#### {i + 1:,}"} for i in range(995, 1015)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
async def make_env(problems):
    made = []

    async def make(script, **settings):
        config = GSM8kConfig(group_size=2, use_wandb=False, dataset=str(problems), **settings)
        env = LocalEnv(config, [APIServerConfig(base_url="http://fake/v1")])
        env.server.servers = [FakeServer(script)]
        await env.setup()
        made.append(env)
        return env

    yield make
    for env in made:
        await env.teardown()


def right_answer(prompt):
    number = int(re.findall(r"What is (\d+)", prompt)[-1])
    return f"<think>Easy.</think> It is \\boxed{{{number + 1}}}."


async def test_right_answers_score_one_and_wrong_ones_minus_one(make_env):
    env = await make_env(["", "\\boxed{3}"])
    env.server.servers[0].script = lambda prompt: right_answer(prompt) if env.server.servers[0].answered == 1 else "3"
    item = await env.get_item(0)
    group, _ = await env.collect_trajectories(item)
    assert group["scores"] == [1.0, -1.0]
    assert [messages[-1]["role"] for messages in group["messages"]] == ["assistant"] * 2
    assert [message["role"] for message in group["messages"][0]] == ["system", "user", "assistant"]
    assert len(group["tokens"][0]) == len(group["masks"][0]) == len(group["inference_logprobs"][0])


async def test_an_epoch_covers_every_training_problem_once_and_then_ends(make_env):
    env = await make_env("x", epochs=2)
    first = [await env.get_item(index) for index in range(18)]
    second = [await env.get_item(index) for index in range(18, 36)]
    assert sorted(item["question"] for item in first) == sorted(item["question"] for item in second)
    assert len({item["question"] for item in first}) == 18
    assert first != second
    assert await env.get_item(36) is None


async def test_evaluation_is_greedy_on_problems_that_are_not_trained_on(make_env, tmp_path):
    env = await make_env(right_answer, data_dir_to_save_evals=str(tmp_path / "evals"))
    await env.evaluate()
    assert {request["temperature"] for request in env.server.servers[0].requests} == {0.0}
    asked = {request["messages"][-1]["content"] for request in env.server.servers[0].requests}
    assert asked == {"What is 1004 + 1?", "What is 1014 + 1?"}
    assert not asked & {(await env.get_item(index))["question"] for index in range(18)}
    assert json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]["eval/percent_correct"] == 1.0


async def test_a_problem_that_fails_is_left_out_of_an_evaluation_and_counted(make_env, tmp_path):
    env = await make_env(right_answer, data_dir_to_save_evals=str(tmp_path / "evals"))
    env.server.servers[0].faults = [RequestFault("too long")]
    await env.evaluate()
    metrics = json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]
    assert (metrics["eval/percent_correct"], metrics["eval/failed"]) == (1.0, 1)
    env.server.servers[0].faults = [RequestFault("too long")] * 2
    with pytest.raises(EnvironmentFault, match="all 2 problems of the evaluation failed"):
        await env.evaluate()


async def test_process_writes_its_groups_from_a_local_file(make_env, tmp_path):
    env = await make_env(right_answer, total_steps=3, rollouts_dir=str(tmp_path), ensure_scores_are_not_same=False)
    await env.process_manager()
    (shard,) = tmp_path.glob("gsm8k_rollouts_main_*.jsonl")
    assert [json.loads(line)["scores"] for line in shard.read_text().splitlines()] == [[1.0, 1.0]] * 3


FOR_EVER = r"\boxed{(\sin x + \cos x + \tan x + \sqrt{x})^{14}}"


async def test_an_answer_that_takes_for_ever_costs_only_itself_and_does_not_hold_up_the_loop(make_env):
    env = await make_env("x", verifier_timeout_s=0.5)
    item = {"question": "", "gold": "1"}
    beats = []

    async def beat():
        while True:
            await asyncio.sleep(0.01)
            beats.append(1)

    beating = asyncio.create_task(beat())
    verdicts = await env.verdicts([r"\boxed{1}", FOR_EVER, r"\boxed{2}"], item)
    beating.cancel()
    assert [verdict.right for verdict in verdicts] == [True, None, False]
    assert len(beats) > 5


async def test_an_answer_that_nobody_can_judge_costs_its_siblings_nothing(make_env, problems, tmp_path):
    right = r"\sqrt{x}"
    problems.write_text("".join(json.dumps({"question": f"No. {n}?", "answer": right}) + "\n" for n in range(20)))
    answers = iter([f"<think>Hm.</think> {FOR_EVER}", rf"\boxed{{{right}}}"])
    env = await make_env(
        lambda prompt: next(answers),
        total_steps=1,
        rollouts_dir=str(tmp_path),
        ensure_scores_are_not_same=False,
        verifier_timeout_s=1,
    )
    await env.process_manager()
    (shard,) = tmp_path.glob("gsm8k_rollouts_main_*.jsonl")
    record = json.loads(shard.read_text())
    assert (record["scores"], record["group_overrides"], record["finish_reasons"]) == (
        [1.0],
        {"group_size": 1},
        ["stop"],
    )
    (said,) = record["unscored"]
    assert (said["index"], said["failure"], said["finish_reason"]) == (0, "verifier", "stop")
    assert "no result after 1 s" in said["error"]


async def test_a_reply_whose_thought_was_opened_by_the_prompt_has_no_answer_before_it_ends(make_env):
    env = await make_env("x")
    env.opening = "<think>\n"
    cut_off, whole = ChatCompletionMessage(role="assistant", content=r"\boxed{1} or"), r"\boxed{2}</think> \boxed{1}"
    replies = [text_of(cut_off, env.opening), text_of(cut_off.model_copy(update={"content": whole}), env.opening)]
    parsed = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": r"\boxed{1}", "reasoning_content": r"\boxed{2}"}
    )
    verdicts = await env.verdicts([*replies, text_of(parsed, env.opening)], {"question": "", "gold": "1"})
    assert [verdict.right for verdict in verdicts] == [False, True, True]


def test_the_right_answer_follows_the_last_hashes_or_is_the_whole_text():
    assert to_question({"question": "q", "answer": "a #### b\n#### 1,234"}) == {"question": "q", "gold": "1234"}
    assert to_question({"question": "q", "answer": 42}) == {"question": "q", "gold": "42"}
    assert to_question({"question": "q", "answer": "#### (1, 2,345)"})["gold"] == "(1, 2345)"


def test_lines_end_only_where_json_lines_do_and_a_byte_order_mark_is_none_of_the_text(tmp_path):
    line = json.dumps({"question": "one\u2028two\x85three", "answer": "#### 4"}, ensure_ascii=False)
    path = tmp_path / "odd.jsonl"
    path.write_bytes(f"\ufeff{line}\r\n{line}\n".encode())
    assert [found["question"] for found in load_split(str(path), to_question, eval_dataset=str(path))["train"]] == [
        "one\u2028two\x85three"
    ] * 2
    path.write_bytes(line.encode("utf-16"))
    with pytest.raises(DataError, match=r"odd\.jsonl is not UTF-8 text"):
        load_split(str(path), to_question)


BAD_LINES = {
    "not JSON": "{",
    "not an object": "3",
    "no answer": '{"question": "q"}',
    "an empty answer": '{"question": "q", "answer": "#### "}',
    "null for an answer": '{"question": "q", "answer": null}',
    "no question": '{"question": null, "answer": "1"}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_damaged_line_is_refused_by_number(problems, line):
    problems.write_text(problems.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"problems\.jsonl line 21 is no problem"):
        load_split(str(problems), to_question)


def test_too_few_lines_and_missing_files_are_refused(tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text('{"question": "q", "answer": "1"}\n')
    with pytest.raises(DataError, match="1 problems to train on and 0 to evaluate with"):
        load_split(str(few), to_question)
    assert len(load_split(str(few), to_question, eval_dataset=str(few))["test"]) == 1
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_split(str(tmp_path / "none.jsonl"), to_question)


async def test_without_math_verify_nothing_is_generated_that_nobody_could_judge(make_env, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="math-verify"):
        await make_env("x")


def test_a_hub_name_without_the_package_datasets_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"name a \.jsonl or \.parquet file"):
        load_split("openai/gsm8k", to_question)


def test_it_can_be_started_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "process", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "eval_dataset" in done.stdout
