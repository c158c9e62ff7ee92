import random

import pytest

from atroposlib.environments.intern_bootcamp.bootcamp import Grading, extract_answer, grade, tagged
from atroposlib.environments.intern_bootcamp.own import OWN_BOOTCAMPS, Addition, Capitals, LargerOfTwo, Sorting
from atroposlib.environments.intern_bootcamp.rewards import reward

LENIENT = Grading(format_score=0.2, short_penalty=False, short_threshold=0, format_penalty=False)

CASES = {
    "addition": ("addition", {"left": 7, "right": 8}, "What is 7 + 8?", "15"),
    "larger of two": ("larger_of_two", {"left": 19, "right": 91}, "Which number is larger, 19 or 91?", "91"),
    "first letter": ("first_letter", {"word": "bread"}, 'What is the first letter of the word "bread"?', "b"),
    "capitals": ("capitals", {"word": "frog"}, 'Write the word "frog" in capital letters.', "FROG"),
    "letter count": ("letter_count", {"word": "tiger"}, 'How many letters does the word "tiger" have?', "5"),
    "sorting": ("sorting", {"numbers": [7, 2, 9]}, "Sort these numbers: 7, 2, 9", "2, 7, 9"),
}


@pytest.mark.parametrize(("name", "identity", "prompt", "solution"), CASES.values(), ids=CASES)
def test_each_bootcamp_asks_its_question_and_knows_the_answer(name, identity, prompt, solution):
    bootcamp = OWN_BOOTCAMPS[name]()
    assert bootcamp.prompt_func(identity) == prompt
    assert bootcamp.solution(identity) == solution


@pytest.mark.parametrize("name", OWN_BOOTCAMPS)
def test_the_right_answer_scores_one_another_one_the_format_score_and_none_zero(name):
    bootcamp = OWN_BOOTCAMPS[name](rng=random.Random(3))
    identity = bootcamp.case_generator()
    assert bootcamp.verify_score(bootcamp.demonstration(identity), identity, **LENIENT) == 1.0
    assert bootcamp.verify_score(tagged("nonsense"), identity, **LENIENT) == 0.2
    assert bootcamp.verify_score(bootcamp.solution(identity), identity, **LENIENT) == 0.0


@pytest.mark.parametrize("name", OWN_BOOTCAMPS)
def test_the_same_generator_state_gives_the_same_problems(name):
    first, second = (OWN_BOOTCAMPS[name](rng=random.Random(5)) for _ in range(2))
    assert [first.case_generator() for _ in range(20)] == [second.case_generator() for _ in range(20)]


def test_parameters_set_the_size_of_a_problem():
    rng = random.Random(0)
    assert max(Addition(largest=999, rng=rng).case_generator()["left"] for _ in range(50)) > 99
    assert min(LargerOfTwo(digits=3, rng=rng).case_generator()["left"] for _ in range(50)) > 99
    assert len(Sorting(count=5, rng=rng).case_generator()["numbers"]) == 5
    assert max(len(word) for word in Capitals(longest=5).words) == 5


ANSWERS = {
    "none": ("15", None),
    "the last one counts": ("<answer>1</answer> no, <answer> 15\n</answer>", "15"),
    "not closed": ("<answer>15", None),
    "a stray end behind it": ("<answer>1</answer> or </answer>", "1"),
    "opened twice": ("<answer>1 <answer>2</answer>", "1 <answer>2"),
    "opened ever again, as by a model in a loop": ("<answer>" * 200_000, None),
    "over several lines": ("<answer>1,\n2</answer>", "1,\n2"),
}


@pytest.mark.parametrize(("output", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_extract_answer(output, answer):
    assert extract_answer(output) == answer


THOUGHTS = {
    "a thought, then the answer": ("<think>7 and 8</think><answer>15</answer>", 1.0),
    "no thought": ("<answer>15</answer>", 0.0),
    "two thoughts": ("<think>a</think><think>b</think><answer>15</answer>", 0.0),
    "nothing after the thought": ("<think><answer>15</answer></think>", 0.0),
    "something before it": ("Hm. <think>a</think><answer>15</answer>", 0.0),
}


@pytest.mark.parametrize(("output", "score"), THOUGHTS.values(), ids=THOUGHTS)
def test_a_format_penalty_demands_exactly_one_thought_before_the_answer(output, score):
    grading = Grading(format_score=0.2, short_penalty=False, short_threshold=0, format_penalty=True)
    assert grade(output, lambda answer: 1.0, grading) == score


def test_a_short_output_keeps_only_a_part_of_its_score():
    grading = Grading(format_score=0.0, short_penalty=True, short_threshold=100, format_penalty=False)
    output = tagged("15").ljust(50, ".")
    assert grade(output, lambda answer: 1.0, grading) == 0.5
    assert grade(output.ljust(100, "."), lambda answer: 1.0, grading) == 1.0


REWARDS = {
    "right": (1.0, 1.0),
    "more than right": (1.5, 1.0),
    "partly": (0.2, -0.3),
    "wrong": (0.0, -0.5),
    "worse than wrong": (-1.0, -0.5),
}


@pytest.mark.parametrize(("verdict", "score"), REWARDS.values(), ids=REWARDS)
def test_reward(verdict, score):
    assert reward(verdict, correct_reward=1.0, incorrect_reward=-0.5) == pytest.approx(score)
