"""A mixture of environments in one run: by weight, by difficulty, by recent pass rate.

    env:
      sources:
        - {environment: countdown, weight: 2}
        - {environment: letter_counting, levels: [1, 2, 3]}   # a source for each level
      curriculum: true

python environments/mixture_env.py serve --config mixture.yaml

Without a curriculum the source of an item depends on seed and index alone. With one, sources whose recent pass rate is
outside of `pass_rates` are drawn rarely: groups whose scores are all alike teach nothing. The rates are kept next to
the rollout files, so that a run that was killed knows them again.
"""

import json
import random
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from atroposlib.environments.intern_bootcamp.seeds import Mixture
from atroposlib.environments.single_turn import local_engine
from atroposlib.envs import catalog
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item, Trajectories
from atroposlib.errors import ConfigError
from atroposlib.json_lines import read_object
from atroposlib.paths import write_text_atomic
from atroposlib.rollouts.failures import is_scored
from atroposlib.rollouts.run import Run
from atroposlib.type_definitions import JsonObject

RARELY = 0.05
"""Factor on the weight of a source that is too easy or too hard: it is tried now and then, as that may change."""

_KEPT_EVERY_S = 1.0


class Source(BaseModel):
    """One environment of a mixture."""

    model_config = ConfigDict(extra="forbid")

    environment: str = Field(description="Name, as `atropos env list` shows it, or a .py file.")
    name: str | None = Field(None, description="Of the source in statistics; null: the environment.")
    weight: PositiveFloat = 1.0
    levels: list[PositiveInt] | None = Field(None, description="A source for each of these difficulties.")
    env: JsonObject = Field({}, description="Fields of the environment's own config.")


class MixtureConfig(BaseEnvConfig):
    """Which environments, and how they are drawn."""

    sources: list[Source] = Field(default=[], description="Environments with weights.")
    curriculum: bool = Field(default=False, description="Draw by recent pass rate, too.")
    pass_rates: tuple[float, float] = Field(default=(0.2, 0.8), description="Sources within are drawn by their weight.")
    window: PositiveInt = Field(default=16, description="Groups of a source that its recent pass rate is of.")
    seed: int = Field(default=0, description="Decides the order of the sources.")


