"""SFT loader: replays a data set of chats as rollouts, so that a trainer mixes it with those of other environments.

python environments/sft_loader_server.py serve --env.dataset my_chats.jsonl

No engine is asked. Groups carry the override `sft`, score 1 and no log-probabilities.
"""

from typing import Literal

from pydantic import Field

from atroposlib.environments.rows import Row, load_items, order
from atroposlib.environments.single_turn import local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataGroup
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import JsonObject
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class SFTConfig(BaseEnvConfig):
    """Which rows, and in which form."""

    dataset: str | None = Field(default=None, description="A .jsonl or .parquet file, or a name on the model hub.")
    dataset_format: Literal["oai_format", "sharegpt_format", "prefix_completion"] = Field(
        default="oai_format", description="messages; conversations with from and value; or prompt and completion."
    )
    epochs: int | None = Field(default=1, ge=1, description="How often all rows are sent; null: without end.")
    seed: int = Field(default=0, description="Decides the order of the rows.")
    train_on_all_assistant_turns: bool = Field(default=True, description="false: only on the last one.")
    ensure_scores_are_not_same: bool = Field(default=False, description="A row is a group of its own.")


class SFTEnv(BaseEnv):
    """Score 1.0 for every row."""

    name = "sft_loader"
    env_config_cls = SFTConfig
    config: SFTConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        return SFTConfig(group_size=1, tokenizer_name=engine[0].model_name), engine

    async def check_engines(self) -> bool:
        return True  # none is asked

    async def setup(self) -> None:
        """Load the rows; ConfigError or DataError when they cannot be used."""
        if self.config.dataset is None:
            raise ConfigError("env.dataset is not set; name a .jsonl or .parquet file of chats")
        self.chats = load_items(self.config.dataset, self.to_chat, wanted=f"rows of {self.config.dataset_format}")

    def to_chat(self, row: Row) -> list[JsonObject]:
        """Return the messages of a row; ValueError when it does not end with an answer."""
        if self.config.dataset_format == "oai_format":
            chat = [dict(message) for message in row["messages"]]
        elif self.config.dataset_format == "sharegpt_format":
            chat = [{"role": _ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        else:
            chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        if not chat or chat[-1]["role"] != "assistant":
            raise ValueError("the last turn is no answer")
        return chat

    async def get_item(self, index: int) -> Item | None:
        epoch, position = divmod(index, len(self.chats))
        if self.config.epochs is not None and epoch >= self.config.epochs:
            return None
        row = order(len(self.chats), f"{self.config.seed}/{epoch}")[position]
        return {"row": row, "epoch": epoch, "messages": self.chats[row]}

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        whole = self.config.train_on_all_assistant_turns
        made = tokenize_for_trainer(self.tokenizer, item["messages"], train_on_all_assistant_turns=whole)
        return {
            "tokens": [made["tokens"]],
            "masks": [made["masks"]],
            "scores": [1.0],
            "messages": [item["messages"]],
            "overrides": [{"sft": True}],
            "group_overrides": {"sft": True, "group_size": 1},
        }, []


if __name__ == "__main__":
    SFTEnv.cli()
