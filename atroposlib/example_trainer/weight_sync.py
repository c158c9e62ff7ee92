"""Trained weights into a rollout engine: one method, `push`, for every kind of engine.

A push returns when the engine answers with the new weights, and raises WeightSyncError when it does not: training
against an engine of unknown weights is worse than stopping. Only processes that `RestartSync` started are ended.
A reload of vLLM's CPU build leaves an output layer that is tied to the embedding as it was.
"""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from atroposlib.errors import AtroposError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.exports import (
    ADAPTER_NAME,
    ADAPTERS,
    CURRENT_ADAPTER,
    CURRENT_GGUF,
    FOLDERS,
    GGUF_FILES,
    exports_folder,
    in_the_making,
    keep_newest,
    replace_link,
    save_folder,
    write_whole,
)
from atroposlib.example_trainer.policy import Policy
from atroposlib.example_trainer.shared_weights import SharedWeights, Views, for_sglang, for_vllm
from atroposlib.paths import writable_dir
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

_NOT_FOUND = 404
STOP_GRACE_S = 10.0
"""For an update in progress when a signal comes; a busy engine may drain for minutes."""


class WeightSyncError(AtroposError, RuntimeError):
    """An engine did not take the weights."""


class Engine:
    """One engine, by its address."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self._client = client

    def post(self, path: str, body: JsonObject | None = None, *, optional: bool = False) -> None:
        """WeightSyncError unless the engine answers 2xx and does not say `success: false`.

        Args:
            optional: the engine may lack the route.
        """
        reply = self._ask("POST", path, body)
        if optional and reply.status_code == _NOT_FOUND:
            return
        if not _is_success(reply):
            raise WeightSyncError(f"POST {self.url}{path} answered {reply.status_code}: {reply.text[:500]}")

    def did(self, path: str, body: JsonObject | None = None) -> bool:
        """Return True when a POST to this path was a success."""
        with contextlib.suppress(WeightSyncError):
            return _is_success(self._ask("POST", path, body))
        return False

    def get(self, path: str) -> JsonObject:
        """Return the engine's answer; WeightSyncError unless it is 200 with JSON."""
        try:
            return self._ask("GET", path, None).raise_for_status().json()
        except (httpx.HTTPStatusError, json.JSONDecodeError) as error:
            raise WeightSyncError(f"GET {self.url}{path} failed: {type(error).__name__} {error}") from error

    def _ask(self, method: str, path: str, body: JsonObject | None) -> httpx.Response:
        try:
            return self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise WeightSyncError(f"{method} {self.url}{path} failed: {type(error).__name__} {error}") from error


class Engines:
    """All engines at once: none waits until another has finished its requests."""

    def __init__(self, config: TrainingConfig, should_stop: Callable[[], bool]) -> None:
        self._client = httpx.Client(timeout=config.engine_timeout_s)
        self._engines = [Engine(url.rstrip("/").removesuffix("/v1"), self._client) for url in config.sync_urls]
        self._should_stop = should_stop

    def each(self, action: Callable[[Engine], object]) -> None:
        """Do something to every engine, and raise the first error once all are through.

        A stop waits for `STOP_GRACE_S` only, as an engine that hangs would hold it up.
        """
        tasks = [_started(action, engine) for engine in self._engines]
        give_up = float("inf")
        while waiting := wait(tasks, timeout=0.1).not_done:
            if self._should_stop():
                give_up = min(give_up, time.monotonic() + STOP_GRACE_S)
            if time.monotonic() > give_up:
                raise WeightSyncError(f"{len(waiting)} of {len(tasks)} engines have not answered yet")
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    def post(self, path: str, body: JsonObject | None = None, *, optional: bool = False) -> None:
        self.each(lambda engine: engine.post(path, body, optional=optional))

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()


def _started(action: Callable[..., object], *args: object, **options: object) -> Future[object]:
    """Begin in a thread that a process which ends does not wait for."""
    future: Future[object] = Future()

    def act() -> None:
        try:
            future.set_result(action(*args, **options))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    return future


def _is_success(reply: httpx.Response) -> bool:
    if not reply.is_success:
        return False
    try:
        content = reply.json()
    except json.JSONDecodeError:
        return True
    return not (isinstance(content, dict) and content.get("success") is False)


class EnginesSync:
    """Kinds of engines that run already: their addresses, and the folder of exported weights."""

    def __init__(self, config: TrainingConfig, folder: Path, should_stop: Callable[[], bool]) -> None:
        self._engines = Engines(config, should_stop)
        self._folder = folder

    def close(self) -> None:
        """Let go of the connections."""
        self._engines.close()


