import pytest

from atroposlib.environments.countdown_env import Countdown, make_problem, prompt, right_answer
from benchmarks.learning_curve import Scores, score, table

ITEM = Countdown(numbers=[2, 3, 4], target=20, solution="(2 + 3) * 4")

ANSWERS = {
    "right": ("<answer> (2 + 3) * 4 </answer>", "(2+3)*4"),
    "right in another way": ("well <answer>4*(3+2)</answer>", "4*(3+2)"),
    "another value": ("<answer>2 + 3 + 4</answer>", None),
    "a number twice": ("<answer>4 * 4 + 4</answer>", None),
    "a number left out": ("<answer>20</answer>", None),
    "an equation": ("<answer>(2+3)*4 = 20</answer>", None),
    "a call": ("<answer>__import__('os').getpid()</answer>", None),
    "a power that would take for ever": ("<answer>2**3**4</answer>", None),
    "division by zero": ("<answer>3/(2-2)*4</answer>", None),
    "no tags": ("(2+3)*4", None),
}


@pytest.mark.parametrize(("text", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_right_answer(text, expected):
    assert right_answer(text, ITEM) == expected


@pytest.mark.parametrize("numbers", [2, 3, 5])
def test_every_made_problem_is_solved_by_its_solution(numbers):
    for seed in range(200):
        item = make_problem(str(seed), numbers, 20)
        assert right_answer(f"<answer>{item['solution']}</answer>", item), item


def test_a_seed_stands_for_one_problem():
    assert make_problem("7", 3, 20) == make_problem("7", 3, 20)


def test_the_prompt_shows_solved_problems_first():
    messages = prompt(ITEM, few_shot=2, largest=20)
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[-1]["content"] == "Use the numbers 2, 3, 4 once each to make 20."


def test_scores_count_right_passed_and_different_answers():
    found = score([["1+2", None, "2+1", "1+2"], [None] * 4])
    assert found == Scores(mean=3 / 8, passed=0.5, distinct=1.0)


def test_the_table_gives_mean_and_spread_over_seeds():
    shown = table(Scores(0.1, 0.2, 0.3), {"grpo": [Scores(0.2, 0.4, 0.5), Scores(0.4, 0.6, 0.5)]})
    assert "| before | - | 0.100 | 0.200 | 0.300 |" in shown
    assert "| grpo | 2 | 0.300 ± 0.100 | 0.500 ± 0.100 | 0.500 ± 0.000 |" in shown
