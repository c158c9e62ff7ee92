"""TextWorld: do what is asked in a house of rooms, doors, boxes and keys, one command a turn.

    python textworld_env.py process --env.games 32 --env.levels '[1, 2]' --env.total_steps 20 ...

Needs `pip install 'atroposlib[textworld]'` (Linux and macOS). The games are made at set-up, some seconds of a core
each: a room, three objects and a step of the quest more with each level. With `games_dir` they are kept, and made once.
"""

import asyncio
import logging
import multiprocessing
import os
import re
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from pydantic import Field, NonNegativeFloat, PositiveInt

from atroposlib.environments.multi_turn import MultiTurnConfig, MultiTurnEnv, Reply, Step, World, last_move
from atroposlib.environments.single_turn import Part
from atroposlib.paths import expand_path

logger = logging.getLogger(__name__)

_EVAL_SEED = 1_000_000
_COMMAND = re.compile(r"[a-z][a-z0-9 '-]{0,99}")
_PROMPT = re.compile(r"\n>\s*(-=.*)?$", re.DOTALL)
_SAID_EVERY_S = 10.0


class TextWorldEnvConfig(MultiTurnConfig):
    """Which games are made, and what commands earn."""

    games: PositiveInt = Field(16, description="Games to train on, each rolled out again and again.")
    eval_games: PositiveInt = Field(4, description="Other games, to evaluate with.")
    games_dir: str | None = Field(None, description="Folder where games are kept; null: made at each start.")
    progress_reward: NonNegativeFloat = Field(
        0.0, description="Earned by a command after which fewer steps are left, taken off where more are."
    )
    show_commands: bool = Field(False, description="List the commands that are possible in each turn.")


class Game(TypedDict):
    """Settings from which a game is made."""

    level: int
    seed: int


class TextWorld(World):
    """One game; the end of its quest earns 1."""

    def __init__(self, file: Path, config: TextWorldEnvConfig) -> None:
        import textworld  # pyright: ignore[reportMissingImports]

        asked = ("policy_commands", "admissible_commands", "description", "objective", "verbs", "moves", "won", "lost")
        self.config = config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the interpreter does not know this game; TextWorld counts moves itself
            self.game: Any = textworld.start(str(file), textworld.EnvInfos(**dict.fromkeys(asked, True)))
            self.state: Any = self.game.reset()

    async def begin(self) -> str:
        verbs = ", ".join(sorted(self.state.verbs))
        how = f"End with a command of one line. Commands begin with one of these words: {verbs}."
        return f"{self.state.objective.strip()}\n\n{how}\n\n{self._shown(self.state.description)}"

    async def step(self, reply: Reply) -> Step:
        command, before, left = last_move(reply.text).lower(), self.state.moves, len(self.state.policy_commands)
        if not self._is_command(command):
            return Step("That is no command of this game.", is_invalid=True)
        self.state, _, is_over = self.game.step(command)
        is_invalid = self.state.moves == before and not is_over
        nearer = left - len(self.state.policy_commands)
        reward = float(self.state.won) + self.config.progress_reward * ((nearer > 0) - (nearer < 0))
        return Step(self._shown(self.state.feedback), is_over, 0.0 if is_invalid else reward, is_invalid)

    def gold(self) -> str | None:
        return next(iter(self.state.policy_commands), None)

    async def close(self) -> None:
        self.game.close()

    def _is_command(self, text: str) -> bool:
        """Tell whether a text is one command of the game, and none to its interpreter, which could write files."""
        words = text.split()
        return bool(_COMMAND.fullmatch(text)) and words[0] in self.state.verbs and "then" not in words

    def _shown(self, text: str) -> str:
        commands = f"\n\nCommands: {', '.join(self.state.admissible_commands)}" * self.config.show_commands
        return _PROMPT.sub("", text).strip() + commands


class TextWorldEnv(MultiTurnEnv):
    """TextWorld: score 1 for a quest that is done, else 0, and a little for what leads there if wanted."""

    name = "textworld"
    env_config_cls = TextWorldEnvConfig
    config: TextWorldEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    extra = needs = "textworld"
    kept: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        return ["--env.games", "4", "--env.eval_games", "2", "--env.games_dir", str(folder / "games")]

    async def setup(self) -> None:
        """Make the games that are not there."""
        await super().setup()
        if self.config.games_dir is None:
            self.kept = tempfile.TemporaryDirectory(prefix="atropos-textworld-")
            self.folder = Path(self.kept.name)
        else:
            self.folder = expand_path(self.config.games_dir, what="env.games_dir")
            self.folder.mkdir(parents=True, exist_ok=True)
        parts: dict[Part, int] = {"train": self.config.games, "test": self.config.eval_games}
        games = [await self.problem(part, index) for part, count in parts.items() for index in range(count)]
        files = {self.file(game): game for game in games if game is not None}
        await make_games({file: game for file, game in files.items() if not file.exists()})

    async def teardown(self) -> None:
        if self.kept is not None:
            await asyncio.to_thread(self.kept.cleanup)

    async def problem(self, part: Part, index: int) -> Game | None:
        if part == "test" and index >= self.config.eval_games:
            return None
        number = index % self.config.games if part == "train" else _EVAL_SEED + index
        return Game(level=self.config.levels[number % len(self.config.levels)], seed=self.config.seed + number)

    async def open(self, item: Game) -> TextWorld:
        return TextWorld(self.file(item), self.config)

    def file(self, game: Game) -> Path:
        return self.folder / f"level-{game['level']}-seed-{game['seed']}.z8"


async def make_games(games: dict[Path, Game]) -> None:
    """Make games, on every core, and say every 10 seconds how many are there."""
    if not games:
        return
    workers = min(len(games), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        loop = asyncio.get_running_loop()
        waiting = {loop.run_in_executor(pool, make_game, file, game) for file, game in games.items()}
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=_SAID_EVERY_S)
            for made in done:
                made.result()
            logger.info("games made: done=%d of=%d", len(games) - len(waiting), len(games))


def make_game(file: Path, game: Game) -> None:
    """Make a game; the same level and seed make the same one."""
    import textworld  # pyright: ignore[reportMissingImports]

    level, options = game["level"], textworld.GameOptions()
    options.seeds = game["seed"]
    options.nb_rooms, options.nb_objects, options.quest_length = 1 + level, 3 * level, 1 + level
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        options.path = str(Path(folder) / file.name)
        textworld.make(options)
        for suffix in (".json", ".z8"):  # the game itself last
            os.replace(Path(folder) / file.with_suffix(suffix).name, file.with_suffix(suffix))


if __name__ == "__main__":
    TextWorldEnv.cli()
