"""Episodes: observations and replies in turn, rolled out on the managed server with its exact tokens.

An adapter says how item number `index` begins and what a reply does. Blocking calls run in a thread.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import Field, PositiveInt

from atroposlib.environments.adapters.framework import FrameworkConfig, FrameworkEnv
from atroposlib.envs.base import ScoredDataItem
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.type_definitions import Item, JsonObject

logger = logging.getLogger(__name__)


class EpisodeConfig(FrameworkConfig):
    """Limits of episodes, and the sampling of replies."""

    max_turns: PositiveInt = Field(32, description="Replies of one episode; one that is not over then ends as it is.")
    temperature: float = Field(1.0, description="Of every reply.")
    system: str = Field("", description="System prompt, in front of the first observation.")


@dataclass(frozen=True, slots=True)
class Step:
    """Outcome of a reply."""

    observation: str  # "" where nothing is left to say
    is_over: bool


class Episode(Protocol):
    """One run of an environment. Called from one thread at a time; may block, or be coroutines."""

    def begin(self) -> list[JsonObject] | Awaitable[list[JsonObject]]:
        """The first messages."""
        ...

    def step(self, reply: str) -> Step | Awaitable[Step]:
        """Take a reply of the model."""
        ...

    def score(self) -> float:
        """Score of the episode so far; called once, at the end."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds; called once, whatever happened."""
        ...


class Conversation:
    """The side of one player: what it was told, what it replied with which tokens."""

    def __init__(self, config: "EpisodeConfig", managed: Any, messages: Sequence[JsonObject]) -> None:
        system = [{"role": "system", "content": config.system}] if config.system else []
        self.config, self.managed, self.messages = config, managed, [*system, *messages]

    async def reply(self) -> str:
        """Let the model speak."""
        reply = await self.managed.chat_completion(
            messages=self.messages, max_tokens=self.config.max_token_length, temperature=self.config.temperature
        )
        text = reply.choices[0].message.content or ""
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        return text

    def hear(self, observation: str) -> None:
        """Tell the model something."""
        self.messages = [*self.messages, {"role": "user", "content": observation}]

    def row(self, score: float) -> ScoredDataItem:
        """Return the tokens so far with their score."""
        node = self.managed.get_state()["nodes"][-1]
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": score,
        }


class EpisodeEnv(FrameworkEnv):
    """A rollout is an episode, and its score is that of the framework."""

    env_config_cls = EpisodeConfig
    config: EpisodeConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    is_thread_safe: ClassVar[bool] = True  # False: the framework draws from a global generator

    def open(self, index: int) -> Episode:
        """Return item number `index`, not yet begun. May block."""
        raise NotImplementedError(f"{type(self).__name__} must define open(index)")

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem, list[Item]]:
        episode: Episode | None = None
        try:
            opened: Episode = await self._call(self.open, item["index"])
            episode = opened  # to be closed, whatever happens
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                talk = Conversation(self.config, managed, await self._call(opened.begin))
                for _ in range(self.config.max_turns):
                    step = await self._call(opened.step, await talk.reply())
                    if step.is_over:
                        break
                    talk.hear(step.observation)
                return talk.row(float(await self._call(opened.score))), []
        except (RolloutFault, ConfigError):
            raise
        except Exception as error:
            raise EnvironmentFault(f"{self.config.id} failed: {type(error).__name__}: {error}") from error
        finally:
            if episode is not None:
                await self._closed(episode)

    async def _closed(self, episode: Episode) -> None:
        """Close an episode; one that does not close has its score all the same."""
        try:
            await self._call(episode.close)
        except Exception as error:
            logger.warning("an episode of %s did not close: %s: %s", self.config.id, type(error).__name__, error)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        """In a thread, except for coroutines, and frameworks whose episodes would draw from each other's numbers."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await asyncio.to_thread(function, *arguments) if self.is_thread_safe else function(*arguments)
