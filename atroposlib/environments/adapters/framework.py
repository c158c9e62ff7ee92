"""Shared by all adapters: numbered items of one environment of a framework, and their evaluation."""

import asyncio
import json
import logging
import time
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from atroposlib.environments.rows import read_rows
from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.eval import evaluate_items
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.type_definitions import Item, JsonObject

logger = logging.getLogger(__name__)

SEEDS = 1_000_000
"""Number of the first item of an evaluation where items are seeds."""


class FrameworkConfig(BaseEnvConfig):
    """Which environment of the framework, and which items of it."""

    id: str = Field("", description="Name of the environment, as its framework knows it.")
    arguments: JsonObject = Field({}, description="Keyword arguments for making it.")
    items: PositiveInt | None = Field(None, description="Number of items (seeds, rows); null: as many as there are.")
    seed: int = Field(0, description="Added to the number of an item to make its seed.")
    eval_items: PositiveInt = Field(64, description="Items of an evaluation, each rolled out group_size times.")
    eval_first: PositiveInt | None = Field(
        None,
        description="Items from this number on are evaluated, and not trained on; null: 1,000,000 of seeds, and of "
        "rows the first ones, which are trained on, too.",
    )


class RowsConfig(FrameworkConfig):
    """Items that are rows of a file."""

    rows: str = Field("", description="Items in the form of the framework: a .jsonl or .parquet file, or a hub name.")

    def read(self) -> list[JsonObject]:
        """Return the rows; ConfigError or DataError where there are none."""
        if not self.rows:
            raise ConfigError("env.rows is empty; give a .jsonl file of items")
        return [dict(row) for _, row in read_rows(self.rows)]


class FrameworkEnv(BaseEnv):
    """Numbered items of one environment of a framework, and their evaluation."""

    env_config_cls = FrameworkConfig
    config: FrameworkConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    framework: ClassVar[str] = ""  # to be installed
    id_is: ClassVar[str] = "the name of an environment"

    def prepare(self) -> int | None:
        """Optional: import the framework and load what is needed; the number of items, None without an end."""
        return None

    async def setup(self) -> None:
        if not self.config.id:
            raise ConfigError(f"env.id is empty; give {self.id_is} of {self.framework}")
        try:
            found = await asyncio.to_thread(self.prepare)
        except ImportError as error:
            raise ConfigError(f"{error}; this adapter needs `pip install {self.framework}`") from error
        self.found = found  # in the framework
        first = self.config.eval_first or (SEEDS if found is None else None)
        self.count = min((n for n in (found, self.config.items, first) if n is not None), default=None)

    async def get_item(self, index: int) -> Item | None:
        return None if self.count is not None and index >= self.count else {"index": index, "id": self.config.id}

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Roll out `eval_items` items, in groups as for training; responses that fail are left out and counted."""
        started, config = time.time(), self.config
        first = config.eval_first or (0 if self.found is not None else SEEDS)
        numbers = range(first, min(first + config.eval_items, self.found or first + config.eval_items))
        at_once = asyncio.Semaphore(config.max_eval_workers)

        async def one(number: int) -> JsonObject | None:
            try:
                async with at_once:
                    groups, _ = await self.collect_trajectories({"index": number, "id": config.id})
            except RolloutFault as fault:
                logger.warning("evaluation item failed: index=%d error=%s", number, fault)
                return None
            rollouts = [scores_of(group) for group in (groups if isinstance(groups, list) else [groups]) if group]
            return {"index": number, "id": config.id, "scores": rollouts}

        results = await evaluate_items(map(one, numbers))
        samples = [sample for sample in results if sample is not None]
        if not samples:
            raise EnvironmentFault(f"all {len(results)} items of the evaluation failed; the log has the reasons")
        means = [fmean(score for group in sample["scores"] for score in group) for sample in samples]
        metrics = {"eval/score": fmean(means), "eval/items": len(samples), "eval/failed": len(results) - len(samples)}
        await self.evaluate_log(metrics, samples=samples, start_time=started, end_time=time.time())


def scores_of(group: ScoredDataGroup) -> list[float]:
    """[G] score of each rollout of a group, one that became several rows counted once."""
    scores = group.get("scores") or []
    names = [(each or {}).get("rollout_id") for each in group.get("overrides") or [None] * len(scores)]
    by_name = {name or number: score for number, (name, score) in enumerate(zip(names, scores, strict=True))}
    return list(by_name.values())


def text_of(value: Any) -> str:
    """A value of a framework as text for the model."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
