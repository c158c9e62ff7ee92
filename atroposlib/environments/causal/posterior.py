"""The posterior over parent sets: one Bayesian regression of the target per set, weighed by how well it predicts.

All values are standardised. A row counts whichever other variable was set in it, since interventions leave the target's
own mechanism as it is; a variable that correlates with the target without causing it predicts badly once it is set.
Each row is predicted before it is learned from.

Source: CBO-U, arXiv:2503.19554; Bayesian linear regression as in Bishop, PRML, section 3.3.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from atroposlib.environments.causal.prior import ParentSet
from atroposlib.environments.causal.scm import Rng
from atroposlib.type_definitions import Array

Noise = Literal["residual", "nig"]

NEGLIGIBLE = 1e-4
NOISE_FLOOR = 0.05
_SYMMETRISE_EVERY = 50
NIG_SHAPE, NIG_SCALE = 2.0, 1.0


class Features(Protocol):
    """The regressors of every candidate set, of equal length; unused ones are 0 and keep their prior."""

    size: int

    def __call__(self, x: Array) -> Array:
        """Return [sets, n, size] for rows [n, m]."""
        ...

    def keep(self, kept: Array) -> None:
        """Forget the sets whose index is not in `kept`."""
        ...


class LinearFeatures:
    """1 and the values of the parents."""

    def __init__(self, sets: Sequence[ParentSet]) -> None:
        most = max(map(len, sets))
        self.size = 1 + most
        self._columns = np.array([[*each, *[-1] * (most - len(each))] for each in sets], int).reshape(len(sets), most)

    def __call__(self, x: Array) -> Array:
        padded = np.concatenate([x, np.zeros((len(x), 1))], axis=1)  # column -1
        values = padded[:, self._columns]  # [n, sets, most]
        ones = np.ones((*values.shape[:2], 1))
        return np.concatenate([ones, values], axis=2).transpose(1, 0, 2)

    def keep(self, kept: Array) -> None:
        self._columns = self._columns[kept]


class FourierFeatures:
    """Random Fourier features of a Gaussian kernel on the parents; the empty set has a constant only."""

    def __init__(self, sets: Sequence[ParentSet], features: int, rng: Rng, *, size: int = 100, length: float = 1.0):
        self.size = size
        self._omega = np.zeros((len(sets), features, size))
        omega = rng.standard_normal((features, size)) / length
        for index, each in enumerate(sets):
            self._omega[index, list(each)] = omega[list(each)]
        self._phase = rng.uniform(0, 2 * np.pi, size)
        self._is_empty = np.array([not each for each in sets])

    def __call__(self, x: Array) -> Array:
        values = np.sqrt(2 / self.size) * np.cos(x @ self._omega + self._phase)
        values[self._is_empty] = np.eye(1, self.size)
        return values

    def keep(self, kept: Array) -> None:
        self._omega, self._is_empty = self._omega[kept], self._is_empty[kept]


class ParentPosterior:
    """P(set | rows so far), and each set's regression: mean [sets, p] and covariance [sets, p, p] of its weights."""

    def __init__(
        self,
        prior: Mapping[ParentSet, float],
        x: Array,
        y: Array,
        *,
        noise: float | Literal["nig"],
        features: Features | None = None,
        prior_std: float = 1.0,
    ) -> None:
        """Fit every set to the observations x [n, m], y [n].

        Args:
            noise: standard deviation of the target given its parents; `nig`: unknown, learned for each set
                (normal-inverse-gamma), so that predictions are Student-t. Covariances are then in units of its square.
        """
        self.sets = list(prior)
        self.features = features or LinearFeatures(self.sets)
        self.log_p = np.log(np.array([prior[each] for each in self.sets]))
        self.is_nig = noise == "nig"
        self._variance = 1.0 if noise == "nig" else noise**2
        phi = self.features(x)
        precision = phi.transpose(0, 2, 1) @ phi / self._variance + np.eye(self.features.size) / prior_std**2
        self.covariance = np.linalg.inv(precision)
        moment = np.einsum("sni,n->si", phi, y) / self._variance
        self.mean = np.einsum("sij,sj->si", self.covariance, moment)
        explained = np.einsum("si,sij,sj->s", self.mean, precision, self.mean)
        self.shape = np.full(len(self.sets), NIG_SHAPE + len(y) / 2)
        self.scale = NIG_SCALE + 0.5 * (y @ y - explained)
        self._rows = 0

    @property
    def probabilities(self) -> dict[ParentSet, float]:
        """P by set; adds up to 1."""
        return dict(zip(self.sets, self.weights.tolist(), strict=True))

    @property
    def weights(self) -> Array:
        """[sets] probabilities."""
        weights = np.exp(self.log_p - self.log_p.max())
        return weights / weights.sum()

    @property
    def noise_variance(self) -> Array:
        """[sets] expected variance of the target given its parents."""
        return self.scale / (self.shape - 1) if self.is_nig else np.full(len(self.sets), self._variance)

    @property
    def best(self) -> ParentSet:
        """The most probable set, the first of equals."""
        return self.sets[int(np.argmax(self.log_p))]

    def log_predictive(self, phi: Array, y: float) -> Array:
        """Return [sets] log densities of `y` at features [sets, p]."""
        error = y - np.einsum("si,si->s", phi, self.mean)
        spread = self._variance + np.einsum("si,sij,sj->s", phi, self.covariance, phi)
        if not self.is_nig:
            return -0.5 * (np.log(2 * np.pi * spread) + error**2 / spread)
        return student_log_density(error, 2 * self.shape, self.scale / self.shape * spread)

    def absorb(self, x: Array, y: float) -> None:
        """Weigh the sets by how well they predicted `y` at row [m], then learn from it."""
        phi = self.features(x[None])[:, 0]
        self.log_p = self.log_p + self.log_predictive(phi, y)
        self.log_p -= self.log_p.max()
        error = y - np.einsum("si,si->s", phi, self.mean)
        gain = np.einsum("sij,sj->si", self.covariance, phi)
        spread = self._variance + np.einsum("si,si->s", phi, gain)
        self.mean = self.mean + gain * (error / spread)[:, None]
        self.covariance = self.covariance - gain[:, :, None] * gain[:, None, :] / spread[:, None, None]
        self.shape = self.shape + 0.5
        self.scale = self.scale + 0.5 * error**2 / spread
        self._rows += 1
        if self._rows % _SYMMETRISE_EVERY == 0:
            self.covariance = 0.5 * (self.covariance + self.covariance.transpose(0, 2, 1))

    def prune(self) -> None:
        """Drop sets below `NEGLIGIBLE`; the most probable one stays."""
        weights = self.weights
        kept = np.flatnonzero((weights >= NEGLIGIBLE) | (np.arange(len(weights)) == np.argmax(weights)))
        if len(kept) == len(weights):
            return
        self.sets = [self.sets[index] for index in kept]
        self.features.keep(kept)
        for name in ("log_p", "mean", "covariance", "shape", "scale"):
            setattr(self, name, getattr(self, name)[kept])

    def marginals(self, features: int) -> Array:
        """Return [m] probabilities that each feature is a parent."""
        found = np.zeros(features)
        for each, weight in zip(self.sets, self.weights, strict=True):
            found[list(each)] += weight
        return np.minimum(found, 1.0)


def student_log_density(error: Array, df: Array, scale2: Array) -> Array:
    """Return log densities of a Student-t at `error` from its centre, with squared scale `scale2`."""
    from scipy.special import gammaln

    normaliser = gammaln((df + 1) / 2) - gammaln(df / 2) - 0.5 * np.log(df * np.pi * scale2)
    return normaliser - (df + 1) / 2 * np.log1p(error**2 / (df * scale2))


def residual_noise(x: Array, y: Array) -> float:
    """Return the standard deviation of what a linear fit on all features leaves over, at least `NOISE_FLOOR`."""
    design = np.column_stack([np.ones(len(x)), x])
    weights = np.linalg.solve(design.T @ design + 1e-3 * np.eye(design.shape[1]), design.T @ y)
    free = max(1, len(y) - design.shape[1])
    return max(NOISE_FLOOR, math.sqrt(float(((y - design @ weights) ** 2).sum()) / free))
