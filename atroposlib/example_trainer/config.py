"""Every setting of the trainer: one flat pydantic model, whose fields are the YAML keys and the command line flags.

Flags are the field names with dashes (`--clip-eps`). Precedence: flags > environment variables > YAML > defaults.
Names that upstream's trainer had keep their meaning. `sequences` are rows; one optimizer step takes
`batch_size * gradient_accumulation_steps` of them.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.losses import (
    AdvantageKind,
    Aggregation,
    KLControl,
    KLKind,
    MaxEntNLL,
    MismatchKind,
    PolicyLoss,
)
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


@dataclass(frozen=True)
class Preset:
    """One row. `eps_high` of cispo is the absolute cap of the ratio minus 1."""

    advantage: AdvantageKind
    loss: PolicyLoss
    aggregation: Aggregation
    eps_low: float = 0.2
    eps_high: float = 0.2
    xdr: bool = False


PRESETS: dict[str, Preset] = {
    "grpo": Preset("grpo", "clipped", "seq_mean_token_mean"),
    "dr_grpo": Preset("dr_grpo", "clipped", "seq_sum_const"),
    "dapo": Preset("grpo", "clipped", "token_mean", eps_high=0.28),
    "gspo": Preset("grpo", "gspo", "seq_mean_token_mean", 3e-4, 4e-4),
    "gspo_token": Preset("grpo", "gspo_token", "seq_mean_token_mean", 3e-4, 4e-4),
    "cispo": Preset("grpo", "cispo", "token_mean", eps_low=1.0, eps_high=0.28),
    "sapo": Preset("grpo", "sapo", "seq_mean_token_mean"),
    "reinforce": Preset("dr_grpo", "reinforce", "token_mean"),
    "rloo": Preset("rloo", "clipped", "seq_mean_token_mean"),
    "reinforce_pp": Preset("reinforce_pp", "clipped", "token_mean"),
    "reinforce_pp_baseline": Preset("reinforce_pp_baseline", "clipped", "token_mean"),
    "lite_ppo": Preset("batch_std", "clipped", "token_mean"),
    "distill": Preset("dr_grpo", "distill", "token_mean"),
    "maxent": Preset("dr_grpo", "maxent", "token_mean"),
    "xdr_grpo": Preset("dr_grpo", "clipped", "seq_sum_const", xdr=True),
}


class RecipeSettings(BaseModel):
    """Strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def with_flags(cls, recipe: Mapping[str, Json], flags: Mapping[str, Json]) -> JsonObject:
        """Return the recipe's values with those of flags in their place; what excludes a flag gives way to it."""
        return {**recipe, **flags}


class ModelSettings(RecipeSettings):
    """The model that is trained, and its precision."""

    model_name: str = Field(description="Model folder, hub name, or smollm2-135m, which pip can fetch.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Precision of forward and backward; auto: bfloat16 on a GPU, float32 on a CPU."
    )
    device: str = Field("auto", description="cuda, cuda:1, cpu; auto: a GPU when there is one.")
    compile_layers: bool | None = Field(
        None,
        description="Compile the decoder's layers: a minute once, then faster; null: on a GPU, all weights trained.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations: less memory, about 30% slower.")
    train_layer_indices: str | None = Field(None, description='Train only these layers, e.g. "20-31" or "0-3,28-31".')
    use_lora: bool = Field(False, description="Train a LoRA adapter instead of all weights.")
    lora_r: PositiveInt = 16
    lora_alpha: PositiveInt = 32
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Above 0 the trainer's log-probabilities differ per pass.")
    lora_target_modules: list[str] = Field(["q_proj", "v_proj"], description="Module names that get an adapter.")
    lora_layer_indices: str | None = Field(None, description="Layers that get an adapter; null: all.")


