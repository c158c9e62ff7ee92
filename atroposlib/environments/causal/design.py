"""Choosing the next intervention: what each would do to the target by what is believed, and where that may be best.

    believed effect of do(X_j = v)    averaged over parent sets, in closed form for linear regressions
    surrogate of each variable        a Gaussian process whose mean and scale are that effect
    choice                            the variable and value of the largest expected improvement (minimising)

All values are standardised.

Source: CBO-U, arXiv:2503.19554; causal Gaussian processes, CBO, arXiv:2005.11741; expected improvement, Jones 1998.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atroposlib.environments.causal.posterior import LinearFeatures, ParentPosterior
from atroposlib.type_definitions import Array

JITTER = 1e-5
_FOURIER_ROWS = 64


@dataclass(frozen=True)
class Effect:
    """Of do(X_j = v) for [n] values: mean and variance of the belief, and the variance of one noisy draw around it."""

    mean: Array
    variance: Array
    noise: Array


def averaged(weights: Array, means: Array, variances: Array) -> tuple[Array, Array]:
    """Return [n] mean and variance over sets with `weights` [sets], from theirs [sets, n] (law of total variance)."""
    mean = weights @ means
    return mean, weights @ variances + weights @ means**2 - mean**2


def do_effect(posterior: ParentPosterior, x: Array, variable: int, values: Array) -> Effect:
    """Return the believed effect of setting feature `variable` to `values`, over the observed rows x [n, m]."""
    if isinstance(posterior.features, LinearFeatures):
        means, variances, spread = _linear_moments(posterior, x, variable, values)
    else:
        means, variances, spread = _sampled_moments(posterior, x, variable, values)
    noise = posterior.noise_variance[:, None]
    mean, variance = averaged(posterior.weights, means, variances + noise)
    return Effect(mean, np.maximum(variance, 0.0), posterior.weights @ (spread + noise))


def _linear_moments(posterior: ParentPosterior, x: Array, variable: int, values: Array) -> tuple[Array, Array, Array]:
    """Return [sets, n] mean, variance by uncertain weights, and variance over the rows of the other parents."""
    phi = posterior.features(x)
    first = phi.mean(axis=1)
    second = phi.transpose(0, 2, 1) @ phi / len(x)
    size = posterior.features.size
    column = np.array([[*each, variable].index(variable) + 1 for each in posterior.sets])
    has = np.array([variable in each for each in posterior.sets])
    is_set = np.zeros((len(column), size), bool)
    is_set[np.flatnonzero(has), column[has]] = True
    rest, unit = np.where(is_set, 0.0, first), is_set.astype(float)
    both = is_set[:, :, None] | is_set[:, None, :]
    fixed = np.where(both, 0.0, second)
    mean, scale = posterior.mean, _unit(posterior)
    covariance = posterior.covariance * scale[:, None, None]
    means = np.einsum("si,si->s", mean, rest)[:, None] + np.einsum("si,si->s", mean, unit)[:, None] * values
    constant = np.einsum("sij,sij->s", covariance, fixed)
    linear = 2 * np.einsum("sij,si,sj->s", covariance, unit, rest)
    square = np.einsum("sij,si,sj->s", covariance, unit, unit)
    variances = constant[:, None] + linear[:, None] * values + square[:, None] * values**2
    centred = fixed - rest[:, :, None] * rest[:, None, :]
    spread = np.maximum(np.einsum("si,sij,sj->s", mean, centred, mean), 0.0)
    return means, variances, np.repeat(spread[:, None], len(values), axis=1)


def _sampled_moments(posterior: ParentPosterior, x: Array, variable: int, values: Array) -> tuple[Array, Array, Array]:
    """Return the same for features of any form, over evenly taken rows."""
    rows = x[np.linspace(0, len(x) - 1, min(len(x), _FOURIER_ROWS)).astype(int)]
    covariance = posterior.covariance * _unit(posterior)[:, None, None]
    columns = []
    for value in values:
        rows = rows.copy()
        rows[:, variable] = value
        phi = posterior.features(rows)
        at = np.einsum("snp,sp->sn", phi, posterior.mean)
        variance = np.einsum("snp,spq,snq->sn", phi, covariance, phi, optimize=True).mean(axis=1)
        columns.append((at.mean(axis=1), variance, at.var(axis=1)))
    means, variances, spread = (np.stack(each, axis=1) for each in zip(*columns, strict=True))
    return means, variances, spread


def _unit(posterior: ParentPosterior) -> Array:
    """[sets] in which covariances are measured."""
    return posterior.noise_variance if posterior.is_nig else np.ones(len(posterior.sets))


def gaussian_process(
    at: Effect, seen: Effect, values: Array, seen_values: Array, outcomes: Array, noise: Array | float = JITTER
) -> tuple[Array, Array]:
    """Return [n] mean and variance at `values`, given `outcomes` [k] at `seen_values`.

    The prior mean is the believed effect; the kernel adds its standard deviations to a Gaussian one of scale and
    length 1.
    """
    deviation, deviation_seen = np.sqrt(at.variance), np.sqrt(seen.variance)
    prior_variance = 1.0 + deviation**2
    if not len(seen_values):
        return at.mean, prior_variance
    kernel = _kernel(seen_values, seen_values) + np.outer(deviation_seen, deviation_seen)
    kernel = kernel + np.diag(np.broadcast_to(noise, seen_values.shape))
    cross = _kernel(values, seen_values) + np.outer(deviation, deviation_seen)
    solved = np.linalg.solve(kernel, np.column_stack([outcomes - seen.mean, cross.T]))
    variance = prior_variance - np.einsum("nk,kn->n", cross, solved[:, 1:])
    return at.mean + cross @ solved[:, 0], np.maximum(variance, 0.0)


def _kernel(a: Array, b: Array) -> Array:
    return np.exp(-0.5 * (a[:, None] - b[None, :]) ** 2)


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Return by how much an outcome is expected to fall below `best`."""
    from scipy.special import ndtr

    gap = best - mean
    is_certain = deviation <= 1e-12
    u = gap / np.where(is_certain, 1.0, deviation)
    improvement = deviation * (u * ndtr(u) + np.exp(-0.5 * u**2) / np.sqrt(2 * np.pi))
    return np.where(is_certain, np.maximum(gap, 0.0), np.maximum(improvement, 0.0))


def exploration_set(sets: Sequence[Sequence[int]], features: int) -> list[int]:
    """Return the features that some set holds; all of them if none does."""
    return sorted({feature for each in sets for feature in each}) or list(range(features))
