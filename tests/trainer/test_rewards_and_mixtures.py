import json

import pytest

from atroposlib.errors import ConfigError, DataError
from atroposlib.example_trainer.dataset_env import (
    DatasetEnv,
    DatasetEnvConfig,
    Source,
    answer_tag_reward,
    canonical,
    math_rewards,
    mix,
    split,
)

REWARDS = {
    "3.0 is 3": ("<think>x</think><answer> 3.0 </answer>", "3", 1.0),
    "without thinking": ("<answer>3</answer>", "3", 0.0),
    "braces": ("<think>x</think><answer>{5}</answer>", "5", 1.0),
    "minus zero": ("<think>x</think><answer>-0</answer>", "0", 1.0),
    "text before the thinking": ("Well <think>x</think><answer>3</answer>", "3", 0.0),
    "a number in parentheses": ("<think>x</think><answer>(7)</answer>", "7", 1.0),
    "the first answer counts": ("<think>x</think><answer>1</answer><answer>2</answer>", "2", 0.0),
    "an answer while thinking": ("<think><answer>2</answer></think><answer>3</answer>", "2", 0.0),
    "after one while thinking": ("<think><answer>2</answer></think><answer>3</answer>", "3", 1.0),
    "an answer that is not closed": ("<think>x</think><answer>3", "3", 0.0),
    "only tags": ("<think>" + "</think><answer>" * 20_000, "3", 0.0),
    "another number": ("<think>x</think><answer>4</answer>", "3", 0.0),
    "ten is not one": ("<think>x</think><answer>10</answer>", "1", 0.0),
}


@pytest.mark.parametrize(("text", "gold", "reward"), REWARDS.values(), ids=REWARDS)
def test_answer_tag_reward(text, gold, reward):
    assert answer_tag_reward(text, gold) == reward


def test_an_answer_inside_a_thought_that_never_ends_is_none():
    assert answer_tag_reward(" <think>maybe <answer>3</answer>", "3", require_think=False) == 0.0


def test_thinking_need_not_be_asked_for():
    assert answer_tag_reward("<answer>3</answer>", "3", require_think=False) == 1.0


@pytest.mark.parametrize(("text", "expected"), [("0.0", "0"), ("+3", "3"), ("1,000", "1,000"), ("(a + b)", "(a+b)")])
def test_canonical(text, expected):
    assert canonical(text) == expected


def test_math_reward_compares_values_after_the_thinking():
    replies = ["<think>#### 5</think> #### 7", "<think>#### 7</think> #### 5", "<think>#### 7"]
    assert math_rewards(replies, "7") == [1.0, 0.0, 0.0]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_weight_of_a_quarter_keeps_two_of_ten_rows(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"problem": i, "answer": i} for i in range(10)])
    assert len(mix([Source(id=source, weight=0.25)], seed=0)) == 2


def test_the_same_seed_gives_the_same_rows_in_the_same_order(tmp_path):
    one = write_rows(tmp_path / "a.jsonl", [{"problem": f"a{i}", "answer": i} for i in range(10)])
    two = write_rows(tmp_path / "b.jsonl", [{"problem": f"b{i}", "answer": i} for i in range(10)])
    sources = [Source(id=one, weight=0.5), Source(id=two)]
    assert mix(sources, seed=3) == mix(sources, seed=3)
    assert mix(sources, seed=3) != mix(sources, seed=4)


def test_columns_are_renamed(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"question": "q", "solution": "s", "other": 1}])
    rows = mix([Source(id=source, columns={"problem": "question", "answer": "solution"})], seed=0)
    assert rows == [{"problem": "q", "answer": "s"}]


def test_sources_must_name_the_same_columns(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"q": 1}])
    with pytest.raises(ConfigError, match="different columns"):
        mix([Source(id=source, columns={"problem": "q"}), Source(id=source, columns={"answer": "q"})], seed=0)


def test_a_column_that_is_not_there_is_named(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"q": 1}])
    with pytest.raises(DataError, match="'question' is asked for"):
        mix([Source(id=source, columns={"problem": "question"})], seed=0)


def test_split_gives_every_row_to_one_side():
    rows = [{"problem": i} for i in range(10)]
    train, test = split(rows, 0.2)
    assert (len(train), len(test)) == (8, 2)
    assert train + test == rows[2:] + rows[:2]


async def test_every_epoch_has_each_problem_once_in_an_order_of_its_own():
    env = DatasetEnv.__new__(DatasetEnv)
    rows = [DatasetEnv.to_item({"problem": i, "answer": i}) for i in range(20)]
    env.config, env.problems = DatasetEnvConfig(), {"train": rows, "test": []}
    epochs = [[(await env.get_item(20 * epoch + i))["problem"] for i in range(20)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(str(i) for i in range(20))
    assert epochs[0] != epochs[1]
