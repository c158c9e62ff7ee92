"""Checkpoints: everything a run needs to resume, written whole or not at all.

`<save_path>/step_00000012/` holds the weights as a Hugging Face (or PEFT) folder, `training_state.pt` (optimizer,
scheduler, random numbers) and `trainer.json` (step, controllers, batches). A folder is built next to its place and
renamed, so one with this name is complete.
"""

import json
import logging
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from atroposlib.errors import DataError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.exports import discard, write_whole
from atroposlib.example_trainer.learner import Learner
from atroposlib.example_trainer.objective import controller_state, restore_controllers
from atroposlib.example_trainer.policy import PEFT_NAMES, adapter_settings
from atroposlib.paths import sync_to_disk
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

_PREFIX = "step_"
_STATE = "training_state.pt"
_FACTS = "trainer.json"
_LASTING = ("model_name", "use_lora", "optimizer", "train_layer_indices")
"""Settings that stay as they were at the run's first start."""


def newest(save_path: Path) -> Path | None:
    """The complete checkpoint of the greatest step, or None."""
    return max(_ours(save_path), key=_step, default=None)


def save(learner: Learner, save_path: Path, *, batch_ids: Sequence[str], keep: int) -> Path:
    """Write the checkpoint of the learner's step and delete all but the newest `keep`.

    Args:
        batch_ids: batches whose update these weights hold and which the API may not know about yet.

    Raises:
        PathError: it cannot be written, as on a full disk; the earlier ones stay.
    """
    target = save_path / f"{_PREFIX}{learner.step:08d}"
    write_whole(target, lambda making: _write(learner, making, batch_ids))
    sync_to_disk(save_path)
    for old in sorted(_ours(save_path), key=_step)[:-keep]:
        discard(old)
    logger.info("checkpoint written: %s", target)
    return target


def _write(learner: Learner, making: Path, batch_ids: Sequence[str]) -> None:
    learner.policy.model.save_pretrained(making)  # pyright: ignore[reportCallIssue]
    learner.policy.tokenizer.save_pretrained(making)
    torch.save(
        {
            "optimizer": learner.optimizer.state_dict(),
            "scheduler": learner.scheduler.state_dict(),
            "random": _random_state(),
        },
        making / _STATE,
    )
    facts = {
        "step": learner.step,
        "batch_ids": list(batch_ids),
        "controllers": controller_state(learner.kl, learner.tau),
        **{name: getattr(learner.config, name) for name in _LASTING},
    }
    (making / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    for path in (*making.rglob("*"), making):
        sync_to_disk(path)


def read_facts(checkpoint: Path) -> JsonObject:
    """`trainer.json` of a checkpoint."""
    return _read(checkpoint, _FACTS)


def _read(checkpoint: Path, name: str) -> JsonObject:
    try:
        return {**json.loads((checkpoint / name).read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(checkpoint, name, error) from error


def _damaged(checkpoint: Path, name: str, error: Exception) -> DataError:
    return DataError(f"checkpoint {checkpoint} has no readable {name} ({error}); delete that folder")


def require_same_model(config: TrainingConfig, checkpoint: Path) -> None:
    """DataError when the checkpoint is of another model or adapter than the config's, whose place it would take."""
    facts = read_facts(checkpoint)
    found, asked = {name: facts[name] for name in _LASTING if name in facts}, config.model_dump()
    if config.use_lora and facts["use_lora"]:
        saved = _read(checkpoint, "adapter_config.json")
        asked |= adapter_settings(config)
        found |= {peft: sorted(saved[peft]) if isinstance(saved[peft], list) else saved[peft] for peft in PEFT_NAMES}
    for name, before in found.items():
        if before != asked[name]:
            what = f"an adapter with {PEFT_NAMES[name]}" if name in PEFT_NAMES else f"a training with {name}"
            raise DataError(
                f"checkpoint {checkpoint} holds {what} {before}, this run asks for {asked[name]}; take the change back "
                "or choose another save_path"
            )


def restore(learner: Learner, checkpoint: Path) -> list[str]:
    """Put optimizer, scheduler, controllers, random numbers and step back; the batch ids that were saved.

    Settings such as lr are the config's. The weights are loaded by `Learner(config, checkpoint=...)`.
    """
    facts = read_facts(checkpoint)
    try:
        state = torch.load(checkpoint / _STATE, map_location="cpu", weights_only=False)
    except Exception as error:  # torch and pickle raise many kinds; all mean that the file is damaged
        raise _damaged(checkpoint, _STATE, error) from error
    settings = [{**group, "params": None} for group in learner.optimizer.param_groups]
    learner.optimizer.load_state_dict(state["optimizer"])
    schedule = learner.scheduler
    schedule.load_state_dict({**state["scheduler"], "base_lrs": schedule.base_lrs})
    factors = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, own, (lr, factor) in zip(learner.optimizer.param_groups, settings, factors, strict=True):
        group.update({**own, "params": group["params"], "lr": lr * factor(schedule.last_epoch)})
    _set_random_state(state["random"])
    restore_controllers(learner.kl, learner.tau, facts["controllers"])
    learner.step = facts["step"]
    return facts["batch_ids"]


def _ours(save_path: Path) -> list[Path]:
    """Checkpoints by their name in full: a copy that a user made (`step_00000012_good`) is left alone."""
    return [path for path in save_path.iterdir() if re.fullmatch(rf"{_PREFIX}\d+", path.name)]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _random_state() -> JsonObject:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: JsonObject) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
