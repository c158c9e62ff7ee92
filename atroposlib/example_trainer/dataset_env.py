"""An environment over problem sets: each row's `problem` is the prompt, its `answer` the right answer."""

import asyncio
import random
from functools import lru_cache
from typing import Any, Literal, TypedDict

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.errors import DataError
from atroposlib.example_trainer.mixture import Source, mix, split
from atroposlib.example_trainer.rewards import answer_tag_reward, math_rewards
from atroposlib.paths import expand_path
from atroposlib.rollouts.failures import is_scored
from atroposlib.type_definitions import Message


class Problem(TypedDict):
    """One row of the mixture."""

    problem: str
    answer: str


class DatasetEnvConfig(BaseEnvConfig):
    """Which problems, how they are asked and scored."""

    datasets: list[Source] = Field(default=[], description="Sources with columns problem and answer.")
    test_split_size: float = Field(default=0.05, ge=0, lt=1, description="Fraction kept for evaluation.")
    reward: Literal["answer_tag", "math"] = "answer_tag"
    require_think: bool = Field(default=True, description="answer_tag: replies must begin with <think>.")
    system_prompt: str | None = None
    chat_template: str | None = Field(default=None, description="File with a Jinja template; null: the model's own.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; evaluation uses 0.")
    seed: int = 0


class DatasetEnv(BaseEnv):
    """Score 1.0 for a right answer, else 0.0. Problems come in a new order every epoch, without end."""

    name = "dataset"
    env_config_cls = DatasetEnvConfig
    config: DatasetEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        server = APIServerConfig(model_name="default", base_url="http://localhost:9001/v1", server_type="sglang")
        return DatasetEnvConfig(), [server]

    async def setup(self) -> None:
        """Load the mixture; DataError when it cannot be used."""
        rows = mix(self.config.datasets, seed=self.config.seed)
        lacking = next((row for row in rows if not {"problem", "answer"} <= set(row)), None)
        if not rows or lacking is not None:
            found = "no rows" if lacking is None else f"a row with the columns {sorted(lacking)}"
            raise DataError(f"datasets give {found}; expected rows with problem and answer, see `columns`")
        self.train, self.test = split(rows, self.config.test_split_size)
        self.eval_metrics: dict[str, float] = {}
        if self.config.chat_template:
            path = expand_path(self.config.chat_template, what="chat_template")
            self.tokenizer.chat_template = path.read_text(encoding="utf-8")

    async def get_item(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self.train))
        row = self.train[_order(f"{self.config.seed}/{epoch}", len(self.train))[position]]
        return Problem(problem=str(row["problem"]), answer=str(row["answer"]))

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        messages = self.messages(item)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages,
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=self.config.temperature,
            )
            nodes = managed.get_state()["nodes"]
        texts = [choice.message.content or "" for choice in reply.choices]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": await self.scores(texts, item),
            "messages": [[*messages, {"role": "assistant", "content": text}] for text in texts],
        }, []

    def messages(self, item: Problem) -> list[Message]:
        """The prompt of one problem."""
        system: list[Message] = [{"role": "system", "content": self.config.system_prompt or ""}]
        return [*(system if self.config.system_prompt else []), {"role": "user", "content": item["problem"]}]

    async def scores(self, texts: list[str], item: Problem) -> list[float]:
        """Return the rewards of replies; `Unscored` for one that could not be judged."""
        if self.config.reward == "math":
            return await asyncio.to_thread(math_rewards, texts, item["answer"])
        return [answer_tag_reward(text, item["answer"], require_think=self.config.require_think) for text in texts]

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Greedy answers to the rows kept for evaluation."""
        scores: list[float] = []
        for row in self.test:
            item = Problem(problem=str(row["problem"]), answer=str(row["answer"]))
            reply = await self.server.chat_completion(
                messages=self.messages(item), n=1, max_tokens=self.config.max_token_length, temperature=0, split="eval"
            )
            scores += await self.scores([reply.choices[0].message.content or ""], item)
        known = [score for score in scores if is_scored(score)]
        self.eval_metrics = {"eval/percent_correct": sum(known) / max(1, len(known))}

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        await super().wandb_log({**(wandb_metrics or {}), **self.eval_metrics})


@lru_cache(maxsize=2)  # both sides of the end of an epoch; a shuffle of 100,000 rows takes 0.1 s
def _order(seed: str, count: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


if __name__ == "__main__":
    DatasetEnv.cli()