class MergedSync(EnginesSync):
    """Whole weights, in one of two ways (`sync_from`).

    From the disk they go through a folder. From the GPU they stay where they are and the engine copies them; a folder
    is then written with each checkpoint only, for an engine that has to start again.
    """

    def __init__(self, config: TrainingConfig, folder: Path, should_stop: Callable[[], bool]) -> None:
        super().__init__(config, folder, should_stop)
        self._from_gpu = config.sync_from == "gpu"
        self._interval = config.checkpoint_interval
        self._shared: SharedWeights | None = None

    def push(self, policy: Policy, version: int) -> None:
        if not self._from_gpu:
            written = save_folder(policy.save_merged, self._folder, version)
            self._engines.each(partial(self._reload, weights=str(written.resolve()), version=str(version)))
        else:
            self._shared = self._shared or SharedWeights(policy, self._describe)
            self._shared.copy(policy)
            self._engines.each(partial(self._hand_over, places=self._shared.places, version=str(version)))
            if version % self._interval:
                return
            save_folder(policy.save_merged, self._folder, version)
        keep_newest(self._folder, FOLDERS)

    _describe: Callable[[Views], Any]

    def _reload(self, engine: Engine, weights: str, version: str) -> None:
        raise NotImplementedError

    def _hand_over(self, engine: Engine, places: Any, version: str) -> None:
        raise NotImplementedError


_PAUSE = {"drain": "wait", "abort": "abort", "keep": "keep"}
"""vLLM's names of our `sync_mode`."""
_PAUSES_SINCE, _MAPS_SINCE = (0, 16), (0, 22)
"""Versions of vLLM: older ones cannot say what becomes of running requests, or lack the routes for GPU memory."""


class VLLMSync(MergedSync):
    """vLLM with VLLM_SERVER_DEV_MODE=1.

    Requests in flight are finished, aborted, or kept and recomputed under the new weights (`sync_mode`); its prefix
    cache is dropped with the old weights.
    """

    _describe = staticmethod(for_vllm)

    def __init__(self, config: TrainingConfig, folder: Path, should_stop: Callable[[], bool]) -> None:
        super().__init__(config, folder, should_stop)
        self._pause = _PAUSE[config.sync_mode]

    def push(self, policy: Policy, version: int) -> None:
        self._engines.each(_require_mapping if self._from_gpu else _require_pausing)
        super().push(policy, version)

    def _reload(self, engine: Engine, weights: str, version: str) -> None:
        with self._paused(engine, version):
            engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": weights}})

    def _hand_over(self, engine: Engine, places: JsonObject, version: str) -> None:
        with self._paused(engine, version):
            _map(engine, places)

    @contextlib.contextmanager
    def _paused(self, engine: Engine, version: str) -> Iterator[None]:
        """Drop what was computed with the old weights, name the version; resume also when the update failed."""
        engine.post(f"/pause?mode={self._pause}")
        try:
            yield
            engine.post("/reset_prefix_cache?reset_running_requests=true")
            engine.post("/update_weight_version", {"new_version": version}, optional=True)
        finally:
            engine.post("/resume")


_BEGIN, _END = "/start_weight_update", "/finish_weight_update"


def _map(engine: Engine, places: JsonObject) -> None:
    """Let vLLM copy the weights out of our GPU memory."""
    engine.post("/init_weight_transfer_engine", {"init_info": {}})
    if not engine.did(_BEGIN, {}):  # a killed trainer may have left an update open
        engine.did(_END, {})
        engine.post(_BEGIN, {})
    try:
        engine.post("/update_weights", {"update_info": places})
    except WeightSyncError:
        # vLLM has put its weights aside for the update; an update without weights takes them back.
        engine.did(_BEGIN, {})
        engine.did(_END, {})
        raise
    engine.post(_END, {})


class VLLMLoraSync(EnginesSync):
    """vLLM with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: swap the adapter called `policy`.

    Running requests use the new adapter. Each version has a path of its own, as vLLM keeps the prefix cache of
    an adapter by its path.
    """

    def push(self, policy: Policy, version: int) -> None:
        """Save the adapter and load it over the old one."""
        target = self._folder / f"adapter_{version:08d}"
        write_whole(target, lambda folder: policy.model.save_pretrained(folder))  # pyright: ignore
        replace_link(self._folder / CURRENT_ADAPTER, target)
        body = {"lora_name": ADAPTER_NAME, "lora_path": str(target.resolve()), "load_inplace": True}
        self._engines.post("/v1/load_lora_adapter", body)
        self._engines.post("/update_weight_version", {"new_version": str(version)}, optional=True)
        keep_newest(self._folder, ADAPTERS)


def _require_pausing(engine: Engine) -> None:
    """WeightSyncError for a release of vLLM that cannot pause as asked."""
    _require(engine, _PAUSES_SINCE, "cannot take weights while requests run", "weight_sync to 'restart'")


def _require_mapping(engine: Engine) -> None:
    """WeightSyncError for a release of vLLM that cannot take weights from GPU memory."""
    _require(engine, _MAPS_SINCE, "cannot take weights from GPU memory", "sync_from to 'disk'")


