"""TextArena's games: for one player (Sudoku-v0, TowerOfHanoi-v0, GuessTheNumber-v0, ...), or for several.

With `env.players` above 1 the policy plays all sides of a game against itself, each in a conversation of its own: an
item gives `group_size` games and a group for each side, so that a side is compared with the same side of other games.
With `env.opponent` the policy plays one side (the number of the item says which), a fixed engine all others.

TextArena repeats the whole game in each observation; the model gets what is new. Its games draw from Python's global
generator; each has a state of its own of it here, so that an item is the same game at every call.
"""

import random
import re
from contextlib import AsyncExitStack
from typing import Any, ClassVar, cast

from pydantic import Field, PositiveInt

from atroposlib.environments.adapters.episode import Conversation, EpisodeConfig, EpisodeEnv, Step
from atroposlib.envs.base import APIServerConfig, ScoredDataItem, ServerManager
from atroposlib.envs.item_rollout import Trajectory
from atroposlib.envs.server_handling.fan_out import raise_first
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.rollouts.trace import held_replies
from atroposlib.type_definitions import Item, JsonObject


class TextArenaConfig(EpisodeConfig):
    """Who plays."""

    players: PositiveInt = Field(1, description="Players of a game; above 1 the policy plays against itself.")
    opponent: JsonObject | None = Field(
        None, description="Engine that plays against the policy instead: base_url, model_name, api_key."
    )


class Game:
    """One game; the score of a player is its reward, 0 where the game is not over."""

    def __init__(self, name: str, arguments: JsonObject, *, players: int, seed: int) -> None:
        self.dice = random.Random(seed).getstate()
        self.shown: dict[int, str] = {}  # by player, as its last observation
        self.said: dict[int, str] = {}
        self.rewards: dict[int, float] | None = None
        self.is_over = False
        self.game = self._with_dice(self._made, name, arguments, players, seed)

    def turn(self) -> tuple[int, str]:
        """Return whose turn it is, and what is new to that player."""
        player, observation = self._with_dice(self.game.get_observation)
        new = observation.removeprefix(self.shown.get(player, ""))
        if said := self.said.get(player):  # the model's own words, under its name
            own = re.match(r"\s*\[[^\]]*\]\s*" + re.escape(said), new)
            new = new[own.end() :] if own else new
        self.shown[player] = observation
        return player, new.strip() or "Go on."

    def act(self, player: int, reply: str) -> bool:
        """Do what the player whose turn it is says; True: the game is over."""
        self.said[player] = reply
        self.is_over, _ = self._with_dice(self.game.step, reply)
        if self.is_over:
            self.rewards, _ = self.game.close()
        return self.is_over

    def score(self, player: int = 0) -> float:
        if not self.is_over:
            return 0.0
        if (reward := (self.rewards or {}).get(player)) is None:
            raise EnvironmentFault(f"the game is over and gave player {player} no reward: {self.rewards}")
        return float(reward)

    def close(self) -> None:
        if not self.is_over:
            self.game.close()

    @staticmethod
    def _made(name: str, arguments: JsonObject, players: int, seed: int) -> Any:
        import textarena

        game = textarena.make(name, **arguments)
        game.reset(num_players=players, seed=seed)
        return game

    def _with_dice(self, function: Any, *arguments: Any) -> Any:
        others = random.getstate()
        random.setstate(self.dice)
        try:
            return function(*arguments)
        finally:
            self.dice = random.getstate()
            random.setstate(others)


class Solo(Game):
    """A game for one as an episode."""

    def begin(self) -> list[JsonObject]:
        player, first = self.turn()
        if player != 0:
            raise ConfigError(f"the game begins with player {player}; say with env.players how many it has")
        return [{"role": "user", "content": first}]

    def step(self, reply: str) -> Step:
        return Step("", is_over=True) if self.act(0, reply) else Step(self.turn()[1], is_over=False)


