"""Structural causal models: graphs whose mechanisms are data, sampled with and without interventions.

A model has variables X0, X1, ...; one of them is the target Y. Values are in the model's own (raw) units. Mechanisms
are plain records, so that a model travels between processes and into files; functions are refused.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

import numpy as np

from atroposlib.errors import ConfigError
from atroposlib.type_definitions import Array, JsonObject

Rng = np.random.Generator
Kind = Literal["linear", "tanh"]
GRAPHS = ("chain", "fork", "star", "collider", "random", "scale_free")
DIFFICULTIES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "difficulty_1": ((3, 4), ("chain", "fork")),
    "difficulty_2": ((5, 6), ("chain", "fork", "star")),
    "difficulty_3": ((7, 8), ("chain", "fork", "star", "collider")),
    "difficulty_4": ((9, 10, 11, 12), ("chain", "fork", "star", "collider", "random")),
    "difficulty_5": ((15, 16, 17, 18, 19, 20), ("random",)),
}
"""Numbers of variables and graph families that each level draws from, evenly."""


@dataclass(frozen=True)
class Mechanism:
    """x = intercept + coef . parents + noise * N(0, 1); `tanh`: intercept + scale * tanh(coef . parents) + noise."""

    type: Kind = "linear"
    parents: tuple[int, ...] = ()
    coef: tuple[float, ...] = ()
    intercept: float = 0.0
    noise: float = 0.5
    scale: float = 1.0  # of tanh only

    def mean(self, parents: Array) -> Array:
        """Return [n] expected values given [n, parents] values."""
        signal = parents @ np.array(self.coef)
        return self.intercept + (signal if self.type == "linear" else self.scale * np.tanh(signal))


@dataclass(frozen=True)
class Scm:
    """A model: the mechanism of every variable, and which of them is the target."""

    mechanisms: tuple[Mechanism, ...]
    target: int
    graph: str = "own"

    def __post_init__(self) -> None:
        """ConfigError where a mechanism is a function, the graph has a cycle, or a number does not fit."""
        for index, mechanism in enumerate(self.mechanisms):
            if not isinstance(mechanism, Mechanism):
                raise ConfigError(
                    f"the mechanism of X{index} is a {type(mechanism).__name__}; a mechanism is data, as "
                    '{"type": "linear", "parents": [0], "coef": [1.5], "intercept": 0, "noise": 0.5}: worker processes '
                    "and records cannot hold functions"
                )
            numbers = [*mechanism.coef, mechanism.intercept, mechanism.noise, mechanism.scale]
            if len(mechanism.parents) != len(mechanism.coef) or not all(map(math.isfinite, numbers)):
                raise ConfigError(f"the mechanism of X{index} needs one finite coefficient per parent: {mechanism}")
            if mechanism.type not in ("linear", "tanh") or not set(mechanism.parents) <= set(range(self.size)):
                raise ConfigError(f"X{index}: type linear or tanh, parents from 0 to {self.size - 1}: {mechanism}")
        if not 0 <= self.target < self.size:
            raise ConfigError(f"target {self.target} is none of the {self.size} variables")
        try:
            self.order()
        except CycleError as error:
            raise ConfigError(f"the graph has a cycle: {error.args[1]}") from None

    @property
    def size(self) -> int:
        """Number of variables, d."""
        return len(self.mechanisms)

    @property
    def parents(self) -> tuple[int, ...]:
        """Parents of the target, ascending."""
        return tuple(sorted(self.mechanisms[self.target].parents))

    def order(self) -> list[int]:
        """Return the variables, causes first."""
        return list(TopologicalSorter({i: m.parents for i, m in enumerate(self.mechanisms)}).static_order())

    def sample(self, rows: int, rng: Rng, do: tuple[int, float | Array] | None = None) -> Array:
        """Return [rows, d] draws, under the perfect intervention do(X_j = value) if one is given (a value, or [rows]).

        The noise of every variable is drawn, also of the one that is set: equal seeds give comparable rows.

        Raises:
            ConfigError: the intervention is on the target.
        """
        if do is not None and do[0] == self.target:
            raise ConfigError(f"X{self.target} is the target; interventions are on the other variables")
        noise = rng.standard_normal((rows, self.size))
        values = np.zeros((rows, self.size))
        for index in self.order():
            mechanism = self.mechanisms[index]
            if do is not None and index == do[0]:
                values[:, index] = do[1]
            else:
                values[:, index] = mechanism.mean(values[:, mechanism.parents]) + mechanism.noise * noise[:, index]
        return values

    def target_mean(self, variable: int, values: Sequence[float] | Array) -> Array:
        """Return E[Y | do(variable = v)] for each of `values`: exact where all is linear, else over 2,000 draws."""
        is_linear = all(mechanism.type == "linear" for mechanism in self.mechanisms)
        if is_linear:
            silent = [Mechanism(**{**asdict(mechanism), "noise": 0.0}) for mechanism in self.mechanisms]
            model = Scm(tuple(silent), self.target)
            rows = model.sample(len(values), np.random.default_rng(0), (variable, np.asarray(values, float)))
            return rows[:, self.target]
        draws = (self.sample(2000, np.random.default_rng(0), (variable, float(value))) for value in values)
        return np.array([rows[:, self.target].mean() for rows in draws])

    def best_mean(self, low: Array, high: Array, *, sign: int = 1) -> float:
        """Return the E[Y | do(X_j = v)] with the smallest `sign` * E over all variables, within [low, high]."""
        found = math.inf
        for variable in (index for index in range(self.size) if index != self.target):
            values = np.linspace(low[variable], high[variable], 33)
            found = min(found, float((sign * self.target_mean(variable, values)).min()))
        return sign * found

    def as_json(self) -> JsonObject:
        """Return plain data, with names."""
        return {
            "variables": [f"X{index}" for index in range(self.size)],
            "target": f"X{self.target}",
            "edges": [[f"X{p}", f"X{i}"] for i, m in enumerate(self.mechanisms) for p in m.parents],
            "graph_type": self.graph,
            "mechanisms": [asdict(mechanism) for mechanism in self.mechanisms],
        }

    @classmethod
    def from_json(cls, said: JsonObject) -> "Scm":
        """Return the model that `as_json` described.

        Raises:
            ConfigError: a mechanism is no record of numbers.
        """
        try:
            mechanisms = tuple(
                Mechanism(**{**each, "parents": tuple(each["parents"]), "coef": tuple(each["coef"])})
                if isinstance(each, dict)
                else each
                for each in said["mechanisms"]
            )
            return cls(mechanisms, int(said["target"].removeprefix("X")), said["graph_type"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"no causal model: {type(error).__name__}: {error}") from None


def levels_of(text: str) -> list[str]:
    """Return the levels that a setting names.

    Raises:
        ConfigError: there is no such level.

    >>> levels_of("difficulty_1,2")
    ['difficulty_1', 'difficulty_2']
    """
    if text == "all":
        return list(DIFFICULTIES)
    named = [f"difficulty_{part.strip().removeprefix('difficulty_')}" for part in text.split(",")]
    if unknown := [name for name in named if name not in DIFFICULTIES]:
        raise ConfigError(
            f"difficulty {text!r}: there is no {unknown[0]!r}; levels are {', '.join(DIFFICULTIES)}, or all"
        )
    return list(dict.fromkeys(named))


def draw_scm(
    rng: Rng,
    difficulty: str,
    *,
    mechanism: Kind | Literal["mixed"] = "linear",
    noise: float = 0.5,
    max_parents: int = 6,
) -> Scm:
    """Return a model of a level: labels are shuffled, the target is one of the variables that have parents.

    Coefficients are +-U(0.5, 2), intercepts U(-1, 1), each drawn by itself; roots have noise 1, the others `noise`.
    """
    if difficulty not in DIFFICULTIES:
        raise ConfigError(f"there is no {difficulty!r}; levels are {', '.join(DIFFICULTIES)}")
    sizes, graphs = DIFFICULTIES[difficulty]
    return make_scm(
        rng,
        graph=str(rng.choice(graphs)),
        size=int(rng.choice(sizes)),
        mechanism=mechanism,
        noise=noise,
        max_parents=max_parents,
    )


def make_scm(
    rng: Rng,
    *,
    graph: str,
    size: int,
    mechanism: Kind | Literal["mixed"] = "linear",
    noise: float = 0.5,
    max_parents: int = 6,
) -> Scm:
    """Return a model of one graph family; see `draw_scm`."""
    parents, targets = _graph(rng, graph, size)
    if max_parents < 1:
        raise ConfigError(f"max_parents is {max_parents}; the target has at least 1")
    target = int(rng.choice(targets))
    if len(parents[target]) > max_parents:
        parents[target] = sorted(rng.choice(parents[target], max_parents, replace=False).tolist())
    label = rng.permutation(size)
    mechanisms: dict[int, Mechanism] = {}
    for index, theirs in enumerate(parents):
        kind = str(rng.choice(["linear", "tanh"])) if mechanism == "mixed" else mechanism
        mechanisms[int(label[index])] = Mechanism(
            type="tanh" if theirs and kind == "tanh" else "linear",
            parents=tuple(int(label[parent]) for parent in theirs),
            coef=tuple(float(rng.choice([-1, 1]) * rng.uniform(0.5, 2)) for _ in theirs),
            intercept=float(rng.uniform(-1, 1)),
            noise=noise if theirs else 1.0,
            scale=float(rng.uniform(1, 3)),
        )
    return Scm(tuple(mechanisms[index] for index in range(size)), int(label[target]), graph)


def _graph(rng: Rng, graph: str, size: int) -> tuple[list[list[int]], list[int]]:
    """Return the parents of every variable, causes first, and those that may be the target.

    Variables that a family does not connect are causes of nothing: they must be told from the parents.
    """
    parents: list[list[int]] = [[] for _ in range(size)]
    if graph not in GRAPHS or size < 3:
        raise ConfigError(
            f"graph {graph!r} of {size} variables; families are {', '.join(GRAPHS)}, of 3 variables or more"
        )
    if graph == "chain":
        parents = [[index - 1] if index else [] for index in range(size)]
    elif graph == "fork":
        parents = [[0] if 1 <= index <= 3 else [] for index in range(size)]
    elif graph == "star" or (graph == "collider" and size > 4):
        parents[-1] = list(range(min(3, size - 1)))
    elif graph == "collider":
        parents[-1] = list(range(size - 1))
    elif graph == "random":
        parents = [[cause for cause in range(index) if rng.random() < 0.3] for index in range(size)]
        parents[-1] = parents[-1] or [int(rng.integers(size - 1))]
    else:  # each variable has up to two causes, drawn by how many effects they have already (Barabasi and Albert)
        weight = np.ones(size)
        for index in range(1, size):
            share = weight[:index] / weight[:index].sum()
            parents[index] = sorted(rng.choice(index, min(2, index), replace=False, p=share).tolist())
            weight[parents[index]] += 1
    return parents, [index for index, theirs in enumerate(parents) if theirs]


def data_plan(size: int) -> tuple[int, int, int, int]:
    """Return rows in all, observational rows, interventional rows and bootstraps for d variables.

    >>> data_plan(3), data_plan(8), data_plan(20)
    ((100, 85, 15, 5), (300, 255, 45, 6), (500, 425, 75, 15))
    """
    limits = ((3, 100), (5, 150), (10, 300), (15, 400))
    total = next((rows for most, rows in limits if size <= most), max(500, 25 * size))
    observed = round(0.85 * total)
    return total, observed, total - observed, min(20, max(5, int(0.75 * size)))


DECIMALS = 4
"""Of every value that is drawn or chosen: a record then holds exactly the rows that the expert saw."""


@dataclass
class World:
    """A model that is observed and intervened on, with the randomness of its answers."""

    scm: Scm
    rng: Rng

    def observe(self, rows: int) -> Array:
        """Return [rows, d] of the untouched model."""
        return np.round(self.scm.sample(rows, self.rng), DECIMALS)

    def explore(self, low: Array, high: Array, rows_per_variable: int) -> tuple[Array, Array]:
        """Return [n, d] rows and the [n] variable that was set in each, to values drawn from its domain."""
        others = [index for index in range(self.scm.size) if index != self.scm.target]
        rows = []
        for variable in others:
            values = np.round(self.rng.uniform(low[variable], high[variable], rows_per_variable), DECIMALS)
            rows.append(np.round(self.scm.sample(rows_per_variable, self.rng, (variable, values)), DECIMALS))
        shape = (rows_per_variable * len(others), self.scm.size)
        return np.concatenate(rows).reshape(shape), np.repeat(others, rows_per_variable)

    def intervene(self, variable: int, value: float) -> tuple[float, Array]:
        """Return the mean of the target over 1,000 draws of do(variable = value), and one further row [d]."""
        outcome = float(self.scm.sample(1000, self.rng, (variable, value))[:, self.scm.target].mean())
        row = self.scm.sample(1, self.rng, (variable, value))[0]
        return round(outcome, DECIMALS), np.round(row, DECIMALS)
