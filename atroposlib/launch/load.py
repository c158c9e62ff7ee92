"""Reading the YAML of a run: changes from the command line, paths expanded, mistakes as sentences.

Unknown keys are refused with the nearest known name.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from atroposlib.envs.catalog import file_of
from atroposlib.errors import ConfigError
from atroposlib.launch.config import DatagenConfig, EnvironmentConfig
from atroposlib.paths import expand_path
from atroposlib.type_definitions import Json, JsonObject
from atroposlib.yaml_files import read_mapping

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
        raise ConfigError(f"{path}: " + "; ".join(_sentence(entry) for entry in error.errors())) from None
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


def _sentence(entry: Mapping[str, Json]) -> str:
    """One pydantic error in words: where, what was found, what was expected."""
    where = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(entry["loc"][-1]), _known_keys(entry["loc"][:-1]), n=1)
        return f"unknown key {where!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if entry["type"] == "missing":
        return f"{where!r} is missing"
    return f"{where} is {entry['input']!r}: {entry['msg']}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Field names of the section that `location` points to."""
    model: type[BaseModel] = DatagenConfig
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = getattr(annotation, "__args__", (annotation,))[0]
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
