"""One problem: a model, the data that is known of it, and what is asked; made from a level, an index and a seed.

The expert and a language model get the same problem. Texts are made here, so that a demonstration's chat and a
rollout's read alike.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from atroposlib.environments.causal.scm import DIFFICULTIES, Rng, Scm, World, data_plan, draw_scm
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import Array, JsonObject, Message

ROWS_SHOWN = 3


class ProblemConfig(BaseModel):
    """Which models are drawn, and how much is known of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: NonNegativeInt = Field(default=0, description="Of everything that is drawn.")
    mechanism: Literal["linear", "tanh", "mixed"] = Field(default="linear", description="How causes act.")
    noise: PositiveFloat = Field(default=0.5, description="Standard deviation of every variable given its causes.")
    max_parents: PositiveInt = Field(default=6, description="Most causes of a target.")
    observations: int | None = Field(
        default=None, ge=20, description="Rows without intervention; null: 85 to 500, by size."
    )
    rows_per_variable: PositiveInt = Field(default=10, description="Rows under interventions on each variable.")


class Step(NamedTuple):
    """One intervention and its answer."""

    variable: int
    value: float
    outcome: float  # mean of the target over 1,000 draws
    row: list[float]  # [d] one further draw


@dataclass
class Problem:
    """All that is known before the first intervention. Rows are raw."""

    scm: Scm
    difficulty: str
    observed: Array  # [n, d]
    rows: Array  # [k, d]
    intervened: Array  # [k] variable that was set

    @property
    def low(self) -> Array:
        """[d] least value that a variable may be set to: the least observed one."""
        return self.observed.min(axis=0)

    @property
    def high(self) -> Array:
        """[d] largest value that a variable may be set to."""
        return self.observed.max(axis=0)

    @property
    def others(self) -> list[int]:
        """Variables but for the target."""
        return [index for index in range(self.scm.size) if index != self.scm.target]

    @property
    def start(self) -> float:
        """Mean of the target without intervention."""
        return float(self.observed[:, self.scm.target].mean())

    def gap(self, best: float, task: str) -> float:
        """Return the share of the possible improvement that `best` is, 0 to 1; 1 where nothing can be improved.

        The best possible is that of one variable within its domain, without noise.
        """
        sign = 1 if task == "min" else -1
        possible = sign * (self.start - self.scm.best_mean(self.low, self.high, sign=sign))
        return 1.0 if possible <= 1e-9 else min(1.0, max(0.0, sign * (self.start - best) / possible))


def random_parts(config: ProblemConfig, difficulty: str, index: int) -> tuple[Rng, Rng, Rng]:
    """Return the randomness of model, world and expert: by level and index, so that any one can be made alone."""
    if difficulty not in DIFFICULTIES:
        raise ConfigError(f"there is no {difficulty!r}; levels are {', '.join(DIFFICULTIES)}")
    key = (list(DIFFICULTIES).index(difficulty), index)
    first, second, third = np.random.SeedSequence(config.seed, spawn_key=key).spawn(3)
    return np.random.default_rng(first), np.random.default_rng(second), np.random.default_rng(third)


def make_problem(config: ProblemConfig, difficulty: str, index: int) -> tuple[Problem, World, Rng]:
    """Return problem number `index` of a level, its world, and the expert's randomness."""
    of_model, of_world, of_expert = random_parts(config, difficulty, index)
    scm = draw_scm(of_model, difficulty, mechanism=config.mechanism, noise=config.noise, max_parents=config.max_parents)
    world = World(scm, of_world)
    observed = world.observe(config.observations or data_plan(scm.size)[1])
    rows, intervened = world.explore(observed.min(axis=0), observed.max(axis=0), config.rows_per_variable)
    return Problem(scm, difficulty, observed, rows, intervened), world, of_expert


