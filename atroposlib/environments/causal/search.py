"""Candidate parent sets beyond those that a prior has seen: climbing from them by how well the interventions fit.

Of 15 or more variables the selection of `prior` finds the target's neighbourhood, children included, and the true set
can be many steps away. A set's evidence is that of the interventional rows given the observational ones, in closed form
from sums over rows, so that thousands of sets cost a tenth of a second.

Source: evidence of the normal-inverse-gamma regression, Murphy, Machine Learning (2012), section 7.6.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np

from atroposlib.environments.causal.posterior import NIG_SCALE, NIG_SHAPE
from atroposlib.environments.causal.prior import ParentSet, neighbours
from atroposlib.type_definitions import Array

Score = Callable[[ParentSet], float]

MAX_CANDIDATES = 100
_STARTS = 4


class Sums:
    """Sums over rows x [n, m], y [n], from which the evidence of a regression on any columns follows."""

    def __init__(self, x: Array, y: Array) -> None:
        design = np.column_stack([np.ones(len(x)), x])
        self.products, self.moments = design.T @ design, design.T @ y
        self.squares, self.rows = float(y @ y), len(y)

    def __add__(self, other: "Sums") -> "Sums":
        both = Sums.__new__(Sums)
        both.products, both.moments = self.products + other.products, self.moments + other.moments
        both.squares, both.rows = self.squares + other.squares, self.rows + other.rows
        return both

    def log_evidence(self, parents: ParentSet) -> float:
        """Return log p(y | x, parents) with weights ~ N(0, noise variance), up to a constant of the number of rows."""
        columns = np.array([0, *(column + 1 for column in parents)])
        precision = self.products[np.ix_(columns, columns)] + np.eye(len(columns))
        moment = self.moments[columns]
        scale = NIG_SCALE + 0.5 * (self.squares - moment @ np.linalg.solve(precision, moment))
        shape = NIG_SHAPE + self.rows / 2
        log_size = float(np.linalg.slogdet(precision)[1])
        return -0.5 * log_size - shape * math.log(scale) + math.lgamma(shape)


def interventional_evidence(observed: Sums, intervened: Sums) -> Score:
    """Return the function from a set to log p(interventional rows | observational rows, set), up to a constant."""
    both = observed + intervened
    return lambda parents: both.log_evidence(parents) - observed.log_evidence(parents)


def climb(starts: Iterable[ParentSet], features: int, score: Score) -> list[ParentSet]:
    """Return the best sets met on the way up from each start, at most `MAX_CANDIDATES`, the best first.

    A step adds, removes or exchanges one feature, and is the best of all such steps.
    """
    known: dict[ParentSet, float] = {}

    def value(parents: ParentSet) -> float:
        if parents not in known:
            known[parents] = score(parents)
        return known[parents]

    for start in starts:
        here = start
        while (best := max(_steps(here, features), key=value)) and value(best) > value(here):
            here = best
    return sorted(known, key=lambda parents: (-known[parents], len(parents), parents))[:MAX_CANDIDATES]


def found_sets(prior: dict[ParentSet, float], features: int, score: Score) -> list[ParentSet]:
    """Return the candidates that climbing from the most probable sets and from the empty one finds; it stays one."""
    likely = sorted(prior, key=lambda parents: (-prior[parents], parents))[:_STARTS]
    found = climb(dict.fromkeys([(), *likely]), features, score)
    return found if () in found else [*found[: MAX_CANDIDATES - 1], ()]


def _steps(parents: ParentSet, features: int) -> list[ParentSet]:
    outside = [feature for feature in range(features) if feature not in parents]
    exchanged = [tuple(sorted((set(parents) - {old}) | {new})) for old in parents for new in outside]
    return [*neighbours(parents, features), *exchanged]
