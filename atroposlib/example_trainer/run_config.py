"""Settings of `atropos-grpo-run`: those of the trainer, and which engine and environment run next to it."""

import contextlib
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.config import RecipeSettings, TrainingConfig
from atroposlib.example_trainer.mixture import Source
from atroposlib.type_definitions import Json, JsonObject

HIGHEST_SGLANG_PORT = 65_535 - 10_000
_OF_DATASETS = {"temperature", "seed", "reward", "system_prompt", "chat_template"}
"""Settings of the run that are also ones of the environment which asks the problems of `datasets`."""
_DECIDED = {
    "group_size": "--num-generations",
    "max_token_length": "--max-completion-length",
    "total_steps": "--training-steps",
    "tokenizer_name": "--model-name",
    "rollout_server_url": "--run-dir",
    "progress_path": "--run-dir",
}


class EngineSettings(RecipeSettings):
    """The inference engine."""

    engine: Literal["embedded", "sglang", "vllm", "external"] = Field(
        "embedded", description="Started here, unless external: then engine_urls says where it runs."
    )
    engine_port: PositiveInt | None = Field(
        None, le=65_535, description="Port on 127.0.0.1, for sglang up to 55535; null: a free one."
    )
    engine_slots: PositiveInt = Field(32, description="embedded: sequences generated at the same time.")
    engine_threads: PositiveInt | None = Field(None, description="embedded: CPU threads; null: all cores.")
    engine_args: list[str] = Field([], description="Further flags, handed to the engine as they are.")
    engine_ready_s: PositiveFloat = Field(1800, description="How long loading may take.")


class EnvironmentSettings(RecipeSettings):
    """The source of problems and scores: a script, or data sets with a reward."""

    environment: str | None = Field(
        None,
        description="The environment's Python file, next to the recipe or in the current folder; null: `datasets`.",
    )
    environment_config: JsonObject = Field({}, description="Fields of the environment's config, as JSON or YAML.")
    environment_workers: PositiveInt = Field(8, description="Problems rolled out at the same time.")
    hang_s: PositiveFloat | None = Field(
        1800, description="The environment is restarted after this many seconds without a sign of life; null: never."
    )
    datasets: list[Source] = Field([], description="Mixture of problem sets with columns problem and answer.")
    reward: Literal["answer_tag", "math"] = Field("answer_tag", description="How `datasets` answers are scored.")
    system_prompt: str | None = Field(None, description="datasets: system message of every prompt.")
    chat_template: str | None = Field(None, description="datasets: file with a Jinja template; null: the model's.")


class RunConfig(TrainingConfig, EngineSettings, EnvironmentSettings):
    """One run: everything it writes lies in `run_dir`."""

    run_dir: str = Field(description="Everything the run writes goes here; the same folder resumes.")
    restart_limit: PositiveInt = Field(5, description="Restarts of one service within ten minutes that end the run.")

    @classmethod
    def with_flags(cls, recipe: Mapping[str, Json], flags: Mapping[str, Json]) -> JsonObject:
        """As `Settings.with_flags`: other problems replace the recipe's, another engine its addresses.

        Raises:
            ConfigError: --environment-config sets what the run decides.
        """
        values = {**recipe, **flags}
        if "environment" in flags:
            values["datasets"] = flags.get("datasets", [])
        elif "datasets" in flags:
            values["environment"] = None
        if "engine_urls" in flags:
            values["engine"] = flags.get("engine", "external")
        elif flags.get("engine", "external") != "external":
            values["engine_urls"] = []
        theirs, own = flags.get("environment_config", {}), values.get("environment_config", {})
        if not (isinstance(theirs, dict) and isinstance(own, dict)):
            return values  # which is refused
        for key in theirs.keys() & _DECIDED.keys():
            raise ConfigError(
                f"--environment-config {key} would have no effect: the run decides it; give {_DECIDED[key]}"
            )
        shared = flags.keys() & own.keys() - theirs.keys()
        if values.get("datasets"):
            own = {key: value for key, value in own.items() if key not in shared & _OF_DATASETS}
        elif "temperature" in shared:  # which trainer and environment must agree on
            with contextlib.suppress(ValueError):  # no number: refused with the other fields
                own = {**own, "temperature": float(flags["temperature"])}
        if "environment_workers" in flags and "max_num_workers" not in theirs:
            own = {key: value for key, value in own.items() if key != "max_num_workers"}
        return {**values, "environment_config": own}

    @model_validator(mode="after")
    def _has_problems(self) -> Self:
        if (self.environment is None) == (not self.datasets):
            raise ConfigError("give either environment, a Python file, or datasets, a list of problem sets")
        if self.engine == "sglang" and (self.engine_port or 0) > HIGHEST_SGLANG_PORT:
            raise ConfigError(
                f"engine_port is {self.engine_port}, but SGLang also takes the port 10,000 above its own; give one "
                f"up to {HIGHEST_SGLANG_PORT}"
            )
        if self.sync_from == "gpu" and self.engine not in ("sglang", "external"):
            raise ConfigError(f"sync_from is 'gpu' but engine {self.engine!r}; only sglang maps the memory of a GPU")
        if self.engine == "external" and not self.engine_urls:
            raise ConfigError("engine is 'external' but engine_urls is empty; give the address of the running engine")
        if self.step_sequences % self.num_generations:
            raise ConfigError(
                f"one step takes {self.step_sequences} sequences (batch_size x gradient_accumulation_steps), which is "
                f"not a multiple of num_generations {self.num_generations}; groups are never split"
            )
        return self
