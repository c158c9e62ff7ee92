"""The right answer first: a bonus for the form of the reasoning counts only when the answer is right."""

import re
from collections.abc import Sequence

from atroposlib.envs.reward_fns.accuracy_reward import accuracy_reward
from atroposlib.envs.reward_fns.math_judge import Gold
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction
from atroposlib.rollouts.failures import is_scored

__all__ = ["accuracy_reward", "cascading_r1_math_reward", "format_reward"]

_ONE_BLOCK_FIRST = re.compile(r"<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*", re.DOTALL)


def format_reward(completions: Sequence[Completion], reward_value: float = 0.5, **kwargs: object) -> list[float]:
    """`reward_value` when a completion starts with its only think block, else 0.0. Other tags are allowed."""
    contents = map(RewardFunction.get_content, completions)
    return [reward_value if _ONE_BLOCK_FIRST.fullmatch(content) else 0.0 for content in contents]


def cascading_r1_math_reward(
    completions: Sequence[Completion],
    solution: Gold | list[Gold] | None,
    ground_truth: Gold | list[Gold] | None = None,
    **kwargs: object,
) -> list[float]:
    """1.0 for the right answer, 1.5 when it is also well formed, 0.0 for a wrong one, `Unscored` for one not judged."""
    answers = accuracy_reward(completions, solution, ground_truth)
    forms = format_reward(completions)
    return [
        answer + form if is_scored(answer) and answer > 0 else answer
        for answer, form in zip(answers, forms, strict=True)
    ]
