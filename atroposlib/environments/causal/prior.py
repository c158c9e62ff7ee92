"""A prior over the parent sets of the target from observations alone: bootstrapped, doubly robust selection.

One selection run asks, for every feature, by how much a regression of the target moves when that feature is muted, and
keeps those for which it does so beyond chance. The share of bootstrap runs that select a set is its prior probability.
Selected are direct predictors: children of the target, too, which interventions must rule out.

Source: DRCFS, arXiv:2306.07024; as the prior of a causal design, CBO-U, arXiv:2503.19554.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np

from atroposlib.environments.causal.scm import Rng
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import Array

ParentSet = tuple[int, ...]
"""Ascending columns of the features."""

Regressor = Literal["ridge", "rff_ridge"]
Predict = Callable[[Array], Array]

FOLDS = 5
FIT_SHARE = 0.8
ALPHA = 0.05
RIDGE = 1e-3
RFF_SIZE = 100
WEIGHT = 0.05
"""Of the prior, spread evenly over all candidates."""


def robust_scores(y: Array, a: Array, r: Array) -> Array:
    """Return [n, m+1] doubly robust scores from two such predictions: column 0 with all features, j without that."""
    return y[:, None] * r - a * (r - y[:, None])


def paired_p_values(z: Array) -> Array:
    """Return [m] two-sided p-values of paired t-tests of column 0 against each of the others; equal columns give 1."""
    from scipy.special import stdtr

    difference = z[:, :1] - z[:, 1:]
    rows = len(z)
    spread = difference.std(axis=0, ddof=1) / np.sqrt(rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = difference.mean(axis=0) / spread
    return np.where(np.isnan(t), 1.0, 2 * stdtr(rows - 1, -np.abs(t)))


def benjamini_yekutieli(p: Array) -> Array:
    """Return [m] p-values adjusted for the false discovery rate under any dependence.

    >>> benjamini_yekutieli(np.array([.001, .02, .04, .5])).round(6).tolist()
    [0.008333, 0.083333, 0.111111, 1.0]
    """
    count = len(p)
    order = np.argsort(p, kind="stable")
    scaled = p[order] * count * (1 / np.arange(1, count + 1)).sum() / np.arange(1, count + 1)
    adjusted = np.empty(count)
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return adjusted


def select_parents(x: Array, y: Array, rng: Rng, *, regressor: Regressor = "ridge", alpha: float = ALPHA) -> ParentSet:
    """Return the features [n, m] that one selection run keeps for the target [n]."""
    rows, features = x.shape
    if rows < 2 * FOLDS:
        raise ConfigError(f"{rows} observations; the prior needs at least {2 * FOLDS}")
    fit = {"ridge": _fit_ridge, "rff_ridge": _fit_rff}[regressor]
    folds = np.arange(rows) % FOLDS
    rng.shuffle(folds)
    predicted = np.empty((2, rows, features + 1))
    for fold in range(FOLDS):
        inside, outside = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        muted = np.repeat(x[inside][None], features + 1, axis=0)  # [m+1, n_fold, m]
        muted[np.arange(1, features + 1), :, np.arange(features)] = 0.0
        for repeat in range(2):
            chosen = rng.choice(outside, max(2, int(FIT_SHARE * len(outside))), replace=False)
            predict = fit(x[chosen], y[chosen], rng)
            predicted[repeat, inside] = predict(muted.reshape(-1, features)).reshape(features + 1, -1).T
    p = paired_p_values(robust_scores(y, *predicted))
    return tuple(np.flatnonzero(benjamini_yekutieli(p) < alpha).tolist())


def bootstrap_prior(
    x: Array, y: Array, rng: Rng, *, bootstraps: int, regressor: Regressor = "ridge", alpha: float = ALPHA
) -> dict[ParentSet, float]:
    """Return the share of `bootstraps` selection runs, each on rows drawn with replacement, that selected each set."""

    def runs() -> Iterable[ParentSet]:
        for _ in range(bootstraps):
            rows = rng.integers(len(x), size=len(x))
            yield select_parents(x[rows], y[rows], rng, regressor=regressor, alpha=alpha)

    return shares(runs())


def shares(selected: Iterable[ParentSet]) -> dict[ParentSet, float]:
    """Return how often each set occurs, as a share.

    >>> shares([(0,)] * 7 + [(0, 2)] * 2 + [()])
    {(0,): 0.7, (0, 2): 0.2, (): 0.1}
    """
    counts = Counter(selected)
    return {chosen: count / counts.total() for chosen, count in counts.items()}


def candidates(prior: dict[ParentSet, float], features: int) -> list[ParentSet]:
    """Return the seen sets, the empty one, all that differ from a seen one by one feature, and of up to 8 features all
    sets of at most 3; ascending by size, then by features.
    """
    found = {(), *prior}
    for seen in prior:
        found |= set(neighbours(seen, features))
    if features <= 8:
        found |= set(small_sets(features))
    return sorted(found, key=lambda each: (len(each), each))


def smoothed(
    prior: dict[ParentSet, float], sets: Iterable[ParentSet], *, weight: float = WEIGHT, per_parent: float = 1.0
) -> dict[ParentSet, float]:
    """Return the prior over `sets` with `weight` of it spread evenly, so that none is impossible; it adds up to 1.

    Args:
        per_parent: factor for each parent of a set. Observations pin the weight of a needless parent near 0, after
            which interventions do not speak against it; 1 / sqrt(rows), as in the BIC, does.
    """
    ordered = list(sets)
    spread = {
        each: ((1 - weight) * prior.get(each, 0.0) + weight / len(ordered)) * per_parent ** len(each)
        for each in ordered
    }
    total = sum(spread.values())
    return {each: share / total for each, share in spread.items()}


def neighbours(parents: ParentSet, features: int) -> list[ParentSet]:
    """Return the sets with one feature more or less."""
    return [tuple(sorted(set(parents) ^ {feature})) for feature in range(features)]


def small_sets(features: int, most: int = 3) -> list[ParentSet]:
    """Return all sets of at most `most` features."""
    return [each for size in range(most + 1) for each in itertools.combinations(range(features), size)]


def _fit_ridge(x: Array, y: Array, rng: Rng) -> Predict:
    mean, level = x.mean(axis=0), y.mean()
    centred = x - mean
    weights = np.linalg.solve(centred.T @ centred + RIDGE * np.eye(x.shape[1]), centred.T @ (y - level))
    return lambda at: level + (at - mean) @ weights


def _fit_rff(x: Array, y: Array, rng: Rng) -> Predict:
    """Ridge on random Fourier features of a Gaussian kernel whose length grows with the number of features."""
    omega = rng.standard_normal((x.shape[1], RFF_SIZE)) / np.sqrt(x.shape[1])
    phase = rng.uniform(0, 2 * np.pi, RFF_SIZE)

    def features(at: Array) -> Array:
        return np.sqrt(2 / RFF_SIZE) * np.cos(at @ omega + phase)

    predict = _fit_ridge(features(x), y, rng)
    return lambda at: predict(features(at))
