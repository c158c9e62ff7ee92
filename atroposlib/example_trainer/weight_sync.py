"""How a rollout engine gets the trained weights: one method, `push`, for every kind of engine.

A push returns when the engine answers with the new weights, and raises WeightSyncError when it does not: training
against an engine of unknown weights is worse than stopping. Only processes that `RestartSync` started are ended.
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.engine_requests import Engine, Engines, WeightSyncError
from atroposlib.example_trainer.exports import (
    CURRENT_GGUF,
    FOLDERS,
    GGUF_FILES,
    exports_folder,
    keep_newest,
    replace_link,
    save_folder,
)
from atroposlib.example_trainer.policy import Policy
from atroposlib.example_trainer.vllm_sync import VLLMLoraSync, VLLMSync

logger = logging.getLogger(__name__)

_UPDATE = "/update_weights_from_disk"
_FLUSH = "/flush_cache?timeout=1"  # seconds that SGLang waits for a moment without requests
_HEAD_START_S = 0.02  # for the update, before each try to flush


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
        from atroposlib.example_trainer.gguf_weights import GGUFExporter
        from atroposlib_engine.models import resolve_model

        self._engines = Engines(config)
        self._folder = folder
        self._exporter = GGUFExporter(resolve_model(config.model_name).gguf, config.engine_dtype)

    def push(self, policy: Policy, version: int) -> None:
        """Export and reload."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"weights_{version:08d}.gguf"
        self._exporter.write(policy.merged_state(), target)
        replace_link(self._folder / CURRENT_GGUF, target)
        body = {"model_path": str(target.resolve()), "weight_version": str(version)}
        self._engines.post("/update_weights_from_disk", body)
        keep_newest(self._folder, GGUF_FILES)

    def close(self) -> None:
        """Let go of the connections."""
        self._engines.close()


class SGLangSync:
    """SGLang: a Hugging Face folder, then `/update_weights_from_disk`, in one of three ways (`sync_mode`).

    drain: SGLang finishes running requests first; with long responses that takes minutes.
    abort: running requests are aborted, the environment repeats them. Takes a second, as SGLang looks once a second
        whether they are gone.
    keep: generation is paused and requests go on with the new weights; prefixes cached under the old weights stay in
        use until they are evicted, and a reply that spans the update names only its last version.

    The update itself never flushes the prefix cache: an update that cannot flush because the last batch is not yet
    put away ends the server (0.5.11: one of some dozen updates under load). `/flush_cache` only says no.
    """

    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        self._engines = Engines(config)
        self._folder = folder
        self._update = {"drain": _drain, "abort": _abort, "keep": _keep}[config.sync_mode]

    def push(self, policy: Policy, version: int) -> None:
        """Save and update."""
        target = save_folder(policy, self._folder, version)
        body = {"model_path": str(target.resolve()), "weight_version": str(version), "flush_cache": False}
        self._engines.each(partial(self._update, body=body))
        keep_newest(self._folder, FOLDERS)

    def close(self) -> None:
        """Let go of the connections."""
        self._engines.close()


def _drain(engine: Engine, body: dict[str, Any]) -> None:
    """Flush in the moment in which running requests are finished and new ones still wait for the update."""
    with ThreadPoolExecutor(1) as thread:
        update = thread.submit(engine.post, _UPDATE, body)
        flushed = ended = False
        while not (flushed or ended):
            ended = bool(wait([update], timeout=_HEAD_START_S).done)
            flushed = engine.did(_FLUSH)
        update.result()
    if not flushed:
        logger.warning("%s is busy and kept its prefix cache: prompts it knows use old weights for now", engine.url)


def _abort(engine: Engine, body: dict[str, Any]) -> None:
    """Update and flush while nothing runs."""
    with _paused(engine, "abort"):
        engine.post(_UPDATE, body)
        engine.post(_FLUSH)


def _keep(engine: Engine, body: dict[str, Any]) -> None:
    """Update under the requests."""
    with _paused(engine, "retract"):
        engine.post(_UPDATE, body)


@contextlib.contextmanager
def _paused(engine: Engine, mode: str) -> Iterator[None]:
    """Pause, and continue also when the update failed."""
    engine.post("/pause_generation", {"mode": mode})
    try:
        yield
    finally:
        engine.post("/continue_generation", {})


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
        if self._is_healthy():
            raise WeightSyncError(
                f"{self._config.sync_urls[0]} already answers, by a process that this trainer did not start and that "
                "would be taken for the new engine (a killed trainer leaves its engine behind); end it"
            )
        command = [part.replace("{model}", str(target.resolve())) for part in self._config.engine_command]
        with (self._folder / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._wait_until_healthy(command)
        keep_newest(self._folder, FOLDERS)

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
        deadline = time.monotonic() + self._config.engine_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise WeightSyncError(
                    f"{command[0]} ended with exit code {self._process.returncode}; read {self._folder / 'engine.log'}"
                )
            if self._is_healthy():
                return
            time.sleep(0.2)
        raise WeightSyncError(
            f"{self._config.sync_urls[0]}/health was not 200 within {self._config.engine_timeout_s:.0f} s; read "
            f"{self._folder / 'engine.log'}"
        )

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self._config.sync_urls[0]}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


KINDS: dict[str, Callable[[TrainingConfig, Path], WeightSync]] = {
    "embedded": EmbeddedSync,
    "sglang": SGLangSync,
    "vllm": VLLMSync,
    "vllm_lora": VLLMLoraSync,
    "restart": RestartSync,
}


def names_versions(config: TrainingConfig) -> bool:
    """True when each push tells the engines a version, which those that can then name in their replies."""
    return config.weight_sync not in ("none", "restart")


def make_sync(config: TrainingConfig, save_path: Path) -> WeightSync:
    """The kind that the config names; exported weights go to `<save_path>/engine`."""
    if config.weight_sync == "none":
        return NoSync()
    return KINDS[config.weight_sync](config, exports_folder(save_path))
