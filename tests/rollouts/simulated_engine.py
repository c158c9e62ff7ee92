"""An engine in simulated time: groups share what it gives, and `ConcurrencyLimit` says how many there are."""

import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from atroposlib.rollouts.concurrency import ConcurrencyLimit, GroupTimes

TICK_S, LOAD_EVERY_S = 0.25, 0.7
Curve = Callable[[float], float]
"""Groups in the engine -> groups per second."""


@dataclass
class Load:
    """Load as an engine reports it."""

    running: int | None = None
    queued: int | None = None
    token_usage: float | None = None
    retracted: int | None = None
    slots: int | None = None


class Engine:
    """With n groups in it, each comes forward at the speed curve(n) / n; lengths are log-normal with mean 1."""

    def __init__(
        self,
        curve: Curve,
        *,
        places: float = math.inf,
        noise: float = 0.3,
        n: int = 4,
        says: bool = False,
        seed: int = 0,
    ) -> None:
        """
        Args:
            places: groups that run at once; more of them wait.
            noise: standard deviation of the logarithm of a group's length.
            n: requests of a group.
            says: it tells its load.
        """
        self.curve, self.places, self.n, self.says, self.noise = cache(curve), places, n, says, noise
        self.times = GroupTimes(lambda: self.now)
        self.decision = ConcurrencyLimit(8, self.times)
        self.is_up = True
        self.now = self.done = 0.0  # s; work on each running group since the start
        self.ended = 0
        self.history: list[tuple[float, int, float]] = []  # (s, limit, groups per second)
        self._running: list[tuple[float, float, float, int]] = []
        self._waiting: deque[tuple[float, int]] = deque()
        self._random = random.Random(seed)

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    def run(self, seconds: float, events: Iterable[tuple[float, Callable[["Engine"], None]]] = ()) -> "Engine":
        """Go on until then; `events` are (s, function of the engine)."""
        left, next_load = sorted(events, key=lambda event: event[0]), 0.0
        while self.now < seconds:
            while left and left[0][0] <= self.now:
                left.pop(0)[1](self)
            self._fill()
            self._until(self.now + TICK_S)
            if self.says and self.is_up and self.now >= next_load:
                next_load = self.now + LOAD_EVERY_S
                self.decision.note_loads([self.load()])
            self.decision.observe(self.now, self.in_flight if self.is_up else 0)
            given = self.curve(len(self._running)) if self._running else 0.0
            self.history.append((self.now, self.decision.limit, given))
        return self

    def load(self) -> Load:
        return Load(len(self._running) * self.n, len(self._waiting) * self.n)

    def given(self, start: float, end: float) -> float:
        """Mean groups per second that the engine gives at the numbers in it, between two times."""
        return statistics.fmean(rate for at, _, rate in self.history if start < at <= end)

    def limits(self, start: float, end: float) -> list[int]:
        return [limit for at, limit, _ in self.history if start < at <= end]

    def _fill(self) -> None:
        running, waiting, chance = self._running, self._waiting, self._random
        for _ in range(self.decision.limit - len(running) - len(waiting)):
            waiting.append((self.now, self.times.begin()))
        while waiting and len(running) < self.places:
            began, mark = waiting.popleft()
            length = chance.lognormvariate(-(self.noise**2) / 2, self.noise)
            heapq.heappush(running, (self.done + length, chance.random(), began, mark))

    def _until(self, end: float) -> None:
        running = self._running
        while running and self.is_up:
            speed = self.curve(len(running)) / len(running)
            at = self.now + (running[0][0] - self.done) / speed
            if at > end:
                self.done += (end - self.now) * speed
                break
            self.now = at
            self.done, _, began, mark = heapq.heappop(running)
            self.ended += 1
            self.times.end(mark, at - began)
            self._fill()
        self.now = end


def knee(groups: float, seconds: float) -> Curve:
    """As many places, each of which takes so long for a group."""
    return lambda n: min(n, groups) / seconds


def smooth(best: float, top: float) -> Curve:
    """N. Gunther's universal scalability law without contention: `top` groups per second with `best` groups."""
    return lambda n: 2 * top / (best / n + n / best)


def table(points: dict[int, float], *, cliff: float, after: float) -> Curve:
    """Straight lines between (groups, groups per second); above `cliff` the share `after` of the last."""
    known = sorted(points.items())

    def curve(n: float) -> float:
        if n > cliff:
            return after * known[-1][1]
        if n <= known[0][0]:
            return known[0][1] * n / known[0][0]
        for (a, low), (b, high) in itertools.pairwise(known):
            if n <= b:
                return low + (high - low) * (n - a) / (b - a)
        return known[-1][1]

    return curve


TOKENS_S = {2: 10449, 4: 18095, 8: 15561, 16: 28540, 32: 32467, 64: 42512}
"""An H200 in `docs/benchmarks.md`: groups of 16 x 128 tokens -> tokens per second; graphs for 64 groups."""
H200 = table({groups: tokens / 2048 for groups, tokens in TOKENS_S.items()}, cliff=66, after=0.5)


def h200_fit(n: float) -> float:
    """The same by a formula."""
    return n / (0.7 + 0.0375 * n) if n <= 66 else 11.0


def plateau(n: float) -> float:
    """Nothing more between 16 and 32 groups, then twice as much until 96."""
    return 10 * min(n, 16) / 16 if n <= 32 else 10 + 10 * min(1.0, (n - 32) / 64)
