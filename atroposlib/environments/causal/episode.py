"""One attempt at a problem by whoever writes texts: a language model, or a script that shows what a score means.

A turn is one action. What cannot be understood, lies outside the domain (the nearest value is taken) or is aimed at the
target costs `PENALTY` and a turn; nothing ends an attempt but an answer or the last turn.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from atroposlib.environments.causal.expert import Expert, ExpertConfig
from atroposlib.environments.causal.problem import (
    Action,
    Problem,
    ProblemConfig,
    Step,
    action_text,
    answer_text,
    jaccard,
    left_text,
    make_problem,
    opening,
    parse_action,
    reply_text,
)
from atroposlib.environments.causal.scm import DECIMALS, Rng, World
from atroposlib.type_definitions import Message

PENALTY = 0.05
Task = Literal["min", "max"]
ScoreKind = Literal["mean", "exact"]


@dataclass
class Episode:
    """The state of one attempt."""

    problem: Problem
    world: World
    turns: int  # interventions; one more turn is for the answer
    task: Task = "min"
    steps: list[Step] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    answer: tuple[int, ...] | None = None
    _used: int = 0

    @classmethod
    def begin(cls, config: ProblemConfig, level: str, index: int, turns: int, task: Task = "min") -> "Episode":
        """Return an attempt at problem `index` of a level; in all of them equal actions show the same."""
        problem, world, _ = make_problem(config, level, index)
        return cls(problem, world, turns, task)

    def opening(self) -> list[Message]:
        """Return the first messages."""
        return opening(self.problem, self.turns, self.task)

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing more to do."""
        return self.answer is not None or self._used > self.turns

    def act(self, text: str) -> str:
        """Do what a reply asks for; returns what is said to it."""
        self._used += 1
        action, left = parse_action(text), max(0, self.turns - self._used)
        target = self.problem.scm.target
        if action is None:
            self.faults.append("format")
            return f"I found neither <intervene>X1=1.25</intervene> nor <answer>X1,X3</answer>. {left_text(left)}"
        if action.parents is not None:
            return self._conclude(action)
        if self._used > self.turns:
            self.faults.append("late")
            return "No interventions are left."
        if action.variable == target or action.variable >= self.problem.scm.size:
            self.faults.append("target" if action.variable == target else "format")
            names = ", ".join(f"X{index}" for index in self.problem.others)
            return f"X{action.variable} cannot be set; {names} can. {left_text(left)}"
        low, high = (float(end[action.variable]) for end in (self.problem.low, self.problem.high))
        value = round(min(max(action.value, low), high), DECIMALS)
        if not low <= action.value <= high:
            self.faults.append("domain")
        outcome, row = self.world.intervene(action.variable, value)
        self.steps.append(Step(action.variable, value, outcome, row.tolist()))
        return reply_text(self.steps[-1], target, left)

    def _conclude(self, action: Action) -> str:
        assert action.parents is not None
        known = [index for index in action.parents if index in self.problem.others]
        if len(known) < len(action.parents):
            self.faults.append("format")
        self.answer = tuple(known)
        return "Thank you."

    @property
    def best(self) -> float:
        """The best mean outcome so far, the untouched model's included."""
        pick = min if self.task == "min" else max
        return pick([self.problem.start, *(step.outcome for step in self.steps)])

    def parts(self) -> dict[str, float]:
        """Return what the score is made of."""
        parents = self.problem.scm.parents
        overlap = 0.0 if self.answer is None else jaccard(self.answer, parents)
        return {
            "jaccard": overlap,
            "exact": float(overlap == 1.0),
            "gap": self.problem.gap(self.best, self.task) if self.steps else 0.0,
            "penalty": PENALTY * len(self.faults),
            "answered": float(self.answer is not None),
        }

    def score(self, kind: ScoreKind = "mean") -> float:
        """Return the mean of Jaccard and improvement less the penalties, or 1 for exactly the parents, else 0."""
        parts = self.parts()
        return parts["exact"] if kind == "exact" else 0.5 * (parts["jaccard"] + parts["gap"]) - parts["penalty"]


Policy = Callable[[Episode, Rng], Callable[[], str]]
"""From an attempt to a function that gives the text of each turn."""


def expert_policy(episode: Episode, rng: Rng) -> Callable[[], str]:
    """Design as PARENT_SCALE does."""
    problem = episode.problem
    config = ExpertConfig(steps=episode.turns, task=episode.task)
    expert = Expert(config, problem.scm.target, problem.observed, problem.rows, problem.intervened, rng)
    seen = 0

    def turn() -> str:
        nonlocal seen
        for step in episode.steps[seen:]:
            expert.observe(step.variable, step.value, step.outcome, np.array(step.row))
        seen = len(episode.steps)
        if seen == episode.turns:
            return answer_text(expert.parents)
        choice = expert.choose()
        return action_text(choice.variable, choice.value)

    return turn


def random_policy(episode: Episode, rng: Rng) -> Callable[[], str]:
    """Set any variable to any value, then name one at random."""

    def turn() -> str:
        variable = int(rng.choice(episode.problem.others))
        if len(episode.steps) == episode.turns:
            return answer_text([variable])
        return action_text(variable, rng.uniform(episode.problem.low[variable], episode.problem.high[variable]))

    return turn


def constant_policy(episode: Episode, rng: Rng) -> Callable[[], str]:
    """Do the same each turn: leave the first variable at the middle of its domain, then name the first."""

    def turn() -> str:
        variable = episode.problem.others[0]
        if len(episode.steps) == episode.turns:
            return answer_text([variable])
        return action_text(variable, (episode.problem.low[variable] + episode.problem.high[variable]) / 2)

    return turn


def empty_policy(episode: Episode, rng: Rng) -> Callable[[], str]:
    """Say nothing."""
    return lambda: ""


POLICIES: dict[str, Policy] = {
    "expert": expert_policy,
    "random": random_policy,
    "constant": constant_policy,
    "empty": empty_policy,
}


def play(episode: Episode, policy: Policy, rng: Rng) -> list[Message]:
    """Let a policy act to the end; returns the conversation."""
    messages, turn = episode.opening(), policy(episode, rng)
    while not episode.is_over:
        text = turn()
        messages.append({"role": "assistant", "content": text})
        reply = episode.act(text)
        if not episode.is_over:
            messages.append({"role": "user", "content": reply})
    return messages
