"""PARENT_SCALE: an expert that learns the target's parents while it looks for the intervention with the best outcome.

Observations give a prior over parent sets, interventions a posterior, and the posterior the next intervention. The
expert works in standardised units; everything that goes in or out is raw.

Source: CBO-U, arXiv:2503.19554.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from atroposlib.environments.causal.design import (
    JITTER,
    do_effect,
    expected_improvement,
    exploration_set,
    gaussian_process,
)
from atroposlib.environments.causal.posterior import FourierFeatures, Noise, ParentPosterior, residual_noise
from atroposlib.environments.causal.prior import (
    WEIGHT,
    ParentSet,
    Regressor,
    bootstrap_prior,
    candidates,
    small_sets,
    smoothed,
)
from atroposlib.environments.causal.scm import DECIMALS, Rng, data_plan
from atroposlib.environments.causal.search import Sums, found_sets, interventional_evidence
from atroposlib.type_definitions import Array


class ExpertConfig(BaseModel):
    """Settings of the expert's estimates, and of the time for its designs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: PositiveInt = Field(default=5, description="Interventions of one demonstration, T.")
    task: Literal["min", "max"] = Field(default="min", description="Whether the target is to be small or large.")
    use_doubly_robust: bool = Field(
        default=True, description="False: all sets of at most 3 parents are equally likely at first."
    )
    regressor: Regressor = Field(default="ridge", description="Of the prior; rff_ridge also sees curved effects.")
    bootstraps: PositiveInt | None = Field(default=None, description="Of the prior; null: 0.75 d, 5 to 20.")
    features: Literal["linear", "fourier"] = Field(
        default="linear", description="Of the regressions on each parent set."
    )
    search: bool = Field(default=True, description="Also climb to parent sets that no bootstrap has seen.")
    sparse: bool = Field(
        default=True, description="Each further parent divides the prior by the root of the number of rows."
    )
    noise: Noise = Field(
        default="nig", description="Of the target: learned per set (nig), or from one fit on all variables."
    )
    prior_std: PositiveFloat = Field(default=1.0, description="Of the weights, standardised.")
    grid: int = Field(default=65, ge=2, description="Values tried per variable.")


@dataclass(frozen=True)
class Choice:
    """An intervention, with what the expert believed when it chose it."""

    variable: int
    value: float
    improvement: float  # expected, in raw units of the target
    candidates: list[int]  # variables it chose from
    marginals: Array  # [d] probability to be a parent


