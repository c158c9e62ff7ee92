"""Episodes of environments of ours whose replies come from elsewhere, such as another framework's client.

Environments of one turn (`SingleTurnEnv`) and of several (`MultiTurnEnv`, one player). Nothing is generated or recorded
here: replies are text, and no token is seen.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openai.types.chat import ChatCompletionMessage

from atroposlib.environments.multi_turn import MultiTurnEnv, Player, message_of
from atroposlib.environments.replies import text_of
from atroposlib.environments.single_turn import SingleTurnEnv
from atroposlib.envs import catalog
from atroposlib.envs.base import APIServerConfig, Item
from atroposlib.envs.cli import resolve
from atroposlib.envs.server_handling.fan_out import contained
from atroposlib.errors import ConfigError
from atroposlib.rollouts.failures import Unscored
from atroposlib.testing import write_tokenizer
from atroposlib.type_definitions import JsonObject

Message = JsonObject
NOWHERE = "http://127.0.0.1:1/v1"
"""Address of the engine that is never asked."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Outcome of a reply: messages for the model, or the end."""

    messages: list[Message]  # that are new
    tools: list[Message]
    reward: float  # since the last turn; their sum is the score
    is_over: bool


class ExternalEpisode:
    """One episode; `close` it."""

    def __init__(self, env: SingleTurnEnv | MultiTurnEnv, item: Item) -> None:
        self._env, self._item = env, item
        self._player: Player | None = None
        self._score = self._paid = 0.0
        self._told = 0
        self._turns: asyncio.Queue[Turn] = asyncio.Queue()
        self._replies: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> Turn:
        """Return the first messages; RolloutFault where the environment failed."""
        self._task = asyncio.create_task(contained(self._play()))
        return await self._next()

    async def reply(self, text: str, calls: Sequence[Message] = ()) -> Turn:
        """Take the model's reply and return what follows; RolloutFault where there is no score.

        Args:
            text: of the reply, thoughts as <think> blocks.
            calls: of tools, in the form of OpenAI's chat completions; without any they are read from the text (hermes).
        """
        self._replies.put_nowait({"role": "assistant", "content": text, **({"tool_calls": [*calls]} if calls else {})})
        return await self._next()

    async def close(self) -> None:
        """End it where it is, and free what its world holds."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _play(self) -> None:
        env = self._env
        if isinstance(env, MultiTurnEnv):
            self._player = env.player(self._asked)
            await env.play(self._item, [self._player])
            return
        said, _ = await self._asked([dict(message) for message in await env.messages(self._item)], ())
        (grade,) = await env.grades([text_of(ChatCompletionMessage.model_validate(said), env.opening)], self._item)
        if isinstance(grade, Unscored):
            raise grade.fault
        self._score = env.reward(grade)

    async def _asked(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Message, str]:
        new, self._told = list(messages[self._told :]), len(messages) + 1
        self._turns.put_nowait(Turn(new, list(tools), self._earned(), False))
        reply = await self._replies.get()
        if tools and "tool_calls" not in reply:
            reply = message_of(reply["content"], tools)
        return reply, "stop"

    async def _next(self) -> Turn:
        assert self._task is not None
        turn = asyncio.ensure_future(self._turns.get())
        await asyncio.wait([turn, self._task], return_when=asyncio.FIRST_COMPLETED)
        if turn.done():
            return turn.result()
        turn.cancel()
        self._task.result()
        return Turn([], [], self._earned(), True)

    def _earned(self) -> float:
        score = self._player.score if self._player is not None else self._score
        earned, self._paid = score - self._paid, score
        return round(earned, 9)


def made(name: str, flags: Sequence[str], folder: Path) -> SingleTurnEnv | MultiTurnEnv:
    """Return an environment by its name, not yet set up; no engine is asked and a tokenizer of the tests stands in.

    Args:
        flags: of its command line, `--env.NAME VALUE`.
        folder: for the tokenizer.

    Raises:
        ConfigError: there is none, or it cannot be played from elsewhere.
    """
    env_cls = catalog.load(name)
    if not issubclass(env_cls, SingleTurnEnv | MultiTurnEnv):
        raise ConfigError(
            f"{name} rolls out by itself; only a SingleTurnEnv or MultiTurnEnv can be played from outside"
        )
    address = ["--openai.base_url", NOWHERE, "--env.tokenizer_name", str(write_tokenizer(folder))]
    settings = resolve(env_cls, "process", [*address, "--env.use_wandb", "false", *flags])
    env = env_cls(settings.env, [APIServerConfig(base_url=NOWHERE, health_check=False)])
    if isinstance(env, MultiTurnEnv) and env.seats != 1:
        raise ConfigError(f"{name} has {env.seats} players; only episodes of one can be played from outside")
    return env
