"""`max_num_workers: auto` on engines of known capacity, in simulated time; no machine was measured here."""

import statistics

import pytest
from simulated_engine import H200, Engine, Load, h200_fit, knee, plateau, smooth

from atroposlib.rollouts.concurrency import (
    ConcurrencyLimit,
    GroupTimes,
    RateMeter,
    Search,
    has_room,
    mean_time,
    most_useful,
    relieved,
)

SEEDS = range(10, 13)
SAYS = {"metrics": True, "rates": False}
KNEES = {
    "a knee at 64": (knee(64, 3.0), 64, 64 / 3.0),
    "a knee at 20": (knee(20, 1.0), 20, 20.0),
    "a knee at 150": (knee(150, 2.0), 150, 75.0),
}
CURVES = {  # curve, best rate; shares of it that the second and third minute reach, medians
    "H200 as measured, a cliff at 66": (H200, H200(64), 0.9, 0.9),
    "H200 by a formula, a cliff at 66": (h200_fit, h200_fit(64), 0.9, 0.9),
    "a plateau, then a rise": (plateau, 20.0, 0.95, 0.95),
    "best at 106, 20 groups/s": (smooth(106, 20), 20.0, 0.95, 0.95),
    "best at 106, 60 groups/s": (smooth(106, 60), 60.0, 0.95, 0.95),
    "best at 236, 80 groups/s": (smooth(236, 80), 80.0, 0.95, 0.95),
    "best at 1,000, 300 groups/s": (smooth(1000, 300), 300.0, 0.95, 0.95),
    # A group takes 12 s and more: a minute is too short for that many numbers, as docs/benchmarks.md says.
    "best at 236, 20 groups/s": (smooth(236, 20), 20.0, 0.8, 0.9),
    "best at 106, 8 groups/s": (smooth(106, 8), 8.0, 0.8, 0.8),
}


def shares(engines, best, start, end):
    return statistics.median(engine.given(start, end) / best for engine in engines)


@pytest.mark.parametrize(("curve", "best", "second", "third"), CURVES.values(), ids=CURVES)
def test_the_best_number_is_found_within_a_minute_by_rates_alone(curve, best, second, third):
    engines = [Engine(curve, seed=seed).run(180) for seed in SEEDS]
    assert shares(engines, best, 60, 120) >= second
    assert shares(engines, best, 120, 180) >= third


@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
@pytest.mark.parametrize(("curve", "places", "best"), KNEES.values(), ids=KNEES)
def test_an_engine_with_so_many_places_is_full_within_a_minute_and_with_metrics_its_queue_stays_short(
    curve, places, best, says
):
    engines = [Engine(curve, places=places, says=says, seed=seed).run(180) for seed in SEEDS]
    assert shares(engines, best, 60, 180) >= 0.95
    if says:
        limits = [limit for engine in engines for limit in engine.limits(60, 180)]
        assert sum(limit > 1.3 * places for limit in limits) <= 0.05 * len(limits)


@pytest.mark.parametrize("curve", [H200, plateau], ids=["a cliff", "a rise"])
def test_what_was_found_is_held_for_ten_minutes(curve):
    best = max(curve(n) for n in range(1, 200))
    assert shares([Engine(curve, seed=seed).run(660) for seed in SEEDS], best, 60, 660) >= 0.9


@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("noise", [0.0, 0.6], ids=["rounds of equal groups", "groups of all lengths"])
def test_an_engine_that_loses_half_of_its_places_and_gets_them_back_stays_full(n, noise, says):
    def places(number):
        return lambda engine: setattr(engine, "places", number)

    events = [(120, places(32)), (240, places(64))]
    engine = Engine(lambda n: n / 2.0, places=64, n=n, noise=noise, says=says, seed=10).run(360, events)
    assert engine.given(60, 120) >= 0.95 * 32
    assert engine.given(180, 240) >= 0.95 * 16
    assert engine.given(300, 360) >= 0.95 * 32


def test_an_engine_whose_best_number_falls_is_relieved_before_more_is_tried():
    """Responses that become longer do this: 106 groups at once were best, and now 30 are."""

    def fall(engine):
        engine.curve = smooth(30, 6)

    engines = [Engine(smooth(106, 20), seed=seed).run(300, [(180, fall)]) for seed in range(8)]
    assert statistics.fmean(engine.given(240, 300) / 6 for engine in engines) >= 0.6


@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
def test_groups_of_ten_minutes_fill_the_engine_before_one_has_ended(says):
    engine = Engine(knee(64, 600.0), places=64, says=says).run(300)
    assert engine.given(60, 300) >= 0.95 * 64 / 600
    assert max(engine.limits(60, 300)) <= (80 if says else 256)


def test_a_number_at_which_the_engine_collapses_is_given_up_before_its_groups_end():
    engines = [Engine(lambda n: n / 2 if n <= 66 else 0.7, seed=seed).run(360) for seed in SEEDS]
    assert shares(engines, 33.0, 180, 360) >= 0.9


@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
def test_an_outage_teaches_nothing(says):
    def up(value):
        return lambda engine: setattr(engine, "is_up", value)

    engine = Engine(knee(64, 2.0), places=64, says=says).run(220, [(120, up(False)), (180, up(True))])
    assert len(set(engine.limits(121, 179))) == 1
    assert engine.given(190, 220) >= 0.9 * 32


