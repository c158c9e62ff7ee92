"""`max_num_workers: auto`: how many groups at once, found and followed from what the engine says or delivers.

1. `RateMeter` measures the groups per second at one number: groups in flight / mean time of a group (Little's law). The
   mean is the Kaplan-Meier estimate, in which groups that still run count with their age, so that neither rounds of
   equal groups nor the early ends of the short ones bend it.
2. `Search` remembers these rates and looks for the best number: steps upwards until a number is worse, then steps
   between the neighbours of the best, then it holds. Rates become old; what may be spent on looking again is a small
   share of what the engine gives.
3. Where the engine reports its load, a lasting queue, retractions or a full cache bring the number down at once, and
   nothing is tried that would only wait.

Sources: J. Little, Operations Research 9 (1961), 383; E. Kaplan and P. Meier, JASA 53 (1958), 457.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

ANY = 10**9  # groups: no limit


class GroupTimes:
    """Times of groups: only those that began since the last `mark`, as earlier ones met another number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.took: list[float] = []  # s, of the groups that ended well
        self.ended_ever = 0
        self._clock = clock
        self._running: dict[int, float] = {}  # number of a group -> when it began
        self._numbers = itertools.count()

    def mark(self) -> None:
        """Forget what was noted."""
        self.took, self._running = [], {}

    def begin(self) -> int:
        """A group begins; `end` wants the number returned."""
        number = next(self._numbers)
        self._running[number] = self._clock()
        return number

    def end(self, number: int, seconds: float | None) -> None:
        """That group ended; None: by a failure, of which the time says nothing."""
        self.ended_ever += seconds is not None
        if self._running.pop(number, None) is not None and seconds is not None:
            self.took.append(seconds)

    def mean(self) -> tuple[float, float]:
        """Return the mean time of a group (s), and the share of groups longer than all that is known."""
        now = self._clock()
        return mean_time(self.took, [now - began for began in self._running.values()])


def mean_time(ended: Sequence[float], running: Sequence[float]) -> tuple[float, float]:
    """Return the mean time of a group (s), and the share of groups longer than all that is known (Kaplan-Meier).

    `ended` are s of groups that ended, `running` ages of those that did not yet.

    >>> mean_time([2.0, 2.0], [1.0, 1.0])
    (2.0, 0.0)
    """
    at_risk = len(ended) + len(running)
    area, survival, last = 0.0, 1.0, 0.0
    for seconds, still_runs in sorted([(each, False) for each in ended] + [(age, True) for age in running]):
        area, last = area + survival * (seconds - last), seconds
        if not still_runs:
            survival *= 1 - 1 / at_risk
        at_risk -= 1
    return area, survival


LEAST_GROUPS = 8  # of which a first rate is made
SURE_GROUPS = 64  # and any other
SHORTEST_S = 0.5
_LONGER = 0.25  # at most this share of groups is longer than all that is known
_BUSY, _OVER = 0.8, 1.1  # of the limit is in flight: less or more says nothing about the limit


@dataclass(slots=True)
class RateMeter:
    """Groups per second while `limit` groups are in flight, of groups that began under it."""

    limit: int
    times: GroupTimes
    since: float  # s; moved on while the limit is not what is in flight
    _is_marked: bool = False
    _in_flight: list[int] = field(default_factory=list)  # at each look
    _next_mean: float = 0.0  # s; a mean over thousands of groups takes its time

    def look(self, now: float, in_flight: int, least: int, hopeless: float = 0.0) -> float | None:
        """Return the rate, once `least` groups have told it or it is surely below `hopeless`; None: not yet."""
        if not _BUSY * self.limit <= in_flight <= math.ceil(_OVER * self.limit):
            self.since, self._is_marked = now, False
            return None
        if not self._is_marked:
            self._is_marked, self._in_flight, self._next_mean = True, [], 0.0
            self.times.mark()
        self._in_flight.append(in_flight)
        elapsed = now - self.since
        if elapsed < SHORTEST_S or now < self._next_mean:
            return None
        self._next_mean = now + elapsed / 16
        mean, longer = self.times.mean()
        if mean <= 0:
            return None
        rate = sum(self._in_flight) / len(self._in_flight) / mean  # or less, as long as longer groups are to come
        is_known = len(self.times.took) >= least and longer <= _LONGER
        return rate if is_known or rate < hopeless else None


