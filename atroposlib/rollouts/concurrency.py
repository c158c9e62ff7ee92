"""`max_num_workers: auto`: how many groups at once, found and followed from what the engine says or delivers.

`ConcurrencyLimit` decides: observations in, a number out, no clock and no I/O of its own. `AutoConcurrency` feeds it.

1. `RateMeter` measures the groups per second at one number: groups in flight / mean time of a group (Little's law). The
   mean is the Kaplan-Meier estimate, in which groups that still run count with their age, so that neither rounds of
   equal groups nor the early ends of the short ones bend it.
2. `BracketSearch` remembers these rates and looks for the best number: steps upwards until a number is worse, then
   golden-section steps between the neighbours of the best, then it holds. Rates become old; what may be spent on
   looking again is a small share of what the engine gives.
3. Where the engine reports its load, a lasting queue, retractions or a full cache bring the number down at once, and
   nothing is tried that would only wait.

Sources: J. Little, Operations Research 9 (1961), 383; E. Kaplan and P. Meier, JASA 53 (1958), 457; bracketing and
golden-section search: J. Kiefer, Proc. AMS 4 (1953), 502, and Press et al., Numerical Recipes, 10.1.
"""

import asyncio
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

logger = logging.getLogger(__name__)


class GroupTimes:
    """Times of groups: only those that began since the last `mark`, as earlier ones met another number."""

    def __init__(self) -> None:
        self.took: list[float] = []  # s, of the groups that ended well
        self.ended_ever = 0
        self._running: dict[int, float] = {}  # number of a group -> when it began
        self._numbers = itertools.count()
        self._now = 0.0

    def mark(self, now: float) -> None:
        """Forget what was noted."""
        self.took, self._running, self._now = [], {}, now

    def tick(self, now: float) -> None:
        """Groups that begin from here on count from `now`."""
        self._now = now

    def begin(self) -> int:
        """A group begins; `end` wants the number returned."""
        number = next(self._numbers)
        self._running[number] = self._now
        return number

    def end(self, number: int, seconds: float | None) -> None:
        """That group ended; None: by a failure, of which the time says nothing."""
        self.ended_ever += seconds is not None
        if self._running.pop(number, None) is not None and seconds is not None:
            self.took.append(seconds)

    def ages(self, now: float) -> list[tuple[float, int]]:
        """(age in s, groups) of those that still run, oldest first."""
        return [(now - began, groups) for began, groups in Counter(self._running.values()).items()]


