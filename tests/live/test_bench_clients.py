"""What the benches against a live engine count, on times that are known."""

import pytest

from benchmarks.bench_clients import Spans, both


def steady(start: float, end: float, *, slots: int, seconds: float, tokens: int) -> list[tuple[float, float, int]]:
    """Each slot does one group after the other."""
    rounds = int((end - start) / seconds)
    return [(start + n * seconds, start + (n + 1) * seconds, tokens) for n in range(rounds) for _ in range(slots)]


def test_tokens_count_evenly_over_their_group_and_only_within_the_window():
    spans = Spans([[(0.0, 4.0, 400), (2.0, 6.0, 400)]])
    assert spans.rate((0.0, 2.0)) == 100
    assert spans.rate((3.0, 5.0)) == pytest.approx((100 + 200) / 2)
    assert spans.busy((0.0, 4.0)) == 1.5


def test_work_is_handed_out_until_a_client_begins_its_last_group():
    one = steady(0.0, 10.0, slots=2, seconds=1.0, tokens=16)
    other = steady(3.0, 9.0, slots=2, seconds=1.0, tokens=16)
    spans = Spans([one, other])
    assert spans.handing_out() == (3.0, 8.0)
    assert spans.rate((3.0, 8.0)) == 4 * 16
    assert spans.busy((3.0, 8.0)) == 4


def test_groups_that_began_while_one_side_was_alone_do_not_count():
    """Alone the bare client is twice as fast; next to it both are equal, and that is what is found."""
    alone = steady(0.0, 3.0, slots=4, seconds=1.0, tokens=100)
    across = [(3.0, 5.0, 100)] * 4  # half of its tokens in the first half second, when the other had not begun
    bare = Spans([alone + across + steady(5.0, 25.0, slots=4, seconds=2.0, tokens=100)])
    ours = Spans([steady(3.5, 23.5, slots=4, seconds=2.0, tokens=100)])
    window = both(ours, bare)
    assert window == (5.0, 21.5)
    assert ours.rate(window) == bare.rate(window) == 200
