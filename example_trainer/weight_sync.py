"""How a rollout engine gets the trained weights: one method, `push`, for every kind of engine.

A push returns when the engine answers with the new weights, and raises WeightSyncError when it does not: training
against an engine of unknown weights is worse than stopping. Only processes that `RestartSync` started are ended.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from example_trainer.config import TrainingConfig
from example_trainer.engine_requests import Engines, WeightSyncError
from example_trainer.exports import exports_folder, keep_newest, save_folder
from example_trainer.policy import Policy
from example_trainer.vllm_sync import VLLMLoraSync, VLLMSync


class WeightSync(Protocol):
    """One kind of engine."""

    def push(self, policy: Policy, version: int) -> None:
        """Give every engine the policy's weights, to be called `version` in its replies."""
        ...

    def close(self) -> None:
        """End what this object started."""
        ...


class NoSync:
    """The engine is left alone: off-policy, or it follows the weights in its own way."""

    def push(self, policy: Policy, version: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class EmbeddedSync:
    """The embedded engine: export a GGUF file, then reload in place. The engine waits for running requests itself."""

    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        from atroposlib.engines.models import resolve_model
        from example_trainer.gguf_weights import GGUFExporter

        self._engines = Engines(config)
        self._folder = folder
        self._exporter = GGUFExporter(resolve_model(config.model_name).gguf, config.engine_dtype)

    def push(self, policy: Policy, version: int) -> None:
        """Export and reload."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"weights_{version:08d}.gguf"
        self._exporter.write(policy.merged_state(), target)
        body = {"model_path": str(target.resolve()), "weight_version": str(version)}
        self._engines.post("/update_weights_from_disk", body)
        keep_newest(self._folder, "weights_*.gguf")

    def close(self) -> None:
        """Let go of the connections."""
        self._engines.close()


class SGLangSync:
    """SGLang: a Hugging Face folder, then `/update_weights_from_disk`, in one of three ways (`sync_mode`).

    drain: SGLang finishes running requests first; with long responses that takes minutes.
    abort: running requests are aborted, the environment repeats them.
    keep: generation is paused and requests go on with the new weights. `flush_cache` must be false there, as the
    default flush ends a paused server; so prefixes cached under the old weights stay in use until they are evicted,
    and a reply that spans the update names only its last version.
    """

    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        self._engines = Engines(config)
        self._folder = folder
        self._mode = config.sync_mode

    def push(self, policy: Policy, version: int) -> None:
        """Save and update."""
        target = save_folder(policy, self._folder, version)
        body = {"model_path": str(target.resolve()), "weight_version": str(version)}
        if self._mode == "keep":
            self._while_paused({**body, "flush_cache": False})
        else:
            self._engines.post("/update_weights_from_disk", {**body, "abort_all_requests": self._mode == "abort"})
        keep_newest(self._folder, "weights_*")

    def _while_paused(self, body: dict[str, Any]) -> None:
        """Pause, update, continue; continue also when the update failed."""
        self._engines.post("/pause_generation", {"mode": "retract"})
        try:
            self._engines.post("/update_weights_from_disk", body)
        finally:
            self._engines.post("/continue_generation", {})

    def close(self) -> None:
        """Let go of the connections."""
        self._engines.close()


class RestartSync:
    """Any engine: end the one we started, start it again from the new folder. `{model}` in the command is replaced."""

    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def push(self, policy: Policy, version: int) -> None:
        """Save, end our engine, start it from the new weights, wait until it is healthy."""
        target = save_folder(policy, self._folder, version)
        self.close()
        command = [part.replace("{model}", str(target.resolve())) for part in self._config.engine_command]
        with (self._folder / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._wait_until_healthy(command)
        keep_newest(self._folder, "weights_*")

    def close(self) -> None:
        """End the process group we started, and nothing else."""
        process, self._process = self._process, None
        if process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(timeout=30)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def _wait_until_healthy(self, command: Sequence[str]) -> None:
        assert self._process is not None
        url = self._config.sync_urls[0]
        deadline = time.monotonic() + self._config.engine_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise WeightSyncError(
                    f"{command[0]} ended with exit code {self._process.returncode}; read {self._folder / 'engine.log'}"
                )
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise WeightSyncError(
            f"{url}/health was not 200 within {self._config.engine_timeout_s:.0f} s; read {self._folder / 'engine.log'}"
        )


KINDS: dict[str, Callable[[TrainingConfig, Path], WeightSync]] = {
    "embedded": EmbeddedSync,
    "sglang": SGLangSync,
    "vllm": VLLMSync,
    "vllm_lora": VLLMLoraSync,
    "restart": RestartSync,
}


def make_sync(config: TrainingConfig, save_path: Path) -> WeightSync:
    """The kind that the config names; exported weights go to `<save_path>/engine`."""
    if config.weight_sync == "none":
        return NoSync()
    return KINDS[config.weight_sync](config, exports_folder(save_path))
