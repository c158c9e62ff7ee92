"""The judge's grade, and a group in which one grade cannot be read."""

import pytest

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
        return next(grades) if "Rate this haiku" in prompt else "An old silent pond"

    (group,) = roll_out(HaikuEnv, answer, tmp_path)
    assert sorted(group["scores"]) == pytest.approx([2 / 9, 6 / 9, 1.0])
    assert [each["failure"] for each in group["unscored"]] == ["verifier"]