def opening(problem: Problem, steps: int, task: str) -> list[Message]:
    """Return the system turn with the rules and the user turn with what is known."""
    target, names = f"X{problem.scm.target}", [f"X{index}" for index in problem.others]
    rules = (
        f"You experiment on a causal model with the variables {', '.join(names)} and the target {target}. "
        f"You have {steps} interventions. Each sets one variable to one value of its domain and shows what follows. "
        f"Make {target} as {'small' if task == 'min' else 'large'} as you can, and find its direct causes.\n"
        "One action a turn. To set a variable write <intervene>X1=1.25</intervene>. To name the causes, which ends the "
        "task, write <answer>X1,X3</answer>, or <answer>none</answer>."
    )
    y = problem.observed[:, problem.scm.target]
    lines = [
        f"{len(y)} observations; {target} has mean {_short(y.mean())} and standard deviation {_short(y.std())}. "
        f"Then {len(problem.rows) // max(1, len(names))} rows for each variable set at random.",
        f"variable | domain | mean | std | correlation with {target} | when set: correlation, mean of {target}",
    ]
    for index in problem.others:
        x = problem.observed[:, index]
        mine = problem.rows[problem.intervened == index]
        domain = f"{problem.low[index]:.4f} to {problem.high[index]:.4f}"
        when_set = mine[:, problem.scm.target]
        lines.append(
            f"X{index} | {domain} | {_short(x.mean())} | {_short(x.std())} | {_short(_correlation(x, y))} | "
            f"{_short(_correlation(mine[:, index], when_set))}, {_short(when_set.mean())}"
        )
    lines.append(f"The first {ROWS_SHOWN} observations:")
    lines += [row_text(row) for row in problem.observed[:ROWS_SHOWN].tolist()]
    return [{"role": "system", "content": rules}, {"role": "user", "content": "\n".join(lines)}]


def reply_text(step: Step, target: int, left: int) -> str:
    """Return what is answered to an intervention."""
    return (
        f"X{step.variable}={step.value:.4f}: X{target} is {step.outcome:.4f} on average over 1,000 rows. "
        f"One more row: {row_text(step.row)}. {left_text(left)}"
    )


def left_text(left: int) -> str:
    """Return how much may still be done."""
    return f"Interventions left: {left}." if left else "No interventions are left: name the causes with <answer>."


def action_text(variable: int, value: float) -> str:
    """Return an intervention as it must be written."""
    return f"<intervene>X{variable}={value:.4f}</intervene>"


def answer_text(parents: Iterable[int]) -> str:
    """Return an answer as it must be written."""
    return f"<answer>{','.join(f'X{index}' for index in parents) or 'none'}</answer>"


def row_text(row: Sequence[float]) -> str:
    """Return one row with names."""
    return ", ".join(f"X{index}={value:.4f}" for index, value in enumerate(row))


_NUMBER = r"[-+]?(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(?:[eE][-+]?\d{1,2})?"
_ACTION = re.compile(
    rf"(?a)<intervene>\s*X(\d{{1,3}})\s*=\s*({_NUMBER})\s*</intervene>"
    r"|<answer>\s*(none|X\d{1,3}(?:\s*,\s*X\d{1,3}){0,99})\s*</answer>"
)


class Action(NamedTuple):
    """The request of a reply: an intervention (`variable`, `value`), or an answer."""

    variable: int = -1
    value: float = 0.0
    parents: tuple[int, ...] | None = None


def parse_action(text: str) -> Action | None:
    """Return the last action of a reply, thoughts aside; None where there is none that can be understood.

    >>> parse_action("<think><answer>X9</answer></think> <intervene>X3=-1.5e0</intervene>")
    Action(variable=3, value=-1.5, parents=None)
    >>> parse_action("<answer>none</answer>").parents, parse_action("<intervene>X1=nan</intervene>")
    ((), None)
    """
    matches = list(_ACTION.finditer(text.rpartition("</think>")[2]))
    if not matches:
        return None
    found = matches[-1]
    if found[1] is not None:
        return Action(int(found[1]), float(found[2]))
    return Action(parents=tuple(sorted({int(number) for number in re.findall(r"\d+", found[3])})))


def jaccard(found: Iterable[int], true: Iterable[int]) -> float:
    """Return the overlap of two sets, 1 for two empty ones.

    >>> jaccard([], []), jaccard([1], [2]), round(jaccard([1, 2], [1, 2, 3]), 6)
    (1.0, 0.0, 0.666667)
    """
    ours, theirs = set(found), set(true)
    return len(ours & theirs) / len(ours | theirs) if ours | theirs else 1.0


def expected_metrics(beliefs: dict[tuple[int, ...], float], true: Iterable[int], others: Sequence[int]) -> JsonObject:
    """Return accuracy, precision, recall and F1 of the labels of `others`, each expected over `beliefs`."""
    theirs = set(true)
    total: JsonObject = {"accuracy": 0.0, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    for parents, weight in beliefs.items():
        hit = len(theirs & set(parents))
        wrong = len(theirs ^ set(parents))
        total["accuracy"] += weight * (1 - wrong / len(others))
        total["precision"] += weight * (hit / len(parents) if parents else float(not theirs))
        total["recall"] += weight * (hit / len(theirs) if theirs else float(not parents))
        total["f1"] += weight * (2 * hit / (len(theirs) + len(parents)) if theirs or parents else 1.0)
    return total


def _correlation(a: Array, b: Array) -> float:
    scale = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean()) / scale if scale > 1e-12 else 0.0


def _short(value: float) -> str:
    return f"{value:.3f}"
