"""Which responses become training data: a list of steps, applied in order to the rows of a `Table`.

Rollouts are kept raw and a policy is bound late, so the same files give as many datasets as there are policies.
In YAML:

    seed: 0
    steps:
      - {step: score, above: 0}
      - {step: length, max_tokens: 16384}
      - {step: pass_rate, min: 0.1, max: 0.9}
      - {step: top_n, n: 2, by: shortest}
      - {step: target, count: 100000}

Every choice by chance follows from the seed and the problem, not from file order: adding files or steps does not
reshuffle what was chosen before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from atroposlib.data.duplicates import Contamination, contaminated, duplicates, near_duplicates
from atroposlib.data.lazy_group import SearchText
from atroposlib.data.rollout_files import expand_input
from atroposlib.data.table import FINISH_REASONS, UNKNOWN_LENGTH, Table
from atroposlib.errors import ConfigError, DataError
from atroposlib.paths import read_mapping
from atroposlib.type_definitions import Array


class Step(BaseModel):
    """One decision; `apply` returns which of the rows in `keep` stay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        raise NotImplementedError


class ScoreStep(Step):
    """Responses whose score lies in a range; the default keeps accepted ones."""

    step: Literal["score"]
    above: float | None = Field(default=None, description="Keep scores greater than this.")
    at_least: float | None = Field(default=None, description="Keep scores of at least this.")
    at_most: float | None = Field(default=None, description="Keep scores of at most this.")

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        score = table.responses["score"]
        if self.above is not None:
            keep = keep & (score > self.above)
        if self.at_least is not None:
            keep = keep & (score >= self.at_least)
        return keep if self.at_most is None else keep & (score <= self.at_most)


class GapStep(Step):
    """Responses better than the worst of their group by more than `above` (upstream's minimum score difference)."""

    step: Literal["gap"]
    above: float = Field(default=0.0, description="Score difference to the group's worst response.")

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        """The group's worst counts whether it is kept or not."""
        score, group = table.responses["score"], table.responses["group"]
        lowest = np.full(len(table.groups), np.inf)
        np.fmin.at(lowest, group, score)
        return keep & (score - lowest[group] > self.above)


class FinishReasonStep(Step):
    """Responses that ended in one of the given ways; `unknown` stands for files that do not record it."""

    step: Literal["finish_reason"]
    allow: list[Literal["stop", "length", "abort", "tool_calls", "unknown"]] = ["stop", "tool_calls", "unknown"]

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        codes = [FINISH_REASONS.index(reason) for reason in self.allow]
        return keep & np.isin(table.responses["finish"], codes)


class LengthStep(Step):
    """Responses of a length, in tokens."""

    step: Literal["length"]
    of: Literal["completion", "total"] = "completion"
    min_tokens: NonNegativeInt = 0
    max_tokens: PositiveInt | None = None

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        """DataError where a length is unknown, because no token ids were recorded."""
        length = _known_lengths(table, keep, self.of)
        keep = keep & (length >= self.min_tokens)
        return keep if self.max_tokens is None else keep & (length <= self.max_tokens)


class PassRateStep(Step):
    """Problems whose share of accepted responses lies in a band: drops the too hard and the too easy."""

    step: Literal["pass_rate"]
    min: float = Field(default=0.0, ge=0, le=1, description="Lowest share that stays.")
    max: float = Field(default=1.0, ge=0, le=1, description="Highest share that stays.")
    accept_score: float = Field(default=0.0, description="A response is accepted when its score is above this.")

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        """The share is of all scored responses of the problem, kept or not; one without any does not stay."""
        rate = pass_rates(table, self.accept_score)
        return keep & (rate >= self.min) & (rate <= self.max)


class TaskStep(Step):
    """Responses to some of the tasks."""

    step: Literal["task"]
    allow: list[str] = Field(min_length=1, description='Tasks that stay; "": groups without one.')

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        return keep & np.isin(table.column("task"), _places(table.tasks, self.allow))


class WeightsStep(Step):
    """Responses of some of the versions that the engine's weights had, as the engine calls them."""

    step: Literal["weights"]
    allow: list[str] = Field(min_length=1, description='Versions that stay; "": groups without one.')

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        """Row by row; the version is that of the group's last generation."""
        return keep & np.isin(table.column("weights"), _places(table.weights, self.allow))


