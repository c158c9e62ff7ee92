"""A trainer to start from: the GRPO and MaxEnt family on batches of the trajectory API.

The names that upstream's `example_trainer` exported are here and import torch only when used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atroposlib.example_trainer.config import TrainingConfig
    from atroposlib.example_trainer.grpo import config_from_args, parse_args
    from atroposlib.example_trainer.trainers import train_legacy, train_lora, train_lora_restart, train_shared_vllm

__all__ = [
    "TrainingConfig",
    "config_from_args",
    "parse_args",
    "train_legacy",
    "train_lora",
    "train_lora_restart",
    "train_shared_vllm",
]

_HOMES = {
    "TrainingConfig": "config",
    "parse_args": "grpo",
    "config_from_args": "grpo",
    **dict.fromkeys(("train_legacy", "train_lora", "train_lora_restart", "train_shared_vllm"), "trainers"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
