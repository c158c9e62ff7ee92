"""Weights into vLLM: all of them reloaded while it is paused, or a LoRA adapter swapped by name.

A reload of vLLM's CPU build leaves an output layer that is tied to the embedding as it was.
"""

import re
from functools import partial
from pathlib import Path

from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.engine_requests import Engine, Engines, WeightSyncError
from atroposlib.example_trainer.exports import (
    ADAPTER_NAME,
    ADAPTERS,
    CURRENT_ADAPTER,
    FOLDERS,
    keep_newest,
    replace_link,
    save_folder,
    write_whole,
)
from atroposlib.example_trainer.policy import Policy

_PAUSE = {"drain": "wait", "abort": "abort", "keep": "keep"}
"""vLLM's names of our `sync_mode`."""
_PAUSES_SINCE = (0, 16)
"""Older versions cannot say what becomes of running requests."""


class VLLMSync:
    """vLLM 0.16 or later with VLLM_SERVER_DEV_MODE=1.

    Requests in flight are finished, aborted, or kept and recomputed under the new weights (`sync_mode`); its prefix
    cache is dropped with the old weights.
    """

    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        self._engines = Engines(config)
        self._folder = folder
        self._pause = _PAUSE[config.sync_mode]

    def push(self, policy: Policy, version: int) -> None:
        """Save and reload."""
        for url, reply in self._engines.get("/version").items():
            require_pausing(url, str(reply.get("version")))
        written = save_folder(policy, self._folder, version)
        self._engines.each(partial(_reload, pause=self._pause, weights=str(written.resolve()), version=str(version)))
        keep_newest(self._folder, FOLDERS)

    def close(self) -> None:
        """Let go of the connections."""
        self._engines.close()


def _reload(engine: Engine, *, pause: str, weights: str, version: str) -> None:
    """Pause, reload, drop what was computed with the old weights, name the version; resume also when that failed."""
    engine.post(f"/pause?mode={pause}")
    try:
        engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": weights}})
        engine.post("/reset_prefix_cache?reset_running_requests=true")
        engine.post("/update_weight_version", {"new_version": version}, optional=True)
    finally:
        engine.post("/resume")


class VLLMLoraSync:
    """vLLM with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: swap the adapter called `policy`.

    Running requests go on with the new adapter. Each version has a path of its own, as vLLM keeps the prefix cache of
    an adapter by its path.
    """

    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        self._engines = Engines(config)
        self._folder = folder

    def push(self, policy: Policy, version: int) -> None:
        """Save the adapter and load it over the old one."""
        target = self._folder / f"adapter_{version:08d}"
        write_whole(target, lambda folder: policy.model.save_pretrained(folder))  # pyright: ignore
        replace_link(self._folder / CURRENT_ADAPTER, target)
        body = {"lora_name": ADAPTER_NAME, "lora_path": str(target.resolve()), "load_inplace": True}
        self._engines.post("/v1/load_lora_adapter", body)
        self._engines.post("/update_weight_version", {"new_version": str(version)}, optional=True)
        keep_newest(self._folder, ADAPTERS)

    def close(self) -> None:
        """Let go of the connections."""
        self._engines.close()


def require_pausing(url: str, version: str) -> None:
    """WeightSyncError for a release of vLLM that cannot pause as asked; development builds pass."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and "dev" not in version and (int(numbers[1]), int(numbers[2])) < _PAUSES_SINCE:
        raise WeightSyncError(
            f"{url} is vLLM {version}, which cannot take weights while requests run; install 0.16 or later, or set "
            "weight_sync to 'restart'"
        )
