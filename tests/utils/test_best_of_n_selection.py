import pytest

from atroposlib.utils.best_of_n_selection import select_best_index

CHOICES = {
    "highest primary": ([1, 3, 2], [0, 0, 0], {}, 1),
    "shorter wins a tie": ([3, 3, 2], [9, 4, 0], {}, 1),
    "first wins a full tie": ([3, 3], [4, 4], {}, 0),
    "lowest primary": ([1, 3, 0], [0, 0, 0], {"primary_higher_is_better": False}, 2),
    "larger secondary": ([3, 3], [4, 5], {"secondary_lower_is_better": False}, 1),
}


@pytest.mark.parametrize(("primary", "secondary", "options", "expected"), CHOICES.values(), ids=CHOICES)
def test_the_best_alternative(primary, secondary, options, expected):
    assert select_best_index(primary, secondary, **options) == expected


@pytest.mark.parametrize(("primary", "secondary"), [([], []), ([1], [1, 2])])
def test_lists_that_cannot_be_compared_are_refused(primary, secondary):
    with pytest.raises(ValueError, match="same length"):
        select_best_index(primary, secondary)
