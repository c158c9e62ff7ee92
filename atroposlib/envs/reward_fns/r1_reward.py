"""Rewards in the style of DeepSeek-R1: for the form of the reasoning, and for the answer after it."""

import re
from collections.abc import Sequence
from typing import TypedDict

from atroposlib.envs.reward_fns.math_answers import after_thinking, clean, final_answer, read_quantity
from atroposlib.envs.reward_fns.math_judge import judge, scores
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction, one_each

_THOUGHTS = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class ReasoningParts(TypedDict):
    """A completion taken apart."""

    thinking_content: str  # "" without a complete block
    response: str  # after the last block; the whole text without one; "" while a thought is open
    multiple_thinking: bool


def parse_reasoning_response(text: str) -> ReasoningParts:
    """Thoughts and response of a completion, both stripped."""
    said = after_thinking(text)
    thoughts = text[: text.rfind("</think>") + len("</think>")] if "</think>" in text else ""
    blocks = _THOUGHTS.findall(thoughts)
    return ReasoningParts(
        thinking_content="\n".join(map(str.strip, blocks)).strip(),
        response=(said.strip() if thoughts else said) if said is not None else "",
        multiple_thinking=len(blocks) > 1,
    )


@registry.register
class FormatReasoningReward(RewardFunction):
    """`reward_value` for one think block and a response after it, else 0.0."""

    def __init__(
        self,
        reward_value: float = 0.5,
        require_thinking: bool = True,
        require_response: bool = True,
        allow_multiple_thinking: bool = False,
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(weight, name, **kwargs)
        self.reward_value = reward_value
        self.require_thinking = require_thinking
        self.require_response = require_response
        self.allow_multiple_thinking = allow_multiple_thinking

    def compute(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        """`reward_value` or 0.0 for each completion."""
        parts = [parse_reasoning_response(self.get_content(completion)) for completion in completions]
        return [self.reward_value if self._is_valid(part) else 0.0 for part in parts]

    def _is_valid(self, part: ReasoningParts) -> bool:
        return bool(
            (part["thinking_content"] or not self.require_thinking)
            and (part["response"] or not self.require_response)
            and (self.allow_multiple_thinking or not part["multiple_thinking"])
        )


@registry.register
class AccuracyXReward(RewardFunction):
    """`reward_value` when the response after the thoughts holds the solution's text as a word of its own, else 0.0.

    A number is compared with the answer that the response marks (\\boxed{}, ####), if it marks one.
    """

    def __init__(
        self,
        exact_match: bool = False,
        case_sensitive: bool = False,
        reward_value: float = 1.0,
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the settings; with `exact_match` the response must be the solution and nothing else."""
        super().__init__(weight, name, **kwargs)
        self.exact_match = exact_match
        self.case_sensitive = case_sensitive
        self.reward_value = reward_value

    def compute(
        self,
        completions: Sequence[Completion],
        solution: Completion | float | list[Completion | float] | None = None,
        **kwargs: object,
    ) -> list[float]:
        """`reward_value` or 0.0 for each completion; `Unscored` for one that could not be judged in time."""
        solutions = one_each(solution, completions, needed_by=self.name, keyword="solution")
        pairs = [
            (parse_reasoning_response(self.get_content(completion))["response"], self._solution_text(right))
            for completion, right in zip(completions, solutions, strict=True)
        ]
        judged = list(dict.fromkeys(pair for pair in pairs if not self.exact_match and _is_mathematics(*pair)))
        verdicts = judge([said for said, _ in judged], [right for _, right in judged], skip_thinking=False)
        known = dict(zip(judged, scores(verdicts, right=self.reward_value, wrong=0.0), strict=True))
        return [known[pair] if pair in known else self.reward_value * self._matches(*pair) for pair in pairs]

    def _solution_text(self, solution: Completion | float) -> str:
        return str(solution) if isinstance(solution, (int, float)) else self.get_content(solution)

    def _matches(self, response: str, solution: str) -> bool:
        if not self.case_sensitive:
            response, solution = response.lower(), solution.lower()
        if self.exact_match or not solution:
            return response == solution
        return re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(solution)}(?!\w)(?![.,]\d)", response) is not None


def _is_mathematics(response: str, solution: str) -> bool:
    """The solution is a number, and the response marks an answer."""
    return read_quantity(clean(solution)) is not None and final_answer(response) is not None


@registry.register
class R1Reward(RewardFunction):
    """`format_weight` for the form plus `accuracy_weight` for the answer."""

    def __init__(
        self,
        format_weight: float = 0.5,
        accuracy_weight: float = 1.0,
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(weight, name, **kwargs)
        self.format_weight = format_weight
        self.accuracy_weight = accuracy_weight
        self.format_reward_fn = FormatReasoningReward(reward_value=format_weight)
        self.accuracy_reward_fn = AccuracyXReward(reward_value=accuracy_weight)

    def compute(
        self,
        completions: Sequence[Completion],
        solution: Completion | float | list[Completion | float] | None = None,
        **kwargs: object,
    ) -> list[float]:
        """Return the sum of both for each completion, VerifierFault without a solution."""
        forms = self.format_reward_fn.compute(completions, **kwargs)
        answers = self.accuracy_reward_fn.compute(completions, solution=solution, **kwargs)
        return [form + answer for form, answer in zip(forms, answers, strict=True)]


def format_reasoning_reward(completions: Sequence[Completion], **kwargs: object) -> list[float]:
    return FormatReasoningReward().compute(completions, **kwargs)


def accuracy_reward(
    completions: Sequence[Completion], solution: Completion | float | list[Completion | float] | None, **kwargs: object
) -> list[float]:
    return AccuracyXReward().compute(completions, solution=solution, **kwargs)


def r1_reward(
    completions: Sequence[Completion], solution: Completion | float | list[Completion | float] | None, **kwargs: object
) -> list[float]:
    return R1Reward().compute(completions, solution=solution, **kwargs)
