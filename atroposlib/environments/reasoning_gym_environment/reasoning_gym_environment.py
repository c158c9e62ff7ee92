"""reasoning-gym: problems of all its datasets, or of some, at its own difficulties or at levels of its curricula.

python environments/reasoning_gym_environment/reasoning_gym_environment.py process --env.levels '[1, 2]'

Generators and verifiers run in child processes, as for every task of the InternBootcamp environment, whose settings
these are. Datasets that are slow, do not work or reward a constant guess are left out unless `tasks` names them; see
`intern_bootcamp/set_aside.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from atroposlib.environments.intern_bootcamp.bootcamp_config import ALL_DATASETS, RANDOM_TASK, InternBootcampEnvConfig
from atroposlib.environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv
from atroposlib.environments.intern_bootcamp.problems import Problem
from atroposlib.environments.intern_bootcamp.tasks import REASONING_GYM, all_datasets
from atroposlib.environments.single_turn import THINK, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.rollouts.failures import is_scored


class ReasoningGymEnvConfig(InternBootcampEnvConfig):
    """Which datasets, and how hard."""

    task_name: str = Field(default=ALL_DATASETS, description="Set by `tasks` and `levels`.")
    tasks: list[str] | None = Field(
        default=None, description="Datasets by name, each as often; null: all but those set aside for a reason."
    )
    levels: list[PositiveInt] | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, description="Levels of the datasets' curricula, each as often; null: the datasets' own settings."
    )
    partial_credit: bool = Field(default=False, description="Also score what a dataset calls partly right.")
    require_reasoning: bool = Field(default=False, description="Give no credit without thoughts before the answer.")
    format_bonus: float = Field(default=0.0, ge=0, description="Credit of a wrong answer in the right form.")
    correct_reward: float = Field(default=1.0, description="Score of a right answer.")
    incorrect_reward: float = Field(default=0.0, description="Score of a wrong answer.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling of rollouts.")

    @model_validator(mode="before")
    @classmethod
    def _as_tasks(cls, values: Any) -> Any:
        """Turn datasets and levels into tasks with weights, which the base knows."""
        if not isinstance(values, Mapping) or values.get("task_weights"):
            return values
        names, levels = values.get("tasks"), values.get("levels")
        if not names and not levels:
            return values
        named = [f"{REASONING_GYM}{name}" for name in names] if names else _with_curriculum()
        weights = {f"{name}@{level}" if level else name: 1.0 for name in named for level in levels or [0]}
        return {**values, "task_name": RANDOM_TASK, "task_weights": weights}

    @model_validator(mode="after")
    def _only_datasets(self) -> Self:
        if odd := [name for name in self.task_weights or () if not name.startswith(REASONING_GYM)]:
            raise ValueError(f"task_weights name {odd[0]!r}, which is no dataset of reasoning-gym")
        return self


class ReasoningGymEnv(InternBootcampEnv):
    """Score 1.0 for a right answer in answer tags after the thinking, else 0.0."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymEnvConfig
    extra, needs = "envs", "reasoning_gym"
    config: ReasoningGymEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    system = THINK + "give your final answer in exactly the form that the problem asks for."

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        return ReasoningGymEnvConfig(group_size=8, max_token_length=4096, tokenizer_name=engine[0].model_name), engine

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        return ["--env.tasks", '["products"]', "--env.levels", "[2]", "--env.verifier_workers", "1"]

    async def grades(self, replies: Sequence[str], item: Problem) -> list[float]:
        """Return what the dataset says of the answers; what is not right counts only with `partial_credit`."""
        said = [(after_thinking(reply) or "").strip() for reply in replies]
        grades = await super().grades(said, item)
        return [self._credit(grade) if is_scored(grade) else grade for grade in grades]

    def _credit(self, grade: float) -> float:
        if grade >= _RIGHT:
            return 1.0
        return grade if self.config.partial_credit and grade > _CRUMB else 0.0


_RIGHT = 0.99
_CRUMB = 0.05
"""Datasets give 0.01 or 0.05 to whatever is an answer at all."""


def _with_curriculum() -> list[str]:
    from reasoning_gym.factory import CURRICULA

    return [name for name in all_datasets() if name.removeprefix(REASONING_GYM) in CURRICULA]


if __name__ == "__main__":
    ReasoningGymEnv.cli()
