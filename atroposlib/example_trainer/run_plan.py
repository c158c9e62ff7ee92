"""The four services of a training run: their commands, config files, logs and probes."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from atroposlib.environments.rows import is_file
from atroposlib.envs.catalog import file_of
from atroposlib.errors import ConfigError
from atroposlib.example_trainer.config import RunConfig, TrainingConfig
from atroposlib.example_trainer.exports import ADAPTER_NAME, exports_folder, first_link, local_folder, model_folder
from atroposlib.example_trainer.recipe import ENVIRONMENT
from atroposlib.launch.services import Probe, Service, answers, at_once, environment, free_ports, trajectory_api
from atroposlib.paths import expand_path, write_text_atomic
from atroposlib.status.runs import PROGRESS_FILE
from atroposlib.status.training import EVALUATIONS
from atroposlib.type_definitions import JsonObject

_VLLM_SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_MAPS_GPU = ["--weight-transfer-config", '{"backend": "ipc"}']
_READS_PICKLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Settings of vLLM for `sync_from: gpu`: whoever reaches its port, here of this host only, can run code in it."""
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)


def engine_services(
    config: RunConfig, port: int, save_path: Path, logs: Path, session: aiohttp.ClientSession
) -> list[Service]:
    """The engine, as one that serves the newest weights however often it is started; none for an external one."""
    if config.engine == "external":
        return []
    url, exports = f"http://127.0.0.1:{port}", exports_folder(save_path)
    starter = [sys.executable, "-m", "atroposlib.example_trainer.exports", weight_sync_of(config), str(exports)]
    ready = "/health" if config.engine == "vllm" else "/health_generate"
    return [
        Service(
            name="engine",
            command=[*starter, *engine_command(config, port, _weights(config, exports))],
            log=logs / "engine.log",
            ready=answers(session, "GET", url + ready),
            healthy=answers(session, "GET", f"{url}/health"),
            ready_timeout_s=config.engine_ready_s,
            env={**_VLLM_SWITCHES, **(_READS_PICKLES if _maps_gpu(config) else {}), **gpus("ATROPOS_ENGINE_GPUS")},
        )
    ]


def weight_sync_of(config: RunConfig) -> str:
    """Return the way in which the engine gets new weights: as the recipe says, else as suits the engine."""
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
    update += _MAPS_GPU if _maps_gpu(config) else []
    name = config.model_name if serves_adapter(config) else model_names(config)[0]  # the adapter has its own
    replies = ["--served-model-name", name, "--logprobs-mode", "processed_logprobs"]  # after temperature
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*module, *at, *sizes, *update, *replies, *config.engine_args]


def _weights(config: RunConfig, exports: Path) -> Path | None:
    """A link to the newest Hugging Face folder; None for an engine that takes GGUF files or an adapter instead."""
    if config.engine == "embedded" or serves_adapter(config):
        return None
    return first_link(exports, local_folder(config.model_name))


def _maps_gpu(config: RunConfig) -> bool:
    """True for a vLLM that takes weights from the trainer's GPU."""
    return config.engine == "vllm" and config.sync_from == "gpu"


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


TRAINER_GRACE_S = 120.0
"""For a step and a checkpoint, after SIGTERM."""
_LAUNCHER_GRACE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(TRAINER_GRACE_S) - 10)}
"""As long for the processes of several GPUs, whose launcher kills them after 30 s unless told."""
_DECIDED = dict.fromkeys(("MAXENT", *ENVIRONMENT), "")
"""Variables that the run has read, and a flag may have overruled: to the trainer, its recipe says it all."""
_DATASET_ENV = Path(__file__).with_name("dataset_env.py")


@dataclass(frozen=True)
class RunPlan:
    """`servers` must be ready, in this order, before the trainer starts, and the trainer before the environment."""

    servers: list[Service]
    trainer: Service
    environment: Service