def mean_time(ended: Sequence[float], running: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return the mean time of a group (s), and the share of groups longer than all that is known (Kaplan-Meier).

    `ended` are s of groups that ended, `running` (age in s, groups) of those that did not yet.

    >>> mean_time([2.0, 2.0], [(1.0, 5)])
    (2.0, 0.0)
    """
    at_risk = len(ended) + sum(count for _, count in running)
    area, survival, last = 0.0, 1.0, 0.0
    for time, is_censored, count in sorted([(s, False, 1) for s in ended] + [(age, True, n) for age, n in running]):
        area, last = area + survival * (time - last), time
        if not is_censored:
            survival *= 1 - 1 / at_risk
        at_risk -= count
    return area, survival


@dataclass(frozen=True, slots=True)
class Rate:
    """Groups per second."""

    value: float
    error: float  # standard error, as a share of it
    groups: int  # that ended


LEAST_GROUPS = 8  # of which a first rate is made
SURE_GROUPS = 64
SHORTEST_S = 0.5
_LONGER = 0.25  # at most this share of groups is longer than all that is known
_BUSY, _OVER = 0.8, 1.1  # of the limit is in flight: less or more says nothing about the limit
_LEAST_ERROR, _LEAST_SPREAD = 0.02, 0.1


@dataclass(slots=True)
class RateMeter:
    """Groups per second while `limit` groups are in flight, of groups that began under it."""

    limit: int
    times: GroupTimes
    since: float  # s; moved on while the limit is not what is in flight
    _is_marked: bool = False
    _in_flight: float = 0.0  # sum over looks
    _looks: int = 0
    _next_look: float = 0.0
    _rate: Rate | None = None

    def look(self, now: float, in_flight: int) -> Rate | None:
        """Return the rate as far as it is known by now; None: not yet."""
        if not _BUSY * self.limit <= in_flight <= math.ceil(_OVER * self.limit):
            self.since, self._is_marked = now, False
            return None
        if not self._is_marked:
            self._is_marked, self._in_flight, self._looks, self._next_look, self._rate = True, 0.0, 0, 0.0, None
            self.times.mark(now)
        self.times.tick(now)
        self._in_flight += in_flight
        self._looks += 1
        groups, elapsed = len(self.times.took), now - self.since
        if groups < LEAST_GROUPS or elapsed < SHORTEST_S or now < self._next_look:
            return self._rate
        self._next_look = now + elapsed / 16
        mean, longer = mean_time(self.times.took, self.times.ages(now))
        if longer > _LONGER or mean <= 0:
            return None
        average = sum(self.times.took) / groups
        spread = max(_LEAST_SPREAD, math.sqrt(sum((t - average) ** 2 for t in self.times.took) / groups) / mean)
        value = self._in_flight / self._looks / mean
        self._rate = Rate(value, max(_LEAST_ERROR, spread / math.sqrt(groups)), groups)
        return self._rate

    def at_most(self, now: float) -> float:
        """Return what the rate cannot exceed, as groups take at least as long as they have been running."""
        ages = [(age, count) for age, count in self.times.ages(now) if age >= (now - self.since) / 2]
        running, took = sum(count for _, count in ages), self.times.took
        if not self._is_marked or running + len(took) < LEAST_GROUPS / 2:
            return math.inf
        least = (sum(age * count for age, count in ages) + sum(took)) / (running + len(took))
        return self._in_flight / max(1, self._looks) / least if least > 0 else math.inf

    def restart(self, now: float) -> None:
        self.since, self._is_marked = now, False


ANY = 10**9  # groups: no limit
GROW, PROBE = 2.0, math.sqrt(2)
STEEP = 1.3  # a doubling that brings this much is followed by another one, else by a smaller step
GOLDEN = (3 - math.sqrt(5)) / 2
CLOSE = 1.5  # neighbours of the best number that are no further away enclose it
GAIN = 0.06
CLEAR = 2.0  # standard errors
SAME = 0.975  # of the best rate: then fewer groups are preferred
WORSE = 0.92  # of the best rate ends the climb
CHANGED = 0.7  # a rate at the same number below this share of the known one (or as much above) is another engine
FLAT, FLAT_SLOW = 8, 2  # times the best number end a climb without a gain, the second where a group takes `SLOW_S`
SLOW_S = 60.0
SEARCH_SHARE = 0.02  # of what the engine gives may be lost by looking again
AGAIN_S = 30.0  # a rate is believed at least so long
_FAR = (PROBE, 2.0)  # factors of the probes upwards that follow one another without success


@dataclass(slots=True)
class _Known:
    rate: float
    error: float
    until: float  # s; then it is looked at again


@dataclass(slots=True)
class BracketSearch:
    """Looks for the number with the highest rate, and holds it.

    A rate at the held number that is another one than before scales all that is remembered, so that a slower engine
    never lowers the number by itself: fewer groups would make fewer groups per second, and so on to one.
    """

    limit: int  # to be measured next
    best: int | None = None
    _known: dict[int, _Known] = field(default_factory=dict)
    _climbs: bool = True
    _fell: bool = False  # the engine became slower: look at smaller numbers first
    _far: int = 0
    _searches: bool = True  # freely: nothing was found yet that could be held
    _next_probe: float = 0.0  # s; not before, once something is held

    def restart(self, limit: int, now: float, *, climbs: bool = False) -> None:
        """Continue from this limit, of which no rate is known; a higher one before it is not tried for a minute."""
        self._known = {} if limit >= self.limit else {self.limit: _Known(0.0, 0.0, now + 2 * AGAIN_S)}
        self.limit, self.best, self._climbs = limit, None, climbs
        self._searches = True

    def known_rate(self) -> float | None:
        """Return the rate at the best number; None before the first."""
        return self._known[self.best].rate if self.best is not None else None

    def is_enough(self, rate: Rate) -> bool:
        """Return True when the rate needs no more groups: clearly better or worse than the best, or of many groups."""
        if rate.groups >= max(SURE_GROUPS, min(self.limit, 4 * SURE_GROUPS)) or self.best is None:
            return True
        best = self._known[self.best]
        error = math.hypot(rate.error, best.error)
        return self.limit != self.best and abs(math.log(rate.value / best.rate)) > CLEAR * error

    def observe(self, rate: Rate, now: float, *, took_s: float, most: int = ANY) -> int:
        """Note the rate at `limit`, which was set `took_s` ago; the next limit, at most `most`."""
        if self.limit == self.best:
            self._hold(rate)
        else:
            self._note(rate, now, took_s)
        top = max(known.rate for known in self._known.values())
        best = min(number for number, known in self._known.items() if known.rate >= SAME * top)
        if self.best is not None and best > self.best:
            self._far = 0
        self.best = best
        for number in [number for number, known in self._known.items() if known.until <= now and number != best]:
            del self._known[number]
        wanted = self._next(most, self.limit / rate.value)
        if wanted == best:
            self._searches = False
        elif not self._searches and now < self._next_probe:
            wanted = best
        self.limit = wanted
        return self.limit

    def _hold(self, rate: Rate) -> None:
        known = self._known[self.limit]
        change = rate.value / known.rate
        if not CHANGED <= change <= 1 / CHANGED:
            self._known = {self.limit: _Known(rate.value, rate.error, 0.0)}
            self._climbs, self._fell, self._far, self._searches = change > 1, change < 1, 0, True
        else:
            known.rate += 0.3 * (rate.value - known.rate)
            known.error = min(known.error, rate.error)

    def _note(self, rate: Rate, now: float, took_s: float) -> None:
        best, before = self.known_rate(), self._known.get(self.limit)
        lost_s = max(0.0, 1 - rate.value / best) * 2 * took_s if best else 0.0  # and as much until it is gone again
        self._next_probe = now + max(AGAIN_S / 2, lost_s / SEARCH_SHARE)
        value = rate.value if before is None or not before.rate else (rate.value + before.rate) / 2
        self._known[self.limit] = _Known(value, rate.error, now + max(AGAIN_S, lost_s / SEARCH_SHARE))

    def _next(self, most: int, group_s: float) -> int:
        assert self.best is not None
        best, here = self.best, self._known
        above = min((number for number in here if number > best), default=None)
        below = max((number for number in here if number < best), default=None)
        if self._climbs and (step := self._climb(best, group_s)):
            return max(best, min(step, most))
        candidates: list[int] = []
        if above is None:
            candidates.append(min(math.ceil(best * _FAR[self._far % len(_FAR)]), most))
        if below is None:
            candidates.insert(0 if self._fell else 1, max(1, int(best / PROBE)))
        if above is not None and (above > CLOSE * best or self._may_gain(below, best, above)):
            candidates.append(min(round(best * (above / best) ** GOLDEN), most))
        if below is not None and best > CLOSE * below:
            candidates.append(round(best * (below / best) ** GOLDEN))
        for candidate in candidates:
            if candidate not in here and not best < candidate <= 1.05 * best:
                self._far += above is None and candidate > best
                self._fell = self._fell and candidate < best
                return candidate
        return best

    def _may_gain(self, below: int | None, best: int, above: int) -> bool:
        """Return True when the rate, were it to rise on as it did below the best, had much to gain before `above`."""
        if below is None:
            return False
        rise = math.log(self._known[best].rate / self._known[below].rate) / math.log(best / below)
        return min(1.0, rise) * math.log(above / best) > GAIN

    def _climb(self, best: int, group_s: float) -> int | None:
        """Return the next number of the climb; None: it is over."""
        numbers = sorted(self._known)
        last = self._known[numbers[-1]]
        at_best = self._known[best]
        error = math.hypot(last.error, at_best.error)
        is_worse = last.rate < at_best.rate * min(WORSE, math.exp(-CLEAR * error))
        if is_worse or numbers[-1] >= best * (FLAT if group_s < SLOW_S else FLAT_SLOW):
            self._climbs = False
            return None
        is_steep = len(numbers) < 2 or last.rate >= STEEP * self._known[numbers[-2]].rate
        return math.ceil(numbers[-1] * (GROW if is_steep else PROBE))


QUEUE_SHARE = 0.1  # queued requests for each running one that keep an engine busy
FULL_CACHE, ROOM_IN_CACHE = 0.95, 0.9
RELIEF = 0.8
TICK_S = 0.1
SAMPLES = 3  # of the load; the calmest counts, as a queue right after a burst of requests is none
BLIND_S = 8.0  # without a single group that ended, the number grows
BLIND_MOST = 32  # times the first number, where no engine says whether it has room
_HOPELESS = 0.85  # of the best rate is all that a number can still reach: it is given up


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
    @property
    def slots(self) -> int | None: ...


def relieved(limit: int, in_flight: int, loads: Sequence[Load]) -> int:
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


def most_useful(limit: int, in_flight: int, loads: Sequence[Load]) -> int:
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


def has_room(loads: Sequence[Load]) -> bool:
    """Return True when more requests would run, and not only wait."""
    return queued(loads) <= QUEUE_SHARE * running(loads) / 2


def running(loads: Sequence[Load]) -> int:
    """Requests that all engines together work on."""
    return sum(load.running or 0 for load in loads)


def queued(loads: Sequence[Load]) -> int:
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
        self._search = BracketSearch(start)
        self._meter = RateMeter(start, times, 0.0)
        self._set_at: float | None = None  # s
        self._samples: deque[Sequence[Load]] = deque(maxlen=SAMPLES)

    def note_loads(self, loads: Sequence[Load]) -> None:
        """Note what the engines say now; those that say nothing are left out."""
        if loads := [load for load in loads if load.running is not None]:
            self._samples.append(loads)
        else:
            self._samples.clear()

    def observe(self, now: float, in_flight: int) -> int:
        """Return the limit from `now` on, s of any clock that does not jump.

        `in_flight` groups are in flight; 0 while something other than the limit holds the run back.
        """
        if self._set_at is None:
            self._set_at = self._meter.since = now
        rate = self._meter.look(now, in_flight)
        if not in_flight:
            self._samples.clear()
            return self.limit
        limit = self._decide(now, in_flight, rate)
        if limit != self.limit:
            self.limit, self._set_at = limit, now
            self._meter = RateMeter(limit, self._times, now)
            self._samples.clear()
        return limit

    def _decide(self, now: float, in_flight: int, rate: Rate | None) -> int:
        search, meter, set_at = self._search, self._meter, self._set_at or 0.0
        calmest = []
        if len(self._samples) == SAMPLES:
            calmest = min(self._samples, key=lambda loads: queued(loads) / max(1, queued(loads) + running(loads)))
        if (limit := relieved(self.limit, in_flight, calmest)) < self.limit:
            search.restart(limit, now)
            return limit
        best = search.known_rate()
        if best and self.limit != search.best and (most := meter.at_most(now)) < _HOPELESS * best:
            rate = Rate(most, 0.0, SURE_GROUPS)
        elif rate is not None and not search.is_enough(rate):
            return self.limit
        room = most_useful(self.limit, in_flight, calmest)
        if rate is not None and rate.groups >= LEAST_GROUPS:
            meter.restart(now)
            return search.observe(rate, now, took_s=now - set_at, most=room)
        if not self._times.ended_ever and now - max(set_at, meter.since) >= BLIND_S:
            room = room if calmest else BLIND_MOST * self._start
            if (limit := min(2 * self.limit, room)) > self.limit:
                search.restart(limit, now, climbs=True)
                return limit
        return self.limit


@dataclass(eq=False)
class AutoConcurrency:
    """Follows one engine pool; `limit` is the number of groups to have in flight now."""

    limit: int
    _: KW_ONLY
    in_flight: Callable[[], int]  # groups running now
    times: GroupTimes  # told of every group that begins and ends
    is_parked: Callable[[], bool] = lambda: False  # nothing can be learned: the engine, a disk or the API is away

    def __post_init__(self) -> None:
        self._decision = ConcurrencyLimit(self.limit, self.times)
        self.note_loads = self._decision.note_loads  # to be told every second what the engines say

    async def follow(self, apply: Callable[[int], None]) -> None:
        """Adjust the limit for ever; `apply` gets every new one."""
        clock = asyncio.get_running_loop().time
        apply(self.limit)
        while True:
            await asyncio.sleep(TICK_S)
            limit = self._decision.observe(clock(), 0 if self.is_parked() else self.in_flight())
            if limit != self.limit:
                logger.info("groups at once: %d -> %d", self.limit, limit)
                self.limit = limit
                apply(limit)
