"""The YAML of `atropos datagen`: one file says what a run makes, with which engine and environment.

Every path may use `~`, `$VAR` and `${VAR}`; `load_config` expands them, takes changes from the command line and tells
mistakes as sentences. `environment.script` and `environment.config` are looked up next to the YAML file, outputs
(`run_dir`, `log_dir`) in the current folder.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from atroposlib.envs.catalog import adapted, file_of
from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path, read_mapping
from atroposlib.type_definitions import JsonObject
from atroposlib.utils.cli import mistakes


class Section(BaseModel):
    """A part of the YAML: frozen, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(Section):
    """Which inference engine serves the model."""

    kind: Literal["embedded", "sglang", "external"] = Field(
        "embedded",
        description="embedded: the CPU engine of this package. sglang: a server started here. external: one that "
        "runs already, at base_url.",
    )
    model: str = Field(
        "smollm2-135m",
        description="embedded: smollm2-135m or a .gguf file. sglang: a model folder or hub name. external: its name.",
    )
    base_url: str | None = Field(None, description="external only, e.g. http://localhost:9000/v1.")
    tokenizer: str | None = Field(None, description="Tokenizer folder or hub name; null: the model's own.")
    port: int | None = Field(None, ge=1, le=65535, description="Port on 127.0.0.1; null: a free one.")
    slots: PositiveInt = Field(32, description="embedded: sequences generated at the same time.")
    context: PositiveInt | None = Field(
        None,
        description="Tokens of prompt plus answer per sequence; null: 1024 (embedded) or the model's own (sglang).",
    )
    threads: PositiveInt | None = Field(None, description="embedded: CPU threads; null: all cores.")
    tp: PositiveInt = Field(1, description="sglang: GPUs that share one copy of the model.")
    dp: PositiveInt = Field(1, description="sglang: copies of the model.")
    router: bool = Field(False, description="sglang on several nodes: SGLang's router in front of all servers.")
    args: list[str] = Field([], description="Further flags, handed to the engine as they are.")
    tune: bool = Field(True, description="sglang: add flags that were measured to be faster, unless args set them.")
    ids_only: bool = Field(
        False,
        description="sglang, with tune: no text in replies, which is faster. Not with stop strings, grammars or /v1.",
    )
    ready_timeout_s: PositiveFloat = Field(1800, description="How long loading may take before the run gives up.")


class EnvironmentConfig(Section):
    """Which environment makes the problems and scores the answers."""

    script: str = Field(description="Name of an environment, or its Python file relative to this YAML file.")
    adapter: str | None = Field(
        None, description="In place of script: a framework, such as textarena or gymnasium, whose environment `id` is."
    )
    id: str | None = Field(None, description="With adapter: which environment of the framework.")
    config: str | None = Field(
        None, description="The environment's own YAML; its `env:` and first `openai:` entry lie below the fields here."
    )
    workers: PositiveInt = Field(16, description="Problems rolled out at the same time.")
    hang_s: PositiveFloat | None = Field(
        1800,
        description="Killed and restarted after N seconds without a sign of life, as in a deadlock; null: never.",
    )
    env: JsonObject = Field({}, description="Fields of the environment's own config, as under `env:` in its YAML.")
    flags: JsonObject = Field(
        {},
        description="As env, but handed over as flags, so that they also win over what excludes them in a file. "
        "`--set environment.env.NAME=VALUE` goes here.",
    )
    server: JsonObject = Field({}, description="Fields of its engine client, as under `openai:`, e.g. timeout.")

    @model_validator(mode="before")
    @classmethod
    def _adapted(cls, values: object) -> object:
        """Find the script of an adapter."""
        adapter = values.get("adapter") if isinstance(values, dict) and "script" not in values else None
        if not isinstance(values, dict) or not adapter or not isinstance(adapter, str):
            return values
        script, env = adapted(adapter, values.get("id"))
        own = values.get("env") or {}
        return {**values, "script": script, "env": {**env, **own} if isinstance(own, dict) else own}


class ApiConfig(Section):
    """The trajectory API between environment and trainer."""

    port: int | None = Field(None, ge=1, le=65535, description="Port on 127.0.0.1; null: a free one.")


