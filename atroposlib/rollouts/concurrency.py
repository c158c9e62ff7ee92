"""`max_num_workers: auto`: how many groups at once, found and followed from what the engine says or delivers.

The number climbs while more groups finish per second because of it (`rate_climber.py`). Where the engine reports its
load, a lasting queue or a full cache bring the number down at once, and groups too long to be timed are trusted to its
queue. (SGLang's own rate, a gauge over a few decoding steps, jumps by a factor of ten when answers are short.)
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from atroposlib.rollouts.rate_climber import FEWEST_GROUPS, HOLD_RATES, GroupTimes, RateClimber, RateMeter

logger = logging.getLogger(__name__)

QUEUE_SHARE = 0.1  # queued requests for each running one that keep an engine busy
FULL_CACHE = 0.95
RELIEF, GROW_UNTIMED = 0.8, 1.5
TICK_S = 0.1
LOAD_EVERY_S = 0.7
SAMPLES = 3  # of the load; the calmest counts, as a queue right after a burst of requests is none
PATIENCE_S = 5.0
LONG_TO_TIME_S = 30.0
HOLD_RATES_WITH_LOADS = 1  # a probe upwards is cheap where the engine says that it has room


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


def relieved(limit: int, in_flight: int, loads: Sequence[Load]) -> int:
    """The limit, or a lower one for engines under pressure, once an earlier cut has taken effect.

    Retractions or a full cache cost work already done: down by a fifth. A queue above `QUEUE_SHARE`: down to what
    runs. A queue while nothing runs is an engine that pauses, as for new weights, and says nothing about its size.
    """
    run, wait = running(loads), queued(loads)
    if not run or in_flight > limit * (1 + QUEUE_SHARE):
        return limit
    fullest = max((load.token_usage or 0.0 for load in loads), default=0.0)
    if any(load.retracted for load in loads) or (fullest > FULL_CACHE and wait):
        return max(1, int(limit * RELIEF))
    if wait > QUEUE_SHARE * run:
        useful = in_flight * run / (run + wait) * (1 + QUEUE_SHARE)
        return max(1, min(limit, math.ceil(useful)))
    return limit


def has_room(loads: Sequence[Load]) -> bool:
    """Whether more requests would run, and not only wait."""
    return queued(loads) <= QUEUE_SHARE * running(loads) / 2


def running(loads: Sequence[Load]) -> int:
    """Requests that all engines together work on."""
    return sum(load.running or 0 for load in loads)


def queued(loads: Sequence[Load]) -> int:
    """Requests that wait in them."""
    return sum(load.queued or 0 for load in loads)


def _queue_share(loads: Sequence[Load]) -> float:
    return queued(loads) / max(1, queued(loads) + running(loads))


class AutoConcurrency:
    """Follows one engine pool; `limit` is the number of groups to have in flight now."""

    def __init__(
        self,
        start: int,
        *,
        loads: Callable[[], Awaitable[Sequence[Load]]],
        in_flight: Callable[[], int],
        times: GroupTimes,
        is_parked: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            start: first limit.
            loads: what the engines say.
            in_flight: groups running now.
            times: told of every group that begins and ends.
            is_parked: whether the run waits for an engine, a disk or the API: nothing can be learned then.
        """
        self.limit = start
        self._loads = loads
        self._in_flight = in_flight
        self._times = times
        self._is_parked = is_parked
        self._climber = RateClimber(start)
        self._meter: RateMeter | None = None
        self._was_timed = False  # a rate has been measured
        self._samples: deque[Sequence[Load]] = deque(maxlen=SAMPLES)

    async def follow(self, apply: Callable[[int], None]) -> None:
        """Adjust the limit for ever; `apply` gets every new one."""
        watching = asyncio.create_task(self._watch_loads())
        try:
            while True:
                apply(self.limit)
                limit = await self._next_limit()
                if limit != self.limit:
                    logger.info("groups at once: %d -> %d", self.limit, limit)
                    self.limit = limit
                    self._samples.clear()
        finally:
            watching.cancel()

    async def _watch_loads(self) -> None:
        while True:
            if loads := [load for load in await self._loads() if load.running is not None]:
                self._samples.append(loads)
            else:
                self._samples.clear()
            await asyncio.sleep(LOAD_EVERY_S)

    async def _next_limit(self) -> int:
        """Down on pressure; else by the rate, or blindly upwards while the first one is far away.

        Not later: an engine that slows down without a queue would get more and more.
        """
        clock = asyncio.get_running_loop().time
        if self._meter is None or self._meter.limit != self.limit:
            self._meter = RateMeter(self.limit, self._times, clock())
        meter = self._meter
        while True:
            await asyncio.sleep(TICK_S)
            now, in_flight = clock(), self._in_flight()
            rate = meter.rate(now, in_flight=0 if self._is_parked() else in_flight)
            calmest = min(self._samples, key=_queue_share) if len(self._samples) == SAMPLES else []
            if (limit := relieved(self.limit, in_flight, calmest)) < self.limit:
                self._climber.restart(limit)
                return limit
            if rate is not None:
                self._was_timed = True
                hold = HOLD_RATES if not calmest else HOLD_RATES_WITH_LOADS
                return self._climber.observe(rate, may_grow=has_room(calmest), hold=hold)
            if calmest and has_room(calmest) and now - meter.began >= PATIENCE_S and self._is_blind(meter, now):
                self._climber.restart(math.ceil(self.limit * GROW_UNTIMED))
                return self._climber.limit

    def _is_blind(self, meter: RateMeter, now: float) -> bool:
        """No rate is known or near: no group has ended yet, or so few are in flight that a rate takes long."""
        left_s = meter.left_s(now)
        return not self._was_timed and (left_s == math.inf or (self.limit < FEWEST_GROUPS and left_s > LONG_TO_TIME_S))