class TextStep(Step):
    """Responses whose conversation holds a text, in prompt or answer; upper and lower case are the same."""

    step: Literal["text"]
    contains: str = Field(min_length=1)

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        """Read the messages of all rows in `keep`; where none were recorded nothing is found."""
        text, found = SearchText(self.contains), np.zeros_like(keep)
        for chosen in table.read(keep):
            for index, row in zip(chosen.indices, chosen.rows, strict=True):
                found[row] = text.is_in(chosen.group, index)
        return found


class TopStep(Step):
    """At most n responses of each group (or problem)."""

    step: Literal["top_n"]
    n: PositiveInt
    by: Literal["score", "shortest", "longest", "random"] = "score"
    per: Literal["group", "problem"] = "group"

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        """Equal ones are told apart by chance, except for scores: there the earlier response wins."""
        owner = table.responses["group"] if self.per == "group" else table.column("item")
        return _first_n(keep, owner, self._order(table, keep, seed), self.n)

    def _order(self, table: Table, keep: Array, seed: int) -> list[Array]:
        if self.by == "random":
            return [priorities(table, seed)]
        if self.by == "score":
            return [-table.responses["score"]]
        length = _known_lengths(table, keep, "completion").astype("i8")
        return [length if self.by == "shortest" else -length, priorities(table, seed)]


class TaskCapStep(Step):
    """At most `count` responses of each task, chosen by chance; `balance` caps all at the smallest task's count."""

    step: Literal["task_cap"]
    count: PositiveInt | None = None
    balance: PositiveFloat | None = Field(
        default=None, description="Cap in multiples of the smallest task's count, e.g. 1."
    )

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        if self.count is None and self.balance is None:
            raise ConfigError("policy step task_cap needs count or balance")
        task = table.column("task")
        counts = np.bincount(task[keep])
        cap = self.count or int(keep.sum())
        if self.balance is not None and counts.any():
            cap = min(cap, max(1, int(counts[counts > 0].min() * self.balance)))
        return _first_n(keep, task, [priorities(table, seed)], cap)


class UniqueStep(Step):
    """One of each set of identical completions, or of nearly identical ones when `near` is set."""

    step: Literal["unique"]
    near: float | None = Field(
        default=None, gt=0, lt=1, description="Jaccard similarity from which two are the same, e.g. 0.8"
    )
    ngram: PositiveInt = Field(default=5, description="Tokens per shingle for `near`.")
    per: Literal["problem", "all"] = "all"

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        per_item = self.per == "problem"
        keep = keep & ~duplicates(table, keep, per_item=per_item)
        if self.near is not None:
            keep &= ~near_duplicates(table, keep, threshold=self.near, ngram=self.ngram, per_item=per_item)
        return keep


class DecontaminateStep(Step):
    """Drops problems and answers that share an n-gram of words with an evaluation set; applied by `select`."""

    step: Literal["decontaminate"]
    against: list[str] = Field(min_length=1, description="Evaluation sets: .jsonl, .json or .txt files.")
    ngram: PositiveInt = Field(default=13, description="Words in a row that count as the same text.")


class TargetStep(Step):
    """Exactly `count` responses, chosen by chance."""

    step: Literal["target"]
    count: PositiveInt
    allow_fewer: bool = Field(default=False, description="Keep all when fewer are left, instead of failing.")

    def apply(self, table: Table, keep: Array, seed: int) -> Array:
        left = int(keep.sum())
        if left < self.count and not self.allow_fewer:
            raise DataError(
                f"policy step target asks for {self.count} responses, but only {left} are left; "
                "lower count, set allow_fewer: true or add rollouts"
            )
        return _first_n(keep, np.zeros(len(keep), "u1"), [priorities(table, seed)], self.count)


AnyStep = Annotated[
    ScoreStep
    | GapStep
    | FinishReasonStep
    | LengthStep
    | PassRateStep
    | TaskStep
    | WeightsStep
    | TextStep
    | TopStep
    | TaskCapStep
    | UniqueStep
    | DecontaminateStep
    | TargetStep,
    Field(discriminator="step"),
]


def _places(names: list[str], wanted: Sequence[str]) -> list[int]:
    return [place for place, name in enumerate(names) if name in wanted]


def pass_rates(table: Table, accept_score: float) -> Array:
    """[responses] share of accepted ones of the scored responses of each response's problem, over all of its groups.

    NaN where no response of the problem has a score.
    """
    _, problem = np.unique(table.column("item"), return_inverse=True)
    total = np.bincount(problem, weights=~np.isnan(table.responses["score"]))
    accepted = np.bincount(problem, weights=table.responses["score"] > accept_score, minlength=len(total))
    rates = np.divide(accepted, total, out=np.full(len(total), np.nan), where=total > 0)
    return rates[problem] if len(total) else np.zeros(0)


