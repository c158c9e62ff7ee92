"""`max_num_workers: auto` on engines of known capacity, in simulated time."""

import asyncio
import itertools
import math
import random
import selectors
import statistics
from collections import deque
from dataclasses import dataclass, field

import pytest

from atroposlib.rollouts.concurrency import AutoConcurrency, GroupTimes, RateClimber, RateMeter, has_room, relieved

LATENCY_S, GROUP = 2.0, 4


class Skipping(selectors.SelectSelector):
    """Instead of waiting it moves a clock."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


class SimulatedTime(asyncio.SelectorEventLoop):
    """Nobody waits for its timers."""

    def __init__(self):
        self._skipping = Skipping()
        super().__init__(self._skipping)

    def time(self):
        return self._skipping.now


@dataclass
class Load:
    """What an engine says."""

    running: int | None = None
    queued: int | None = None
    token_usage: float | None = None
    retracted: int | None = None


class Engine:
    """`places` requests at once, the others wait; and the rollouts that keep `limit` groups with it."""

    def __init__(self, places, *, spread=0.0, says=True, seconds=lambda running: LATENCY_S, seed=1):
        self.places, self.is_up, self.limit = places, True, 8
        self.in_flight = self.ended = self.running = 0
        self.times = GroupTimes()
        self._waiting = deque()
        self._spread, self._says, self._seconds = spread, says, seconds
        self._random = random.Random(seed)
        self._tasks = set()
        self.history = []  # (time, limit, groups ended)

    async def loads(self):
        """As SGLang's gauges."""
        return [Load(self.running, len(self._waiting))] if self._says and self.is_up else []

    def apply(self, limit):
        self.limit = limit
        while self.in_flight < limit:
            self.in_flight += 1
            task = asyncio.ensure_future(self._group())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def run(self, seconds):
        """So many seconds with AutoConcurrency in charge."""
        loop = asyncio.get_running_loop()
        auto = AutoConcurrency(
            self.limit,
            loads=self.loads,
            in_flight=lambda: self.in_flight,
            times=self.times,
            is_parked=lambda: not self.is_up,
        )
        following = asyncio.ensure_future(auto.follow(self.apply))
        end = loop.time() + seconds
        while loop.time() < end:
            yield loop.time()
            await asyncio.sleep(1)
            self.history.append((loop.time(), self.limit, self.ended))
        following.cancel()

    def rate(self, start, end):
        """Groups per second between two times."""
        inside = [(at, ended) for at, _, ended in self.history if start <= at <= end]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def limits(self, start, end):
        return [limit for at, limit, _ in self.history if start <= at <= end]

    async def _group(self):
        began, marks = asyncio.get_running_loop().time(), self.times.begin()
        seconds = self._seconds(self.running) * self._random.lognormvariate(-(self._spread**2) / 2, self._spread)
        await asyncio.gather(*(self._request(seconds) for _ in range(GROUP)))
        while not self.is_up:
            await asyncio.sleep(0.5)
        self.ended += 1
        self.times.end(marks, asyncio.get_running_loop().time() - began)
        self.in_flight -= 1
        self.apply(self.limit)

    async def _request(self, seconds):
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._start()
        await turn
        await asyncio.sleep(seconds)
        self.running -= 1
        self._start()

    def _start(self):
        while self._waiting and self.running < self.places:
            self.running += 1
            self._waiting.popleft().set_result(None)


def simulate(engine, seconds, events=()):
    """Run it; `events` are (time, function of the engine)."""

    async def all_of_it():
        left = sorted(events, key=lambda event: event[0])
        async for now in engine.run(seconds):
            while left and now >= left[0][0]:
                left.pop(0)[1](engine)

    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        runner.run(all_of_it())
    return engine


def places(number):
    return lambda engine: setattr(engine, "places", number)


KINDS = {"metrics": True, "rates": False}
SPREADS = {"rounds of equal groups": 0.0, "groups of all lengths": 0.6}


