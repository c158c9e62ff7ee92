"""`max_num_workers: auto`: how many groups at once, found and followed from what the engine says or delivers.

The number climbs while more groups finish per second because of it, and steps back when more of them only wait. Where
the engine reports its load, a long queue or a full cache bring the number down at once, and groups too long to be
timed are trusted to its queue. (SGLang's own rate, a gauge over a few decoding steps, jumps by a factor of ten when
answers are short; following it, measured on an H100, ended at one group.)
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

GROW = 1.5
PROBE_UP, PROBE_DOWN = 1.3, 0.8
HEADROOM = 1.15
GAIN = 1.1  # a rate is better when it is so many times higher
LOSS = 0.6  # below this share of the best rate the engine has lost capacity
HOLD_INTERVALS = 5  # between two probes
QUEUE_SHARE = 0.1  # queued requests for each running one that keep an engine busy
FULL_CACHE = 0.95
LOAD_EVERY_S = 2.0
SAMPLES = 3  # of the load in that time; the calmest counts, as a queue right after a burst of requests is none
PATIENCE_S = 5.0
SHORTEST_INTERVAL_S = 1.0


class Load(Protocol):
    """What `EngineLoad` says of one engine; None where it says nothing."""

    @property
    def running(self) -> int | None: ...
    @property
    def queued(self) -> int | None: ...
    @property
    def token_usage(self) -> float | None: ...
    @property
    def retracted(self) -> int | None: ...


def limit_from_loads(limit: int, in_flight: int, loads: Sequence[Load]) -> int:
    """The next limit for engines that report their queues.

    Retractions or a full cache cost work already done: down by a fifth. A queue above `QUEUE_SHARE`: down to what
    runs, once an earlier cut has taken effect. No queue, and all that is allowed is in flight: up.
    """
    running = sum(load.running or 0 for load in loads)
    queued = sum(load.queued or 0 for load in loads)
    fullest = max((load.token_usage or 0.0 for load in loads), default=0.0)
    if any(load.retracted for load in loads) or (fullest > FULL_CACHE and queued):
        return max(1, int(limit * PROBE_DOWN))
    if queued > QUEUE_SHARE * running:
        if in_flight > limit * (1 + QUEUE_SHARE):
            return limit  # groups above the limit are still ending; what they leave is not known yet
        useful = in_flight * running / (running + queued) * (1 + QUEUE_SHARE)
        return max(1, min(limit, math.ceil(useful)))
    if queued <= QUEUE_SHARE * running / 2 and in_flight >= 0.9 * limit:
        return math.ceil(limit * GROW)
    return limit


def _queue_share(loads: Sequence[Load]) -> float:
    queued = sum(load.queued or 0 for load in loads)
    return queued / max(1, queued + sum(load.running or 0 for load in loads))


@dataclass(slots=True)
class RateClimber:
    """The next limit from the rate (groups per second) at the present one. Pure bookkeeping."""

    limit: int
    best_rate: float = 0.0
    best_limit: int = 0
    _held: int = 0
    _probes: int = 0

    def observe(self, rate: float) -> int:
        """Note the rate of an interval in which the limit was in use; the limit of the next interval."""
        if rate >= self.best_rate * GAIN and self.limit > self.best_limit:
            self.settle(rate, self.limit)
            self.limit = math.ceil(self.limit * GROW)
        elif rate < self.best_rate * LOSS:
            self.settle(rate, max(1, int(self.limit * LOSS)))
            self.limit = self.best_limit
        elif self.limit > self.best_limit:
            self.settle(max(rate, self.best_rate), max(1, min(self.limit, math.ceil(self.best_limit * HEADROOM))))
            self.limit = self.best_limit
        elif self.limit < self.best_limit:
            if rate >= self.best_rate / GAIN:
                self.settle(rate, self.limit)
            self.limit = self.best_limit
        else:
            self.best_rate += 0.3 * (rate - self.best_rate)
            self._held += 1
            if self._held >= HOLD_INTERVALS:
                self._probe()
        return self.limit

    def settle(self, rate: float, limit: int) -> None:
        """Take this for the best known."""
        self.best_rate, self.best_limit, self._held = rate, limit, 0

    def _probe(self) -> None:
        """Try a higher and a lower limit in turn."""
        self._probes += 1
        self._held = 0
        up = self._probes % 2 == 1
        self.limit = math.ceil(self.limit * PROBE_UP) if up else max(1, int(self.limit * PROBE_DOWN))


class AutoConcurrency:
    """Follows one engine pool; `limit` is the number of groups to have in flight now."""

    def __init__(
        self,
        start: int,
        *,
        loads: Callable[[], Awaitable[Sequence[Load]]],
        in_flight: Callable[[], int],
        completed: Callable[[], int],
    ) -> None:
        """
        Args:
            start: first limit.
            loads: what the engines say.
            in_flight, completed: groups running now, and ended so far.
        """
        self.limit = start
        self._loads = loads
        self._in_flight = in_flight
        self._completed = completed
        self._climber = RateClimber(start)

    async def follow(self, apply: Callable[[int], None]) -> None:
        """Adjust the limit for ever; `apply` gets every new one."""
        while True:
            loads = await self._calmest_loads()
            limit = await (self._from_loads(loads) if loads else self._measured())
            if limit != self.limit:
                logger.info("groups at once: %d -> %d", self.limit, limit)
                self.limit = self._climber.limit = limit
            apply(self.limit)

    async def _from_loads(self, loads: Sequence[Load]) -> int:
        """Down on pressure; up by the rate, or blindly while groups take longer than a rate is waited for."""
        limit = limit_from_loads(self.limit, self._in_flight(), loads)
        if limit > self.limit:
            return await self._measured(PATIENCE_S, otherwise=limit)
        if limit < self.limit:
            self._climber.settle(self._climber.best_rate, limit)
        return limit

    async def _calmest_loads(self) -> Sequence[Load]:
        """What the engines said when they had least of a queue, in `LOAD_EVERY_S`; [] when they say nothing."""
        samples = []
        for _ in range(SAMPLES):
            loads = [load for load in await self._loads() if load.running is not None]
            if not loads:
                return []
            samples.append(loads)
            await asyncio.sleep(LOAD_EVERY_S / SAMPLES)
        return min(samples, key=_queue_share)

    async def _measured(self, patience_s: float = math.inf, otherwise: int = 0) -> int:
        """One interval: long enough for all that is in flight to end once; `otherwise` when that takes too long."""
        started, before, busy = time.monotonic(), self._completed(), True
        while True:
            await asyncio.sleep(SHORTEST_INTERVAL_S / 4)
            busy = busy and self._in_flight() >= 0.8 * self.limit
            seconds, ended = time.monotonic() - started, self._completed() - before
            if seconds >= SHORTEST_INTERVAL_S and ended >= self.limit:
                return self._climber.observe(ended / seconds) if busy else self.limit
            if not busy and seconds >= SHORTEST_INTERVAL_S:
                return self.limit  # something else holds the rollouts back; nothing to learn
            if seconds >= patience_s:
                return otherwise
