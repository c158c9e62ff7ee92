"""Statistics of evaluations: N items, K sampled answers each, every answer scored.

The item is the unit of chance: intervals resample items, never single answers, because answers to one question are
not independent of each other.
"""

import math
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


def avg_at_k(scores: Sequence[Sequence[float]]) -> float:
    """Mean over items of the mean score of their answers.

    Args:
        scores: [N][K]; K may differ, every item has at least one answer.
    """
    return float(np.mean(_item_means(scores)))


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


def sampled_metrics(
    scores: Sequence[Sequence[float]], *, correct_above: float = 0.0, confidence: float = 0.95
) -> dict[str, float]:
    """avg@K, and pass@k for k = 1, 2, 4, ... up to K, each with its bootstrap interval.

    Args:
        scores: [N][K]; K is the smallest number of answers any item has, at least 1.
        correct_above: an answer is correct when its score is above this.
        confidence: of the intervals.

    Returns:
        `avg@K`, `pass@k`, and `<name>_ci_low`, `<name>_ci_high` of each.
    """
    if not scores:
        raise ValueError("metrics need at least one item, found none; did every item fail?")
    smallest = min(map(len, scores))
    per_item = {f"avg@{smallest}": _item_means(scores)}
    for k in _ks(smallest):
        per_item[f"pass@{k}"] = [
            pass_at_k(len(answers), sum(score > correct_above for score in answers), k) for answers in scores
        ]
    metrics = {}
    for name, values in per_item.items():
        interval = bootstrap_interval(values, confidence=confidence)
        metrics |= {name: float(np.mean(values)), f"{name}_ci_low": interval.low, f"{name}_ci_high": interval.high}
    return metrics


def _item_means(scores: Sequence[Sequence[float]]) -> list[float]:
    empty = sum(len(answers) == 0 for answers in scores)
    if empty or not scores:
        raise ValueError(
            f"{empty} of {len(scores)} items have no scored answer; leave them out and count them as failed"
        )
    return [float(np.mean(answers)) for answers in scores]


def _ks(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest`."""
    return sorted({2**i for i in range(largest.bit_length()) if 2**i <= largest} | {largest})
