"""TextArena's games for one player: Sudoku-v0, Mastermind-v0, TowerOfHanoi-v0, GuessTheNumber-v0, FrozenLake-v0, ...

TextArena repeats the whole game in each observation; the model gets what is new. Its games draw from Python's global
generator, so that a game is made and reset in one piece.
"""

import random
import re
from typing import Any, ClassVar

from atroposlib.environments.adapters.episode import EpisodeEnv, Step
from atroposlib.errors import ConfigError


class TextArenaEpisode:
    """One game; the score is the reward of player 0, 0 where it is not over."""

    def __init__(self, game: Any, first: str) -> None:
        self.game, self.shown = game, first
        self.rewards: dict[int, float] | None = None

    def begin(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.shown.strip()}]

    def step(self, reply: str) -> Step:
        is_over, _ = self.game.step(action=reply)
        if is_over:
            self.rewards, _ = self.game.close()
            return Step("", is_over=True)
        _, observation = self.game.get_observation()
        new = observation.removeprefix(self.shown)
        self.shown = observation
        said = re.match(r"\s*\[[^\]]*\]\s*" + re.escape(reply), new)  # the model's own words, under its name
        return Step((new[said.end() :] if said else new).strip() or "Go on.", is_over=False)

    def score(self) -> float:
        return float((self.rewards or {}).get(0, 0.0))

    def close(self) -> None:
        if self.rewards is None:
            self.game.close()


class TextArenaEnv(EpisodeEnv):
    """A game of TextArena for one player, by `env.id`."""

    name = "textarena"
    framework: ClassVar[str] = "textarena"
    is_thread_safe: ClassVar[bool] = False

    def prepare(self) -> None:
        import textarena

        if self.config.id not in textarena.envs.registration.ENV_REGISTRY:
            raise ConfigError(f"env.id is {self.config.id!r}, which TextArena does not know")

    def open(self, index: int) -> TextArenaEpisode:
        import textarena

        seed = self.config.seed + index
        state = random.getstate()
        random.seed(seed)
        try:
            game = textarena.make(self.config.id, **self.config.arguments)
            game.reset(num_players=1, seed=seed)
            player, first = game.get_observation()
        finally:
            random.setstate(state)
        if player != 0:
            raise ConfigError(f"{self.config.id} begins with player {player}; this adapter plays games for one")
        return TextArenaEpisode(game, first)


if __name__ == "__main__":
    TextArenaEnv.cli()
