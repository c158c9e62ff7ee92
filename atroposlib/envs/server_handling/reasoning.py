"""Limits of thinking of a reasoning model, and the request fields that say so to each kind of provider."""

from dataclasses import dataclass
from typing import Any, ClassVar

from atroposlib.errors import ConfigError

VALID_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
OFFICIAL_OPENAI_HOST = "api.openai.com"


@dataclass
class ReasoningConfig:
    """Thinking options of one environment. Setting `effort` or `max_tokens` enables thinking.

    Args:
        enabled: ask for reasoning.
        effort: one of `VALID_REASONING_EFFORTS`; None leaves it to the provider.
        max_tokens: most reasoning tokens; not checked here, providers differ.

    Raises:
        ConfigError: an unknown effort.
    """

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            raise ConfigError(
                f"Invalid reasoning_effort: {self.effort!r}; use one of {', '.join(VALID_REASONING_EFFORTS)}"
            )
        if self.effort is not None or self.max_tokens is not None:
            self.enabled = True

    @classmethod
    def from_env_config(cls, env_config: Any) -> "ReasoningConfig":
        """Read `thinking_mode`, `reasoning_effort` and `max_reasoning_tokens` of a BaseEnvConfig."""
        return cls(
            enabled=env_config.thinking_mode,
            effort=env_config.reasoning_effort,
            max_tokens=env_config.max_reasoning_tokens,
        )

    def is_reasoning_kwargs_active(self) -> bool:
        """Tell if requests carry reasoning fields."""
        return self.enabled

    def build_extra_body(self, base_url: str | None = None, use_max_tokens: bool = False) -> dict[str, Any] | None:
        """The request fields for the provider behind `base_url`; None when reasoning is off.

        `use_max_tokens` turns an effort into its token count, for providers that take no effort.
        """
        if not self.enabled:
            return None
        if base_url and OFFICIAL_OPENAI_HOST in base_url:
            return {"reasoning_effort": self.effort or "medium"}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.effort is not None and use_max_tokens:
            reasoning["max_tokens"] = self.EFFORT_TO_MAX_TOKENS[self.effort]
        elif self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}