def priorities(table: Table, seed: int) -> Array:
    """[responses] of pseudo-random u8, from seed, problem and index alone (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        mixed = table.column("item") ^ (np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15))
        mixed = mixed + table.responses["index"].astype("u8") * np.uint64(0xD1B54A32D192ED03)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _first_n(keep: Array, owner: Array, order: Sequence[Array], n: int) -> Array:
    """Of the rows in `keep`, the first n of each owner in the given order (ties: earlier rows first)."""
    rows = np.flatnonzero(keep)
    ranked = rows[np.lexsort([rows, *(key[rows] for key in reversed(order)), owner[rows]])]
    owners = owner[ranked]
    starts = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]]) if len(owners) else np.zeros(0, int)
    rank = np.arange(len(owners)) - np.repeat(starts, np.diff(np.r_[starts, len(owners)]))
    after = np.zeros_like(keep)
    after[ranked[rank < n]] = True
    return after


def _known_lengths(table: Table, keep: Array, of: str) -> Array:
    length = table.responses[of]
    unknown = np.flatnonzero(keep & (length == UNKNOWN_LENGTH))
    if len(unknown):
        raise DataError(f"{table.where(int(unknown[0]))}: no token ids were recorded, so its length is unknown")
    return length


class SelectionPolicy(BaseModel):
    """Steps in order, and the seed of every choice by chance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    steps: list[AnyStep] = []


@dataclass(frozen=True)
class StepResult:
    """The result of one step."""

    step: str
    kept: int
    dropped: int


@dataclass(frozen=True)
class Selection:
    """The rows a policy keeps, and how it got there."""

    keep: Array  # [responses] of bool
    steps: list[StepResult]
    contamination: list[Contamination]


def select(table: Table, policy: SelectionPolicy) -> Selection:
    """Apply every step of `policy` to all responses that may be used."""
    keep = table.responses["odd"] == 0
    results: list[StepResult] = []
    contamination: list[Contamination] = []
    for step in policy.steps:
        if isinstance(step, DecontaminateStep):
            hits, found = contaminated(table, keep, step.against, step.ngram)
            contamination += found
            after = keep & ~hits
        else:
            try:
                after = step.apply(table, keep, policy.seed)
            except DataError as error:
                before = "; ".join(f"{each.step} kept {each.kept}, dropped {each.dropped}" for each in results)
                raise DataError(f"{error} (before it: {before})" if before else str(error)) from error
        results.append(StepResult(step.step, int(after.sum()), int(keep.sum() - after.sum())))
        keep = after
    return Selection(keep, results, contamination)


def load_policy(text: str | Path, *, seed: int | None = None, target: int | None = None) -> SelectionPolicy:
    """Return the policy in a YAML file, with `seed` and the number of responses to keep as flags give them.

    Raises:
        ConfigError: not YAML, an unknown step or key, a value out of range; names file and key.
    """
    path = expand_input(str(text), what="--policy")
    content = read_mapping(path, expected="seed: and steps:", what="a policy", may_be_empty=True)
    try:
        policy = SelectionPolicy.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--policy {path}: {place or 'top level'}: {first['msg']}") from error
    if seed is not None:
        policy = policy.model_copy(update={"seed": seed})
    if target is not None:
        others = [step for step in policy.steps if not isinstance(step, TargetStep)]
        steps = [*others, TargetStep(step="target", count=target, allow_fewer=True)]
        policy = policy.model_copy(update={"steps": steps})
    return policy


def simple_policy(
    *,
    above: float | None = 0.0,
    min_score: float | None = None,
    min_gap: float = 0.0,
    top_n: int | None = None,
    target: int | None = None,
    seed: int = 0,
) -> SelectionPolicy:
    """The policy that upstream's options mean.

    Args:
        above: keep scores greater than this; None keeps every score.
        min_score: keep scores of at least this, instead of `above`.
        min_gap: when above 0, keep responses better than their group's worst by more than this.
        top_n: best n of each group; None keeps all.
        target: at most this many in all, chosen by chance.
    """
    steps: list[AnyStep] = []
    if min_score is not None:
        steps.append(ScoreStep(step="score", at_least=min_score))
    elif above is not None:
        steps.append(ScoreStep(step="score", above=above))
    if min_gap > 0:
        steps.append(GapStep(step="gap", above=min_gap))
    if top_n is not None:
        steps.append(TopStep(step="top_n", n=top_n))
    if target is not None:
        steps.append(TargetStep(step="target", count=target, allow_fewer=True))
    return SelectionPolicy(seed=seed, steps=steps)
