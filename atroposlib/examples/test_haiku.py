"""The judge's grade, a group in which one grade cannot be read, and policies that must not be rewarded."""

import pytest

from atroposlib.environments.check import reward_faults
from atroposlib.errors import VerifierFault
from atroposlib.examples.haiku import HaikuEnv, grade
from atroposlib.testing import roll_out

GRADES = {"lowest": ("1", 0.0), "highest": ("10", 1.0), "in a sentence": ("I say 10/10.", 1.0)}


@pytest.mark.parametrize(("text", "expected"), GRADES.values(), ids=GRADES)
def test_grades_become_scores(text, expected):
    assert grade(text) == expected


@pytest.mark.parametrize("text", ["lovely", "", "0", "11"])
def test_what_is_no_grade_is_no_score(text):
    with pytest.raises(VerifierFault, match="expected a number from 1 to 10"):
        grade(text)


def test_a_grade_that_cannot_be_read_costs_one_response(tmp_path):
    grades = iter(["3", "lovely", "7", "10"])

    def answer(prompt):
        return (
            next(grades)
            if "Rate this haiku" in prompt
            else "An old silent pond\nA frog jumps into the pond\nSplash! Silence again"
        )

    (group,) = roll_out(HaikuEnv, answer, tmp_path)
    assert sorted(group["scores"]) == pytest.approx([2 / 9, 6 / 9, 1.0])
    assert [each["failure"] for each in group["unscored"]] == ["verifier"]


def test_what_is_no_three_lines_scores_nothing_without_a_judge(tmp_path):
    settings = ["--env.ensure_scores_are_not_same", "false"]
    (group,) = roll_out(HaikuEnv, lambda prompt: "10, I say. A haiku.", tmp_path, settings=settings)
    assert group["scores"] == [0.0] * 4


def test_a_haiku_scores_and_junk_nothing_the_question_another_haiku_and_an_unfinished_thought_do_not(tmp_path):
    assert reward_faults(HaikuEnv, tmp_path, problems=8) == []
