"""Reasoning Gym's data sets, by name: basic_arithmetic, countdown, sudoku, ... One question, one answer in tags."""

import re
from typing import Any, ClassVar

from atroposlib.environments.adapters.episode import EpisodeEnv, Step
from atroposlib.errors import ConfigError

ASK = "\nGive the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ENDLESS = 100_000


class ReasoningGymEpisode:
    """One question; the score is the data set's own, 0 without an answer."""

    def __init__(self, dataset: Any, index: int) -> None:
        self.dataset, self.entry, self.points = dataset, dataset[index], 0.0

    def begin(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.entry["question"] + ASK}]

    def step(self, reply: str) -> Step:
        answers = _ANSWER.findall(reply.rpartition("</think>")[2])
        self.points = float(self.dataset.score_answer(answers[-1].strip(), self.entry)) if answers else 0.0
        return Step("", is_over=True)

    def score(self) -> float:
        return self.points

    def close(self) -> None:
        """Nothing is held."""


class ReasoningGymEnv(EpisodeEnv):
    """A data set of Reasoning Gym, by `env.id`; `env.arguments` go into its config."""

    name = "reasoning_gym"
    framework: ClassVar[str] = "reasoning-gym"

    def prepare(self) -> int:
        import reasoning_gym

        size = self.config.items or _ENDLESS
        try:
            self.dataset = reasoning_gym.create_dataset(
                self.config.id, **{"size": size, "seed": self.config.seed, **self.config.arguments}
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"{self.config.id} cannot be made: {error}") from error
        return len(self.dataset)

    def open(self, index: int) -> ReasoningGymEpisode:
        return ReasoningGymEpisode(self.dataset, index)


if __name__ == "__main__":
    ReasoningGymEnv.cli()