class ExportConfig(Section):
    """One dataset made from the rollouts when the run is complete."""

    path: str = Field("sft.jsonl", description="File name inside run_dir.")
    format: Literal["prompt-completion", "messages", "sharegpt", "prefix", "tokens"] = "prompt-completion"
    above_score: float = Field(0.0, description="Responses are kept when their score is above this.")
    top_n_per_problem: PositiveInt | None = Field(None, description="Keep the best n of a problem; null: all.")
    unique: bool = Field(False, description="Of equal responses to a problem, keep one.")
    rows: PositiveInt | None = Field(None, description="Write exactly this many responses; null: all that are kept.")


class RestartConfig(Section):
    """When a service that keeps dying stops the run."""

    limit: PositiveInt = Field(5, description="Restarts of one service ...")
    window_s: PositiveFloat = Field(
        600, description="... within this many seconds; without getting ready in between, within any time."
    )


class ShareConfig(Section):
    """Several processes, on one node or many, that share a run through a folder all of them see."""

    member: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of this process among them; null: it is alone."
    )
    problems_per_lease: PositiveInt = Field(8, description="Problems that a member takes at a time.")
    timeout_s: PositiveFloat = Field(120, description="Silence after which the others take over a member's problems.")


class DatagenConfig(Section):
    """A whole run: `problems` x `responses`, recorded, scored and exported."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run and its files.")
    run_dir: str = Field(description="Everything the run writes goes here; the same folder resumes.")
    problems: PositiveInt = Field(description="Groups to record, exactly.")
    responses: PositiveInt = Field(description="Responses per problem (the group size).")
    expected_tokens: PositiveInt | None = Field(
        None, description="Mean tokens of a response, for the disk estimate; null: a quarter of max_token_length."
    )
    max_prompt_tokens: PositiveInt = Field(1, description="Longest prompt; with the answer it must fit the context.")
    log_dir: str | None = Field(None, description="Logs of the services; null: logs in run_dir.")
    links: str | None = Field(None, description="Folder in which every rollout file gets a link, too; null: none.")
    engine: EngineConfig = EngineConfig()  # pyright: ignore[reportCallIssue]
    environment: EnvironmentConfig
    api: ApiConfig = ApiConfig()  # pyright: ignore[reportCallIssue]
    export: list[ExportConfig] = [ExportConfig()]  # pyright: ignore[reportCallIssue]
    restarts: RestartConfig = RestartConfig()  # pyright: ignore[reportCallIssue]
    share: ShareConfig = ShareConfig()  # pyright: ignore[reportCallIssue]

    @property
    def work_dir(self) -> Path:
        """Folder of this process: `run_dir`, or its own part of a shared one."""
        return Path(self.run_dir, "members", self.share.member) if self.share.member else Path(self.run_dir)

    @property
    def logs(self) -> Path:
        return Path(self.log_dir) if self.log_dir else self.work_dir / "logs"


_PATH_KEYS = ("path", "dir", "folder", "file")
"""Endings of an environment's keys whose values are paths."""


def load_config(path: Path, changes: Sequence[str] = (), **overrides: object) -> DatagenConfig:
    """Read and check one YAML file; every path in it comes back expanded, script and run_dir absolute.

    Args:
        changes: `key.key=value` with a YAML value, later ones win, e.g. `engine.tp=4`.
        overrides: top-level values that replace the file's; None keeps the file's.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, a wrong type; one line per problem.
        PathError: a path with an unset variable.
    """
    content = read_mapping(path, expected="keys such as name, run_dir and problems", what="a YAML file")
    given: set[str] = set()
    for change in changes:
        given.add(_apply(content, change))
    content |= {key: value for key, value in overrides.items() if value is not None}
    try:
        config = DatagenConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {mistakes(error, DatagenConfig)}") from None
    engine = config.engine
    return config.model_copy(
        update={
            "run_dir": _absolute(config.run_dir, f"{path}: run_dir"),
            "links": config.links and _absolute(config.links, f"{path}: links"),
            "log_dir": config.log_dir and _absolute(config.log_dir, f"{path}: log_dir"),
            "engine": engine.model_copy(
                update={
                    "model": _expanded(engine.model, f"{path}: engine.model"),
                    "tokenizer": engine.tokenizer and _expanded(engine.tokenizer, f"{path}: engine.tokenizer"),
                    "args": [_expanded(word, f"{path}: engine.args") for word in engine.args],
                }
            ),
            "environment": _environment(config.environment, path, given),
            "export": [
                entry.model_copy(update={"path": str(expand_path(entry.path, what=f"{path}: export.path"))})
                for entry in config.export
            ],
        }
    )