class TextArenaEnv(EpisodeEnv):
    """A game of TextArena, by `env.id`: for one player, against itself, or against another engine."""

    name = "textarena"
    framework: ClassVar[str] = "textarena"
    is_thread_safe: ClassVar[bool] = False
    env_config_cls = TextArenaConfig
    config: TextArenaConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def prepare(self) -> None:
        import textarena

        if self.config.id not in textarena.envs.registration.ENV_REGISTRY:
            raise ConfigError(f"env.id is {self.config.id!r}, which TextArena does not know")
        if self.config.players > 1 and self.early_stop.is_on:
            raise ConfigError("games against oneself cannot be stopped early; leave env.stop_after_accepted away")
        if self.config.opponent is not None:
            self.rivals = ServerManager([APIServerConfig(**{"health_check": False, **self.config.opponent})])

    def open(self, index: int) -> Solo:
        return Solo(self.config.id, self.config.arguments, players=1, seed=self.config.seed + index)

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """As for one player; against itself, a group for each side."""
        if self.config.players == 1 or self.config.opponent is not None:
            return await super().collect_trajectories(item)
        games = await self._item_rollout.trajectories(item, range(self.config.group_size))
        if all(isinstance(game, BaseException) for game in games):
            raise_first(games)
        sides = [[_of_side(game, side) for game in games] for side in range(self.config.players)]
        played = [rows for rows in sides if not all(isinstance(row, BaseException) for row in rows)]
        return [self._item_rollout.merged(rows)[0] for rows in played], []

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem, list[Item]]:
        if self.config.players == 1:
            return await super().collect_trajectory(item)
        config, seed = self.config, self.config.seed + item["index"]
        policy = {item["index"] % config.players} if config.opponent else set(range(config.players))
        try:
            game = Game(config.id, config.arguments, players=config.players, seed=seed)
            try:
                rows = await self._played(game, policy)
            finally:
                game.close()
        except (RolloutFault, ConfigError):
            raise
        except Exception as error:
            raise EnvironmentFault(f"{config.id} failed: {type(error).__name__}: {error}") from error
        if config.opponent is None:
            return cast(ScoredDataItem, rows), []
        row = _of_side((cast(ScoredDataItem, rows), []), *policy)
        if isinstance(row, BaseException):
            raise row
        return row

    async def _played(self, game: Game, policy: set[int]) -> dict[int, ScoredDataItem]:
        """Play a game to its end; the row of each side that the policy had and that had a turn."""
        sides: dict[int, Conversation] = {}
        async with AsyncExitStack() as stack:
            for _ in range(self.config.max_turns * self.config.players):
                side, news = game.turn()
                if side in sides:
                    sides[side].hear(news)
                else:
                    served = self.server.managed_server(tokenizer=self.tokenizer)
                    managed = await stack.enter_async_context(served) if side in policy else Rival(self)
                    sides[side] = Conversation(self.config, managed, [{"role": "user", "content": news}])
                if game.act(side, await sides[side].reply()):
                    break
            return {side: talk.row(game.score(side)) for side, talk in sides.items() if side in policy}


class Rival:
    """The engine that plays against the policy. Its replies outlive a kill, too, but are no part of the rollout."""

    def __init__(self, env: TextArenaEnv) -> None:
        self.server = env.rivals
        self.server.keep_responses(env.server.kept_responses)

    async def chat_completion(self, **asked: Any) -> Any:
        with held_replies():
            return await self.server.chat_completion(**asked)


def _of_side(game: Trajectory | BaseException, side: int) -> Trajectory | BaseException:
    """Return the row of one side of a game, or why there is none."""
    if isinstance(game, BaseException):
        return game
    row = cast(dict[int, ScoredDataItem], game[0]).get(side)
    return EnvironmentFault(f"the game was over before player {side} had a turn") if row is None else (row, [])


if __name__ == "__main__":
    TextArenaEnv.cli()
