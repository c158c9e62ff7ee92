"""A demonstration: one run of the expert on one problem, as one line of a rollout file.

A line is a group of one response, so everything that reads rollouts reads demonstrations: its score is the accuracy
(Jaccard of the most probable parent set with the true one), its messages are the expert's chat. What only
demonstrations have lies under `demonstration`. `posterior_history` has T + 1 states, and state t is what the expert
believed after t interventions.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.environments.causal.expert import Choice, Expert, ExpertConfig
from atroposlib.environments.causal.problem import (
    Problem,
    ProblemConfig,
    Step,
    action_text,
    answer_text,
    expected_metrics,
    jaccard,
    make_problem,
    opening,
    reply_text,
)
from atroposlib.environments.causal.scm import DIFFICULTIES, Scm
from atroposlib.errors import DataError
from atroposlib.type_definitions import Array, Json, JsonObject, Message

ENV = "causal"
SCHEMA_VERSION = 1
_DIGITS = 9
TOLERANCE = 1e-6

Beliefs = dict[tuple[int, ...], float]


class DemonstrationConfig(BaseModel):
    """Settings of making demonstrations and of accepting them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problem: ProblemConfig = ProblemConfig()
    expert: ExpertConfig = ExpertConfig()
    min_accuracy: float = Field(default=0.7, ge=0, le=1, description="Least Jaccard of an accepted demonstration.")
    min_confidence: float = Field(default=0.1, ge=0, le=1, description="Least probability of its parent set.")


def demonstrate(config: Mapping[str, Json], difficulty: str, index: int) -> JsonObject:
    """Return the record of attempt `index` of a level; the same for the same config, wherever it is made."""
    settings = DemonstrationConfig.model_validate(config)
    problem, world, rng = make_problem(settings.problem, difficulty, index)
    expert = Expert(settings.expert, problem.scm.target, problem.observed, problem.rows, problem.intervened, rng)
    prior = {expert.named(each): share for each, share in expert.prior.items()}
    history, steps, choices = [expert.beliefs], list[Step](), list[Choice]()
    best = [problem.start]
    for _ in range(settings.expert.steps):
        choice = expert.choose()
        outcome, row = world.intervene(choice.variable, choice.value)
        expert.observe(choice.variable, choice.value, outcome, row)
        history.append(expert.beliefs)
        steps.append(Step(choice.variable, choice.value, outcome, row.tolist()))
        choices.append(choice)
        best.append(expert.best)
    accuracy = jaccard(expert.parents, problem.scm.parents)
    confidence = expert.confidence
    task = settings.expert.task
    improved = sum(after != before for before, after in itertools.pairwise(best))
    name = demo_name(settings.problem.seed, difficulty, index)
    return {
        "item_key": name,
        "group_id": f"{ENV}/{run_name(config)}/{name}",
        "task": difficulty,
        "scores": [accuracy],
        "tokens": [],
        "masks": [],
        "messages": [chat(problem, steps, expert.parents, task)],
        "demonstration": {
            "schema_version": SCHEMA_VERSION,
            "demo_id": name,
            "seed": settings.problem.seed,
            "scm": problem.scm.as_json(),
            "n_nodes": problem.scm.size,
            "difficulty": difficulty,
            "mean": problem.observed.mean(axis=0).tolist(),
            "std": expert.std.tolist(),
            "lo": problem.low.tolist(),
            "hi": problem.high.tolist(),
            "config": settings.model_dump(),
            "D_O": problem.observed.tolist(),
            "D_I": {"rows": problem.rows.tolist(), "intervened": problem.intervened.tolist()},
            "prior": _written(prior),
            "posterior_history": [_written(beliefs) for beliefs in history],
            "steps": [
                {
                    "t": t,
                    "variable": f"X{step.variable}",
                    "value": step.value,
                    "outcome_mean": step.outcome,
                    "row": step.row,
                    "ei": round(choice.improvement, _DIGITS),
                    "best_so_far": best[t],
                    "exploration_set": [f"X{index}" for index in choice.candidates],
                    "marginals_before": choice.marginals.round(_DIGITS).tolist(),
                }
                for t, (step, choice) in enumerate(zip(steps, choices, strict=True))
            ],
            "map_parents": [f"X{index}" for index in expert.parents],
            "true_parents": [f"X{index}" for index in problem.scm.parents],
            "accuracy": accuracy,
            "confidence": round(confidence, _DIGITS),
            "accepted": accuracy >= settings.min_accuracy and confidence >= settings.min_confidence,
            "metrics": {
                **{
                    name: round(value, _DIGITS)
                    for name, value in expected_metrics(expert.beliefs, problem.scm.parents, problem.others).items()
                },
                "exact": float(accuracy == 1.0),
                "gap": round(problem.gap(expert.best, task), _DIGITS),
                "convergence_rate": improved / len(steps),
                "exploration_efficiency": len({step.variable for step in steps}) / len(steps),
            },
        },
    }