GROW, PROBE = 2.0, math.sqrt(2)
GOLDEN = (3 - math.sqrt(5)) / 2
STEEP = 1.3  # a doubling that brings this much is followed by another one, else by a smaller step
CLOSE = 1.5  # neighbours of the best number that are no further away enclose it
SAME = 0.975  # of the best rate: then fewer groups are preferred
WORSE = 0.95  # of the best rate ends the climb
CHANGED = 0.7  # a rate at the same number below this share of the known one (or as much above) is another engine
HOPELESS = 0.7  # of the best rate is all that a number can still reach: it is given up
FLAT = 8  # times the best number end a climb without a gain
SEARCH_SHARE = 0.02  # of what the engine gives may be lost by looking again
AGAIN_S = 30.0  # a rate is believed at least so long


@dataclass(slots=True)
class _Known:
    rate: float
    until: float  # s; then it is looked at again


@dataclass(slots=True)
class Search:
    """Looks for the number with the highest rate, and holds it.

    A rate at the held number that is another one than before scales all that is remembered, so that a slower engine
    never lowers the number by itself: fewer groups would make fewer groups per second, and so on to one.
    """

    limit: int  # to be measured next
    best: int | None = None
    _known: dict[int, _Known] = field(default_factory=dict)
    _climbs: bool = True
    _fell: bool = False  # the engine became slower: look at smaller numbers first

    def restart(self, limit: int, now: float, *, climbs: bool = False) -> None:
        """Continue from this limit, of which no rate is known; a higher one before it is not tried for a minute."""
        self._known = {} if limit >= self.limit else {self.limit: _Known(0.0, now + 2 * AGAIN_S)}
        self.limit, self.best, self._climbs = limit, None, climbs

    @property
    def hopeless(self) -> float:
        """A rate at which the number that is tried is given up."""
        return HOPELESS * self._known[self.best].rate if self.best not in (None, self.limit) else 0.0

    def observe(self, rate: float, now: float, *, took_s: float, most: int = ANY) -> int:
        """Note the rate at `limit`, which was set `took_s` ago; the next limit, at most `most`."""
        known = self._known.get(self.limit)
        if self.best is not None and self.limit == self.best:
            assert known is not None
            change = rate / known.rate
            if CHANGED <= change <= 1 / CHANGED:
                known.rate += 0.3 * (rate - known.rate)
            else:
                self._known = {self.limit: _Known(rate, 0.0)}
                self._climbs, self._fell = change > 1, change < 1
        else:
            top = self._known[self.best].rate if self.best is not None else rate
            lost_s = max(0.0, 1 - rate / top) * 2 * took_s  # and as much until it is gone again
            value = (rate + known.rate) / 2 if known is not None and known.rate else rate
            self._known[self.limit] = _Known(value, now + max(AGAIN_S, lost_s / SEARCH_SHARE))
        top = max(each.rate for each in self._known.values())
        self.best = best = min(number for number, each in self._known.items() if each.rate >= SAME * top)
        self._known = {n: each for n, each in self._known.items() if each.until > now or n == best}
        self.limit = self._next(best, most)
        return self.limit

    def _next(self, best: int, most: int) -> int:
        numbers = sorted(self._known)
        if self._climbs:
            rates = [self._known[number].rate for number in numbers[-2:]]
            if rates[-1] >= WORSE * self._known[best].rate and numbers[-1] < FLAT * best:
                is_steep = len(rates) < 2 or rates[1] >= STEEP * rates[0]
                return max(best, min(math.ceil(numbers[-1] * (GROW if is_steep else PROBE)), most))
            self._climbs = False
        above = min((number for number in numbers if number > best), default=None)
        below = max((number for number in numbers if number < best), default=None)
        candidates = []
        if above is None or above > CLOSE * best:
            candidates.append(min(math.ceil(best * (PROBE if above is None else (above / best) ** GOLDEN)), most))
        if below is None or best > CLOSE * below:
            smaller = best / (GROW if self._fell else PROBE) if below is None else best * (below / best) ** GOLDEN
            candidates.insert(0 if self._fell else 1, max(1, int(smaller)))
        return next((n for n in candidates if n not in self._known and not best < n <= 1.05 * best), best)


QUEUE_SHARE = 0.1  # queued requests for each running one that keep an engine busy
FULL_CACHE, ROOM_IN_CACHE = 0.95, 0.9
RELIEF = 0.8
TICK_S = 0.1
SAMPLES = 3  # of the load; the calmest counts, as a queue right after a burst of requests is none
BLIND_S = 8.0  # without a single group that ended, the number grows
BLIND_MOST = 32  # times the first number, where no engine says whether it has room


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One endpoint's load; None where it does not say. Requests count choices, as the engine schedules them."""

    base_url: str
    running: int | None = None
    queued: int | None = None
    token_usage: float | None = None  # share of the KV cache in use, 0 to 1
    retracted: int | None = None  # requests that lost their KV cache and wait to start again
    slots: int | None = None  # requests that may run at once
    tokens_s: float | None = None  # generated now

    @property
    def is_known(self) -> bool:
        return self.running is not None


