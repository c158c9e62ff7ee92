"""The engine of a training run: its command line, its service, and when it serves what the environment asks for."""

import os
import sys
from pathlib import Path

import aiohttp

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.exports import ADAPTER_NAME, exports_folder, first_link
from atroposlib.example_trainer.model_folder import local_folder, model_folder
from atroposlib.example_trainer.run_config import RunConfig
from atroposlib.launch.probes import answers
from atroposlib.launch.services import Probe, Service

_VLLM_SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)


def engine_services(
    config: RunConfig, port: int, save_path: Path, logs: Path, session: aiohttp.ClientSession
) -> list[Service]:
    """The engine, as one that serves the newest weights however often it is started; none for an external one."""
    if config.engine == "external":
        return []
    url, exports = f"http://127.0.0.1:{port}", exports_folder(save_path)
    starter = [sys.executable, "-m", "atroposlib.example_trainer.engine_start", weight_sync_of(config), str(exports)]
    ready = "/health" if config.engine == "vllm" else "/health_generate"
    return [
        Service(
            name="engine",
            command=[*starter, *engine_command(config, port, _weights(config, exports))],
            log=logs / "engine.log",
            ready=answers(session, "GET", url + ready),
            healthy=answers(session, "GET", f"{url}/health"),
            ready_timeout_s=config.engine_ready_s,
            env={**_VLLM_SWITCHES, **gpus("ATROPOS_ENGINE_GPUS")},
        )
    ]


def weight_sync_of(config: RunConfig) -> str:
    """How the engine gets new weights: as the recipe says, else as suits the engine."""
    if "weight_sync" in config.model_fields_set:
        return config.weight_sync
    vllm = "vllm_lora" if config.use_lora else "vllm"
    return {"embedded": "embedded", "sglang": "sglang", "vllm": vllm}.get(config.engine, "none")


def serves_adapter(config: RunConfig) -> bool:
    """True for a vLLM of this run that serves what is trained under a name of its own, once it was pushed."""
    return config.engine == "vllm" and weight_sync_of(config) == "vllm_lora"


def adapter_is_served(session: aiohttp.ClientSession, url: str) -> Probe:
    """True when this vLLM knows the adapter."""

    async def probe(pid: int) -> bool:
        try:
            async with session.get(f"{url}/v1/models", timeout=_PROBE_TIMEOUT) as reply:
                models = (await reply.json())["data"] if reply.status == 200 else []
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        return any(model["id"] == ADAPTER_NAME for model in models)

    return probe


def engine_command(config: RunConfig, port: int, weights: Path | str | None = None) -> list[str]:
    """The engine's command line.

    Args:
        weights: Hugging Face folder to start from; None: the model's. The embedded engine has its own files.
    """
    at = ["--host", "127.0.0.1", "--port", str(port)]
    context = str(config.seq_len)
    if config.engine == "embedded":
        threads = ["--threads", str(config.engine_threads)] if config.engine_threads else []
        sizes = ["--slots", str(config.engine_slots), "--context", context, *threads]
        module = [sys.executable, "-m", "atroposlib.cli.engine", "--model", config.model_name]
        return [*module, *at, *sizes, *config.engine_args]
    model, tp = str(weights or model_folder(config.model_name)), str(config.vllm_tp_size)
    memory = str(config.gpu_memory_utilization)
    if config.engine == "sglang":
        module = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        sizes = ["--tp", tp, "--mem-fraction-static", memory, "--context-length", context]
        return [*module, *at, *sizes, "--enable-metrics", *config.engine_args]
    sizes = ["--tensor-parallel-size", tp, "--gpu-memory-utilization", memory, "--max-model-len", context]
    update = ["--enable-lora", "--max-lora-rank", _lora_rank(config)] if serves_adapter(config) else []
    name = config.model_name if serves_adapter(config) else model_names(config)[0]  # the adapter has its own
    replies = ["--served-model-name", name, "--logprobs-mode", "processed_logprobs"]  # after temperature
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*module, *at, *sizes, *update, *replies, *config.engine_args]


def _weights(config: RunConfig, exports: Path) -> Path | None:
    """A link to the newest Hugging Face folder; None for an engine that takes GGUF files or an adapter instead."""
    if config.engine == "embedded" or serves_adapter(config):
        return None
    return first_link(exports, local_folder(config.model_name))


def _lora_rank(config: RunConfig) -> str:
    """vLLM's `--max-lora-rank`, which is one of a few sizes."""
    for rank in _VLLM_RANKS:
        if rank >= config.lora_r:
            return str(rank)
    raise ConfigError(f"lora_r is {config.lora_r}, but vLLM serves adapters up to rank {_VLLM_RANKS[-1]}; lower it")


def gpus(variable: str) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for one process, when `variable` names its GPUs."""
    return {"CUDA_VISIBLE_DEVICES": os.environ[variable]} if os.environ.get(variable) else {}


def model_names(config: RunConfig) -> tuple[str, str]:
    """Names of the model and of its tokenizer, as the environment uses them."""
    from atroposlib_engine.models import CATALOG, resolve_model

    name = tokenizer = config.model_name
    if name in CATALOG or name.endswith(".gguf"):
        local = resolve_model(name)
        name, tokenizer = local.name, str(local.tokenizer_dir)
    return ADAPTER_NAME if serves_adapter(config) else name, tokenizer
