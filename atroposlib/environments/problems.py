"""`ProblemsEnv`: problems by number, to train on or kept for an evaluation. The base of one turn and of many."""

import asyncio
import importlib.util
import inspect
import random
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from atroposlib.environments.replies import opening_of
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item
from atroposlib.envs.eval import evaluate_items
from atroposlib.envs.server_handling.conversation import render
from atroposlib.errors import ConfigError, EnvironmentFault
from atroposlib.rollouts.source import of_hook
from atroposlib.type_definitions import JsonObject

Part = Literal["train", "test", "shot"]
"""shot: solved problems that are shown in prompts."""

MOST_EVALUATED = 20_000
"""Problems of an evaluation of all rows; of made ones there is no end."""


class ProblemsConfig(BaseEnvConfig):
    """Settings of choosing, asking and evaluating problems."""

    seed: int = Field(default=0, description="Decides which problems come, and in which order.")
    levels: list[PositiveInt] = Field(
        default=[1], min_length=1, description="Made problems: difficulties from 1 on, each as often as the others."
    )
    system_prompt: str | None = Field(default=None, description="null: the environment's own; empty: none.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling of rollouts.")
    eval_problems: PositiveInt | None = Field(default=64, description="Problems of an evaluation.")


class ProblemsEnv(BaseEnv):
    """An author writes `make`, or `problem`; a base of environments what is done with a problem."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = ProblemsConfig
    config: ProblemsConfig
    system: ClassVar[str] = ""  # the system prompt, unless the settings name another
    is_verifiable: ClassVar[bool] = True  # a right reply can be told from a wrong one
    guessing: ClassVar[float] = 0.05  # mean score that the best constant reply may have
    extra: ClassVar[str] = ""  # of this package, which it needs
    needs: ClassVar[str] = ""  # module that the extra installs

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        return cls.env_config_cls(group_size=8, tokenizer_name=engine[0].model_name), engine

    # -- what an author writes -------------------------------------------------------------------------------------

    def make(self, rng: random.Random, level: int) -> Item:
        """Return a problem of a difficulty, drawn with `rng`. JSON-shaped."""
        raise NotImplementedError(f"{type(self).__name__} must define make(rng, level), or problem(part, index)")

    async def problem(self, part: Part, index: int) -> Item | None:
        """Optional: return problem number `index`, the same at every call; None from the end on. Default: `make`."""
        rng = random.Random(f"{self.config.seed}/{part}/{index}")
        return self.make(rng, rng.choice(self.config.levels))

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        """Optional: flags for checks of the environment, which may write data to `folder`."""
        return []

    # -- what a base writes ----------------------------------------------------------------------------------------

    async def evaluate_one(self, item: Item, at_once: asyncio.Semaphore) -> JsonObject | None:
        """Return one problem as it was answered, a sample for the records; None: it failed."""
        raise NotImplementedError

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        """Optional: return the metrics of an evaluation's samples; add yours to these."""
        raise NotImplementedError

    def eval_sampling(self) -> JsonObject:
        """Return the sampling parameters of an evaluation."""
        return {"temperature": 0.0}

    def train_metrics(self) -> dict[str, float]:
        """Return metrics of the rollouts since the last log, and count them from the beginning again."""
        return {}

    # -- what they have in common ----------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Call it first in a `setup` of your own."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            wanted = f"pip install 'atroposlib[{self.extra}]'"
            raise ConfigError(f"{self.label} needs the package {self.needs}; run: {wanted}")

    @cached_property
    def opening(self) -> str:
        """The tag that opens a thought, where the chat template writes it into the prompt; else ""."""
        return opening_of(render(self.tokenizer, [{"role": "user", "content": ""}]))

    @cached_property
    def eval_metrics(self) -> dict[str, float]:
        """Metrics of the newest evaluation, until they are logged."""
        return {}

    async def get_item(self, index: int) -> Item | None:
        return await of_hook(self.problem("train", index), "problem")

    def system_turns(self) -> list[Any]:
        """Return the system prompt as a turn; none when it is empty."""
        system = self.system if self.config.system_prompt is None else self.config.system_prompt
        return [{"role": "system", "content": system}] if system else []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Ask `eval_problems` problems that are not trained on; those that fail are left out and counted."""
        started, at_once = time.time(), asyncio.Semaphore(self.config.max_eval_workers)
        items: list[Item] = []
        for index in range(self.config.eval_problems or MOST_EVALUATED):
            if (item := await self.problem("test", index)) is None:
                break
            items.append(item)
        found = await evaluate_items(self.evaluate_one(item, at_once) for item in items)
        samples = [sample for sample in found if sample is not None]
        if not samples:
            raise EnvironmentFault(f"all {len(found)} problems of the evaluation failed; the log has the reasons")
        self.eval_metrics = self.sample_metrics(samples) | {"eval/failed": len(found) - len(samples)}
        await self.evaluate_log(
            self.eval_metrics,
            samples=samples,
            start_time=started,
            end_time=time.time(),
            generation_parameters=self.eval_sampling(),
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {**(wandb_metrics or {}), **self.eval_metrics, **self.train_metrics()}
        self.eval_metrics = {}
        await super().wandb_log(metrics)


def local_engine(model: str = "Qwen/Qwen3-4B", port: int = 9001) -> list[APIServerConfig]:
    """Return the engine of a `config_init`: SGLang, or one that speaks like it, on this machine."""
    url = f"http://localhost:{port}/v1"
    return [APIServerConfig(model_name=model, base_url=url, server_type="sglang", api_key="x")]


def as_number(given: object, name: str) -> float:
    """Return the number that an author's function of this name returned.

    Raises:
        TypeError: it returned something else.
    """
    try:
        if not isinstance(given, str | bytes):
            return float(given)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        pass
    closed(given)
    hint = "; it is called, not awaited: write it as `def`" if inspect.isawaitable(given) else ""
    raise TypeError(f"{name} returned {given!r:.80}; it must return a number, such as 1.0 or 0.0{hint}")


def closed(given: object) -> None:
    """Close what an `async def` returned, so that Python does not warn that nobody awaited it."""
    if inspect.iscoroutine(given):
        given.close()