class Bursts(Engine):
    """SGLang right after a burst: nothing runs, all wait; and a moment later all run."""

    asked = 0

    def load(self):
        self.asked += 1
        here = self.in_flight * self.n
        return Load(0, here) if self.asked % 3 == 0 else Load(here, 0)


def test_a_queue_that_is_there_for_a_moment_only_does_not_bring_the_limit_down():
    assert min(Bursts(knee(100, 2.0), places=100, says=True).run(100).limits(50, 100)) >= 64


class Pausing(Engine):
    """Says between 100 and 110 s that all its requests wait, as for new weights."""

    def load(self):
        return Load(0, self.in_flight * self.n) if 100 <= self.now < 110 else super().load()


def test_an_engine_that_pauses_for_new_weights_keeps_its_limit():
    assert min(Pausing(knee(64, 2.0), places=64, says=True).run(130).limits(100, 130)) >= 0.6 * 64


class FullCache(Engine):
    def load(self):
        return Load(running=250, queued=6, token_usage=0.97, retracted=0)


def test_groups_of_minutes_are_cut_once_for_one_full_cache():
    engine = FullCache(knee(1000, 600.0), says=True)
    engine.decision.limit = 64
    assert engine.run(120).limits(60, 120)[-1] == int(0.8 * 64)


def test_nothing_is_learned_while_something_else_holds_the_rollouts_back():
    decision = ConcurrencyLimit(8, GroupTimes())
    assert {decision.observe(at / 4, 0) for at in range(240)} == {8}


async def test_the_first_number_is_applied_and_a_parked_run_keeps_it():
    applied = []

    def apply(limit):
        applied.append(limit)
        raise KeyboardInterrupt  # ends it

    with pytest.raises(KeyboardInterrupt):
        await ConcurrencyLimit(12, GroupTimes()).follow(lambda: 0, apply)
    assert applied == [12]


def test_retractions_and_a_full_cache_bring_the_limit_down():
    assert relieved(100, 100, [Load(running=100, queued=0, retracted=3)]) == 80
    assert relieved(100, 100, [Load(running=90, queued=5, token_usage=0.99)]) == 80


def test_a_cut_is_not_repeated_before_it_has_taken_effect():
    assert relieved(36, 60, [Load(running=32, queued=28)]) == 36
    assert relieved(36, 36, [Load(running=20, queued=16)]) == 22
    assert relieved(51, 64, [Load(running=60, queued=3, token_usage=0.97)]) == 51
    assert relieved(51, 64, [Load(running=60, queued=0, retracted=2)]) == 51


def test_there_is_room_while_hardly_anything_waits():
    assert has_room([Load(running=100, queued=5)])
    assert not has_room([Load(running=100, queued=6)])
    assert has_room([])


def test_places_and_cache_say_how_many_are_useful():
    assert most_useful(16, 16, [Load(running=64, queued=0, slots=128)]) == 35  # 32 groups, and a tenth that wait
    assert most_useful(16, 16, [Load(running=64, queued=0, token_usage=0.45)]) == 32
    assert most_useful(16, 16, [Load(running=32, queued=32)]) == 16
    assert most_useful(16, 16, []) > 10**6


def test_a_slower_engine_alone_never_lowers_the_number():
    """Whatever is lost, each group in flight delivers the same: then fewer groups are never better."""
    search, now = Search(64), 0.0
    for each in (0.5, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01):
        for _ in range(8):
            now += 30.0
            search.observe(each * search.limit, now, took_s=30.0)
            assert search.best >= 44


def test_groups_that_still_run_count_with_their_age():
    assert mean_time([2.0, 2.0], [1.0] * 5) == (2.0, 0.0)
    mean, longer = mean_time([1.0] * 4, [2.0] * 4)
    assert (mean, longer) == (1.5, 0.5)  # half are longer than 2 s
    assert mean_time([], [3.0] * 2) == (3.0, 1.0)


def test_a_rate_does_not_depend_on_when_rounds_end():
    """Rounds of 16 groups every 2 s are 8 per second, however an interval cuts them."""
    now, found = 0.0, []
    times = GroupTimes(lambda: now)
    meter = RateMeter(16, times, 0.0)
    meter.look(0.0, 16, 8)
    round_ = [times.begin() for _ in range(16)]
    for at in range(1, 160):
        now = at / 10
        if at % 20 == 0:
            for group in round_:
                times.end(group, 2.0)
            round_ = [times.begin() for _ in range(16)]
        found.append(meter.look(now, 16, 8))
    values = [rate for rate in found if rate is not None]
    assert values
    assert values == pytest.approx([8.0] * len(values))


def test_groups_of_an_earlier_limit_do_not_count_however_late_they_end():
    now = 0.0
    times = GroupTimes(lambda: now)
    slow = [times.begin() for _ in range(16)]
    meter = RateMeter(16, times, 0.0)
    assert [meter.look(float(at), 40, 8) for at in range(10)] == [None] * 10
    assert meter.since == 9.0
    assert meter.look(10.0, 16, 8) is None
    for group in slow[:15]:
        times.end(group, 60.0)
    assert meter.look(11.0, 16, 8) is None  # from here on
    for group in [times.begin() for _ in range(40)]:
        times.end(group, 2.0)
    times.end(slow[15], 70.0)
    assert meter.look(12.0, 16, 8) == pytest.approx(8.0)


def test_a_group_that_failed_says_nothing_about_times():
    times = GroupTimes()
    times.end(times.begin(), None)
    assert (times.took, times.ended_ever) == ([], 0)
