"""Upstream's entry points, each as the one loop with its way of updating the engine."""

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.loop import TrainResult, train
from atroposlib.example_trainer.recipe import check


def train_legacy(config: TrainingConfig) -> TrainResult:
    """All weights; the engine is restarted from each new folder when `engine_command` is given."""
    return train(_with(config, use_lora=False, weight_sync="restart" if config.engine_command else config.weight_sync))


def train_lora(config: TrainingConfig) -> TrainResult:
    """A LoRA adapter that a running vLLM loads after every update."""
    return train(_with(config, use_lora=True, weight_sync="vllm_lora"))


def train_lora_restart(config: TrainingConfig) -> TrainResult:
    """A LoRA adapter; the engine is restarted from the merged weights."""
    return train(_with(config, use_lora=True, weight_sync="restart"))


def train_shared_vllm(config: TrainingConfig) -> TrainResult:
    """Gone: it wrote into the GPU memory of a patched vLLM.

    Raises:
        ConfigError: always; it names what to use.
    """
    raise ConfigError(
        "train_shared_vllm needs a patched vLLM that shares its GPU memory; use weight_sync 'vllm' (weights through a "
        "folder), 'vllm_lora' or 'sglang'"
    )


def _with(config: TrainingConfig, **changes: object) -> TrainingConfig:
    return check(TrainingConfig, {**config.model_dump(exclude_unset=True), **changes})
