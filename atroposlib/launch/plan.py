"""From a checked config to the services of a datagen run: their commands, logs, probes and config files."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.engine_plan import EnginePlan, plan_engines
from atroposlib.launch.model_checks import Model
from atroposlib.launch.services import Service, at_once, environment, free_ports, trajectory_api
from atroposlib.paths import write_text_atomic
from atroposlib.status.runs import PROGRESS_FILE
from atroposlib.type_definitions import JsonObject


@dataclass(frozen=True)
class Plan:
    """The services in the order in which they are needed; no `engines` when they run elsewhere."""

    engines: list[Service]
    api: Service
    trainer: Service
    environment: Service


def make_plan(config: DatagenConfig, model: Model, session: aiohttp.ClientSession) -> Plan:
    """Choose ports, write the environment's YAML and describe the services."""
    engines: EnginePlan = plan_engines(config, session)
    api_port = config.api.port or free_ports(1)[0]
    api_url = f"http://127.0.0.1:{api_port}"
    env_yaml = config.work_dir / "environment.yaml"
    write_text_atomic(env_yaml, environment_yaml(config, model, engines.urls, api_url))
    return Plan(
        engines=engines.services,
        api=trajectory_api(config.work_dir, api_port, session, logs=config.logs),
        trainer=_trainer(config, api_url),
        environment=_environment(config, env_yaml),
    )


def environment_yaml(config: DatagenConfig, model: Model, engine_urls: list[str], api_url: str) -> str:
    """The file handed to the environment: the user's fields, and those that the run decides."""
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
        "rollouts_dir": str(config.work_dir / "rollouts"),
        "run_name": config.name,
        "progress_path": str(config.work_dir / PROGRESS_FILE),
        **_lease_fields(config),
    }
    server = {
        "server_type": "sglang",
        "api_key": "x",
        "num_max_requests_at_once": max(512, config.environment.workers * config.responses),
        **config.environment.server,
        "model_name": model.name,
        "tokenizer_name": model.tokenizer,
    }
    servers = [{**server, "base_url": f"{url}/v1"} for url in engine_urls]
    return yaml.safe_dump({"env": env, "openai": servers}, sort_keys=False)


def environment_flags(config: DatagenConfig) -> list[str]:
    """Return the settings of the environment that were given on the command line, as flags of its own."""
    return [f"--env.{key}={_as_text(value)}" for key, value in config.environment.flags.items()]


def _as_text(value: object) -> str:
    """Text as it is, anything else as JSON, which the environment reads as YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _lease_fields(config: DatagenConfig) -> JsonObject:
    """Return how the environment shares the problems with other members of the run."""
    share = config.share
    if share.member is None:
        return {}
    return {
        "lease_dir": str(Path(config.run_dir) / "leases"),
        "lease_owner": share.member,
        "lease_items": share.problems_per_lease,
        "lease_timeout": share.timeout_s,
    }


def _trainer(config: DatagenConfig, api_url: str) -> Service:
    module = [sys.executable, "-m", "atroposlib.example_trainer.fake_trainer", "--api-url", api_url]
    command = [*module, "--batch-size", str(config.responses)]
    return Service("fake_trainer", command, config.logs / "fake_trainer.log", ready=at_once, ready_timeout_s=60)


def _environment(config: DatagenConfig, env_yaml: Path) -> Service:
    script = Path(config.environment.script)
    log = config.logs / f"{script.stem.removesuffix('_env')}.log"
    progress = config.work_dir / PROGRESS_FILE
    return environment(script, env_yaml, log, progress, config.environment.hang_s, environment_flags(config))