def demonstration_text(config: Mapping[str, Json], difficulty: str, index: int) -> str:
    """Return `demonstrate` as JSON text, which a process can hand over without its being parsed number by number."""
    return json.dumps(demonstrate(config, difficulty, index), allow_nan=False)


def run_name(config: Mapping[str, Json]) -> str:
    """Return the name of a set, which follows from its settings."""
    settings = DemonstrationConfig.model_validate(config).model_dump_json()
    return hashlib.blake2b(settings.encode(), digest_size=5).hexdigest()


def demo_name(seed: int, difficulty: str, index: int) -> str:
    """Return the name of an attempt, `seed-level-index`; equal names have the same model.

    >>> demo_name(7, "difficulty_3", 12)
    '7-3-12'
    """
    return f"{seed}-{list(DIFFICULTIES).index(difficulty) + 1}-{index}"


def chat(
    problem: Problem, steps: list[Step], parents: tuple[int, ...], task: str, thoughts: list[str] | None = None
) -> list[Message]:
    """Return the expert's run as a conversation; `thoughts` [T + 1] come before its actions."""
    thought = [f"<think>{text}</think>\n" for text in thoughts] if thoughts else [""] * (len(steps) + 1)
    messages = opening(problem, len(steps), task)
    for t, step in enumerate(steps):
        action = thought[t] + action_text(step.variable, step.value)
        reply = reply_text(step, problem.scm.target, len(steps) - t - 1)
        messages.append({"role": "assistant", "content": action})
        messages.append({"role": "user", "content": reply})
    messages.append({"role": "assistant", "content": thought[-1] + answer_text(parents)})
    return messages


