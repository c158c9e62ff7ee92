"""How a rollout engine gets the trained weights: one method, `push`, for every kind of engine.

A push returns when the engine answers with the new weights, and raises WeightSyncError when it does not: training
against an engine of unknown weights is worse than stopping. Only processes that `RestartSync` started are ended.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from atroposlib.errors import AtroposError
from example_trainer.config import TrainingConfig
from example_trainer.policy import Policy

logger = logging.getLogger(__name__)

_KEPT_EXPORTS = 2


class WeightSyncError(AtroposError, RuntimeError):
    """An engine did not take the weights."""


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

        self._engines = _Engines(config)
        self._folder = folder
        self._exporter = GGUFExporter(resolve_model(config.model_name).gguf, config.engine_dtype)

    def push(self, policy: Policy, version: int) -> None:
        """Export and reload."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"weights_{version:08d}.gguf"
        self._exporter.write(policy.merged_state(), target)
        body = {"model_path": str(target.resolve()), "weight_version": str(version)}
        self._engines.post("/update_weights_from_disk", body)
        _keep_newest(self._folder, "weights_*.gguf")

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
        self._engines = _Engines(config)
        self._folder = folder
        self._mode = config.sync_mode

    def push(self, policy: Policy, version: int) -> None:
        """Save and update."""
        target = _save_folder(policy, self._folder, version)
        body = {"model_path": str(target.resolve()), "weight_version": str(version)}
        if self._mode == "keep":
            self._while_paused({**body, "flush_cache": False})
        else:
            self._engines.post("/update_weights_from_disk", {**body, "abort_all_requests": self._mode == "abort"})
        _keep_newest(self._folder, "weights_*")

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


class VLLMSync:
    """vLLM with `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1, serving the folder `<save_path>/engine/current`.

    Its workers reload from the path they were started with, so the weights are written to that same path.
    """

    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        self._engines = _Engines(config)
        self._folder = folder

    def push(self, policy: Policy, version: int) -> None:
        """Save, sleep (weights and cache are dropped), reload, wake."""
        written = _save_folder(policy, self._folder, version)
        _replace_link(self._folder / "current", written)
        self._engines.post("/sleep?level=2", None)
        self._engines.post("/wake_up?tags=weights", None)
        self._engines.post("/collective_rpc", {"method": "reload_weights"})
        self._engines.post("/wake_up?tags=kv_cache", None)
        _keep_newest(self._folder, "weights_*")

    def close(self) -> None:
        """Let go of the connections."""
        self._engines.close()


class VLLMLoraSync:
    """vLLM with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: swap the adapter called `policy`."""

    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        self._engines = _Engines(config)
        self._folder = folder

    def push(self, policy: Policy, version: int) -> None:
        """Save the adapter and load it over the old one."""
        target = self._folder / f"adapter_{version:08d}"
        _written_whole(target, lambda folder: policy.model.save_pretrained(folder))  # pyright: ignore
        body = {"lora_name": "policy", "lora_path": str(target.resolve()), "load_inplace": True}
        self._engines.post("/v1/load_lora_adapter", body)
        _keep_newest(self._folder, "adapter_*")

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
        target = _save_folder(policy, self._folder, version)
        self.close()
        command = [part.replace("{model}", str(target.resolve())) for part in self._config.engine_command]
        with (self._folder / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._wait_until_healthy(command)
        _keep_newest(self._folder, "weights_*")

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
    return KINDS[config.weight_sync](config, save_path / "engine")


class _Engines:
    """The same request to every engine."""

    def __init__(self, config: TrainingConfig) -> None:
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in config.sync_urls]
        self._client = httpx.Client(timeout=config.engine_timeout_s)

    def post(self, path: str, body: dict[str, Any] | None) -> None:
        """WeightSyncError unless every engine answers 2xx and does not say `success: false`."""
        for url in self._urls:
            try:
                reply = self._client.post(url + path, json=body)
            except httpx.HTTPError as error:
                raise WeightSyncError(f"POST {url}{path} failed: {type(error).__name__} {error}") from error
            if not reply.is_success or _says_no(reply):
                raise WeightSyncError(f"POST {url}{path} answered {reply.status_code}: {reply.text[:500]}")

    def close(self) -> None:
        self._client.close()


def _says_no(reply: httpx.Response) -> bool:
    try:
        content = reply.json()
    except json.JSONDecodeError:
        return False
    return isinstance(content, dict) and content.get("success") is False


def _save_folder(policy: Policy, folder: Path, version: int) -> Path:
    """The weights as `<folder>/weights_<version>`."""
    target = folder / f"weights_{version:08d}"
    _written_whole(target, policy.save_merged)
    return target


def _written_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Build a folder beside its place, then rename it."""
    making = target.with_name(f".making.{target.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    write(making)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(making, target)


def _replace_link(link: Path, target: Path) -> None:
    making = link.with_name(f".{link.name}.making")
    making.unlink(missing_ok=True)
    making.symlink_to(target.resolve(), target_is_directory=True)
    os.replace(making, link)


def _keep_newest(folder: Path, pattern: str) -> None:
    for old in sorted(folder.glob(pattern))[:-_KEPT_EXPORTS]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
