"""`max_num_workers: auto` on engines of known capacity, in simulated time."""

import asyncio
import itertools
import math
import random
from dataclasses import dataclass

import pytest

from atroposlib.rollouts.concurrency import AutoConcurrency, RateClimber, limit_from_loads

LATENCY_S = 2.0


@dataclass
class Engine:
    """`capacity` groups at once, each `LATENCY_S` long; what is above waits."""

    capacity: int
    running: int | None = None
    queued: int | None = None
    token_usage: float | None = None
    retracted: int | None = None

    def rate(self, in_flight):
        return min(in_flight, self.capacity) / LATENCY_S

    def interval_s(self, in_flight):
        return max(1.0, in_flight / self.rate(in_flight))

    def load(self, in_flight):
        self.running = min(in_flight, self.capacity)
        self.queued = in_flight - self.running
        return self


def climb(climber, engine, seconds, noise=None):
    """Run the climber for so many simulated seconds."""
    elapsed = 0.0
    while elapsed < seconds:
        limit = climber.limit
        elapsed += engine.interval_s(limit)
        climber.observe(engine.rate(limit) * (noise.uniform(0.95, 1.05) if noise else 1.0))
    return climber


CAPACITIES = [4, 32, 95, 120, 400]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("noisy", [False, True])
def test_without_metrics_90_percent_of_the_knee_is_reached_within_60_s(capacity, noisy):
    engine = Engine(capacity)
    climber = climb(RateClimber(8), engine, 60, random.Random(1) if noisy else None)
    assert engine.rate(climber.best_limit) >= 0.9 * engine.rate(capacity)


@pytest.mark.parametrize("capacity", [32, 120, 400])
def test_without_metrics_it_backs_off_after_the_capacity_halves_and_climbs_when_it_returns(capacity):
    engine = Engine(capacity)
    climber = climb(RateClimber(8), engine, 120)
    engine.capacity //= 2
    climb(climber, engine, 240)
    assert climber.best_limit <= 1.6 * engine.capacity
    assert engine.rate(climber.best_limit) >= 0.9 * engine.rate(engine.capacity)
    engine.capacity *= 2
    climb(climber, engine, 240)
    assert engine.rate(climber.best_limit) >= 0.9 * engine.rate(engine.capacity)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_with_metrics_90_percent_of_the_knee_is_reached_within_60_s_and_followed(capacity):
    engine, limit = Engine(capacity), 8
    for _ in range(30):  # two seconds each
        limit = limit_from_loads(limit, limit, [engine.load(limit)])
    assert capacity * 0.9 <= limit <= math.ceil(capacity * 1.8)
    engine.capacity = max(1, capacity // 2)
    for _ in range(10):
        limit = limit_from_loads(limit, limit, [engine.load(limit)])
    assert 0.9 * engine.capacity <= limit <= math.ceil(engine.capacity * 1.8)


def test_retractions_and_a_full_cache_bring_the_limit_down():
    assert limit_from_loads(100, 100, [Engine(200, running=100, queued=0, retracted=3)]) == 80
    assert limit_from_loads(100, 100, [Engine(200, running=90, queued=5, token_usage=0.99)]) == 80


def test_a_cut_is_not_repeated_before_it_has_taken_effect():
    assert limit_from_loads(36, 60, [Engine(32, running=32, queued=28)]) == 36
    assert limit_from_loads(36, 36, [Engine(20, running=20, queued=16)]) == 22


def test_a_limit_that_is_not_used_is_not_raised():
    assert limit_from_loads(100, 20, [Engine(200, running=20, queued=0)]) == 100


class Clock:
    """Time that passes only while somebody sleeps; a group takes `seconds(limit)`, one ends after the other."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.ended, self.limit, self._seconds = 0.0, 0.0, 8, seconds
        monkeypatch.setattr("atroposlib.rollouts.concurrency.time.monotonic", lambda: self.now)
        monkeypatch.setattr("atroposlib.rollouts.concurrency.asyncio.sleep", self._sleep)

    async def _sleep(self, seconds):
        self.now += seconds
        self.ended += seconds * self.limit / self._seconds(self.limit)
        if self.now > 300:
            raise TimeoutError

    async def follow(self, engine):
        """300 s of it: (time, limit) at every step."""
        steps = []

        async def loads():
            return [engine(self)]

        auto = AutoConcurrency(8, loads=loads, in_flight=lambda: self.limit, completed=lambda: int(self.ended))

        def apply(limit):
            self.limit = limit
            steps.append((self.now, limit))

        with pytest.raises(TimeoutError):
            await auto.follow(apply)
        return steps


@pytest.mark.parametrize("knee", [20, 64, 200])
async def test_an_engine_that_slows_down_without_a_queue_is_kept_at_its_knee(monkeypatch, knee):
    """As SGLang above the batch sizes it has graphs for: everything runs, and the whole becomes slower."""

    def seconds(limit):
        return 1.0 * max(1.0, limit / knee) * (1.4 if limit > 1.3 * knee else 1.0)

    steps = await Clock(monkeypatch, seconds).follow(lambda clock: Engine(10**6, running=clock.limit, queued=0))

    assert max(limit for at, limit in steps if at <= 60) >= 0.9 * knee
    later = sorted(limit for at, limit in steps if at > 60)
    assert 0.8 * knee <= later[len(later) // 2] <= 1.3 * knee


async def test_groups_too_long_to_be_timed_are_trusted_to_the_queue(monkeypatch):
    def engine(clock):
        return Engine(64).load(clock.limit)

    steps = await Clock(monkeypatch, lambda limit: 3600.0).follow(engine)

    assert max(limit for at, limit in steps if at <= 60) >= 58
    assert all(limit <= 110 for _, limit in steps)
    assert steps[-1][1] >= 58


async def test_a_queue_that_is_there_for_a_moment_only_does_not_bring_the_limit_down(monkeypatch):
    """SGLang right after a burst: nothing runs, all wait; and a moment later all run."""
    asked = 0

    def engine(clock):
        nonlocal asked
        asked += 1
        waiting = asked % 3 == 0
        return Engine(10**6, running=0 if waiting else clock.limit, queued=clock.limit if waiting else 0)

    steps = await Clock(monkeypatch, lambda limit: 1.0).follow(engine)

    assert all(later >= earlier * 0.6 for (_, earlier), (_, later) in itertools.pairwise(steps))
    assert steps[-1][1] >= 100


async def test_nothing_is_learned_while_something_else_holds_the_rollouts_back(monkeypatch):
    monkeypatch.setattr("atroposlib.rollouts.concurrency.SHORTEST_INTERVAL_S", 0.004)
    applied = []

    async def no_loads():
        return []

    auto = AutoConcurrency(8, loads=no_loads, in_flight=lambda: 2, completed=lambda: 0)
    following = asyncio.create_task(auto.follow(applied.append))
    async with asyncio.timeout(5):
        while len(applied) < 3:
            await asyncio.sleep(0.002)
    following.cancel()
    assert set(applied) == {8}