class Expert:
    """One run on one model. Call `choose` and `observe` in turn."""

    def __init__(
        self,
        config: ExpertConfig,
        target: int,
        observed: Array,
        rows: Array,
        intervened: Array,
        rng: Rng,
    ) -> None:
        """Learn from what is known before the first intervention of its own.

        Args:
            observed: [n, d] rows without intervention.
            rows: [k, d] rows, each under an intervention on the variable `intervened` [k].
        """
        self.config, self.target = config, target
        size = observed.shape[1]
        self._others = np.array([index for index in range(size) if index != target])
        self.mean, std = observed.mean(axis=0), observed.std(axis=0)
        self.std = np.where(std == 0, 1.0, std)
        self.low, self.high = observed.min(axis=0), observed.max(axis=0)
        z = self._standard(observed)
        self._x, y = z[:, self._others], z[:, target]
        known = self._standard(rows)
        self.prior = self._prior(y, Sums(known[:, self._others], known[:, target]), rng)
        sets = list(self.prior)
        noise = "nig" if config.noise == "nig" else residual_noise(self._x, y)
        fourier = FourierFeatures(sets, size - 1, rng) if config.features == "fourier" else None
        self.posterior = ParentPosterior(
            self.prior, self._x, y, noise=noise, features=fourier, prior_std=config.prior_std
        )
        self._sign = 1.0 if config.task == "min" else -1.0
        self._outcomes: dict[int, list[tuple[float, float, bool]]] = {int(index): [] for index in range(size - 1)}
        self.best = float(observed[:, target].mean())
        for row, variable in zip(known, intervened, strict=True):
            self.posterior.absorb(row[self._others], float(row[target]))
            column = self._column(int(variable))
            self._outcomes[column].append((float(row[self._others][column]), float(row[target]), False))

    @property
    def beliefs(self) -> dict[ParentSet, float]:
        """Probability of every set of variables that is still considered."""
        return {self.named(each): weight for each, weight in self.posterior.probabilities.items()}

    @property
    def parents(self) -> ParentSet:
        """The most probable set."""
        return self.named(self.posterior.best)

    @property
    def confidence(self) -> float:
        """Probability of that set."""
        return float(self.posterior.weights.max())

    @property
    def marginals(self) -> Array:
        """[d] probability of each variable to be a parent; 0 for the target."""
        found = np.zeros(len(self.mean))
        found[self._others] = self.posterior.marginals(len(self._others))
        return found

    def choose(self) -> Choice:
        """Return the intervention with the largest expected improvement; of equals the first variable and value."""
        candidates = exploration_set(self.posterior.sets, len(self._others))
        best = self._sign * (self.best - self.mean[self.target]) / self.std[self.target]
        found: tuple[float, int, float] | None = None
        for column in candidates:
            values = np.linspace(*self._domain(column), self.config.grid)
            improvement = expected_improvement(*self._surrogate(column, values), best)
            at = int(np.argmax(improvement))
            if found is None or improvement[at] > found[0]:
                found = (float(improvement[at]), column, float(values[at]))
        assert found is not None
        improvement, column, value = found
        variable = int(self._others[column])
        raw = round(value * float(self.std[variable]) + float(self.mean[variable]), DECIMALS)
        return Choice(
            variable,
            min(max(raw, float(self.low[variable])), float(self.high[variable])),
            improvement * float(self.std[self.target]),
            [int(self._others[each]) for each in candidates],
            self.marginals,
        )

    def observe(self, variable: int, value: float, outcome: float, row: Array) -> None:
        """Learn from one intervention: the mean outcome of the target, and one noisy row [d]."""
        if self._sign * outcome < self._sign * self.best:
            self.best = outcome
        column, z = self._column(variable), self._standard(row)
        at = (value - self.mean[variable]) / self.std[variable]
        mean = (outcome - self.mean[self.target]) / self.std[self.target]
        self._outcomes[column].append((float(at), float(mean), True))
        self.posterior.absorb(z[self._others], float(z[self.target]))
        self.posterior.prune()

    def _prior(self, y: Array, intervened: Sums, rng: Rng) -> dict[ParentSet, float]:
        """Return the prior over the candidates; which sets are candidates may follow from all rows."""
        features = len(self._others)
        if not self.config.use_doubly_robust:
            sets = small_sets(features)
            return dict.fromkeys(sets, 1 / len(sets))
        bootstraps = self.config.bootstraps or data_plan(features + 1)[3]
        seen = bootstrap_prior(self._x, y, rng, bootstraps=bootstraps, regressor=self.config.regressor)
        sets = candidates(seen, features)
        per_parent = len(y) ** -0.5 if self.config.sparse else 1.0
        if self.config.search:
            evidence = interventional_evidence(Sums(self._x, y), intervened)
            unseen = WEIGHT / len(sets)

            def score(parents: ParentSet) -> float:
                share = (1 - WEIGHT) * seen.get(parents, 0.0) + unseen
                return evidence(parents) + math.log(share) + len(parents) * math.log(per_parent)

            sets = found_sets(seen, features, score)
        return smoothed(seen, sets, per_parent=per_parent)

    def _surrogate(self, column: int, values: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the outcome at `values`, its sign such that less is better."""
        known = self._outcomes[column]
        seen_values = np.array([value for value, _, _ in known])
        outcomes = np.array([outcome for _, outcome, _ in known])
        is_mean = np.array([is_mean for _, _, is_mean in known], bool)
        at = do_effect(self.posterior, self._x, column, values)
        seen = do_effect(self.posterior, self._x, column, seen_values)
        noise = np.where(is_mean, JITTER, seen.noise + JITTER)  # an average of 1,000 draws, or a single one
        mean, variance = gaussian_process(at, seen, values, seen_values, outcomes, noise)
        return self._sign * mean, np.sqrt(variance)

    def _standard(self, rows: Array) -> Array:
        return (rows - self.mean) / self.std

    def _domain(self, column: int) -> tuple[float, float]:
        variable = self._others[column]
        low, high = (float((end[variable] - self.mean[variable]) / self.std[variable]) for end in (self.low, self.high))
        return low, high

    def _column(self, variable: int) -> int:
        return int(np.flatnonzero(self._others == variable)[0])

    def named(self, columns: ParentSet) -> ParentSet:
        """Return the variables that a set of features stands for."""
        return tuple(int(self._others[column]) for column in columns)
