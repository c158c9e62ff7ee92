import itertools

import numpy as np
import pytest

from atroposlib.utils.eval_statistics import (
    Answers,
    answer_metrics,
    bootstrap_interval,
    pass_at_k,
)


def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer():
    answers = [True, True, False, False, False, False]
    draws = list(itertools.combinations(answers, 3))
    assert pass_at_k(6, 2, 3) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


EDGES = {
    "all correct": (4, 4, 1, 1.0),
    "none correct": (4, 0, 4, 0.0),
    "too few wrong ones": (4, 2, 3, 1.0),
    "summed scores": (2, 1.0, 1, 0.5),
}


@pytest.mark.parametrize(("m", "c", "k", "expected"), EDGES.values(), ids=EDGES)
def test_pass_at_k_at_its_edges(m, c, k, expected):
    assert pass_at_k(m, c, k) == expected


@pytest.mark.parametrize(("m", "c", "k"), [(2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(m, c, k):
    with pytest.raises(ValueError, match=f"m={m} c={c} k={k}"):
        pass_at_k(m, c, k)


def test_pass_at_k_of_many_answers_stays_exact():
    assert pass_at_k(10_000, 1, 5000) == pytest.approx(0.5)


def test_the_interval_holds_the_mean_and_narrows_with_more_items():
    rng = np.random.default_rng(1)
    few, many = (bootstrap_interval(rng.integers(0, 2, size=size).tolist()) for size in (20, 2000))
    assert few.low < 0.5 < few.high
    assert many.low < 0.5 < many.high
    assert many.high - many.low < (few.high - few.low) / 5


def test_the_interval_has_the_width_theory_gives():
    values = [0.0, 1.0] * 200
    low, high = bootstrap_interval(values, resamples=4000)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 400**0.5, rel=0.1)


def test_the_same_seed_gives_the_same_interval():
    values = [0.1, 0.5, 0.9]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)


def test_equal_values_give_an_interval_without_width():
    assert bootstrap_interval([0.5] * 7) == (0.5, 0.5)


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="found none"):
        bootstrap_interval([])


def test_different_right_answers_are_counted_as_expected_numbers_and_as_shares_of_those_there_are():
    items = [Answers([1, 1, 1, 0], ["a", "a", "b", None], 4), Answers([0, 0, 0, 0], [None] * 4)]
    metrics = answer_metrics(items)
    assert metrics["mean@4"] == 0.375
    assert [metrics[f"pass@{k}"] for k in (1, 2, 4)] == [0.375, 0.5, 0.5]
    assert [metrics[f"distinct@{k}"] for k in (1, 2, 4)] == pytest.approx([0.375, (5 / 6 + 1 / 2) / 2, 1.0])
    assert [metrics[f"coverage@{k}"] for k in (1, 2, 4)] == pytest.approx([0.75 / 4, (5 / 6 + 1 / 2) / 4, 0.5])
    assert metrics["pass@4_ci_low"] <= metrics["pass@4"] <= metrics["pass@4_ci_high"]


def test_one_answer_an_item_has_no_different_ones():
    metrics = answer_metrics([Answers([1], ["a"], 1), Answers([0], [None], 1)])
    assert [name for name in metrics if "_ci_" not in name] == ["mean@1", "pass@1"]
    with pytest.raises(ValueError, match="found 0 items"):
        answer_metrics([])
