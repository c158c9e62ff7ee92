"""The engines of a run: one on this node, or several on the nodes of a SLURM job, with or without a router.

In a job of several nodes the addresses follow the rules that environments use to find engines
(`server_handling.discovery`): `NUM_TRAINING_NODES` (here 1 unless set) leading nodes are left out, the others run 8 /
`INFER_TP` (here tp x dp unless set) servers each from port 9000 on. The servers there are started with `srun`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from atroposlib.envs.server_handling.discovery import FIRST_SLURM_PORT, slurm_base_urls
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.services import Service, answers, free_ports

DEFAULT_CONTEXT = 1024
_ONE_TOKEN = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


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
    """The engine's command line."""
    engine = config.engine
    at = ["--host", host, "--port", str(port)]
    if engine.kind == "sglang":
        size = ["--tp", str(engine.tp), "--dp", str(engine.dp)]
        context = ["--context-length", str(engine.context)] if engine.context else []
        tokenizer = ["--tokenizer-path", engine.tokenizer] if engine.tokenizer else []
        server = [sys.executable, "-m", "sglang.launch_server", "--model-path", engine.model, *tokenizer]
        return [*server, *at, *size, *context, "--enable-metrics", *engine.args, *_tuned(config)]
    sizes = ["--slots", str(engine.slots), "--context", str(engine.context or DEFAULT_CONTEXT)]
    threads = ["--threads", str(engine.threads)] if engine.threads else []
    return [sys.executable, "-m", "atroposlib.cli.engine", "--model", engine.model, *at, *sizes, *threads, *engine.args]


def _tuned(config: DatagenConfig) -> list[str]:
    """SGLang's flags for this run's number of sequences."""
    engine = config.engine
    if not engine.tune:
        return []
    in_flight = max(1, config.environment.workers * config.responses // engine.dp)
    return tuned_flags(engine.args, in_flight=in_flight, one_gpu=engine.tp == 1, ids_only=engine.ids_only)


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


_MOST_GRAPHS = 1024


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
