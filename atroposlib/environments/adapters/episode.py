"""What adapters share: an episode of observations and replies, rolled out on the managed server with its exact tokens.

An adapter says how item number `index` begins and what a reply does; blocking calls run in a thread.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import Field, PositiveInt

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataItem
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.type_definitions import Item


class EpisodeConfig(BaseEnvConfig):
    """Which environment of the framework, and how long its episodes may be."""

    id: str = Field("", description="Name of the environment, as its framework knows it.")
    arguments: dict[str, Any] = Field({}, description="Keyword arguments for making it.")
    items: PositiveInt | None = Field(None, description="Number of items (seeds, rows); null: as many as there are.")
    seed: int = Field(0, description="Added to the number of an item to make its seed.")
    max_turns: PositiveInt = Field(32, description="Replies of one episode; one that is not over then ends as it is.")
    temperature: float = Field(1.0, description="Of every reply.")
    system: str = Field("", description="System prompt, in front of the first observation.")


@dataclass(frozen=True, slots=True)
class Step:
    """What a reply led to."""

    observation: str  # "" where nothing is left to say
    is_over: bool


class Episode(Protocol):
    """One run of an environment. Called from one thread at a time; may block."""

    def begin(self) -> list[dict[str, Any]]:
        """The first messages."""
        ...

    def step(self, reply: str) -> Step:
        """Take a reply of the model."""
        ...

    def score(self) -> float:
        """Score of the episode so far; called once, at the end."""
        ...

    def close(self) -> None:
        """Free what the episode holds; called once, whatever happened."""
        ...


class EpisodeEnv(BaseEnv):
    """The base of adapters: a rollout is an episode, and its score is that of the framework."""

    env_config_cls = EpisodeConfig
    config: EpisodeConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    framework: ClassVar[str] = ""  # to be installed
    is_thread_safe: ClassVar[bool] = True  # False: the framework draws from a global generator

    def open(self, index: int) -> Episode:
        """Return item number `index`, not yet begun. May block."""
        raise NotImplementedError(f"{type(self).__name__} must define open(index)")

    def prepare(self) -> int | None:
        """Optional: import the framework and load what is needed; the number of items, None without an end."""
        return None

    async def setup(self) -> None:
        if not self.config.id:
            raise ConfigError(f"env.id is empty; name an environment of {self.framework}")
        try:
            found = await asyncio.to_thread(self.prepare)
        except ImportError as error:
            raise ConfigError(f"{error}; this adapter needs `pip install {self.framework}`") from error
        self.count = min((n for n in (found, self.config.items) if n is not None), default=None)

    async def get_item(self, index: int) -> Item | None:
        return None if self.count is not None and index >= self.count else {"index": index, "id": self.config.id}

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem, list[Item]]:
        episode: Episode | None = None
        try:
            opened: Episode = await self._call(self.open, item["index"])
            episode = opened  # to be closed, whatever happens
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                messages = [*self._system(), *await self._call(opened.begin)]
                for _ in range(self.config.max_turns):
                    reply = await managed.chat_completion(
                        messages=messages,
                        max_tokens=self.config.max_token_length,
                        temperature=self.config.temperature,
                    )
                    text = reply.choices[0].message.content or ""
                    step = await self._call(opened.step, text)
                    if step.is_over:
                        break
                    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": step.observation}]
                node = managed.get_state()["nodes"][-1]
            score = float(await self._call(opened.score))
        except (RolloutFault, ConfigError):
            raise
        except Exception as error:
            raise EnvironmentFault(f"{self.config.id} failed: {type(error).__name__}: {error}") from error
        finally:
            if episode is not None:
                await self._call(episode.close)
        row: ScoredDataItem = {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": score,
        }
        return row, []

    def _system(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.config.system}] if self.config.system else []

    async def _call(self, function: Any, *arguments: Any) -> Any:
        """In a thread, except for frameworks whose episodes would draw from each other's numbers there."""
        return await asyncio.to_thread(function, *arguments) if self.is_thread_safe else function(*arguments)


def text_of(value: Any) -> str:
    """A value of a framework as text for the model."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