def relieved(limit: int, in_flight: int, loads: Sequence[EngineLoad]) -> int:
    """Return the limit, or a lower one for engines under pressure, once an earlier cut has taken effect.

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


def most_useful(limit: int, in_flight: int, loads: Sequence[EngineLoad]) -> int:
    """Return the largest number that the engines have room for, by their queue, places and KV cache."""
    run, wait = running(loads), queued(loads)
    if loads and not has_room(loads):
        return limit
    most = float(ANY)
    slots = [load.slots for load in loads]
    if run and slots and all(slots):
        most = sum(slot or 0 for slot in slots) * (1 + QUEUE_SHARE) * in_flight / (run + wait)
    fullest = max((load.token_usage or 0.0 for load in loads), default=0.0)
    if fullest > 0:
        most = min(most, in_flight * ROOM_IN_CACHE / fullest)
    return max(limit, int(most))


def has_room(loads: Sequence[EngineLoad]) -> bool:
    """Return True when more requests would run, and not only wait."""
    return queued(loads) <= QUEUE_SHARE * running(loads) / 2


def running(loads: Sequence[EngineLoad]) -> int:
    """Requests that all engines together work on."""
    return sum(load.running or 0 for load in loads)


def queued(loads: Sequence[EngineLoad]) -> int:
    return sum(load.queued or 0 for load in loads)


class ConcurrencyLimit:
    """Decides the number of groups at once: `observe` a few times a second, in any time.

    Pressure that an engine reports comes first, then rates, then blind growth while not one group has ended.
    """

    def __init__(self, start: int, times: GroupTimes) -> None:
        """`start` is the first limit; `times` are told of every group that begins and ends."""
        self.limit = start
        self._start = start
        self._times = times
        self._search = Search(start)
        self._meter = RateMeter(start, times, -math.inf)
        self._set_at = math.nan  # s; of the first look
        self._samples: deque[Sequence[EngineLoad]] = deque(maxlen=SAMPLES)

    def note_loads(self, loads: Sequence[EngineLoad]) -> None:
        """Note what the engines say now; those that say nothing are left out."""
        if loads := [load for load in loads if load.running is not None]:
            self._samples.append(loads)
        else:
            self._samples.clear()

    def observe(self, now: float, in_flight: int) -> int:
        """Return the limit from `now` on, s of any clock that does not jump.

        `in_flight` groups are in flight; 0 while something other than the limit holds the run back.
        """
        if math.isnan(self._set_at):
            self._set_at = self._meter.since = now
        least = LEAST_GROUPS if self._search.best is None else max(LEAST_GROUPS, min(self.limit, SURE_GROUPS))
        rate = self._meter.look(now, in_flight, least, self._search.hopeless)
        if not in_flight:
            self._samples.clear()
            return self.limit
        limit = self._decide(now, in_flight, rate)
        if limit != self.limit or rate is not None:
            self._meter = RateMeter(limit, self._times, now)
        if limit != self.limit:
            self.limit, self._set_at = limit, now
            self._samples.clear()
        return limit

    def _decide(self, now: float, in_flight: int, rate: float | None) -> int:
        calmest = []
        if len(self._samples) == SAMPLES:
            calmest = min(self._samples, key=lambda loads: queued(loads) / max(1, queued(loads) + running(loads)))
        if (limit := relieved(self.limit, in_flight, calmest)) < self.limit:
            self._search.restart(limit, now)
            return limit
        room = most_useful(self.limit, in_flight, calmest)
        if rate is not None:
            return self._search.observe(rate, now, took_s=now - self._set_at, most=room)
        if not self._times.ended_ever and now - max(self._set_at, self._meter.since) >= BLIND_S:
            room = room if calmest else BLIND_MOST * self._start
            if (limit := min(2 * self.limit, room)) > self.limit:
                self._search.restart(limit, now, climbs=True)
                return limit
        return self.limit

    async def follow(self, in_flight: Callable[[], int], apply: Callable[[int], None]) -> None:
        """Adjust the limit for ever; `apply` gets every new one. `in_flight` as for `observe`."""
        apply(self.limit)
        while True:
            await asyncio.sleep(TICK_S)
            before = self.limit
            if self.observe(time.monotonic(), in_flight()) != before:
                logger.info("groups at once: %d -> %d", before, self.limit)
                apply(self.limit)
