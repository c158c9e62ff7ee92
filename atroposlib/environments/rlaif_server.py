"""RLAIF: a judge compares the replies of a group in pairs, each pair in both orders; or a reward model scores them.

python environments/rlaif_server.py process --env.dataset my_requests.jsonl
atropos-dpo-gen ROLLOUTS --allow-negative-scores --minimum-score-diff-max-min 0 --output pairs.jsonl

A reply's score is its mean preference over its pairs, less one half; pairs that no judgement can be read of count
nowhere, and a reply without any pair has no score. Replies that are as good as each other score alike and make no pair.
With `--env.reward_model '{"base_url": ..., "tokenizer_name": ...}'` it is that of the model, in its own unit.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from atroposlib.environments.judging import WANTED, Judge
from atroposlib.environments.reward_model import RewardModel, RewardModelConfig
from atroposlib.environments.rows import Row
from atroposlib.environments.single_turn import RowsConfig, RowsEnv, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.errors import VerifierFault
from atroposlib.rollouts.failures import Unscored, scored
from atroposlib.type_definitions import JsonObject


class RLAIFConfig(RowsConfig):
    """Where requests come from, and who judges."""

    dataset: str | None = Field(
        default="allenai/WildChat",
        description="A .jsonl or .parquet file with the field prompt or conversation, or a name on the model hub.",
    )
    judge: APIServerConfig | None = Field(default=None, description="Engine that judges; null: the one that answers.")
    reward_model: RewardModelConfig | None = Field(default=None, description="Scores replies in the place of a judge.")
    wanted: str = Field(default=WANTED, description="What makes a reply better, in words for the judge.")
    all_pairs: bool = Field(default=False, description="Compare all pairs; else each reply with the next one.")


class RLAIFEnv(RowsEnv):
    """Score between -0.5 and 0.5: how often the judge prefers a reply to others of its group; or a reward model's."""

    name = "rlaif"
    env_config_cls = RLAIFConfig
    config: RLAIFConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    is_verifiable = False
    reward_model: RewardModel | None = None
    wanted = 'an object like {"prompt": "..."}'

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        return RLAIFConfig(group_size=4, tokenizer_name=engine[0].model_name), engine

    async def setup(self) -> None:
        await super().setup()
        self.judge = Judge(self.server, self.config.judge, wanted=self.config.wanted)
        self.reward_model = RewardModel(self.config.reward_model) if self.config.reward_model else None

    @classmethod
    def sample_rows(cls) -> list[JsonObject]:
        return [{"prompt": f"Say something about the number {n}."} for n in range(20)]

    @classmethod
    def to_item(cls, row: Row) -> Item:
        prompt = row["prompt"] if "prompt" in row else row["conversation"][0]["content"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError("the prompt is empty")
        return {"question": prompt}

    async def grades(self, replies: Sequence[str], item: Item) -> list[float]:
        """Return the mean preference of each reply, 0 to 1, or the reward model's scores."""
        said = [(after_thinking(reply) or "").strip() for reply in replies]
        if self.reward_model is not None:
            asked = [*self.system_turns(), {"role": "user", "content": item["question"]}]
            return await self.reward_model.scores([[*asked, {"role": "assistant", "content": text}] for text in said])
        numbers = range(len(said))
        ring = [(number, (number + 1) % len(said)) for number in numbers if len(said) > 2 or number == 0]
        pairs = list(itertools.combinations(numbers, 2)) if self.config.all_pairs else ring if len(said) > 1 else []
        votes = await asyncio.gather(*(scored(self.judge.prefer(item["question"], said[a], said[b])) for a, b in pairs))
        of_reply: list[list[float]] = [[] for _ in said]
        for (a, b), vote in zip(pairs, votes, strict=True):
            if not isinstance(vote, Unscored):
                of_reply[a].append(vote)
                of_reply[b].append(1 - vote)
        none = VerifierFault("no judgement of a pair with this reply could be read")
        return [sum(found) / len(found) if found else Unscored(none) for found in of_reply]

    def reward(self, grade: float) -> float:
        return grade if self.reward_model is not None else grade - 0.5

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Score replies by the reward model; without one do nothing, as a reply alone has no preference."""
        await (BaseEnv if self.reward_model is None else RowsEnv).evaluate(self, *args, **kwargs)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        judged: dict[str, Any] = {}
        for area, judge in (("judge", self.judge), ("reward_model", self.reward_model)):
            if judge is not None:
                judged |= {f"{area}/{name.replace(' ', '_')}": count for name, count in judge.counts.items()}
                judge.counts.clear()
        await super().wandb_log({**(wandb_metrics or {}), **judged})


if __name__ == "__main__":
    RLAIFEnv.cli()
