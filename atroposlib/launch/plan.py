"""From a checked config to the services of a datagen run: their commands, logs, probes and config files.

A run may be shared by members (`share.member`), each with rollouts of its own, which are counted together here.

Engines run on this node, or in a SLURM job of several nodes on the others, with or without a router. Their addresses
follow the rules that environments use to find engines (`server_handling.server_config`): `NUM_TRAINING_NODES` (here 1
unless set) leading nodes are left out, the others run 8 / `INFER_TP` (here tp x dp unless set) servers each from port
9000 on. The servers there are started with `srun`.
"""

import contextlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import yaml

from atroposlib.envs.server_handling.server_config import FIRST_SLURM_PORT, slurm_base_urls
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.services import Service, answers, at_once, environment, free_ports, trajectory_api
from atroposlib.paths import writable_dir, write_text_atomic
from atroposlib.rollouts.ledger import Ledger, read_recorded
from atroposlib.rollouts.locations import RunFiles
from atroposlib.status.runs import PROGRESS_FILE
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 1024  # tokens, of the embedded engine
_MOST_GRAPHS = 1024
_FAKE_TRAINER = [sys.executable, "-m", "atroposlib.example_trainer.fake_trainer"]
_ONE_TOKEN = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


@dataclass(frozen=True)
class Model:
    """The model as the run uses it. Paths may be hub names."""

    name: str
    path: str
    tokenizer: str
    own_tokenizer: str  # the one that came with the model


@dataclass(frozen=True)
class Plan:
    """The services in the order in which they are needed; no `engines` when they run elsewhere."""

    engines: list[Service]
    api: Service
    trainer: Service
    environment: Service


