"""Experiments on causal models by a language model: it sees data, sets variables over several turns, names the parents.

python -m atroposlib.environments.causal.causal_env process --env.data_path_to_save_groups causal.jsonl ...
"""

import asyncio
import logging
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, field_validator

from atroposlib.environments.causal.episode import Episode, ScoreKind
from atroposlib.environments.causal.problem import ProblemConfig
from atroposlib.environments.causal.scm import levels_of
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem
from atroposlib.envs.eval import evaluate_items
from atroposlib.envs.server_handling.sequence import SequenceNode
from atroposlib.errors import EnvironmentFault, RolloutFault
from atroposlib.type_definitions import JsonObject, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Played:
    """One attempt of the model, ended."""

    messages: list[Message]
    node: SequenceNode
    parts: dict[str, float]
    score: float


class CausalConfig(BaseEnvConfig):
    """Which problems are asked, and how an attempt is scored."""

    difficulty: str = Field(default="difficulty_1", description="Levels with commas, taken in turn, or all.")
    problem_seed: int = Field(default=1, ge=0, description="Of the problems; demonstrations are of seed 0.")
    rows_per_variable: int = Field(default=10, ge=1, description="Rows under interventions that are known at first.")
    trajectory_length: int = Field(default=5, ge=1, description="Interventions of an attempt.")
    task: Literal["min", "max"] = Field(default="min", description="Whether the target is to be small or large.")
    score: ScoreKind = Field(
        default="mean", description="Of Jaccard and improvement, or 1 for exactly the parents, else 0."
    )
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature.")
    eval_problems: int = Field(default=32, ge=1, description="Problems of an evaluation, of the next seed.")

    @field_validator("difficulty")
    @classmethod
    def _is_known(cls, difficulty: str) -> str:
        levels_of(difficulty)
        return difficulty


class CausalEnv(BaseEnv):
    """Score: half the Jaccard of the named parents, half the share of the possible improvement, less faults."""

    name = "causal_llm"
    env_config_cls = CausalConfig
    config: CausalConfig

    @classmethod
    def config_init(cls) -> tuple[CausalConfig, list[APIServerConfig]]:
        server = APIServerConfig(model_name="default", base_url="http://localhost:9001/v1", server_type="sglang")
        return CausalConfig(group_size=8, max_token_length=512), [server]

    async def setup(self) -> None:
        self._parts: dict[str, list[float]] = {}  # of scores, since the last log

    async def get_item(self, index: int) -> Item:
        return self._item(index, self.config.problem_seed)

    def _item(self, index: int, seed: int) -> Item:
        levels = levels_of(self.config.difficulty)
        return {"level": levels[index % len(levels)], "index": index // len(levels), "seed": seed}

    def item_task(self, item: Item) -> str:
        return item["level"]

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem, list[Item]]:
        played = await self._play(item, self.config.temperature, "train")
        for name, value in played.parts.items():
            self._parts.setdefault(name, []).append(value)
        return {
            "tokens": played.node.tokens,
            "masks": played.node.masked_tokens,
            "inference_logprobs": played.node.logprobs,
            "scores": played.score,
            "messages": played.messages,
        }, []

    async def _play(self, item: Item, temperature: float, split: str) -> "_Played":
        """Let the model act to the end."""
        config = self.config
        problems = ProblemConfig(seed=item["seed"], rows_per_variable=config.rows_per_variable)
        turns = config.trajectory_length
        episode = await asyncio.to_thread(Episode.begin, problems, item["level"], item["index"], turns, config.task)
        messages = episode.opening()
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            while not episode.is_over:
                reply = await managed.chat_completion(
                    messages=messages, n=1, max_tokens=config.max_token_length, temperature=temperature, split=split
                )
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                said = episode.act(text)
                if not episode.is_over:
                    messages.append({"role": "user", "content": said})
            node = managed.get_state()["nodes"][-1]  # the whole conversation; only what the model wrote takes loss
        parts = await asyncio.to_thread(episode.parts)
        return _Played(messages, node, parts, episode.score(config.score))

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the means over problems that training never sees, with temperature 0; failed ones are left out."""
        at_once = asyncio.Semaphore(self.config.max_eval_workers)

        async def one(item: Item) -> JsonObject | None:
            try:
                async with at_once:
                    played = await self._play(item, 0.0, "eval")
            except RolloutFault as fault:
                logger.warning("evaluation problem failed: level=%s error=%s", item["level"], fault)
                return None
            return {"item": item, "messages": played.messages, "score": played.score, **played.parts}

        items = [self._item(index, self.config.problem_seed + 1) for index in range(self.config.eval_problems)]
        results = await evaluate_items(one(item) for item in items)
        samples = [sample for sample in results if sample is not None]
        if not samples:
            raise EnvironmentFault(f"all {len(results)} problems of the evaluation failed; the log has the reasons")
        names = samples[0].keys() - {"item", "messages"}
        metrics = {f"eval/{name}": fmean(sample[name] for sample in samples) for name in sorted(names)}
        metrics["eval/failed"] = float(len(results) - len(samples))
        await self.evaluate_log(metrics, samples=samples, generation_parameters={"temperature": 0.0})
        return metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        means = {f"train/{name}": fmean(values) for name, values in self._parts.items()}
        self._parts.clear()
        await super().wandb_log({**(wandb_metrics or {}), **means})


if __name__ == "__main__":
    CausalEnv.cli()