class MixtureEnv(BaseEnv):
    """Scores are those of the environments; a group's task is its source."""

    name = "mixture"
    env_config_cls = MixtureConfig
    config: MixtureConfig
    children: Mapping[str, BaseEnv] = {}
    _kept: Path | None = None  # file of the pass rates
    _keep_at = 0.0

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        return MixtureConfig(group_size=8, tokenizer_name=engine[0].model_name), engine

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        """Return flags for checks of the environment."""
        return ["--env.sources", '[{"environment": "countdown"}, {"environment": "text_reversal", "levels": [1, 2]}]']

    async def setup(self) -> None:
        """Set up every environment; ConfigError when there is none, or two have one name."""
        children: dict[str, BaseEnv] = {}
        self.weights: dict[str, float] = {}
        for source in self.config.sources:
            for level in source.levels or [None]:
                name = (source.name or source.environment) + (f"@{level}" if level else "")
                if name in children:
                    raise ConfigError(f"env.sources has {name!r} twice; give one of them another name")
                children[name] = await self._child(source, level)
                self.weights[name] = source.weight / len(source.levels or [None])
        self.children = children
        if not children:
            raise ConfigError("env.sources is empty; name environments, as in [{environment: countdown}]")
        self.recent = {name: deque[float](maxlen=self.config.window) for name in self.children}
        self._recall_rates()
        self.drawn = dict.fromkeys(self.children, 0)
        self.ended: set[str] = set()
        self._mixture, self._order = Mixture(self.weights, f"{self.config.seed}/mixture"), list[tuple[str, int]]()
        self._rng = random.Random(f"{self.config.seed}/curriculum")
        self.eval_metrics: dict[str, float] = {}

    def attach(self, run: Run) -> None:
        """Keep the pass rates next to the run's files; of a run that begins there are none yet."""
        super().attach(run)
        if run.files is not None and self.config.curriculum:
            self._kept = run.files.files.sidecar("pass_rates")
            if not run.files.ledger.done:
                self._kept.unlink(missing_ok=True)

    def _recall_rates(self) -> None:
        """Know the pass rates of an earlier process of the run again."""
        kept = (read_object(self._kept) if self._kept is not None else None) or {}
        for name in self.recent.keys() & kept.keys():
            self.recent[name].extend(kept[name])

    def _keep_rates(self) -> None:
        if self._kept is not None and time.monotonic() >= self._keep_at:
            self._keep_at = time.monotonic() + _KEPT_EVERY_S
            write_text_atomic(self._kept, json.dumps({name: [*recent] for name, recent in self.recent.items()}))

    async def _child(self, source: Source, level: int | None) -> BaseEnv:
        env_cls = catalog.load(source.environment)
        shared = {name: getattr(self.config, name) for name in ("group_size", "tokenizer_name", "accept_score")}
        given = {**shared, "use_wandb": False, **({"levels": [level]} if level else {}), **source.env}
        defaults = env_cls.config_init()[0]
        if unknown := given.keys() - type(defaults).model_fields.keys():
            raise ConfigError(f"env.sources: {source.environment} has no setting {sorted(unknown)[0]!r}")
        config = type(defaults).model_validate({**defaults.model_dump(exclude_unset=True), **given})
        child = env_cls(config, self.server_configs)
        child.server, child.tokenizer = self.server, self.tokenizer
        await child.setup()
        return child

    @property
    def has_get_item(self) -> bool:
        """True when items depend on their index alone."""
        return not self.config.curriculum and all(child.has_get_item for child in self.children.values())

    async def get_item(self, index: int) -> Item | None:
        while len(self._order) <= index:
            name = self._mixture.task_of(len(self._order))
            self._order.append((name, self.drawn[name]))
            self.drawn[name] += 1
        return await self._item(*self._order[index])

    async def get_next_item(self) -> Item | None:
        if self.has_get_item:
            return await super().get_next_item()
        while chances := self.chances():
            (name,) = self._rng.choices(list(chances), weights=list(chances.values()))
            self.drawn[name] += 1
            if (item := await self._item(name, self.drawn[name] - 1)) is not None:
                return item
            self.ended.add(name)
        return None

    def chances(self) -> dict[str, float]:
        """Return the weights by which the next item is drawn: with a curriculum as the recent pass rates leave them.

        Sources that have ended are left out.
        """
        weights = {name: weight for name, weight in self.weights.items() if name not in self.ended}
        if not self.config.curriculum:
            return weights
        low, high = self.config.pass_rates
        whole = {name: recent for name, recent in self.recent.items() if len(recent) == recent.maxlen}
        rates = {name: sum(recent) / len(recent) for name, recent in whole.items()}
        odd = {name for name, rate in rates.items() if not low <= rate <= high}
        return {name: weight * (RARELY if name in odd else 1.0) for name, weight in weights.items()}

    async def _item(self, name: str, index: int) -> Item | None:
        child = self.children[name]
        item = await (child.get_item(index) if child.has_get_item else child.get_next_item())
        return None if item is None else {"source": name, "item": item}

    def item_task(self, item: Item) -> str:
        return item["source"]

    async def collect_trajectories(self, item: Item) -> tuple[Trajectories, list[Item]]:
        result, backlog = await self.children[item["source"]].collect_trajectories(item["item"])
        for group in result if isinstance(result, list) else [result]:
            if group:
                group["task"] = item["source"]  # pyright: ignore[reportGeneralTypeIssues]  # a group may carry its task
                scores = [score for score in group.get("scores", []) if is_scored(score)]
                if scores:
                    passed = sum(score > self.config.accept_score for score in scores)
                    self.recent[item["source"]].append(passed / len(scores))
                    self._keep_rates()
        return result, [{"source": item["source"], "item": more} for more in backlog]

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Evaluate every environment; results lie in a folder for each."""
        for name, child in self.children.items():
            folder = self.config.data_dir_to_save_evals
            child.config.data_dir_to_save_evals = str(Path(folder) / name) if folder else None
            await child.evaluate()
            found = getattr(child, "eval_metrics", {})  # authors' own environments keep none
            self.eval_metrics |= {f"{key}/{name}": value for key, value in found.items()}

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        chances = self.chances()
        for name, recent in self.recent.items():
            self.eval_metrics[f"mixture/share_{name}"] = chances.get(name, 0.0) / (sum(chances.values()) or 1.0)
            if recent:
                self.eval_metrics[f"mixture/pass_rate_{name}"] = sum(recent) / len(recent)
        metrics, self.eval_metrics = {**(wandb_metrics or {}), **self.eval_metrics}, {}
        await super().wandb_log(metrics)

    async def teardown(self) -> None:
        for child in self.children.values():
            await child.teardown()


if __name__ == "__main__":
    MixtureEnv.cli()
