"""When to stop asking for more responses to one problem, and when to stop the run: fewer tokens for the same dataset.

For datasets, not for training: groups get different sizes, and problems that are easy or hopeless fewer responses.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from atroposlib.rollouts.ledger import Totals

T = TypeVar("T")
Z_95 = 1.96
FIRST_SHARE = 4
"""The first round asks for one part in this many of a group, or for as many as must be accepted."""


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """The rule for one problem. Both None: all responses are asked for at once."""

    accepted: int | None = None  # enough is accepted
    hopeless_rate: float | None = None  # a problem solved more rarely than this, with 95% confidence, is given up

    @property
    def is_on(self) -> bool:
        return self.accepted is not None or self.hopeless_rate is not None

    def next_round(self, accepted: int, tried: int, most: int) -> int:
        """Return the number of responses to ask for next, 0 to stop; `most` make a whole group.

        >>> rule = EarlyStop(accepted=2, hopeless_rate=0.25)
        >>> rule.next_round(0, 0, 16), rule.next_round(1, 4, 16), rule.next_round(2, 7, 16), rule.next_round(0, 12, 16)
        (4, 3, 0, 0)
        """
        left = most - tried
        if left <= 0 or not self.is_on:
            return left
        if self.accepted is not None and accepted >= self.accepted:
            return 0
        if self.hopeless_rate is not None and tried and wilson_upper(accepted, tried) < self.hopeless_rate:
            return 0
        round_size = math.ceil(most / FIRST_SHARE)
        if not tried:
            return min(left, max(self.accepted or 0, round_size))
        if self.accepted is None:
            return min(left, round_size)
        needed = math.ceil((self.accepted - accepted) * (tried + 2) / (accepted + 1))
        return min(left, needed if self.hopeless_rate is None else min(needed, round_size))


async def sample_until(
    rule: EarlyStop, most: int, ask: Callable[[int], Awaitable[Sequence[T]]], is_accepted: Callable[[T], bool]
) -> list[T]:
    """Ask for responses in rounds until the rule says stop; at most `most`. `ask` gives scored ones."""
    scored: list[T] = []
    while size := rule.next_round(sum(map(is_accepted, scored)), len(scored), most):
        scored += await ask(size)
    return scored


def wilson_upper(accepted: float, tried: int, z: float = Z_95) -> float:
    """Upper end of Wilson's interval for the rate behind `accepted` of `tried`.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209.

    >>> round(wilson_upper(0, 8), 3), round(wilson_upper(8, 8), 3)
    (0.324, 1.0)
    """
    share, weight = accepted / tried, z * z / tried
    middle = share + weight / 2
    spread = z * math.sqrt(share * (1 - share) / tried + weight / (4 * tried))
    return min(1.0, (middle + spread) / (1 + weight))


@dataclass(frozen=True, slots=True)
class RunLimits:
    """When a run has what it wants; None: no such limit."""

    groups: int | None = None
    accepted: int | None = None  # responses
    tokens: int | None = None  # generated, for recorded and rejected groups

    def share_done(self, counts: Totals) -> float | None:
        """Of the limit that is nearest, 0 to 1 and more; None: there is no limit."""
        reached = (
            (self.groups, counts.groups),
            (self.accepted, counts.accepted),
            (self.tokens, counts.completion_tokens + counts.rejected_tokens),
        )
        shares = [count / limit if limit > 0 else 1.0 for limit, count in reached if limit is not None]
        return max(shares, default=None)

    def is_reached(self, counts: Totals) -> bool:
        """Nothing more is to be started."""
        return (self.share_done(counts) or 0.0) >= 1

    def may_start(self, counts: Totals, in_flight: int) -> bool:
        """Would one more group find room, if those in flight turn out as those recorded?"""
        if self.is_reached(counts) or (self.groups is not None and counts.groups + in_flight >= self.groups):
            return False
        if not counts.groups or not in_flight:
            return True
        to_come = in_flight / counts.groups
        spent = counts.completion_tokens + counts.rejected_tokens
        return (self.accepted is None or counts.accepted * (1 + to_come) < self.accepted) and (
            self.tokens is None or spent * (1 + to_come) < self.tokens
        )
