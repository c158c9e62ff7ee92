"""The servers that an environment uses: its own `config_init`, then YAML `openai:`, then `--openai.*` flags."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline
from atroposlib.errors import ConfigError

FLAG_PREFIX = "openai."


def resolve_openai_configs(
    default_server_configs: ServerBaseline | Sequence[APIServerConfig],
    openai_config_dict: Mapping[str, Any],
    yaml_config: Mapping[str, Any] | None,
    cli_passed_flags: Mapping[str, Any],
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
        return _one_server(default_server_configs, merged, changes)
    if len(default_server_configs) > 1:
        if changes and logger is not None:
            logger.info("server settings apply to all %d servers: %s", len(default_server_configs), sorted(changes))
        return [APIServerConfig(**{**config.model_dump(), **changes}) for config in default_server_configs]
    return [APIServerConfig(**merged)]


def _one_server(
    default: ServerBaseline, merged: Mapping[str, Any], changes: Mapping[str, Any]
) -> ServerBaseline | list[APIServerConfig]:
    if isinstance(default, APIServerConfig):
        return [APIServerConfig(**{**default.model_dump(), **merged})]
    if changes.keys() & (APIServerConfig.model_fields.keys() - ServerBaseline.model_fields.keys()):
        return [APIServerConfig(**{**default.model_dump(), **merged})]
    return ServerBaseline(**{**default.model_dump(), **changes})


def _yaml_entries(yaml_config: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    openai = (yaml_config or {}).get("openai")
    if openai is None:
        return []
    entries = openai if isinstance(openai, list) else [openai]
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"openai: in the YAML file is {openai!r}; write one mapping, or a list of mappings")
    return entries
