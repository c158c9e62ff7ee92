"""Addresses of the inference servers, and the limits of their use.

Where the user named none: inference nodes of a SLURM job, or local ports. `SLURM_JOB_NODELIST`, `NUM_TRAINING_NODES`
(leading nodes that train, default 0) and `INFER_TP` (GPUs per server, default 1) are read; each inference node has 8
GPUs, so it runs 8 / INFER_TP servers from port 9000 on.
"""

import logging
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import orjson
from pydantic import BaseModel, Field, PositiveFloat, ValidationError

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path
from atroposlib.type_definitions import Json, JsonObject, Tokenizer

VALID_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
OFFICIAL_OPENAI_HOST = "api.openai.com"
GPUS_PER_NODE = 8
FIRST_SLURM_PORT = 9000
LOCAL_PORTS = range(9004, 9008)
LOCAL_API_KEY = "x"


@dataclass
class ReasoningConfig:
    """Thinking options of one environment. Setting `effort` or `max_tokens` enables thinking.

    Args:
        enabled: ask for reasoning.
        effort: one of `VALID_REASONING_EFFORTS`; None leaves it to the provider.
        max_tokens: most reasoning tokens; not checked here, providers differ.

    Raises:
        ConfigError: an unknown effort.
    """

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            raise ConfigError(
                f"Invalid reasoning_effort: {self.effort!r}; use one of {', '.join(VALID_REASONING_EFFORTS)}"
            )
        if self.effort is not None or self.max_tokens is not None:
            self.enabled = True

    @classmethod
    def from_env_config(cls, env_config: BaseEnvConfig) -> "ReasoningConfig":
        """Read `thinking_mode`, `reasoning_effort` and `max_reasoning_tokens` of a BaseEnvConfig."""
        return cls(
            enabled=env_config.thinking_mode,
            effort=env_config.reasoning_effort,
            max_tokens=env_config.max_reasoning_tokens,
        )

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(self, base_url: str | None = None, use_max_tokens: bool = False) -> JsonObject | None:
        """The request fields for the provider behind `base_url`; None when reasoning is off.

        `use_max_tokens` turns an effort into its token count, for providers that take no effort.
        """
        if not self.enabled:
            return None
        if base_url and OFFICIAL_OPENAI_HOST in base_url:
            return {"reasoning_effort": self.effort or "medium"}
        reasoning: JsonObject = {"enabled": True}
        if self.effort is not None and use_max_tokens:
            reasoning["max_tokens"] = self.EFFORT_TO_MAX_TOKENS[self.effort]
        elif self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}


class ServerBaseline(BaseModel):
    """Settings of every server. Given alone, the endpoints are discovered (SLURM nodes, or local ports)."""

    timeout: int = Field(
        default=1200,
        description="Seconds a request may take beyond its generation time; a request for many tokens gets more.",
    )
    num_max_requests_at_once: int = Field(
        default=512, description="Requests in flight to one server, training rollouts."
    )
    num_requests_for_eval: int = Field(default=64, description="Requests in flight to one server, evaluations.")
    model_name: str = Field(default="default", description="Model name sent with every request.")
    rolling_buffer_length: int = Field(default=1000, description="Request timings kept per server for the metrics.")
    server_type: Literal["openai", "trl", "sglang", "vllm"] = Field(
        default="openai", description="Protocol of the server: openai (any OpenAI-style endpoint), sglang, vllm or trl."
    )
    tokenizer_name: str = Field(default="none", description="Tokenizer of the model; none: the same as model_name.")
    tool_parser: str | None = Field(
        default=None,
        description="How the model writes tool calls (hermes): managed servers read the calls themselves. "
        "null: they refuse tools=.",
    )
    outage_timeout_s: PositiveFloat = Field(
        default=3600.0, description="Seconds for which a request, and a run, waits while no server is up."
    )


class APIServerConfig(ServerBaseline):
    """One inference server."""

    api_key: str | None = Field(default="", description="Sent as a Bearer token when not empty.")
    base_url: str | None = Field(
        default="", description="Address, such as http://localhost:9001/v1; null or empty: the official OpenAI API."
    )
    n_kwarg_is_ignored: bool = Field(
        default=False, description="The server gives one choice whatever n is; send n requests. Noticed by itself."
    )
    health_check: bool = Field(
        default=True, description="Ask the server's health (free of charge) after a failed request."
    )


OpenaiConfig = APIServerConfig


class ServersConfig(BaseModel):
    """The servers of a managed-server proxy: its config file, and the body of /setup."""

    model_name: str
    tokenizer_name: str = "none"
    servers: list[JsonObject] = Field(min_length=1)

    def server_configs(self) -> list[APIServerConfig]:
        """One per server; `server_type` is vllm unless given."""
        shared = {"server_type": "vllm", "model_name": self.model_name, "tokenizer_name": self.tokenizer_name}
        return [APIServerConfig(**{**shared, **server}) for server in self.servers]

    def load_tokenizer(self) -> Tokenizer:
        from atroposlib.data.tokenizers import load_tokenizer

        return load_tokenizer(self.model_name if self.tokenizer_name == "none" else self.tokenizer_name)


