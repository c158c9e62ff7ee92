"""From a checked config to the four services of a datagen run: their commands, logs, probes and config files."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.preflight import Model
from atroposlib.launch.probes import answers, at_once, free_ports, trajectory_api
from atroposlib.launch.services import Probe, Service
from atroposlib.launch.status import PROGRESS_FILE
from atroposlib.paths import write_text_atomic


@dataclass(frozen=True)
class Plan:
    """The services in the order in which they are needed; `engine` is None when it runs elsewhere."""

    engine: Service | None
    api: Service
    trainer: Service
    environment: Service


def make_plan(config: DatagenConfig, model: Model, session: aiohttp.ClientSession) -> Plan:
    """Choose ports, write the environment's YAML and describe the services."""
    run_dir = Path(config.run_dir)
    free = free_ports(2)
    engine_port, api_port = config.engine.port or free[0], config.api.port or free[1]
    engine_url = (config.engine.base_url or f"http://127.0.0.1:{engine_port}").removesuffix("/v1")
    api_url = f"http://127.0.0.1:{api_port}"
    env_yaml = run_dir / "environment.yaml"
    write_text_atomic(env_yaml, environment_yaml(config, model, engine_url, api_url))
    return Plan(
        engine=None if config.engine.kind == "external" else _engine(config, model, engine_port, session),
        api=trajectory_api(run_dir, api_port, session),
        trainer=_trainer(config, api_url),
        environment=_environment(config, env_yaml),
    )


def environment_yaml(config: DatagenConfig, model: Model, engine_url: str, api_url: str) -> str:
    """The file handed to the environment: the user's fields, and those that the run decides."""
    run_dir = Path(config.run_dir)
    env = {
        "use_wandb": False,
        "ensure_scores_are_not_same": False,
        "include_messages": True,
        "max_num_workers": config.environment.workers,
        "max_batches_offpolicy": 4 * config.environment.workers,  # the trainer discards: never hold work back
        "steps_per_eval": -1,
        **config.environment.env,
        "wandb_name": config.name,
        "group_size": config.responses,
        "total_steps": config.problems,
        "total_groups": config.problems,
        "tokenizer_name": model.tokenizer,
        "rollout_server_url": api_url,
        "dump_rollouts": True,
        "rollouts_dir": str(run_dir / "rollouts"),
        "run_name": config.name,
        "progress_path": str(run_dir / PROGRESS_FILE),
    }
    server = {
        "server_type": "sglang",
        "api_key": "x",
        "num_max_requests_at_once": max(512, config.environment.workers * config.responses),
        **config.environment.server,
        "model_name": model.name,
        "tokenizer_name": model.tokenizer,
        "base_url": f"{engine_url}/v1",
    }
    return yaml.safe_dump({"env": env, "openai": [server]}, sort_keys=False)


def engine_command(config: DatagenConfig, model: Model, port: int) -> list[str]:
    """The engine's command line."""
    engine = config.engine
    if engine.kind == "sglang":
        size = ["--tp", str(engine.tp), "--dp", str(engine.dp)]
        server = [sys.executable, "-m", "sglang.launch_server", "--model-path", engine.model]
        return [*server, "--host", "127.0.0.1", "--port", str(port), *size, "--enable-metrics", *engine.args]
    sizes = ["--slots", str(engine.slots), "--context", str(engine.context)]
    threads = ["--threads", str(engine.threads)] if engine.threads else []
    command = [sys.executable, "-m", "atroposlib.cli.engine", "--model", engine.model, "--host", "127.0.0.1"]
    return [*command, "--port", str(port), *sizes, *threads, *engine.args]


def _engine(config: DatagenConfig, model: Model, port: int, session: aiohttp.ClientSession) -> Service:
    url = f"http://127.0.0.1:{port}"
    one_token = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    return Service(
        name="engine",
        command=engine_command(config, model, port),
        log=Path(config.run_dir) / "logs" / "engine.log",
        ready=answers(session, "POST", f"{url}/generate", one_token),
        healthy=answers(session, "GET", f"{url}/health"),
        ready_timeout_s=config.engine.ready_timeout_s,
    )


def _trainer(config: DatagenConfig, api_url: str) -> Service:
    module = [sys.executable, "-m", "example_trainer.fake_trainer", "--api-url", api_url]
    command = [*module, "--batch-size", str(config.responses)]
    log = Path(config.run_dir) / "logs" / "fake_trainer.log"
    return Service("fake_trainer", command, log, ready=at_once, ready_timeout_s=60)


def _environment(config: DatagenConfig, env_yaml: Path) -> Service:
    progress = Path(config.run_dir) / PROGRESS_FILE
    command = [sys.executable, config.environment.script, "serve", "--config", str(env_yaml)]
    log = Path(config.run_dir) / "logs" / "environment.log"
    return Service("environment", command, log, ready=_reports(progress), ready_timeout_s=600, is_job=True)


def _reports(progress: Path) -> Probe:
    """True when the progress file is the running process's own."""

    async def probe(pid: int) -> bool:
        try:
            return json.loads(progress.read_text(encoding="utf-8")).get("pid") == pid
        except (OSError, ValueError):
            return False

    return probe