def make_plan(config: DatagenConfig, model: Model, session: aiohttp.ClientSession) -> Plan:
    """Choose ports, write the environment's YAML and describe the services."""
    engines = plan_engines(config, session)
    api_port = config.api.port or free_ports(1)[0]
    api_url = f"http://127.0.0.1:{api_port}"
    script, env_yaml = Path(config.environment.script), config.work_dir / "environment.yaml"
    write_text_atomic(env_yaml, environment_yaml(config, model, engines.urls, api_url))
    return Plan(
        engines=engines.services,
        api=trajectory_api(config.work_dir, api_port, session, logs=config.logs),
        trainer=Service(
            "fake_trainer",
            [*_FAKE_TRAINER, "--api-url", api_url, "--batch-size", str(config.responses)],
            config.logs / "fake_trainer.log",
            ready=at_once,
            ready_timeout_s=60,
        ),
        environment=environment(
            script,
            env_yaml,
            config.logs / f"{script.stem.removesuffix('_env')}.log",
            config.work_dir / PROGRESS_FILE,
            config.environment.hang_s,
            environment_flags(config),
        ),
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
    return [
        f"--env.{key}={value if isinstance(value, str) else json.dumps(value)}"  # JSON is YAML, as which it is read
        for key, value in config.environment.flags.items()
    ]


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


def recorded(config: DatagenConfig) -> list[Ledger]:
    """Read what the run's rollout files hold, each member's alone; nothing is changed there."""
    found = [path for folder in rollout_folders(config) for path in folder.glob(f"*_rollouts_{config.name}_*.jsonl*")]
    stems = {(path.parent, path.name.partition(".jsonl")[0].rpartition("_")[0]) for path in found}
    return [
        read_recorded(RunFiles(folder, stem, env="", run=config.name))
        for folder, stem in sorted(stems)
        if stem.endswith(f"_rollouts_{config.name}")
    ]


def groups_missing(config: DatagenConfig) -> int:
    """Problems of a shared run that no member has recorded yet; the files are only read."""
    seats = Counter(int(key) % config.problems for ledger in recorded(config) for key in ledger.done if key.isdecimal())
    twice = [seat for seat, groups in seats.items() if groups > 1]
    if twice:
        logger.warning("problems recorded by two members: %s; a member was frozen while it wrote", sorted(twice))
    return config.problems - len(seats)


@dataclass(frozen=True)
class EnginePlan:
    """Services to start, and the addresses (without /v1) that environments send their requests to."""

    services: list[Service]
    urls: list[str]


def plan_engines(config: DatagenConfig, session: aiohttp.ClientSession) -> EnginePlan:
    """The engines of this run, ready when they have generated a token."""
    engine = config.engine
    if engine.kind == "external":
        assert engine.base_url is not None  # preflight
        return EnginePlan([], [engine.base_url.rstrip("/").removesuffix("/v1")])
    nodes = engine_urls(config, os.environ)
    if not nodes:
        port = engine.port or free_ports(1)[0]
        url = f"http://127.0.0.1:{port}"
        return EnginePlan([_service(config, engine_command(config, port), url, engine.kind, session)], [url])
    services = [_service(config, remote_command(config, url), url, name_of(url), session) for url in nodes]
    if not engine.router:
        return EnginePlan(services, nodes)
    port = engine.port or free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    return EnginePlan([*services, _service(config, router_command(nodes, port), url, "router", session)], [url])


def engine_urls(config: DatagenConfig, environ: Mapping[str, str]) -> list[str]:
    """Addresses of the engines on the other nodes of this SLURM job; [] when the engine runs on this node."""
    if config.engine.kind != "sglang":
        return []
    usual = {"NUM_TRAINING_NODES": "1", "INFER_TP": str(config.engine.tp * config.engine.dp)}
    return [url.removesuffix("/v1") for url in slurm_base_urls({**usual, **environ})]


def engine_command(config: DatagenConfig, port: int, host: str = "127.0.0.1") -> list[str]:
    engine = config.engine
    at = ["--host", host, "--port", str(port)]
    if engine.kind == "sglang":
        size = ["--tp", str(engine.tp), "--dp", str(engine.dp)]
        context = ["--context-length", str(engine.context)] if engine.context else []
        tokenizer = ["--tokenizer-path", engine.tokenizer] if engine.tokenizer else []
        server = [sys.executable, "-m", "sglang.launch_server", "--model-path", engine.model, *tokenizer]
        in_flight = max(1, config.environment.workers * config.responses // engine.dp)
        tuned = tuned_flags(engine.args, in_flight=in_flight, one_gpu=engine.tp == 1, ids_only=engine.ids_only)
        return [*server, *at, *size, *context, "--enable-metrics", *engine.args, *(tuned if engine.tune else [])]
    sizes = ["--slots", str(engine.slots), "--context", str(engine.context or DEFAULT_CONTEXT)]
    threads = ["--threads", str(engine.threads)] if engine.threads else []
    return [sys.executable, "-m", "atroposlib.cli.engine", "--model", engine.model, *at, *sizes, *threads, *engine.args]


def remote_command(config: DatagenConfig, url: str) -> list[str]:
    """The server of one address, as a step of this job on its node; servers of a node use its GPUs in turn."""
    at = urlsplit(url)
    node, port = at.hostname or "", at.port or FIRST_SLURM_PORT
    gpus = config.engine.tp * config.engine.dp
    where = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "--unbuffered"]
    first_gpu = ["--base-gpu-id", str((port - FIRST_SLURM_PORT) * gpus)]
    return [*where, "--kill-on-bad-exit=1", *engine_command(config, port, node), *first_gpu]


def router_command(urls: list[str], port: int) -> list[str]:
    """SGLang's router: balances over the servers by load and shared prompt prefixes."""
    at = ["--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "sglang_router.launch_router", *at, "--worker-urls", *urls]


def name_of(url: str) -> str:
    """`sglang-node2-9000`: names a server in the status and its log."""
    at = urlsplit(url)
    return f"sglang-{at.hostname}-{at.port}"


def _service(
    config: DatagenConfig, command: list[str], url: str, log_name: str, session: aiohttp.ClientSession
) -> Service:
    return Service(
        name="engine" if log_name in {"embedded", "sglang"} else log_name,
        command=command,
        log=config.logs / f"{log_name}.log",
        ready=answers(session, "POST", f"{url}/generate", _ONE_TOKEN),
        healthy=answers(session, "GET", f"{url}/health"),
        ready_timeout_s=config.engine.ready_timeout_s,
    )


def tuned_flags(given: Sequence[str], *, in_flight: int, one_gpu: bool, ids_only: bool) -> list[str]:
    """Return flags to add to `given`, which make SGLang faster for rollouts (measured in docs/benchmarks.md).

    Decoding without a CUDA graph is several times slower, and SGLang takes graphs for fewer sequences than a rollout
    keeps in flight; the HTTP log costs a line per request; text that nobody reads costs the detokenizer process.

    Args:
        in_flight: sequences generated at the same time.
        one_gpu: the model lies on one GPU. Only there graphs are asked for: memory that they need was not measured
            on others, so there SGLang's own choice stays.
        ids_only: replies carry token ids and no text; excludes stop strings, grammars and the /v1 routes.

    >>> tuned_flags(["--log-level-http", "info"], in_flight=300, one_gpu=True, ids_only=False)
    ['--cuda-graph-max-bs', '512']
    """
    graphs = min(_MOST_GRAPHS, 1 << (in_flight - 1).bit_length())
    wanted = {
        "--log-level-http": ["warning"],
        **({"--cuda-graph-max-bs": [str(graphs)]} if one_gpu else {}),
        **({"--skip-tokenizer-init": []} if ids_only else {}),
    }
    names = {flag.partition("=")[0] for flag in given}
    if "--disable-cuda-graph" in names or "--cuda-graph-bs" in names:
        names.add("--cuda-graph-max-bs")
    return [part for name, values in wanted.items() if name not in names for part in (name, *values)]
