"""`max_num_workers: auto`: how many groups at once, found and followed from what the engine says or delivers.

The number climbs while more groups finish per second because of it (`RateClimber`). Where the engine reports its
load, a lasting queue or a full cache bring the number down at once, and groups too long to be timed are trusted to its
queue. (SGLang's own rate, a gauge over a few decoding steps, jumps by a factor of ten when answers are short.)
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger(__name__)

GROW, PROBE_UP, PROBE_DOWN = 2.0, 1.3, 0.7
WORTH = 0.3  # of a change in the number of groups must show in the rate for the change to pay
CHANGED = 0.7  # a rate at the same number below this share of the known one (or as much above) is another engine
HOLD_RATES = 5
TRIES = 2
FEWEST_GROUPS = 40  # in a rate
SHORTEST_S = 1.0
_BUSY, _OVER = 0.8, 1.1  # of the limit is in flight: less or more says nothing about the limit
_FEW = 0.1  # of the limit


@dataclass(slots=True)
class GroupTimes:
    """Times of groups: only those that began since the last `mark`, as earlier ones met another load."""

    took: int = 0  # groups
    took_s: float = 0.0  # together
    ended: int = 0  # since the mark, earlier ones and failures included
    earlier: int = 0  # that began before the mark and still run
    _running: int = 0
    _marks: int = 0

    def mark(self) -> None:
        """Forget what was noted."""
        self._marks += 1
        self.took, self.took_s, self.ended, self.earlier = 0, 0.0, 0, self._running

    def begin(self) -> int:
        """A group begins; `end` wants the number returned."""
        self._running += 1
        return self._marks

    def end(self, began: int, seconds: float | None) -> None:
        """That group ended; None: by a failure, of which the time says nothing."""
        self._running -= 1
        self.ended += 1
        if began != self._marks:
            self.earlier -= 1
        elif seconds is not None:
            self.took += 1
            self.took_s += seconds


@dataclass(slots=True)
class RateMeter:
    """Groups per second while `limit` groups are in flight: limit / mean time of a group (Little's law).

    Ends of groups are not counted against the clock: groups of equal length end together, and whether an interval holds
    two such rounds or three is chance. It begins when hardly a group is left that began under another limit.
    """

    limit: int
    times: GroupTimes
    began: float  # s; moved on while the limit is not what is in flight
    _is_marked: bool = False
    _first: tuple[float, int, float] | None = None  # time, groups, their seconds

    def rate(self, now: float, *, in_flight: int) -> float | None:
        """None until enough groups have ended."""
        times = self.times
        if not _BUSY * self.limit <= in_flight <= math.ceil(_OVER * self.limit):
            self.began, self._is_marked, self._first = now, False, None
        elif not self._is_marked:
            self._is_marked = True
            times.mark()
        elif self._first is None:
            self._first = (now, times.took, times.took_s) if times.earlier <= max(1, _FEW * self.limit) else None
        else:
            began, groups_before, seconds_before = self._first
            groups, seconds = times.took - groups_before, times.took_s - seconds_before
            if groups >= self._enough and now - began >= SHORTEST_S and seconds > 0:
                self._first = now, times.took, times.took_s
                return self.limit * groups / seconds
        return None

    def left_s(self, now: float) -> float:
        """Seconds until the next rate, by the groups that ended so far; infinite before the first."""
        if not self._is_marked or not self.times.ended:
            return math.inf
        counted = 0 if self._first is None else self.times.took - self._first[1]
        missing = self.times.earlier + self._enough - counted
        return missing * (now - self.began) / self.times.ended

    @property
    def _enough(self) -> int:
        return max(self.limit, FEWEST_GROUPS)


@dataclass(slots=True)
class RateClimber:
    """Holds the best number known, and tries a higher and a lower one now and then.

    A number becomes the best only by its own rate. So a rate that falls (the engine lost capacity, or answers became
    longer) never lowers the number by itself: fewer groups would make fewer groups per second, and so on to one.
    """

    limit: int  # to be measured next
    _best: int = 0
    _rate: float | None = None  # at the best
    _climbing: bool = True  # no end of the climb was seen yet
    _held: int = 0
    _probes: int = 0
    _patience: int = 1
    _tried: list[float] = field(default_factory=list)  # rates at a limit that is not the best

    def __post_init__(self) -> None:
        """The first limit is the best known."""
        self._best = self.limit

    def restart(self, limit: int) -> None:
        """Somebody knows better: continue from this limit, of which no rate is known; on upwards if it is higher."""
        self._climbing = limit > self.limit
        self.limit = self._best = limit
        self._rate, self._held, self._patience = None, 0, 1

    def observe(self, rate: float, *, may_grow: bool = True, hold: int = HOLD_RATES) -> int:
        """Note the rate at `limit`; the next limit.

        Args:
            hold: rates before the next probe upwards; failed probes double it, up to `HOLD_RATES`.
        """
        known, up = self._rate, GROW if may_grow else 1.0
        if known is None:
            return self._take(rate, up if self._climbing else 1.0)
        if self.limit != self._best:
            return self._judge(rate, known, up)
        if not known * CHANGED <= rate <= known / CHANGED:
            self._patience = 1
            return self._take(rate, PROBE_DOWN if rate < known else up)
        self._rate = known + 0.3 * (rate - known)
        self._held += 1
        is_up = may_grow and self._probes % 2 == 0
        if self._held < (min(HOLD_RATES, hold * self._patience) if is_up else HOLD_RATES):
            return self.limit
        self._probes += 1
        return self._try(PROBE_UP if is_up else PROBE_DOWN)

    def _judge(self, rate: float, known: float, up: float) -> int:
        """Does another limit pay? "Fewer groups" is believed of two rates, or of one that is far below the best."""
        self._tried.append(rate)
        mean, is_higher = sum(self._tried) / len(self._tried), self.limit > self._best
        pays = mean / known - 1 >= WORTH * (self.limit / self._best - 1)
        if pays is not is_higher and len(self._tried) < TRIES and mean >= CHANGED * known:
            return self.limit
        if pays:
            self._patience = 1
            further = min(up, GROW if self._climbing else PROBE_UP)
            return self._take(mean, further if is_higher else PROBE_DOWN)
        if is_higher:  # at the end of the climb a smaller step comes next
            self._patience = 0 if self._climbing else max(1, min(2 * self._patience, HOLD_RATES))
        self._rate, self._climbing = None, False  # it may have been luck that nothing else came up to it
        return self._try(1.0)

    def _take(self, rate: float, factor: float) -> int:
        """`limit` is the best now; try on in the same direction."""
        self._best, self._rate = self.limit, rate
        return self._try(factor)

    def _try(self, factor: float) -> int:
        self._held, self._tried = 0, []
        self.limit = max(1, math.ceil(self._best * factor) if factor >= 1 else int(self._best * factor))
        return self.limit


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
    """The load of one engine as `EngineLoad` has it; None where the engine says nothing."""

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
    """Return True when more requests would run, and not only wait."""
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