def load_config(path: str) -> ServersConfig:
    """The config file of a proxy; ConfigError says what is wrong with it."""
    file = expand_path(path, what="--config")
    try:
        return ServersConfig.model_validate(orjson.loads(file.read_bytes()))
    except (OSError, orjson.JSONDecodeError, ValidationError) as error:
        raise ConfigError(f"--config {file} cannot be used: {error}") from error


def without_login(text: str) -> str:
    """`text` with its addresses as they may be shown and recorded: what stands before an @ may be a password."""
    return re.sub(r"//[^/?#\s]*@", "//", text)


FLAG_PREFIX = "openai."


def resolve_openai_configs(
    default_server_configs: ServerBaseline | Sequence[APIServerConfig],
    openai_config_dict: Mapping[str, Json],
    yaml_config: Mapping[str, Json] | None,
    cli_passed_flags: Mapping[str, Json],
    logger: logging.Logger | None = None,
) -> ServerBaseline | list[APIServerConfig]:
    """The server configs to run with.

    Args:
        default_server_configs: from `config_init`.
        openai_config_dict: one server's settings, with YAML and flags merged over the default already.
        yaml_config: the whole YAML file; `openai` is one mapping or a list of them.
        cli_passed_flags: flags that were really given, as `openai.<field>`.

    Returns:
        A list, one config per server; a ServerBaseline when endpoints are to be discovered.

    Raises:
        ConfigError: `openai` in the YAML file is neither a mapping nor a list of mappings.
    """
    entries = _yaml_entries(yaml_config)
    flags = {
        key.removeprefix(FLAG_PREFIX): value for key, value in cli_passed_flags.items() if key.startswith(FLAG_PREFIX)
    }
    if "base_url" in flags:  # one server, with what else is said of the first one
        entries = entries[:1]
        if not isinstance(default_server_configs, ServerBaseline):
            default_server_configs = default_server_configs[:1]
    if len(entries) > 1:
        return [APIServerConfig(**{**entry, **flags}) for entry in entries]
    changes = {**(entries[0] if entries else {}), **flags}
    merged = {**openai_config_dict, **changes}
    if isinstance(default_server_configs, ServerBaseline):
        names_endpoint = changes.keys() & (APIServerConfig.model_fields.keys() - ServerBaseline.model_fields.keys())
        if isinstance(default_server_configs, APIServerConfig) or names_endpoint:
            return [APIServerConfig(**{**default_server_configs.model_dump(), **merged})]
        return ServerBaseline(**{**default_server_configs.model_dump(), **changes})
    if len(default_server_configs) > 1:
        if changes and logger is not None:
            logger.info("server settings apply to all %d servers: %s", len(default_server_configs), sorted(changes))
        return [APIServerConfig(**{**config.model_dump(), **changes}) for config in default_server_configs]
    return [APIServerConfig(**merged)]


def _yaml_entries(yaml_config: Mapping[str, Json] | None) -> list[Mapping[str, Json]]:
    openai = (yaml_config or {}).get("openai")
    if openai is None:
        return []
    entries = openai if isinstance(openai, list) else [openai]
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"openai: in the YAML file is {openai!r}; write one mapping, or a list of mappings")
    return entries


def slurm_base_urls(environ: Mapping[str, str]) -> list[str]:
    """Endpoints on the job's inference nodes; [] outside SLURM and on jobs of fewer than two nodes.

    Raises:
        ConfigError: INFER_TP or NUM_TRAINING_NODES makes no sense, or leaves no server.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST", "")
    nodes = expand_nodelist(nodelist) if nodelist else []
    if len(nodes) < 2:
        return []
    training = _whole_number(environ, "NUM_TRAINING_NODES", 0)
    gpus_per_server = max(1, _whole_number(environ, "INFER_TP", 1))
    servers_per_node = GPUS_PER_NODE // gpus_per_server
    urls = [
        f"http://{node}:{FIRST_SLURM_PORT + offset}/v1"
        for node in nodes[training:]
        for offset in range(servers_per_node)
    ]
    if not urls:
        raise ConfigError(
            f"no inference server is left: {len(nodes)} nodes, NUM_TRAINING_NODES={training}, "
            f"INFER_TP={gpus_per_server} (at most {GPUS_PER_NODE}); lower one of the two"
        )
    return urls


def expand_nodelist(nodelist: str) -> list[str]:
    """Host names of a SLURM node list, by `scontrol` where there is one (containers often lack it).

    >>> expand_nodelist("gpu[01-03,7],login1")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login1']
    """
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return _expand(nodelist)
    listed = subprocess.run([scontrol, "show", "hostnames", nodelist], capture_output=True, text=True, timeout=30)
    if listed.returncode != 0:
        raise ConfigError(f"scontrol cannot expand SLURM_JOB_NODELIST={nodelist!r}: {listed.stderr.strip()}")
    return listed.stdout.split()


def _expand(nodelist: str) -> list[str]:
    hosts: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?[^,\[\]]*", nodelist):
        match = re.fullmatch(r"([^\[]+)\[([^\]]+)\](.*)", part)
        if match is None:
            hosts.append(part)
            continue
        head, ranges, tail = match.groups()
        for span in ranges.split(","):
            first, _, last = span.partition("-")
            hosts += [f"{head}{i:0{len(first)}}{tail}" for i in range(int(first), int(last or first) + 1)]
    return hosts


def _whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r}; it must be a whole number")
    return int(text)
