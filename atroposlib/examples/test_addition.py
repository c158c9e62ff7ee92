"""Scores of AdditionEnv, a group rolled out against scripted answers, and policies that must not be rewarded."""

import re

import pytest

from atroposlib.environments.check import reward_faults
from atroposlib.examples.addition import AdditionEnv, score
from atroposlib.testing import roll_out

ANSWERS = {
    "exact": ("\\boxed{42}", 1.0),
    "spaces": ("So it is \\boxed{ 42 }.", 1.0),
    "corrected": ("\\boxed{41}, no, \\boxed{42}", 1.0),
    "wrong": ("\\boxed{41}", 0.0),
    "no box": ("42", 0.0),
    "empty": ("", 0.0),
    "no number that anyone needs": ("\\boxed{" + "9" * 5000 + "}", 0.0),
}


@pytest.mark.parametrize(("text", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_the_exact_sum_scores(text, expected):
    assert score(text, 42) == expected


def test_right_and_wrong_answers_of_a_group_are_told_apart(tmp_path):
    def answer(prompt):
        left, right = map(int, re.findall(r"(\d+) \+ (\d+)", prompt)[0])
        return [f"\\boxed{{{left + right}}}", "I do not know."]

    (group,) = roll_out(AdditionEnv, answer, tmp_path)
    assert group["scores"] == [1.0, 0.0] * 4
    assert [turn["role"] for turn in group["messages"][0]] == ["user", "assistant"]


def test_junk_nothing_the_question_a_constant_and_an_unfinished_thought_do_not_score_and_gold_does(tmp_path):
    assert reward_faults(AdditionEnv, tmp_path) == []
