"""The base of all reward functions: completions of one group in, one number each out.

A reward function that cannot score raises; it never answers 0 for what it failed to judge. Calling one gives the
responses that it failed on an `Unscored` in place of a number, so that the others keep theirs.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from atroposlib.errors import EngineFault, KilledFault, RolloutFault, VerifierFault
from atroposlib.rollouts.failures import Unscored

logger = logging.getLogger(__name__)

Completion: TypeAlias = str | Mapping[str, object] | Sequence[Mapping[str, object]]
"""Text, an assistant message, `{"message": {...}}`, or a conversation."""


T = TypeVar("T")


class MetricsLogger(Protocol):
    """Where metrics go: the `wandb` module or a run."""

    def log(self, data: dict[str, float], /) -> object: ...


class RewardFunction(ABC):
    """Scores completions; `compute` gives raw rewards, calling the object gives weighted ones."""

    # Class-level values serve subclasses that set up themselves without calling __init__.
    weight: float = 1.0
    wandb_logger: MetricsLogger | None = None
    config: Mapping[str, object] = {}
    _name: str | None = None

    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: object) -> None:
        """Keep the settings.

        Args:
            weight: factor on every reward when the object is called.
            name: in metrics and errors; None: the class name in lower case.
            kwargs: kept in `config`.
        """
        self.weight = weight
        self._name = name
        self.config = kwargs

    @property
    def name(self) -> str:
        """Under which metrics are logged."""
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: Sequence[Completion], **kwargs: Any) -> list[float]:
        """Raw rewards [G] of G completions; `kwargs` carry the item's solution and the like."""

    def __call__(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        """Weighted rewards [G], `Unscored` where there is none. If `compute` fails on G > 1, each is scored alone.

        Raises:
            VerifierFault: there is none at all, as `compute` raised or gave another number of rewards.
            EngineFault, KilledFault: `compute` raised it; the item is tried again.
        """
        rewards = self._checked(completions, kwargs)
        weighted = [reward * self.weight for reward in rewards]
        scored = [pair for pair in zip(rewards, weighted, strict=True) if not isinstance(pair[0], Unscored)]
        self.log_metrics([raw for raw, _ in scored], [product for _, product in scored])
        return weighted

    def set_wandb_logger(self, logger: MetricsLogger | None) -> None:
        """Where `log_metrics` sends to; None: nowhere."""
        self.wandb_logger = logger

    def log_metrics(self, raw_rewards: Sequence[float], weighted_rewards: Sequence[float]) -> None:
        """Log mean, minimum and maximum of one group under `reward/<name>/`."""
        if self.wandb_logger is None or not raw_rewards:
            return
        self.wandb_logger.log(
            {
                f"reward/{self.name}/mean_raw": sum(raw_rewards) / len(raw_rewards),
                f"reward/{self.name}/mean_weighted": sum(weighted_rewards) / len(weighted_rewards),
                f"reward/{self.name}/min": min(raw_rewards),
                f"reward/{self.name}/max": max(raw_rewards),
            }
        )

    @staticmethod
    def get_content(completion: Completion) -> str:
        """The assistant's text; of a conversation the first assistant message's. "" when there is none."""
        if isinstance(completion, str):
            return completion
        if isinstance(completion, Mapping):
            message = completion.get("message", completion)
            return _text(message) if isinstance(message, Mapping) else ""
        return next((_text(message) for message in completion if _is_assistant(message)), "")

    def _checked(self, completions: Sequence[Completion], kwargs: Mapping[str, object]) -> list[float]:
        try:
            rewards = self._computed(completions, kwargs)
        except (EngineFault, KilledFault):
            raise
        except RolloutFault as fault:
            if len(completions) < 2:
                raise
            rewards = [self._alone(i, completions, kwargs) for i in range(len(completions))]
            if all(isinstance(reward, Unscored) for reward in rewards):
                raise
            logger.debug("scored one by one: function=%s error=%s", self.name, fault)
        if len(rewards) != len(completions):
            raise VerifierFault(f"reward function {self.name} gave {rewards!r} for {len(completions)} completions")
        checked = [self._finite(reward) for reward in rewards]
        faults = [reward.fault for reward in checked if isinstance(reward, Unscored)]
        if faults and len(faults) == len(checked):
            raise faults[0]
        return checked

    def _computed(self, completions: Sequence[Completion], kwargs: Mapping[str, object]) -> list[float]:
        try:
            return self.compute(completions, **kwargs)
        except RolloutFault:
            raise
        except Exception as error:
            raise VerifierFault(
                f"reward function {self.name} failed on a group of {len(completions)}: {type(error).__name__}: {error}"
            ) from error

    def _alone(self, index: int, completions: Sequence[Completion], kwargs: Mapping[str, object]) -> float:
        """The reward of one completion, with its own part of the lists that have one entry for each."""
        size = len(completions)
        own = {
            key: [value[index]] if isinstance(value, list) and len(value) == size else value
            for key, value in kwargs.items()
        }
        try:
            return self._computed([completions[index]], own)[0]
        except RolloutFault as fault:
            return Unscored(fault)

    def _finite(self, reward: float) -> float:
        if isinstance(reward, Unscored) or math.isfinite(reward):
            return reward
        return Unscored(VerifierFault(f"reward function {self.name} gave {reward!r}; expected one finite number each"))


def one_each(value: T | list[T] | None, completions: Sequence[Completion], *, needed_by: str, keyword: str) -> list[T]:
    """[G] solutions: a list is one per completion, anything else holds for all.

    Raises:
        VerifierFault: no solution, or a list of another length.
    """
    if value is None:
        raise VerifierFault(f"{needed_by} needs {keyword}= to compare with, and got none; pass the item's answer")
    if not isinstance(value, list):
        return [value] * len(completions)
    if len(value) != len(completions):
        raise VerifierFault(f"{needed_by} got {len(value)} answers in {keyword}= for {len(completions)} completions")
    return value


def _is_assistant(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _text(message: Mapping[str, object]) -> str:
    content = message.get("content") if _is_assistant(message) else None
    if isinstance(content, list):  # OpenAI content parts
        return "".join(part.get("text", "") for part in content)
    return str(content or "")
