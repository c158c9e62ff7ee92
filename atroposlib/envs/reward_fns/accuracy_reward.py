"""Rewards for the right mathematical answer."""

from collections.abc import Sequence

from atroposlib.envs.reward_fns.math_judge import Gold, judge, scores
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction, one_each


@registry.register
class AccuracyReward(RewardFunction):
    """1.0 for the right answer, else 0.0. Answers are boxed, follow `####` or are announced; see `math_judge`."""

    def __init__(
        self,
        tolerance: float = 1e-6,
        split_on_think_tag: bool = True,
        max_boxed_threshold: int = 6,
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the settings.

        Args:
            tolerance: for numbers with a decimal point, relative to the right one where that is below 1.
            split_on_think_tag: judge only what follows the last `</think>`; a thought that never ends has no answer.
            max_boxed_threshold: more boxed answers than this are guessing, and wrong.
        """
        super().__init__(weight, name, **kwargs)
        self.tolerance = tolerance
        self.split_on_think_tag = split_on_think_tag
        self.max_boxed_threshold = max_boxed_threshold

    def compute(
        self,
        completions: Sequence[Completion],
        solution: Gold | list[Gold] | None = None,
        ground_truth: Gold | list[Gold] | None = None,
        **kwargs: object,
    ) -> list[float]:
        """1.0 or 0.0 for each completion; `Unscored` for one that could not be judged in time.

        The right answer, or one for each completion, is `ground_truth`, else `solution`; VerifierFault without any.
        """
        gold = solution if ground_truth is None else ground_truth
        answers = one_each(gold, completions, needed_by=self.name, keyword="solution")
        contents = [self._without_guesses(self.get_content(completion)) for completion in completions]
        return scores(judge(contents, answers, tolerance=self.tolerance, skip_thinking=self.split_on_think_tag))

    def _without_guesses(self, content: str) -> str:
        said = content.rpartition("</think>")[2] if self.split_on_think_tag else content
        return "" if said.count("\\boxed") > self.max_boxed_threshold else content


def accuracy_reward(
    completions: Sequence[Completion],
    solution: Gold | list[Gold] | None = None,
    ground_truth: Gold | list[Gold] | None = None,
    **kwargs: object,
) -> list[float]:
    return AccuracyReward().compute(completions, solution=solution, ground_truth=ground_truth, **kwargs)