class Demonstration:
    """The `demonstration` of a line, read back and checked."""

    def __init__(self, said: Mapping[str, Json]) -> None:
        """
        Raises:
            DataError: something is missing, of the wrong shape, not finite, or does not follow from the rest.
        """
        try:
            self._read(said)
        except DataError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DataError(f"no demonstration: {type(error).__name__}: {error}") from None
        self.said = said

    def _read(self, said: Mapping[str, Json]) -> None:
        if said["schema_version"] != SCHEMA_VERSION:
            raise DataError(f"schema_version is {said['schema_version']!r}, expected {SCHEMA_VERSION}")
        scm = Scm.from_json(said["scm"])
        observed, rows = _rows(said["D_O"], scm.size, "D_O"), _rows(said["D_I"]["rows"], scm.size, "D_I")
        intervened = np.array(said["D_I"]["intervened"], int)
        self.problem = Problem(scm, str(said["difficulty"]), observed, rows, intervened)
        self.steps = [
            Step(_index(each["variable"]), float(each["value"]), float(each["outcome_mean"]), list(each["row"]))
            for each in said["steps"]
        ]
        self.history = [_beliefs(each) for each in said["posterior_history"]]
        self.parents = tuple(_index(name) for name in said["map_parents"])
        self.accuracy, self.confidence = float(said["accuracy"]), float(said["confidence"])
        self.accepted = bool(said["accepted"])
        self.demo_id, self.graph = str(said["demo_id"]), scm.graph
        self.task = str(said["config"]["expert"]["task"])
        self.metrics: dict[str, float] = {name: float(value) for name, value in said["metrics"].items()}
        for fault in self._faults(said):
            raise DataError(fault)

    def _faults(self, said: Mapping[str, Json]) -> Any:
        scm, size = self.problem.scm, self.problem.scm.size
        if len(self.history) != len(self.steps) + 1:
            yield f"{len(self.history)} states of belief for {len(self.steps)} interventions, expected one more"
        for t, beliefs in enumerate(self.history):
            if abs(sum(beliefs.values()) - 1) > TOLERANCE or min(beliefs.values()) < 0:
                yield f"posterior_history[{t}] adds up to {sum(beliefs.values()):.8f}, expected 1"
            if any(scm.target in parents or not set(parents) < set(range(size)) for parents in beliefs):
                yield f"posterior_history[{t}] names parents that cannot be"
        if len(self.problem.intervened) != len(self.problem.rows):
            yield f"D_I: {len(self.problem.rows)} rows, but {len(self.problem.intervened)} intervened"
        if any(variable == scm.target or not 0 <= variable < size for variable in self.problem.intervened.tolist()):
            yield "D_I: an intervention on the target or on no variable"
        for t, step in enumerate(self.steps):
            _rows([step.row], size, f"steps[{t}].row")
            low, high = (float(end[step.variable]) for end in (self.problem.low, self.problem.high))
            if step.variable == scm.target or not low - TOLERANCE <= step.value <= high + TOLERANCE:
                yield f"steps[{t}] sets X{step.variable} to {step.value}, outside {low} to {high}"
            if step.row[step.variable] != step.value or not math.isfinite(step.outcome):
                yield f"steps[{t}]: the row does not show the intervention, or the outcome is no number"
        if sorted(said["true_parents"]) != sorted(f"X{index}" for index in scm.parents):
            yield f"true_parents {said['true_parents']} are not those of the graph"
        if abs(self.accuracy - jaccard(self.parents, scm.parents)) > TOLERANCE:
            yield f"accuracy {self.accuracy} is not the Jaccard of {self.parents} and {scm.parents}"
        last = self.history[-1]
        if abs(last.get(self.parents, 0.0) - max(last.values())) > TOLERANCE:
            yield f"map_parents {self.parents} are not the most probable set of the last state"

    @property
    def marginals(self) -> Array:
        """[T + 1, d] probability of each variable to be a parent, by state."""
        found = np.zeros((len(self.history), self.problem.scm.size))
        for t, beliefs in enumerate(self.history):
            for parents, weight in beliefs.items():
                found[t, list(parents)] += weight
        return np.minimum(found, 1.0)

    def thoughts(self) -> list[str]:
        """Return a sentence for each action, from recorded numbers alone."""
        sentences = []
        best = [step["best_so_far"] for step in self.said["steps"]]
        for t, marginals in enumerate(self.marginals):
            order = sorted(self.problem.others, key=lambda index: -marginals[index])
            likely = ", ".join(f"X{index} {marginals[index]:.2f}" for index in order if marginals[index] >= 0.05)
            believed = f"Probable causes: {likely or 'none'}."
            if t < len(self.steps):
                step = self.said["steps"][t]
                gain = (
                    f"X{self.steps[t].variable}={self.steps[t].value:.4f} is expected to improve it by {step['ei']:.4f}"
                )
                believed += f" The best mean so far is {best[t]:.4f}; {gain}."
            sentences.append(believed)
        return sentences

    def messages(self, *, with_thoughts: bool = False) -> list[Message]:
        """Return the chat, made again from the numbers."""
        thoughts = self.thoughts() if with_thoughts else None
        return chat(self.problem, self.steps, self.parents, self.task, thoughts)


def _written(beliefs: Beliefs) -> dict[str, float]:
    """Return beliefs as JSON has them; sets that round to 0 are left out."""
    rounded = {parents: round(weight, _DIGITS) for parents, weight in beliefs.items()}
    return {",".join(f"X{index}" for index in parents): weight for parents, weight in rounded.items() if weight}


def _beliefs(said: Mapping[str, float]) -> Beliefs:
    return {
        tuple(_index(name) for name in names.split(",")) if names else (): float(weight)
        for names, weight in said.items()
    }


def _index(name: str) -> int:
    if not (name.startswith("X") and name[1:].isdecimal()):
        raise DataError(f"{name!r} is no variable; they are X0, X1, ...")
    return int(name[1:])


def _rows(said: Any, size: int, what: str) -> Array:
    rows = np.array(said, float).reshape(len(said), -1) if len(said) else np.zeros((0, size))
    if rows.shape[1] != size or not np.isfinite(rows).all():
        raise DataError(f"{what} has {rows.shape[1]} columns of {size}, or a value that is not finite")
    return rows
