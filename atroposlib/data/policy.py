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
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from atroposlib.data.contents import Contamination, contaminated
from atroposlib.data.rollout_files import expand_input
from atroposlib.data.steps import AnyStep, DecontaminateStep, GapStep, ScoreStep, TargetStep, TopStep
from atroposlib.data.table import Table
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import Array


class Policy(BaseModel):
    """Steps in order, and the seed of every choice by chance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    steps: list[AnyStep] = []


@dataclass(frozen=True)
class StepResult:
    """What one step left."""

    step: str
    kept: int
    dropped: int


@dataclass(frozen=True)
class Selection:
    """The rows a policy keeps, and how it got there."""

    keep: Array  # [responses] of bool
    steps: list[StepResult]
    contamination: list[Contamination]


def select(table: Table, policy: Policy) -> Selection:
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
            after = step.apply(table, keep, policy.seed)
        results.append(StepResult(step.step, int(after.sum()), int(keep.sum() - after.sum())))
        keep = after
    return Selection(keep, results, contamination)


def load_policy(text: str | Path, *, seed: int | None = None, target: int | None = None) -> Policy:
    """Return the policy in a YAML file, with `seed` and the number of responses to keep as flags give them.

    Raises:
        ConfigError: not YAML, an unknown step or key, a value out of range; names file and key.
    """
    import yaml  # only files need it

    path = expand_input(str(text), what="--policy")
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        policy = Policy.model_validate(data)
    except OSError as error:
        raise ConfigError(f"--policy {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--policy {path} is not YAML: {' '.join(str(error).split())}") from error
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
) -> Policy:
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
    return Policy(seed=seed, steps=steps)
