"""The base of all reward functions: completions of one group in, one number each out.

A reward function that cannot score raises; it never answers 0 for what it failed to judge.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from atroposlib.errors import RolloutFault, VerifierFault

logger = logging.getLogger(__name__)

Completion: TypeAlias = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Text, an assistant message, `{"message": {...}}`, or a conversation."""


class MetricsLogger(Protocol):
    """Where metrics go: the `wandb` module or a run."""

    def log(self, data: dict[str, float], /) -> Any: ...


class RewardFunction(ABC):
    """Scores completions; `compute` gives raw rewards, calling the object gives weighted ones."""

    # Class-level values serve subclasses that set up themselves without calling __init__.
    weight: float = 1.0
    wandb_logger: MetricsLogger | None = None
    config: Mapping[str, Any] = {}
    _name: str | None = None

    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: Any) -> None:
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

    def __call__(self, completions: Sequence[Completion], **kwargs: Any) -> list[float]:
        """Weighted rewards [G].

        Raises:
            VerifierFault: `compute` raised, or gave another number of rewards, or one that is not finite.
        """
        rewards = self._checked(completions, kwargs)
        weighted = [reward * self.weight for reward in rewards]
        self.log_metrics(rewards, weighted)
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

    def _checked(self, completions: Sequence[Completion], kwargs: Mapping[str, Any]) -> list[float]:
        try:
            rewards = self.compute(completions, **kwargs)
        except RolloutFault:
            raise
        except Exception as error:
            raise VerifierFault(
                f"reward function {self.name} failed on a group of {len(completions)}: {type(error).__name__}: {error}"
            ) from error
        if len(rewards) != len(completions) or not all(map(math.isfinite, rewards)):
            raise VerifierFault(
                f"reward function {self.name} gave {rewards!r} for {len(completions)} completions; "
                "expected one finite number each"
            )
        return rewards


def one_each(value: Any, completions: Sequence[Completion], *, needed_by: str, keyword: str) -> list[Any]:
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


def _is_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") if _is_assistant(message) else None
    if isinstance(content, list):  # OpenAI content parts
        return "".join(part.get("text", "") for part in content)
    return content or ""
