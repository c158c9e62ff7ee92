"""Reward completions that hold XML-style sections such as `<think>...</think>`."""

import re
from collections.abc import Sequence

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction


@registry.register
class FormatReward(RewardFunction):
    """1.0 when a completion holds a complete section of the wanted tags, else 0.0."""

    def __init__(
        self,
        preferred_tags: Sequence[str] | None = None,
        require_all_tags: bool = False,
        case_sensitive: bool = False,
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the settings.

        Args:
            preferred_tags: tag names; None: think and answer.
            require_all_tags: every tag is needed; otherwise one is enough.
            case_sensitive: `<Think>` is no `<think>`.
        """
        super().__init__(weight, name, **kwargs)
        self.preferred_tags = list(preferred_tags or ("think", "answer"))
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def compute(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        """1.0 or 0.0 for each completion."""
        flags = re.NOFLAG if self.case_sensitive else re.IGNORECASE
        names = map(re.escape, self.preferred_tags)
        tags = [(re.compile(f"<{name}>", flags), re.compile(f"</{name}>", flags)) for name in names]
        enough = all if self.require_all_tags else any
        return [
            float(enough((start := begin.search(content)) and end.search(content, start.end()) for begin, end in tags))
            for content in map(self.get_content, completions)
        ]


def format_reward(
    completions: Sequence[Completion], preferred_tags: Sequence[str] | None = None, **kwargs: object
) -> list[float]:
    """`FormatReward` with one of the tags."""
    return FormatReward(preferred_tags=preferred_tags).compute(completions, **kwargs)
