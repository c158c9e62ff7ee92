"""SkyRL Gym's text environments: gsm8k, gsm8k_multi_turn, aime, text2sql, search, ...

Items are the rows of a JSONL file in SkyRL's form: `prompt` (messages), `reward_spec`, and what else the environment
reads from its extras; `env.id` names the environment, unless a row has its own `env_class`.
"""

from typing import Any, ClassVar

from atroposlib.environments.adapters.episode import EpisodeConfig, EpisodeEnv, Step
from atroposlib.environments.adapters.framework import RowsConfig
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import JsonObject


class SkyRLConfig(EpisodeConfig, RowsConfig):
    """Rows as prompt, reward_spec, extra_info, ..."""


class SkyRLEpisode:
    """One row; the score is the sum of the rewards."""

    def __init__(self, env: Any, prompt: list[JsonObject]) -> None:
        self.env, self.prompt, self.total = env, prompt, 0.0

    def begin(self) -> list[JsonObject]:
        messages, _ = self.env.init(self.prompt)
        return list(messages)

    def step(self, reply: str) -> Step:
        given = self.env.step(reply)  # `postprocessed_action` would cut what the model wrote, and is left alone
        self.total += float(given["reward"])
        text = "\n".join(str(message["content"]) for message in given["observations"])
        return Step(text, bool(given["done"]))

    def score(self) -> float:
        return self.total

    def close(self) -> None:
        self.env.close()


class SkyRLEnv(EpisodeEnv):
    """An environment of SkyRL Gym, by `env.id`."""

    name = "skyrl_gym"
    framework: ClassVar[str] = "skyrl-gym"
    env_config_cls = SkyRLConfig
    config: SkyRLConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def prepare(self) -> int:
        import skyrl_gym  # noqa: F401 (told here when it is missing)

        self.rows = self.config.read()
        return len(self.rows)

    def open(self, index: int) -> SkyRLEpisode:
        import skyrl_gym

        row = self.rows[index]
        if not isinstance(row.get("prompt"), list):
            raise ConfigError(f"row {index} of {self.config.rows} has no prompt; give a list of messages")
        extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
        env = skyrl_gym.make(row.get("env_class") or self.config.id, env_config=self.config.arguments, extras=extras)
        return SkyRLEpisode(env, row["prompt"])


if __name__ == "__main__":
    SkyRLEnv.cli()
