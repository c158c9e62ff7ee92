"""Tells whether a run moves, and if not, says in a sentence what it waits for, what that means, what to do.

One object looks at each run, several times a second. Nothing here waits or counts itself: `Facts` hold what the run has
counted, so each decision is a function of two looks.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from atroposlib.errors import AtroposError
from atroposlib.rollouts.failures import NO_GROUP
from atroposlib.rollouts.groups import EQUAL_SCORES

QUIET_S = 6.0
"""Seconds without a sign of life before something is said: within ten it is in the log and in the progress file."""
HOPELESS = {EQUAL_SCORES: 1000, NO_GROUP: 500}
"""Items in a row without a usable group, with none before, after which a run ends, by reason: one solved response in
2,000 gives every 125th group of 16 different scores, and an environment may mean to skip most of its items."""
HOPELESS_FORM = 200
"""The same for any other reason, such as a wrong size."""


@dataclass(slots=True)
class Dropped:
    """Groups of no use in this process by reason, and the scores that were seen in them; groups that were withheld."""

    reasons: Counter[str] = field(default_factory=Counter)
    scores: set[float] = field(default_factory=set)  # a few of them
    withheld: int = 0  # stored, but kept from the trainer
    longest: int = 0  # tokens, of the sequences for which they were

    def note(self, reason: str, scores: Sequence[float]) -> None:
        self.reasons[reason] += 1
        if len(self.scores) < 4:
            self.scores.update(map(float, scores))


@dataclass(frozen=True, slots=True)
class Facts:
    """Counts of a run at one moment."""

    is_set_up: bool = True
    is_told: bool = False  # something else says already what it waits for
    engine_down: str | None = None  # no engine is up and takes requests, in a sentence
    patience_s: float = math.inf  # for which that may last
    held_back: str | None = None  # why no rollout may start, where that is the trainer's or an evaluation's doing
    not_taken: str | None = None  # the trajectory API takes no groups, in a sentence
    no_items: str | None = None  # the environment has had nothing to roll out for some seconds
    in_flight: int = 0  # groups
    answers: int = 0  # of unfinished groups
    tokens: int = 0  # of those answers
    requests: int | None = None  # that the engines run or queue; None: they do not say
    engine_tokens_s: float | None = None
    stored: int = 0  # groups
    dropped: int = 0  # items in a row that ended without a group to keep
    fruitless: str | None = None  # what is said of them
    reason: str | None = None  # of most of them
    scores: frozenset[float] = frozenset()
    withheld: int = 0
    longest: int = 0
    max_token_len: int = -1  # of the trainer

    @property
    def signs(self) -> tuple[int, ...]:
        """Whatever changes while a run moves."""
        return (self.answers, self.tokens, self.stored, self.dropped, self.withheld, bool(self.in_flight))


class Standstill:
    """Looks at one run. Times are seconds of a clock that the caller chooses."""

    def __init__(self, now: float) -> None:
        self._moved, self._sent = (now, Facts()), (now, Facts())
        self._engine_up = now

    def look(self, facts: Facts, now: float) -> str | None:
        """Return the sentence about this moment, None while all is well; AtroposError: continuing is pointless."""
        if not facts.engine_down:
            self._engine_up = now
        elif now - self._engine_up >= facts.patience_s:
            raise AtroposError(
                f"the run ends, as no engine has taken a request for {facts.patience_s:g} s (outage_timeout_s); the "
                f"same command continues. It waited for {facts.engine_down}"
            )
        if facts.is_told or facts.signs != self._moved[1].signs:
            self._moved = (now, facts)
        if facts.stored - facts.withheld != self._sent[1].stored - self._sent[1].withheld:
            self._sent = (now, facts)
        if facts.is_told:
            return None
        if facts.fruitless:
            if _is_pointless(facts):
                raise AtroposError(f"the run ends, as nothing comes of it: it waits for {facts.fruitless}")
            return facts.fruitless
        if now - self._sent[0] >= QUIET_S and (withheld := facts.withheld - self._sent[1].withheld):
            return (
                f"a group that the trainer takes: the last {withheld} are withheld from it, as they hold a sequence of "
                f"up to {facts.longest} tokens and its max_token_len is {facts.max_token_len}; lower "
                "env.max_token_length or raise the trainer's (the groups stay in the rollout files, if any are written)"
            )
        return _unmoved(facts) if now - self._moved[0] >= QUIET_S else facts.no_items


def _is_pointless(facts: Facts) -> bool:
    """Nothing was ever stored, and the way in which groups are of no use does not depend on the model's luck."""
    if facts.stored or (facts.reason == EQUAL_SCORES and len(facts.scores) > 1):
        return False
    return facts.dropped >= HOPELESS.get(facts.reason or "", HOPELESS_FORM)


def _unmoved(facts: Facts) -> str | None:
    if not facts.is_set_up:
        return "the end of setup(): it loads data, or waits for a hub that does not answer"
    if facts.in_flight and facts.not_taken:
        return facts.not_taken
    if facts.in_flight:
        made = (
            f"{facts.in_flight} groups are in the making, with {facts.answers} answers of {facts.tokens} tokens so far"
        )
        if facts.requests == 0:
            return (
                f"the environment's own code: {made}, and no request is at the engine. A verifier or a tool takes "
                "long; env.worker_timeout ends it"
            )
        if facts.requests is None:
            return f"answers: {made}; the engine does not say how busy it is"
        speed = f", {facts.engine_tokens_s:.0f} tokens/s" if facts.engine_tokens_s is not None else ""
        return f"answers: {made}; the engine has {facts.requests} requests{speed}"
    return facts.held_back or facts.no_items


class HeldLoop:
    """Looks at how late the event loop is: what holds it for long stops every rollout of the process."""

    OVER_S = 10.0
    """The time that is judged at once; more than half of it held is said."""
    AGAIN_S = 600.0

    def __init__(self, now: float) -> None:
        self._since, self._said = now, -math.inf
        self._held_s = self._longest_s = 0.0

    def look(self, late_s: float, now: float) -> str | None:
        """Return what to say of blocking code, if anything; `late_s` is how much later than asked this look came."""
        self._held_s, self._longest_s = self._held_s + late_s, max(self._longest_s, late_s)
        if (over_s := now - self._since) < self.OVER_S:
            return None
        held_s, longest_s = self._held_s, self._longest_s
        self._since, self._held_s, self._longest_s = now, 0.0, 0.0
        if 2 * held_s <= over_s or now - self._said < self.AGAIN_S:
            return None
        self._said = now
        return (
            f"the event loop was held for {held_s:.1f} of {over_s:.1f} s, {longest_s:.1f} s at once, and no rollout "
            "moves meanwhile: a request, program, sleep or computation of the environment blocks it; await it, or use "
            "asyncio.to_thread or atroposlib.sandbox.workers.WorkerPool. Or the process itself was suspended"
        )
