"""From a checked config to the services of a datagen run: their commands, logs, probes and config files.

A run may be shared by members (`share.member`), each with rollouts of its own, which are counted together here.
"""

import contextlib
import json
import logging
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.engine_plan import EnginePlan, plan_engines
from atroposlib.launch.model_checks import Model
from atroposlib.launch.services import Service, at_once, environment, free_ports, trajectory_api
from atroposlib.paths import writable_dir, write_text_atomic
from atroposlib.rollouts.ledger import recorded_items
from atroposlib.rollouts.locations import RunFiles
from atroposlib.status.runs import PROGRESS_FILE
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)


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


def rollout_folders(config: DatagenConfig) -> list[Path]:
    """The folders that hold the run's rollouts: one, or one of each member that has any."""
    run_dir = Path(config.run_dir)
    if not config.share.member:
        return [run_dir / "rollouts"]
    return sorted({shard.parent for shard in run_dir.glob("members/*/rollouts/*_rollouts_*.jsonl*")})


def link_rollouts(config: DatagenConfig) -> None:
    """Link every rollout file of this process in the folder `links`; links of its that lead nowhere go away.

    A member's name stands in its links, as the files of all members are called alike. What is no link stays.
    """
    if config.links is None:
        return
    links, folder = writable_dir(config.links, what="links"), config.work_dir / "rollouts"
    named = f"_rollouts_{config.name}_"
    member = f"{config.share.member}_" if config.share.member else ""
    for link in links.glob(f"*{named}{member}*.jsonl*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    for shard in folder.glob(f"*{named}*.jsonl*"):
        head, tail = shard.name.split(named, 1)
        with contextlib.suppress(FileExistsError):
            (links / f"{head}{named}{member}{tail}").symlink_to(os.path.relpath(shard, links))


def has_recorded(config: DatagenConfig) -> bool:
    """A group, or the rejection of one, is on disk."""
    run_dir = Path(config.run_dir)
    folders = [*run_dir.glob("members/*/rollouts"), run_dir / "rollouts"]
    kinds = ("*_rollouts_*.jsonl*", "*_rollouts_*.index")
    return any(path.stat().st_size for folder in folders for kind in kinds for path in folder.glob(kind))


def groups_missing(config: DatagenConfig) -> int:
    """Problems of a shared run that no member has recorded yet; the files are only read."""
    seats = Counter(
        int(key) % config.problems
        for folder in rollout_folders(config)
        for index in folder.glob(f"*_rollouts_{config.name}.index")
        for key in recorded_items(RunFiles(folder, index.stem, env="", run=config.name))
        if key.isdecimal()
    )
    twice = [seat for seat, groups in seats.items() if groups > 1]
    if twice:
        logger.warning("problems recorded by two members: %s; a member was frozen while it wrote", sorted(twice))
    return config.problems - len(seats)