_DECIDED = {
    key: by
    for by, keys in {
        "responses": ("group_size",),
        "problems": ("total_steps", "total_groups"),
        "name": ("run_name", "wandb_name"),
        "run_dir": ("dump_rollouts", "rollouts_dir", "data_path_to_save_groups", "progress_path", "lease_dir"),
        "engine.model": ("model_name",),
        "engine.tokenizer": ("tokenizer_name",),
        "engine.base_url": ("base_url",),
        "api.port": ("rollout_server_url",),
        "share": ("lease_owner", "lease_items", "lease_timeout"),
    }.items()
    for key in keys
}
"""Settings of an environment and its engine client that the run decides, and from what."""


def _environment(section: EnvironmentConfig, path: Path, given: Collection[str]) -> EnvironmentConfig:
    """The section with the environment's own file merged in, below what is written here; `workers` stands here.

    Args:
        given: the keys that the command line sets.
    """
    for name, settings in (("env", section.env), ("flags", section.flags), ("server", section.server)):
        for key in settings:
            if key in _DECIDED:
                raise ConfigError(
                    f"environment.{name}.{key} would have no effect: the run decides it; set {_DECIDED[key]} instead"
                )
    folder = path.absolute().parent
    named = file_of(section.script)  # an environment's name, as `atropos env list` shows it
    script = named or folder / expand_path(section.script, what=f"{path}: environment.script")
    own: JsonObject = {}
    if section.config:
        config = folder / expand_path(section.config, what=f"{path}: environment.config")
        own = read_mapping(config, expected="env: and openai:", what="a YAML file")
    servers, settings = own.get("openai") or {}, own.get("env") or {}
    server = servers[0] if isinstance(servers, list) else servers
    for name, value in (("env", settings), ("openai", server)):
        if not isinstance(value, dict):
            raise ConfigError(f"{section.config}: {name} holds {value!r}, expected keys and values")
    theirs = {key: value for key, value in settings.items() if key != "max_num_workers"}
    flagged = {*section.flags, *(key for key in section.env if _is_given(f"environment.env.{key}", given))}
    env = {**theirs, **section.env, **section.flags}
    if "environment.workers" in given and "max_num_workers" not in flagged:
        env.pop("max_num_workers", None)
    for key, value in env.items():
        if isinstance(value, str) and key.endswith(_PATH_KEYS):
            env[key] = str(expand_path(value, what=f"{path}: environment.env.{key}"))
    flags = {key: value for key, value in env.items() if key in flagged}
    server = {**server, **section.server}
    return section.model_copy(update={"script": str(script.resolve()), "env": env, "flags": flags, "server": server})


def _is_given(key: str, given: Collection[str]) -> bool:
    """Tell whether the command line set this key, the section around it, or something inside of it."""
    return any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in given)


def _apply(content: JsonObject, change: str) -> str:
    """Set one value named by its dotted key, which is returned; sections on the way are made."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set is {change!r}; write it as KEY=VALUE, e.g. --set engine.tp=4")
    *sections, last = key.split(".")
    for section in sections:
        inner = content.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {change}: {section} is {inner!r} in the file, which has no keys")
        content = inner
    try:
        content[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change}: the value is not YAML: {' '.join(str(error).split())}") from None
    return key


def _absolute(text: str, what: str) -> str:
    return str(expand_path(text, what=what).absolute())


def _expanded(text: str, what: str) -> str:
    """Model names, flags and settings stay as they are; what a shell would have expanded as a path is expanded."""
    looks_like_path = text.startswith(("~", "$")) or "/$" in text
    return str(expand_path(text, what=what)) if looks_like_path else text