@pytest.mark.parametrize("says", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("knee", "spread"),
    [(knee, spread) for knee in (16, 64, 150) for spread in SPREADS.values() if not (knee == 150 and spread)],
)
def test_90_percent_of_the_knee_within_60_s_and_after_half_the_engine_went_and_came_back(says, spread, knee):
    """Medians of five engines, as lengths are chance; rates alone cannot tell a queue from long answers."""
    events = [(100, places(knee * GROUP // 2)), (300, places(knee * GROUP))]
    engines = [
        simulate(Engine(knee * GROUP, spread=spread, says=says, seed=seed), 500, events)
        for seed in range(5 if spread else 1)
    ]
    for start, end, here in ((60, 100, knee), (130, 300, knee / 2), (400, 500, knee)):
        assert statistics.median(engine.rate(start, end) for engine in engines) >= 0.9 * here / LATENCY_S
        limits = [statistics.median(engine.limits(start, end)) for engine in engines]
        assert 0.6 * here <= min(limits)
        assert statistics.median(limits) <= (1.8 if says else 2.4) * here


@pytest.mark.parametrize("knee", [20, 100])
def test_an_engine_that_slows_down_without_a_queue_is_kept_at_its_knee(knee):
    """As SGLang above the batch sizes it has graphs for: everything runs, and the whole becomes slower."""

    def seconds(running):
        groups = running / GROUP
        return 1.0 * max(1.0, groups / knee) * (1.4 if groups > 1.3 * knee else 1.0)

    engine = simulate(Engine(10**6, spread=0.3, seconds=seconds), 300)

    assert max(engine.limits(0, 60)) >= 0.9 * knee
    assert 0.7 * knee <= statistics.median(engine.limits(60, 300)) <= 1.4 * knee


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_can_be_timed_are_not_trusted_to_a_queue_that_never_comes(seed):
    """As measured on an H200: with graphs for 64 groups it does 20 groups/s, above that half as much, all running."""

    def seconds(running):
        groups = running / GROUP
        return 0.7 + 0.0375 * groups if groups <= 66 else groups / 11

    engine = simulate(Engine(10**6, spread=0.3, seconds=seconds, seed=seed), 200)

    assert max(engine.limits(0, 200)) <= 2 * 64
    assert engine.rate(60, 200) >= 0.8 * 64 / 3.1


def test_groups_too_long_to_be_timed_are_trusted_to_the_queue():
    engine = simulate(Engine(64 * GROUP, seconds=lambda running: 3600.0), 300)

    assert max(engine.limits(0, 60)) >= 58
    assert max(engine.limits(100, 300)) <= 110
    assert min(engine.limits(100, 300)) >= 58


@pytest.mark.parametrize("says", KINDS.values(), ids=KINDS)
def test_an_outage_teaches_nothing(says):
    events = [
        (100, lambda engine: setattr(engine, "is_up", False)),
        (160, lambda engine: setattr(engine, "is_up", True)),
    ]
    engine = simulate(Engine(64 * GROUP, says=says), 200, events)

    assert len(set(engine.limits(105, 158))) == 1
    assert min(engine.limits(100, 200)) >= 0.6 * 64


@dataclass
class Bursts:
    """SGLang right after a burst: nothing runs, all wait; and a moment later all run."""

    engine: Engine
    asked: "itertools.count[int]" = field(default_factory=itertools.count)

    async def loads(self):
        here = self.engine.in_flight * GROUP
        return [Load(0, here) if next(self.asked) % 3 == 2 else Load(here, 0)]


def test_a_queue_that_is_there_for_a_moment_only_does_not_bring_the_limit_down():
    engine = Engine(100 * GROUP)
    engine.loads = Bursts(engine).loads
    simulate(engine, 100)
    assert min(engine.limits(50, 100)) >= 64


def test_nothing_is_learned_while_something_else_holds_the_rollouts_back():
    engine = Engine(10**6)
    engine.apply = lambda limit: setattr(engine, "limit", limit)  # none is started
    simulate(engine, 60)
    assert set(engine.limits(0, 60)) == {8}


def test_retractions_and_a_full_cache_bring_the_limit_down():
    assert relieved(100, 100, [Load(running=100, queued=0, retracted=3)]) == 80
    assert relieved(100, 100, [Load(running=90, queued=5, token_usage=0.99)]) == 80


def test_a_cut_is_not_repeated_before_it_has_taken_effect():
    assert relieved(36, 60, [Load(running=32, queued=28)]) == 36
    assert relieved(36, 36, [Load(running=20, queued=16)]) == 22
    assert relieved(51, 64, [Load(running=60, queued=3, token_usage=0.97)]) == 51
    assert relieved(51, 64, [Load(running=60, queued=0, retracted=2)]) == 51


def test_an_engine_that_pauses_for_new_weights_keeps_its_limit():
    def pausing(is_paused):
        return lambda engine: setattr(engine, "is_paused", is_paused)

    engine = simulate(PausingEngine(64 * GROUP), 130, [(100, pausing(True)), (110, pausing(False))])
    assert min(engine.limits(100, 130)) >= 0.6 * 64


class PausingEngine(Engine):
    """Says that all its requests wait, now and then."""

    is_paused = False

    async def loads(self):
        return [Load(0, self.running + len(self._waiting))] if self.is_paused else await super().loads()


def test_groups_of_minutes_are_cut_once_for_one_full_cache():
    engine = Engine(10**6, seconds=lambda running: 600.0)
    engine.limit = 64

    async def loads():
        return [Load(running=250, queued=6, token_usage=0.97, retracted=0)]

    engine.loads = loads
    simulate(engine, 120)
    assert engine.limits(60, 120)[-1] == int(0.8 * 64)


def test_there_is_room_while_hardly_anything_waits():
    assert has_room([Load(running=100, queued=5)])
    assert not has_room([Load(running=100, queued=6)])
    assert has_room([])


def test_a_falling_rate_alone_never_lowers_the_limit():
    """Whatever is lost, each group that is in flight delivers the same: then fewer groups are never better."""
    climber = RateClimber(64)
    for each in (0.5, 0.5, 0.5, 0.25, 0.25, 0.1, 0.05, 0.02, 0.01):
        for _ in range(4):
            climber.observe(each * climber.limit, may_grow=False)
    assert climber.limit >= 44
    while climber.limit < 64:
        climber.observe(0.01 * climber.limit, may_grow=False)
    assert climber.limit == 64


def test_a_rate_does_not_depend_on_when_rounds_end():
    """Rounds of 16 groups every 2 s are 8 per second, however an interval cuts them."""
    times = GroupTimes()
    meter, found = RateMeter(16, times, began=0.0), []
    round_ = [times.begin() for _ in range(16)]
    for at in range(160):
        if at % 20 == 0 and at:
            for group in round_:
                times.end(group, 2.0)
            round_ = [times.begin() for _ in range(16)]
        found.append(meter.rate(at / 10, in_flight=16))
    assert [rate for rate in found if rate is not None] == [8.0, 8.0]


def test_groups_of_an_earlier_limit_do_not_count_however_late_they_end():
    times = GroupTimes()
    slow = [times.begin() for _ in range(16)]
    meter = RateMeter(16, times, began=0.0)
    assert [meter.rate(float(at), in_flight=40) for at in range(10)] == [None] * 10
    assert meter.began == 9.0
    assert meter.rate(10.0, in_flight=16) is None
    for group in slow[:15]:
        times.end(group, 60.0)
    assert meter.rate(11.0, in_flight=16) is None  # from here on
    for group in [times.begin() for _ in range(40)]:
        times.end(group, 2.0)
    times.end(slow[15], 70.0)
    assert meter.rate(12.0, in_flight=16) == 8.0


def test_how_far_a_rate_is_away_is_known_once_groups_have_ended():
    times = GroupTimes()
    meter = RateMeter(8, times, began=0.0)
    meter.rate(0.0, in_flight=8)
    assert meter.left_s(5.0) == math.inf
    for group in [times.begin() for _ in range(8)]:
        times.end(group, 2.0)
    assert meter.left_s(4.0) == 40 * 4.0 / 8
    times.end(times.begin(), None)  # a failure ends, too, and says nothing about times
    assert (times.took, times.ended) == (8, 9)
