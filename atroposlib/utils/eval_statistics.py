"""Statistics of evaluations: N items, K sampled answers each, every answer scored.

The item is the unit of chance: intervals resample items, never single answers, because answers to one question are
not independent of each other.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A confidence interval of a mean."""

    low: float
    high: float


def pass_at_k(m: float, c: float, k: int) -> float:
    """Chance that at least one of `k` answers, drawn without replacement, is correct.

    Args:
        m: answers sampled.
        c: of these, correct ones; a whole number, also as a sum of scores of 1.0.
        k: answers drawn, at most m for an unbiased estimate; with fewer than k wrong answers it is 1.

    Source: the unbiased estimator of arXiv:2107.03374, equation 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= c <= m or k < 1:
        raise ValueError(f"pass@k needs 0 <= c <= m and k >= 1, found m={m} c={c} k={k}")
    if m - c < k:
        return 1.0
    return 1.0 - math.comb(int(m - c), k) / math.comb(int(m), k)


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the mean.

    Args:
        values: [N] one per item.
        confidence: share of the resampled means inside, 0 to 1.
        resamples: how often N items are drawn with replacement.
        seed: the same values and seed give the same interval.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    if len(values) == 0:
        raise ValueError("an interval needs at least one item, found none")
    items = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    means = [items[rng.integers(len(items), size=len(items))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def _ks(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest`."""
    return sorted({2**i for i in range(largest.bit_length()) if 2**i <= largest} | {largest})


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean: the sample's standard deviation over the root of N; 0 for one value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation of two lists, -1 to 1; pairs that are equal in either count for neither side (tau-b).

    >>> round(kendall_tau([1, 2, 3], [1, 3, 2]), 3)
    0.333
    """
    signs = [
        (np.sign(a - b), np.sign(c - d))
        for (a, c), (b, d) in itertools.combinations(zip(first, second, strict=True), 2)
    ]
    sizes = [sum(abs(pair[side]) for pair in signs) for side in (0, 1)]
    return float(sum(a * b for a, b in signs) / math.sqrt(math.prod(sizes))) if all(sizes) else 0.0


class Paired(NamedTuple):
    """Two results on the same items."""

    difference: float  # mean of second less first
    standard_error: float  # of it, paired
    p_value: float  # of no difference
    items: int
    better: int  # items on which the second is
    worse: int


def paired_test(first: Sequence[float], second: Sequence[float], *, draws: int = 10_000, seed: int = 0) -> Paired:
    """Compare two results item by item, by a permutation test: under no difference each sign is as likely as the other.

    Args:
        first: [N] scores.
        second: [N] scores of the same items in the same order.
        draws: random signs; with 13 differing items or fewer, all signs are tried instead.

    Source: Fisher's randomisation test, as in Good, Permutation Tests, 2000, section 3.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"a paired test needs as many scores on both sides, found {len(first)} and {len(second)}")
    gaps = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    differing = gaps[gaps != 0]
    observed = abs(differing.sum())
    if len(differing) <= 13:
        signs = 1 - 2 * ((np.arange(2 ** len(differing))[:, None] >> np.arange(len(differing))) & 1)
        p_value = float(np.mean(np.abs(signs @ differing) >= observed - 1e-12))
    else:
        rng = np.random.default_rng(seed)
        hits = sum(abs(rng.choice((-1, 1), len(differing)) @ differing) >= observed - 1e-12 for _ in range(draws))
        p_value = (hits + 1) / (draws + 1)
    better, worse = int((gaps > 0).sum()), int((gaps < 0).sum())
    return Paired(float(gaps.mean()), standard_error(gaps.tolist()), p_value, len(gaps), better, worse)


class Answers(NamedTuple):
    """K answers sampled to one item."""

    grades: Sequence[float]  # 1 or more: right
    right: Sequence[str | None]  # which answer each right one gives, in one spelling; None: a wrong one
    known: int | None = None  # how many different right answers there are; None: nobody knows


def distinct_at_k(right: Sequence[str | None], k: int) -> float:
    """Expected number of *different* right answers among `k`, drawn without replacement from those sampled.

    An answer given c times of m is among them with the chance that equation 1 of arXiv:2107.03374 gives for pass@k.

    >>> distinct_at_k(["a", "a", "b", None], 1)
    0.75
    """
    counts = Counter(answer for answer in right if answer is not None)
    return sum(pass_at_k(len(right), count, k) for count in counts.values())


def answer_metrics(items: Sequence[Answers]) -> dict[str, float]:
    """mean@K, and pass@k, distinct@k and coverage@k for k = 1, 2, 4, ... up to K, with bootstrap intervals over items.

    coverage@k is distinct@k as a share of the right answers there are, over the items where their number is known.

    Args:
        items: N items; K is the smallest number of answers any of them has, at least 1.

    Returns:
        The metrics, each with `<name>_ci_low` and `<name>_ci_high`. distinct and coverage only for K > 1.
    """
    smallest = min((len(item.grades) for item in items), default=0)
    if smallest == 0:
        raise ValueError(f"metrics need items with at least one answer each, found {len(items)} items")
    per_item: dict[str, list[float]] = {f"mean@{smallest}": [float(np.mean(item.grades)) for item in items]}
    for k in _ks(smallest):
        counts = [(len(item.grades), sum(grade >= 1 for grade in item.grades)) for item in items]
        per_item[f"pass@{k}"] = [pass_at_k(sampled, right, k) for sampled, right in counts]
        if smallest > 1:
            per_item[f"distinct@{k}"] = [distinct_at_k(item.right, k) for item in items]
            per_item[f"coverage@{k}"] = [distinct_at_k(item.right, k) / item.known for item in items if item.known]
    metrics = {}
    for name, values in per_item.items():
        if values:
            low, high = bootstrap_interval(values)
            metrics |= {name: float(np.mean(values)), f"{name}_ci_low": low, f"{name}_ci_high": high}
    return metrics
