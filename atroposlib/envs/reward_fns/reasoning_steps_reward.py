"""Score how much a completion looks like reasoning in steps. A measure of form, not of truth."""

import re
from collections.abc import Mapping, Sequence

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction

PATTERN_WEIGHTS = {"numbered_steps": 0.5, "list_numbers": 0.5, "bullet_points": 0.4, "transition_words": 0.3}

_TRANSITIONS = (
    r"first|second|third|fourth|fifth|next|then|finally|subsequently|afterward|lastly|initially|eventually|"
    r"understand|analyze|apply|compute|to begin|begin by|let's begin|i'll first|after that|in conclusion|to solve"
)
_FLAGS = re.IGNORECASE | re.MULTILINE

PATTERNS = {
    "numbered_steps": re.compile(r"Step\s+\d+[\s:]+", _FLAGS),
    "list_numbers": re.compile(r"^\s*\d+\.\s+", _FLAGS),
    "bullet_points": re.compile(r"^\s*[-*•]\s+", _FLAGS),
    "transition_words": re.compile(rf"\b(?:{_TRANSITIONS})\b", _FLAGS),
}


@registry.register
class ReasoningStepsReward(RewardFunction):
    """0.0 to 1.0: each kind of marker gives its weight when it occurs `min_steps` times, less when more rarely."""

    def __init__(
        self,
        min_words: int = 10,
        min_steps: int = 3,
        base_score: float = 0.1,
        pattern_weights: Mapping[str, float] | None = None,
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the settings.

        Args:
            min_words: a text of more words gets `base_score`.
            min_steps: occurrences of a marker that give its whole weight.
            base_score: for a text that is more than an answer.
            pattern_weights: replaces single values of PATTERN_WEIGHTS.
        """
        super().__init__(weight, name, **kwargs)
        self.min_words = min_words
        self.min_steps = min_steps
        self.base_score = base_score
        self.pattern_weights = {**PATTERN_WEIGHTS, **(pattern_weights or {})}

    def compute(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        """0.0 to 1.0 for each completion."""
        return [self._score(self.get_content(completion)) for completion in completions]

    def _score(self, content: str) -> float:
        steps = sum(
            self.pattern_weights[kind] * min(1.0, len(pattern.findall(content)) / self.min_steps)
            for kind, pattern in PATTERNS.items()
        )
        base = self.base_score if len(content.split()) > self.min_words else 0.0
        return min(1.0, steps + base)


def reasoning_steps_reward(completions: Sequence[Completion], **kwargs: object) -> list[float]:
    return ReasoningStepsReward().compute(completions, **kwargs)
