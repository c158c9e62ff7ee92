"""Several reward functions as one."""

from collections.abc import Mapping, Sequence

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, MetricsLogger, RewardFunction
from atroposlib.errors import ConfigError
from atroposlib.rollouts.failures import Unscored

NORMALIZATIONS = ("none", "sum", "minmax")


@registry.register
class CombinedReward(RewardFunction):
    """The weighted sum of its parts. A response that one part cannot score has no score."""

    reward_functions: list[RewardFunction]
    normalization: str

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, object]],
        normalization: str = "none",
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        """Create the parts.

        Args:
            rewards: names or configs as `registry.create` takes them; `weight` in a config counts.
            normalization: "none", "sum" (divide by the sum of weights) or "minmax" (onto 0 to 1 within the group;
                a group of equal rewards stays as it is).
            weight: of the whole.
        """
        super().__init__(weight, name, **kwargs)
        if normalization not in NORMALIZATIONS:
            raise ConfigError(f"normalization is {normalization!r}; expected one of {', '.join(NORMALIZATIONS)}")
        self.normalization = normalization
        self.reward_functions = [registry.create(reward) for reward in rewards]

    @property
    def name(self) -> str:
        """`combined(first,second)`."""
        return self._name or f"combined({','.join(part.name for part in self.reward_functions)})"

    def set_wandb_logger(self, logger: MetricsLogger | None) -> None:
        """Also of every part."""
        super().set_wandb_logger(logger)
        for part in self.reward_functions:
            part.set_wandb_logger(logger)

    def compute(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        """Sums [G] of the weighted parts, normalised."""
        parts = [part(completions, **kwargs) for part in self.reward_functions]
        sums = [sum(values, 0.0) for values in zip(*parts, strict=True)] if parts else [0.0] * len(completions)
        if self.normalization == "sum":
            total_weight = sum(part.weight for part in self.reward_functions)
            return [value / total_weight for value in sums] if total_weight > 0 else sums
        return _minmax(sums) if self.normalization == "minmax" else sums


def _minmax(values: Sequence[float]) -> list[float]:
    scored = [value for value in values if not isinstance(value, Unscored)]
    low, high = min(scored, default=0.0), max(scored, default=0.0)
    return [(value - low) / (high - low) for value in values] if high > low else list(values)
