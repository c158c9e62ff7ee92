"""Gymnasium's environments with a finite number of actions: FrozenLake-v1, Taxi-v4, CliffWalking-v1, Blackjack-v1, ...

The model sees the state as text (`render_mode="ansi"` where there is one) and answers with the number of an action.
"""

import re
from typing import Any, ClassVar

from atroposlib.environments.adapters.episode import EpisodeEnv, Step
from atroposlib.environments.adapters.framework import text_of
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import JsonObject

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ACTIONS = {
    "FrozenLake": "left, down, right, up",
    "CliffWalking": "up, right, down, left",
    "Taxi": "south, north, east, west, pick up, drop off",
    "Blackjack": "stick, hit",
}
"""Names of the actions, in the order of their numbers, by the beginning of an environment's name."""


class GymnasiumEpisode:
    """One run with one seed; the score is the sum of the rewards."""

    def __init__(self, env: Any, seed: int, names: str) -> None:
        self.env, self.seed, self.total = env, seed, 0.0
        first = int(env.action_space.start)
        self.actions = range(first, first + int(env.action_space.n))
        listed = ", ".join(f"{i} = {name}" for i, name in enumerate(names.split(", "), first)) if names else ""
        self.asked = f"Answer with the number of one action, {first} to {self.actions[-1]}" + (
            f": {listed}." if listed else "."
        )

    def begin(self) -> list[JsonObject]:
        observation, _ = self.env.reset(seed=self.seed)
        return [{"role": "user", "content": f"{self._shown(observation)}\n{self.asked}"}]

    def step(self, reply: str) -> Step:
        numbers = re.findall(r"-?\d+" if self.actions[0] < 0 else r"\d+", reply)
        if not numbers or int(numbers[-1]) not in self.actions:
            return Step(f"That is no action. {self.asked}", is_over=False)
        observation, reward, is_over, is_cut, _ = self.env.step(int(numbers[-1]))
        self.total += float(reward)
        return Step(f"{self._shown(observation)}\nReward: {float(reward):g}.", is_over or is_cut)

    def score(self) -> float:
        return self.total

    def close(self) -> None:
        self.env.close()

    def _shown(self, observation: Any) -> str:
        picture = self.env.render() if self.env.render_mode == "ansi" else None
        return _COLOURS.sub("", picture) if isinstance(picture, str) else f"State: {text_of(observation)}"


class GymnasiumEnv(EpisodeEnv):
    """An environment of Gymnasium, by `env.id`."""

    name = "gymnasium"
    framework: ClassVar[str] = "gymnasium"

    def prepare(self) -> None:
        import gymnasium

        try:
            modes = gymnasium.spec(self.config.id).kwargs.get("render_modes") or self._modes()
        except gymnasium.error.Error as error:
            raise ConfigError(f"env.id: {error}") from error
        self.mode = "ansi" if "ansi" in modes else None
        env = self._made()
        if not isinstance(env.action_space, gymnasium.spaces.Discrete):
            raise ConfigError(
                f"{self.config.id} has the actions {env.action_space}; this adapter takes numbered ones only"
            )
        env.close()

    def open(self, index: int) -> GymnasiumEpisode:
        names = next((names for prefix, names in ACTIONS.items() if self.config.id.startswith(prefix)), "")
        return GymnasiumEpisode(self._made(), self.config.seed + index, names)

    def _made(self) -> Any:
        import gymnasium

        return gymnasium.make(self.config.id, render_mode=self.mode, **self.config.arguments)

    def _modes(self) -> list[str]:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator

        creator: Any = gymnasium.spec(self.config.id).entry_point
        creator = load_env_creator(creator) if isinstance(creator, str) else creator
        return list(getattr(creator, "metadata", {}).get("render_modes", ()))


if __name__ == "__main__":
    GymnasiumEnv.cli()
