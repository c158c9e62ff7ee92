"""An environment over problem sets: each row's `problem` is the prompt, its `answer` the right answer."""

import asyncio
from collections.abc import Sequence
from typing import Literal, TypedDict

from pydantic import Field, PositiveInt

from atroposlib.environments.rows import Row, Split
from atroposlib.environments.single_turn import RowsConfig, RowsEnv, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.errors import DataError
from atroposlib.example_trainer.mixture import Source, mix, split
from atroposlib.example_trainer.rewards import answer_tag_reward, math_rewards
from atroposlib.paths import expand_path


class Problem(TypedDict):
    """One row of the mixture."""

    problem: str
    answer: str


class DatasetEnvConfig(RowsConfig):
    """Which problems, how they are asked and scored."""

    datasets: list[Source] = Field(default=[], description="Sources with columns problem and answer.")
    test_split_size: float = Field(default=0.05, ge=0, lt=1, description="Fraction kept for evaluation.")
    reward: Literal["answer_tag", "math"] = "answer_tag"
    require_think: bool = Field(default=True, description="answer_tag: replies must begin with <think>.")
    chat_template: str | None = Field(default=None, description="File with a Jinja template; null: the model's own.")
    epochs: PositiveInt | None = Field(default=None, description="How often all rows are asked; null: without end.")


class DatasetEnv(RowsEnv):
    """Score 1.0 for a right answer, else 0.0. Problems come in a new order every epoch, without end."""

    name = "dataset"
    env_config_cls = DatasetEnvConfig
    config: DatasetEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return DatasetEnvConfig(), local_engine("default")

    async def setup(self) -> None:
        """Load the mixture; DataError when it cannot be used."""
        if self.config.chat_template:
            path = expand_path(self.config.chat_template, what="chat_template")
            self.tokenizer.chat_template = path.read_text(encoding="utf-8")
        await super().setup()

    def load(self) -> Split:
        rows = mix(self.config.datasets, seed=self.config.seed)
        lacking = next((row for row in rows if not {"problem", "answer"} <= set(row)), None)
        if not rows or lacking is not None:
            found = "no rows" if lacking is None else f"a row with the columns {sorted(lacking)}"
            raise DataError(f"datasets give {found}; expected rows with problem and answer, see `columns`")
        train, test = split([self.to_item(row) for row in rows], self.config.test_split_size)
        return Split(train=train, test=test)

    @classmethod
    def to_item(cls, row: Row) -> Problem:
        return Problem(problem=str(row["problem"]), answer=str(row["answer"]))

    def question(self, item: Problem) -> str:
        return item["problem"]

    async def grades(self, replies: Sequence[str], item: Problem) -> list[float]:
        if self.config.reward == "math":
            return await asyncio.to_thread(math_rewards, replies, item["answer"])
        return [answer_tag_reward(text, item["answer"], require_think=self.config.require_think) for text in replies]

    def gold(self, item: Problem) -> str:
        answer = f"<answer>{item['answer']}</answer>"
        return f"<think>I see.</think>{answer}" if self.config.require_think else answer

    def answer_of(self, said: str, item: Problem) -> str:
        return item["answer"]


if __name__ == "__main__":
    DatasetEnv.cli()
