import pytest

from atroposlib.utils.metrics import get_std_min_max_avg


def test_the_four_statistics_land_under_suffixed_names_beside_what_was_there():
    metrics = {"other": 1.0}
    returned = get_std_min_max_avg("length", [1, 3, 5, 7], metrics)
    assert returned is metrics
    assert metrics == {
        "other": 1.0,
        "length_mean": 4.0,
        "length_std": pytest.approx(5**0.5),
        "length_max": 7.0,
        "length_min": 1.0,
    }


def test_an_empty_list_is_refused_by_name():
    with pytest.raises(ValueError, match="length has no values"):
        get_std_min_max_avg("length", [], {})
