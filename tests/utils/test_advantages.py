import numpy as np
import pytest

from atroposlib.utils.advantages import (
    allclose_to_first,
    compute_discounted_returns,
    compute_grpo_process_supervision_advantages,
    compute_stats,
)

NAN = float("nan")
CLOSE = {
    "equal": ([1.0, 1.0, 1.0], {}, True),
    "within tolerance": ([1.0, 1.0 + 1e-9], {}, True),
    "apart": ([1.0, 1.0, 1.1], {}, False),
    "rows": ([[1, 2], [1, 2]], {}, True),
    "rows apart": ([[1, 2], [1, 3]], {}, False),
    "nan differs from nan": ([NAN, NAN], {}, False),
    "nan may equal nan": ([NAN, NAN], {"equal_nan": True}, True),
}


@pytest.mark.parametrize(("values", "options", "expected"), CLOSE.values(), ids=CLOSE)
def test_closeness_of_all_rows_is_one_real_bool(values, options, expected):
    assert allclose_to_first(values, **options) is expected


def test_closeness_per_row_is_a_vector():
    vector = allclose_to_first([[1, 2], [1, 3], [1, 2]], return_vector=True)
    assert vector.tolist() == [True, False, True]


def test_statistics_of_a_jagged_nest():
    assert compute_stats([1, 2, 3, [4, [5]]]) == {"mean": pytest.approx(3.0), "var": pytest.approx(2.0)}


def test_variance_of_large_close_numbers_does_not_cancel_out():
    assert compute_stats([1e9, 1e9 + 1, 1e9 + 2])["var"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("data", [[], [[], []], ["text"]])
def test_statistics_of_nothing_or_of_text_are_refused(data):
    with pytest.raises(ValueError, match="number"):
        compute_stats(data)


@pytest.mark.parametrize("rewards", [[1, 1, 1], np.array([1, 1, 1]), np.array([1.0, 1.0, 1.0])])
def test_returns_are_discounted_also_for_integers(rewards):
    assert compute_discounted_returns(rewards, 0.9) == pytest.approx([2.71, 1.9, 1.0])


def test_returns_leave_the_rewards_alone():
    rewards = np.array([1.0, 2.0])
    compute_discounted_returns(rewards, 0.5)
    assert rewards.tolist() == [1.0, 2.0]


GAMMAS = {
    "summed to the end": (None, [[-3, -1, 0], [3, 2]]),
    "discounted": (0.5, [[-2.5, -1, 0], [2, 2]]),
}


@pytest.mark.parametrize(("gamma", "expected"), GAMMAS.values(), ids=GAMMAS)
def test_step_rewards_are_normalised_over_the_group(gamma, expected):
    advantages = compute_grpo_process_supervision_advantages([[1, 2, 3], [4, 5]], gamma=gamma)
    std = 2**0.5
    assert [row.tolist() for row in advantages] == [pytest.approx([value / std for value in row]) for row in expected]


def test_a_group_without_differences_is_refused():
    with pytest.raises(ValueError, match="carries no signal"):
        compute_grpo_process_supervision_advantages([[1, 1], [1]])
