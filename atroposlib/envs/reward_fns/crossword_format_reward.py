"""Reward completions that are written like crossword answers: `1-Across: WORD`."""

import re
from collections.abc import Sequence

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction

ANSWER = re.compile(r"\d+-(?:Across|Down):\s+[A-Z\s]+", re.IGNORECASE)

_ANSWER_WORD = re.compile(r"(?:Across|Down):[ \t]+([^\s,;]+)", re.IGNORECASE)  # no heading of a list of clues


@registry.register
class CrosswordFormatReward(RewardFunction):
    """`reward_value` for at least one answer in the right form and only valid letters in all, else 0.0."""

    def __init__(
        self,
        format_patterns: Sequence[re.Pattern[str]] | None = None,
        reward_value: float = 1.0,
        penalize_invalid_chars: bool = True,
        valid_chars: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the settings: one of `format_patterns` (None: ANSWER) must be found, and no answer has other characters
        than `valid_chars` where `penalize_invalid_chars`."""
        super().__init__(weight, name, **kwargs)
        self.format_patterns = list(format_patterns or [ANSWER])
        self.reward_value = reward_value
        self.penalize_invalid_chars = penalize_invalid_chars
        self.valid_chars = valid_chars.upper()

    def compute(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        """`reward_value` or 0.0 for each completion."""
        contents = map(self.get_content, completions)
        return [self.reward_value if self._is_well_formed(content) else 0.0 for content in contents]

    def _is_well_formed(self, content: str) -> bool:
        if not any(pattern.search(content) for pattern in self.format_patterns):
            return False
        words = (word.rstrip(".!?").upper() for word in _ANSWER_WORD.findall(content))
        return not self.penalize_invalid_chars or all(set(word) <= set(self.valid_chars) for word in words)


def crossword_format_reward(completions: Sequence[Completion], **kwargs: object) -> list[float]:
    return CrosswordFormatReward().compute(completions, **kwargs)
