"""Whether completions give the right mathematical answer."""

from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.math_answers import is_correct
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction, one_each


@registry.register
class AccuracyReward(RewardFunction):
    """1.0 for the right answer, else 0.0. Answers are LaTeX, boxed, or follow `####`."""

    def __init__(
        self,
        tolerance: float = 1e-6,
        split_on_think_tag: bool = True,
        max_boxed_threshold: int = 6,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        """Keep the settings.

        Args:
            tolerance: absolute, for plain numbers.
            split_on_think_tag: judge only what follows the last `</think>`.
            max_boxed_threshold: more boxed answers than this are guessing, and wrong.
            weight: factor on the reward.
            kwargs: kept in `config`.
        """
        super().__init__(weight=weight, **kwargs)
        self.tolerance = tolerance
        self.split_on_think_tag = split_on_think_tag
        self.max_boxed_threshold = max_boxed_threshold

    def compute(
        self,
        completions: Sequence[Completion],
        solution: Any = None,
        ground_truth: Any = None,
        **kwargs: Any,
    ) -> list[float]:
        """1.0 or 0.0 for each completion.

        Args:
            completions: [G].
            solution: the right answer, or a list of one per completion.
            ground_truth: the same, and preferred when both are given.
            kwargs: ignored.

        Raises:
            VerifierFault: neither answer is given, or the comparison ran into its time limit.
        """
        gold = solution if ground_truth is None else ground_truth
        answers = one_each(gold, completions, needed_by=self.name, keyword="solution")
        contents = map(self.get_content, completions)
        return [float(self._is_correct(*pair)) for pair in zip(contents, answers, strict=True)]

    def _is_correct(self, content: str, answer: Any) -> bool:
        said = content.rpartition("</think>")[2] if self.split_on_think_tag else content
        return said.count("\\boxed") <= self.max_boxed_threshold and is_correct(said, answer, self.tolerance)


def accuracy_reward(
    completions: Sequence[Completion], solution: Any = None, ground_truth: Any = None, **kwargs: Any
) -> list[float]:
    """`AccuracyReward` with its defaults."""
    return AccuracyReward().compute(completions, solution=solution, ground_truth=ground_truth, **kwargs)