class OptimizerSettings(RecipeSettings):
    """The optimizer and its schedule."""

    lr: PositiveFloat = 1e-5
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        "adamw", description="adamw_8bit needs bitsandbytes, adafactor transformers."
    )
    adafactor_scale_parameter: bool = Field(False, description="adafactor: scale lr by the size of the weights.")
    adafactor_relative_step: bool = Field(False, description="adafactor: its own lr instead of ours.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="After the warm-up.")
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0


class BatchSettings(RecipeSettings):
    """The size of a step, and its cut into micro-batches."""

    training_steps: PositiveInt = Field(10, description="The run ends at this step, also after a resume.")
    batch_size: PositiveInt = Field(2, description="Sequences; times gradient_accumulation_steps gives one step's.")
    gradient_accumulation_steps: PositiveInt = 32
    seq_len: PositiveInt = Field(2048, description="Tokens of the longest sequence; longer ones are refused.")
    micro_batch_tokens: PositiveInt = Field(
        8192, description="Padded tokens per forward pass; lower it when memory runs out. The loss does not change."
    )
    share_prompts: bool = Field(
        True, description="Compute a prompt once for several responses, where attention is full and sdpa."
    )
    num_generations: PositiveInt = Field(8, description="Responses per prompt (atropos-grpo-run: the group size).")
    max_completion_length: PositiveInt = Field(512, description="Tokens of the longest response.")
    temperature: PositiveFloat = Field(1.0, description="Of the rollouts, where a group does not tell its own.")
    max_staleness: NonNegativeInt | None = Field(
        None, description="Drop groups whose first token is more than this many weight updates old; null: keep all."
    )
    seed: int = 0


class LossSettings(RecipeSettings):
    """The objective. A null takes the value of the objective's row in the table of docs/trainer.md."""

    objective: Literal[tuple(PRESETS)] = "grpo"  # pyright: ignore[reportInvalidTypeForm]
    aggregation: Aggregation | None = None
    clip_eps: PositiveFloat | None = Field(None, description="Ratios below 1 - clip_eps get no gradient when A < 0.")
    clip_eps_high: PositiveFloat | None = Field(None, description="Ratios above 1 + clip_eps_high, when A > 0.")
    clip_delta: PositiveFloat | None = Field(None, description="Two-sided: cap of the ratio when A < 0, e.g. 4.")
    std_ddof: int = Field(0, ge=0, le=1, description="0: population deviation (Atropos); 1: sample (TRL, verl).")
    advantage_eps: NonNegativeFloat = Field(1e-8, description="Added to the deviation that divides.")
    old_logprobs: Literal["inference", "trainer"] = Field(
        "inference", description="What ratios are taken against: the engine's numbers, or the trainer's own."
    )
    mismatch: MismatchKind = Field(
        "none", description="Correction between engine and trainer; needs old_logprobs: trainer."
    )
    mismatch_low: PositiveFloat = 0.5
    mismatch_high: PositiveFloat = 2.0
    off_policy_delta: PositiveFloat | None = Field(
        None, description="Drop rows with A < 0 whose mean log-probability fell by more than this (nats per token)."
    )
    mask_truncated: bool = Field(False, description="No loss on responses that reached max_completion_length.")
    overlong_cache: NonNegativeInt = Field(0, description="DAPO's soft penalty over this many last tokens; 0: none.")
    distill_coeff: NonNegativeFloat | None = Field(
        None,
        description="Times the KL from the teacher's top-k tokens, added to the loss; null: 1 for distill, else 0.",
    )
    entropy_metric: bool = Field(True, description="Log the entropy of the policy; one more pass over the logits.")


class KLSettings(RecipeSettings):
    """Distance to the reference: the model as it was at the start."""

    init_kl_coeff: NonNegativeFloat = Field(0.0, description="beta; 0 needs no reference model.")
    kl_kind: KLKind = "k3"
    kl_in_reward: bool = Field(False, description="Subtract beta k1 from the advantages instead of adding to the loss.")
    kl_is_correct: bool = Field(False, description="Multiply the KL term by the policy ratio (DeepSeek-V3.2).")
    kl_target: NonNegativeFloat | None = Field(None, description="Nats per token; null: beta stays.")
    kl_horizon: NonNegativeFloat | None = Field(None, description="How slowly beta follows.")
    kl_control: KLControl = "ziegler"
    kl_ctl_step_size: PositiveFloat = 0.15


class MaxEntSettings(RecipeSettings):
    """maxent and xdr_grpo only."""

    maxent_tau: NonNegativeFloat = Field(0.2, description="Temperature of the weights over a group; inf: Dr. GRPO.")
    maxent_q_temperature: PositiveFloat = Field(1.0, description="maxent: temperature of the softmax over rewards.")
    maxent_q_epsilon: NonNegativeFloat = Field(1e-6, description="maxent: least probability of a response.")
    maxent_length_normalize_ref: bool = Field(True, description="Reference scores per token.")
    maxent_nll: MaxEntNLL = "token_mean"
    maxent_skip_constant: bool = Field(True, description="Leave out groups whose rewards are all equal.")
    maxent_target_weight_entropy: NonNegativeFloat | None = Field(None, description="Nats; null: tau stays.")
    maxent_tau_lr: PositiveFloat = 0.05
    maxent_tau_min: PositiveFloat = 0.01
    maxent_tau_max: PositiveFloat = 10.0
    maxent_tau_warmup_steps: NonNegativeInt = 0


class ConnectionSettings(RecipeSettings):
    """The trajectory API, and how the engine gets new weights."""

    atropos_url: str = "http://localhost:8000"
    batch_lease_s: PositiveFloat = Field(
        1800, description="A batch that no checkpoint holds after this time is delivered again."
    )
    batch_wait_s: PositiveFloat | None = Field(
        None, description="Give up when no batch came for so long; null: wait, and say every 30 s what is missing."
    )
    weight_sync: Literal["none", "embedded", "sglang", "vllm", "vllm_lora", "restart"] = "none"
    sync_mode: Literal["drain", "abort", "keep"] = Field(
        "drain", description="sglang, vllm: running requests are finished, aborted, or continue with the new weights."
    )
    sync_from: Literal["disk", "gpu"] = Field(
        "disk",
        description="sglang, vllm: weights go through a folder, or stay in GPU memory that an engine here maps.",
    )
    sync_interval: PositiveInt = Field(1, description="Steps between weight updates of the engine.")
    engine_urls: list[str] = Field([], description="Engines to update, e.g. http://localhost:9000.")
    engine_command: list[str] = Field([], description="restart: the engine's command; {model} is the weights' folder.")
    engine_dtype: Literal["F16", "Q8_0", "F32"] = Field("F16", description="embedded: type of the exported weights.")
    engine_timeout_s: PositiveFloat = Field(600, description="A weight update that takes longer is an error.")
    vllm_port: PositiveInt = Field(9001, le=65_535, description="Used when engine_urls is empty.")
    vllm_tp_size: PositiveInt = 1
    max_model_len: PositiveInt = 4096
    gpu_memory_utilization: float = Field(0.45, gt=0, le=1)


class OutputSettings(RecipeSettings):
    """Outputs of the trainer."""

    save_path: str = Field("trained_model_checkpoints", description="Checkpoints; the same folder resumes.")
    checkpoint_interval: PositiveInt = Field(3, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(2, description="Older ones are deleted.")
    resume: bool = Field(True, description="Resume from the newest checkpoint in save_path.")
    save_final: bool = Field(True, description="Write save_path/final as a Hugging Face folder at the end.")
    log_dir: str = Field("logs", description="metrics.jsonl and samples.jsonl.")
    samples_per_step: NonNegativeInt = Field(4, description="Rows of the samples table.")
    use_wandb: bool = False
    wandb_project: str | None = None
    wandb_group: str | None = None
    wandb_run_name: str | None = None


class TrainingConfig(
    ModelSettings,
    OptimizerSettings,
    BatchSettings,
    LossSettings,
    KLSettings,
    MaxEntSettings,
    ConnectionSettings,
    OutputSettings,
):
    """All of the above."""

    @property
    def step_sequences(self) -> int:
        """Sequences of one optimizer step; what the trainer registers as its batch size."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def preset(self) -> Preset:
        """The objective with this config's overrides; `clip_eps` alone sets both bounds where they are equal."""
        row = PRESETS[self.objective]
        both = self.clip_eps if row.eps_low == row.eps_high else None
        return replace(
            row,
            aggregation=self.aggregation or row.aggregation,
            eps_low=self.clip_eps or row.eps_low,
            eps_high=self.clip_eps_high or both or row.eps_high,
        )

    @property
    def teacher_weight(self) -> float:
        """The factor of the teacher's KL in the loss."""
        return float(self.objective == "distill") if self.distill_coeff is None else self.distill_coeff

    @property
    def sync_urls(self) -> list[str]:
        return self.engine_urls or [f"http://127.0.0.1:{self.vllm_port}"]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.mismatch != "none" and self.old_logprobs == "inference":
            raise ConfigError(
                f"mismatch is {self.mismatch!r} but old_logprobs is 'inference', which already takes the ratio against "
                "the engine; set old_logprobs to 'trainer' or mismatch to 'none'"
            )
        if self.sync_from == "gpu" and (self.weight_sync not in ("sglang", "vllm", "none") or self.use_lora):
            raise ConfigError(
                f"sync_from is 'gpu', weight_sync {self.weight_sync!r}, use_lora {self.use_lora}; GPU memory is only "
                "handed to sglang and vllm, and without an adapter: set sync_from to 'disk'"
            )
        if self.weight_sync == "restart" and not self.engine_command:
            raise ConfigError("weight_sync is 'restart' but engine_command is empty; give the engine's command")
        if self.weight_sync == "vllm_lora" and not self.use_lora:
            raise ConfigError("weight_sync is 'vllm_lora' but use_lora is false; set --use-lora or another weight_sync")
        if self.max_completion_length > self.seq_len:
            raise ConfigError(
                f"max_completion_length is {self.max_completion_length} but seq_len, prompt and response together, is "
                f"{self.seq_len} tokens; raise the one or lower the other"
            )
        if self.kl_in_reward and self.objective in ("maxent", "distill"):
            raise ConfigError(
                f"kl_in_reward needs advantages, which objective {self.objective!r} does not have; set it to false"
            )
        if self.distill_coeff and self.preset.loss == "maxent":
            raise ConfigError(
                "distill_coeff is added to a loss per token, which objective 'maxent' does not have; set it to "
                "0, or use another objective"
            )
        if self.objective == "distill" and self.teacher_weight == 0:
            raise ConfigError("objective is 'distill' but distill_coeff is 0, so there is no loss; leave it out")
        if self.objective == "maxent" and math.isinf(self.maxent_tau):
            raise ConfigError("maxent_tau is inf; use objective 'dr_grpo' for uniform weights")
        return self


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


class Source(RecipeSettings):
    """One part of a mixture: a file of JSON lines or Parquet, or a hub name that the package `datasets` loads."""

    id: str = Field(description="A .jsonl or .parquet file, or a data set on the hub.")
    config: str | None = Field(None, description="hub: name of the configuration.")
    split: str = Field("train", description="hub: which split.")
    columns: dict[str, str] | None = Field(
        None, description="Our column to theirs, e.g. {problem: question, answer: solution}; null: all, as they are."
    )
    weight: float = Field(1.0, gt=0, le=1, description="Fraction of the rows that is used.")


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
    system_prompt: str | None = Field(None, description="datasets: system message; null: the form of the reward.")
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
        if self.sync_from == "gpu" and self.engine == "embedded":
            raise ConfigError("sync_from is 'gpu' but engine 'embedded'; only sglang and vllm map the memory of a GPU")
        if self.engine == "external" and not self.engine_urls:
            raise ConfigError("engine is 'external' but engine_urls is empty; give the address of the running engine")
        if self.step_sequences % self.num_generations:
            raise ConfigError(
                f"one step takes {self.step_sequences} sequences (batch_size x gradient_accumulation_steps), which is "
                f"not a multiple of num_generations {self.num_generations}; groups are never split"
            )
        return self