def _require(engine: Engine, since: tuple[int, int], lack: str, instead: str) -> None:
    """Development builds pass."""
    version = str(engine.get("/version").get("version"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and "dev" not in version and (int(numbers[1]), int(numbers[2])) < since:
        raise WeightSyncError(
            f"{engine.url} is vLLM {version}, which {lack}; install {since[0]}.{since[1]} or later, or set {instead}"
        )


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
        pass

    def close(self) -> None:
        pass


class EmbeddedSync(EnginesSync):
    """The embedded engine: export a GGUF file, then reload in place. The engine waits for running requests itself."""

    def __init__(self, config: TrainingConfig, folder: Path, should_stop: Callable[[], bool]) -> None:
        from atroposlib.example_trainer.gguf_weights import GGUFExporter
        from atroposlib_engine.models import resolve_model

        super().__init__(config, folder, should_stop)
        self._exporter = GGUFExporter(resolve_model(config.model_name).gguf, config.engine_dtype)

    def push(self, policy: Policy, version: int) -> None:
        target = self._folder / f"weights_{version:08d}.gguf"
        with in_the_making(target) as making:
            self._exporter.write(policy.merged_state(), making)
            os.replace(making, target)
        replace_link(self._folder / CURRENT_GGUF, target)
        body = {"model_path": str(target.resolve()), "weight_version": str(version)}
        self._engines.post("/update_weights_from_disk", body)
        keep_newest(self._folder, GGUF_FILES)


class SGLangSync(MergedSync):
    """SGLang, in one of three ways (`sync_mode`).

    drain: SGLang finishes running requests first; with long responses that takes minutes.
    abort: running requests are aborted, the environment repeats them. Takes a second, as SGLang looks once a second
        whether they are gone.
    keep: generation is paused and requests continue with the new weights; prefixes cached under the old weights stay in
        use until they are evicted, and a reply that spans the update names only its last version. The first update of
        a process drains: what is cached under the names that it will use, by an earlier run or before a resume, goes.

    The update itself never flushes the prefix cache: an update that cannot flush because the last batch is not yet
    put away ends the server (0.5.11: one of some dozen updates under load). `/flush_cache` only says no.
    """

    _describe = staticmethod(for_sglang)

    def __init__(self, config: TrainingConfig, folder: Path, should_stop: Callable[[], bool]) -> None:
        super().__init__(config, folder, should_stop)
        self._later_updates = {"drain": _drain, "abort": _abort, "keep": _keep}[config.sync_mode]
        self._update = _drain if config.sync_mode == "keep" else self._later_updates

    def push(self, policy: Policy, version: int) -> None:
        super().push(policy, version)
        self._update = self._later_updates

    def _reload(self, engine: Engine, weights: str, version: str) -> None:
        body = {"weight_version": version, "flush_cache": False, "model_path": weights}
        self._update(engine, path="/update_weights_from_disk", body=body)

    def _hand_over(self, engine: Engine, places: str, version: str) -> None:
        ranks = int(engine.get("/server_info")["tp_size"])
        body = {"weight_version": version, "flush_cache": False, "serialized_named_tensors": [places] * ranks}
        self._update(engine, path="/update_weights_from_tensor", body=body)


def _drain(engine: Engine, path: str, body: JsonObject) -> None:
    """Flush in the moment in which running requests are finished and new ones still wait for the update."""
    update = _started(engine.post, path, body)
    flushed = ended = False
    while not (flushed or ended):
        ended = bool(wait([update], timeout=_HEAD_START_S).done)
        flushed = engine.did(_FLUSH)
    update.result()
    if not flushed:
        logger.warning("%s is busy and kept its prefix cache: prompts it knows use old weights for now", engine.url)


def _abort(engine: Engine, path: str, body: JsonObject) -> None:
    """Update and flush while nothing runs."""
    with _paused(engine, "abort"):
        engine.post(path, body)
        engine.post(_FLUSH)


def _keep(engine: Engine, path: str, body: JsonObject) -> None:
    """Update under the requests."""
    with _paused(engine, "retract"):
        engine.post(path, body)


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

    def __init__(self, config: TrainingConfig, folder: Path, should_stop: Callable[[], bool]) -> None:
        self._config = config
        self._should_stop = should_stop
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def push(self, policy: Policy, version: int) -> None:
        """Save, end our engine, start it from the new weights, wait until it is healthy."""
        target = save_folder(policy.save_merged, self._folder, version)
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
            if self._should_stop():
                raise WeightSyncError(f"{command[0]} was not healthy yet")
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


KINDS: dict[str, Callable[[TrainingConfig, Path, Callable[[], bool]], WeightSync]] = {
    "embedded": EmbeddedSync,
    "sglang": SGLangSync,
    "vllm": VLLMSync,
    "vllm_lora": VLLMLoraSync,
    "restart": RestartSync,
}


def names_versions(config: TrainingConfig) -> bool:
    """True when each push tells the engines a version, which those that can then name in their replies."""
    return config.weight_sync not in ("none", "restart")


def make_sync(config: TrainingConfig, save_path: Path, should_stop: Callable[[], bool] = lambda: False) -> WeightSync:
    """The kind that the config names; exported weights go to `<save_path>/engine`.

    Args:
        should_stop: true once a signal came; a push then gives up on an engine that does not answer.
    """
    if config.weight_sync == "none":
        return NoSync()
    folder = writable_dir(exports_folder(save_path), what="the folder of exported weights")
    return KINDS[config.weight_sync](config, folder, should_stop)