def make_plan(config: RunConfig, run_dir: Path, session: aiohttp.ClientSession) -> RunPlan:
    """Choose ports, write the trainer's and the environment's YAML, describe the services.

    Raises:
        ConfigError: a file that the recipe names is not there.
    """
    script = _script(config)
    _require_files(config)
    free = free_ports(2)
    engine_port, api_port = config.engine_port or free[0], free[1]
    engine_urls = [url.rstrip("/").removesuffix("/v1") for url in config.engine_urls]
    engine_urls = engine_urls or [f"http://127.0.0.1:{engine_port}"]
    api_url = f"http://127.0.0.1:{api_port}"
    trainer_yaml, environment_yaml = run_dir / "trainer.yaml", run_dir / "environment.yaml"
    write_text_atomic(trainer_yaml, yaml.safe_dump(trainer_settings(config, run_dir, engine_urls, api_url)))
    write_text_atomic(environment_yaml, yaml.safe_dump(environment_settings(config, run_dir, engine_urls, api_url)))
    logs = run_dir / "logs"
    api = trajectory_api(run_dir, api_port, session)
    trainer = [*trainer_launcher(os.environ), "atroposlib.example_trainer.grpo", "--config", str(trainer_yaml)]
    waits = serves_adapter(config)  # the environment asks for what the trainer pushes first
    return RunPlan(
        servers=[*engine_services(config, engine_port, _checkpoints(run_dir), logs, session), api],
        trainer=Service(
            name="trainer",
            command=trainer,
            log=logs / "trainer.log",
            ready=adapter_is_served(session, engine_urls[0]) if waits else at_once,
            ready_timeout_s=config.engine_ready_s,
            env={**gpus("ATROPOS_TRAINER_GPUS"), **_LAUNCHER_GRACE, **_DECIDED},
            is_job=True,
            grace_s=TRAINER_GRACE_S,
        ),
        environment=environment(
            script, environment_yaml, logs / "environment.log", run_dir / PROGRESS_FILE, config.hang_s
        ),
    )


def trainer_launcher(environ: Mapping[str, str]) -> list[str]:
    """Return the command that starts the trainer's module: as one process, or as one for each of several GPUs.

    >>> trainer_launcher({"ATROPOS_TRAINER_GPUS": "1,2,3"})[1:]
    ['-m', 'accelerate.commands.launch', '--num_processes', '3', '-m']
    """
    gpus = environ.get("ATROPOS_TRAINER_GPUS", "").count(",") + 1
    launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(gpus)] if gpus > 1 else []
    return [sys.executable, *launcher, "-m"]


def trainer_settings(config: RunConfig, run_dir: Path, engine_urls: list[str], api_url: str) -> JsonObject:
    """The recipe of the trainer process."""
    own = config.model_dump(mode="json", include=set(TrainingConfig.model_fields), exclude_unset=True)
    return {
        "weight_sync": weight_sync_of(config),
        "temperature": config.environment_config.get("temperature", config.temperature),
        **own,
        "engine_urls": engine_urls,
        "atropos_url": api_url,
        "save_path": str(_checkpoints(run_dir)),
        "log_dir": str(run_dir / "metrics"),
    }


def environment_settings(config: RunConfig, run_dir: Path, engine_urls: list[str], api_url: str) -> JsonObject:
    """The environment's YAML: the user's fields, and those that the run decides."""
    name, tokenizer = model_names(config)
    from_datasets = {
        "datasets": [source.model_dump() for source in config.datasets],
        "reward": config.reward,
        "system_prompt": config.system_prompt,
        "chat_template": config.chat_template,
        "temperature": config.temperature,
        "seed": config.seed,
    }
    env = {
        "use_wandb": config.use_wandb,
        "ensure_scores_are_not_same": config.objective == "dapo",  # its dynamic sampling; others count such groups
        "include_messages": True,
        "max_num_workers": config.environment_workers,
        "max_batches_offpolicy": 1,
        "steps_per_eval": -1,
        "wandb_name": "train",
        "dump_rollouts": True,
        "rollouts_dir": str(run_dir / "rollouts"),
        "data_dir_to_save_evals": str(run_dir / EVALUATIONS),
        **(from_datasets if config.datasets else {}),
        **config.environment_config,
        "group_size": config.num_generations,
        "max_token_length": config.max_completion_length,
        "total_steps": config.training_steps if config.max_staleness is None else sys.maxsize,  # stale ones are dropped
        "tokenizer_name": tokenizer,
        "rollout_server_url": api_url,
        "progress_path": str(run_dir / PROGRESS_FILE),
    }
    servers = [
        {
            "server_type": "vllm" if config.engine == "vllm" else "sglang",
            "api_key": "x",
            "model_name": name,
            "tokenizer_name": tokenizer,
            "base_url": f"{url.rstrip('/').removesuffix('/v1')}/v1",
        }
        for url in engine_urls
    ]
    return {"env": env, "openai": servers}


def _checkpoints(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _script(config: RunConfig) -> Path:
    """The environment's file; ConfigError when it is not there."""
    if config.environment is None:
        return _DATASET_ENV
    return file_of(config.environment) or _existing(config.environment, "environment", "a name or a Python file")


def _require_files(config: RunConfig) -> None:
    """ConfigError when a file of problems or a template is not there; what the hub has shows when it is loaded."""
    for source in config.datasets:
        if is_file(source.id):
            _existing(source.id, "data set", "a file of JSON lines")
    if config.chat_template:
        _existing(config.chat_template, "chat_template", "a Jinja file")


def _existing(name: str, what: str, expected: str) -> Path:
    path = expand_path(name, what=what).absolute()
    if not path.is_file():
        raise ConfigError(
            f"{what} {path} does not exist; give {expected}, relative to the recipe or to the current folder"
        )
    return path
