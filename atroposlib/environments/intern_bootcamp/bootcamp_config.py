"""Settings of the InternBootcamp environment."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from atroposlib.environments.single_turn import SingleTurnConfig
from atroposlib.type_definitions import Json, JsonObject

RANDOM_TASK = "RandomTask"
"""`task_name` of a mixture of `task_weights`, or of all classes of a checkout."""
ALL_DATASETS = "reasoning_gym"
"""`task_name` of a mixture of all datasets of reasoning-gym."""


class InternBootcampEnvConfig(SingleTurnConfig):
    """Which tasks, how they are asked, and what an answer is worth."""

    task_name: str = Field(
        default=RANDOM_TASK,
        description="addition, larger_of_two, first_letter, capitals, letter_count, sorting, reasoning_gym:<dataset>, "
        "a class of internbootcamp_path, RandomTask for a mixture, or reasoning_gym for one of all its datasets.",
    )
    task_params: JsonObject = Field(
        default_factory=dict, description="Parameters of the task; of a mixture: task name to its parameters."
    )
    task_weights: dict[str, PositiveFloat] | None = Field(
        default=None,
        description="Mixture: task name to its weight. null: every class of internbootcamp_path alike; without a "
        "path, every task of our own, which only a model of the embedded engine is asked.",
    )
    internbootcamp_path: str | None = Field(default=None, description="Folder of a checkout of InternBootcamp.")
    quarantine_path: str | None = Field(
        default=None,
        description="Classes not to use, as `python -m atroposlib.environments.intern_bootcamp.quarantine` wrote them.",
    )

    system_prompt: str | None = Field(
        default=None, description="null: an instruction to think when require_reasoning is on, else none; empty: none."
    )
    temperature: float = Field(default=0.7, ge=0, description="Sampling temperature of rollouts; evaluation uses 0.")
    top_p: float = Field(default=0.9, gt=0, le=1, description="Nucleus sampling of rollouts.")

    correct_reward: float = Field(default=1.0, description="Score of a right answer.")
    incorrect_reward: float = Field(default=-0.5, description="Score of a wrong answer; partial credit is added to it.")
    format_bonus: float = Field(default=0.2, ge=0, description="Partial credit of a wrong answer in the right form.")
    require_reasoning: bool = Field(
        default=True, description="Give no credit without <think>...</think> before the answer."
    )
    min_reasoning_length: int = Field(
        default=50, ge=0, description="Characters below which credit shrinks in proportion."
    )

    eval_problems: PositiveInt | None = Field(default=20, description="Problems of an evaluation.")
    verifier_workers: PositiveInt = Field(
        default=2, description="Processes for generators and verifiers that are not ours."
    )
    verifier_timeout_s: PositiveFloat = Field(
        default=10, description="Seconds one call of a generator or verifier may take."
    )
    verifier_memory_mb: PositiveInt = Field(default=2048, description="Address space of such a process, in MiB.")

    @classmethod
    def reset_by(cls, flags: Mapping[str, Json]) -> JsonObject:
        """As for every environment; another choice of tasks ends the mixture, or the one task, of the YAML file."""
        reset = super().reset_by(flags)
        if flags.keys() & {"task_name", "task_weights"}:
            reset |= {"task_name": RANDOM_TASK, "task_weights": None, "task_params": {}}
        return reset

    @model_validator(mode="after")
    def _weights_belong_to_a_mixture(self) -> Self:
        if self.task_weights is not None and self.task_name != RANDOM_TASK:
            raise ValueError(
                f"task_weights need task_name {RANDOM_TASK}, but it is {self.task_name!r}; drop one of both"
            )
        if self.task_weights == {}:
            raise ValueError("task_weights is empty; name at least one task, or use null for all")
        return self
