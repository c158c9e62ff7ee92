"""From command line, environment variables and a YAML recipe to a checked config.

A recipe holds config fields, and `env:`, a mapping that is exported to the process's environment. An unknown key or
flag is refused with the nearest known name.
"""

import argparse
import importlib.util
import json
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.config import RecipeSettings
from atroposlib.paths import expand_path, read_mapping
from atroposlib.type_definitions import Json, JsonObject
from atroposlib.utils.cli import mistakes, refuse_unknown

ConfigT = TypeVar("ConfigT", bound=RecipeSettings)

_METAVARS: dict[object, str] = {str: "TEXT", int: "N", float: "X"}
ENVIRONMENT = {
    "VLLM_MODEL": "model_name",
    "VLLM_PORT": "vllm_port",
    "VLLM_TP_SIZE": "vllm_tp_size",
    "VLLM_MAX_LEN": "max_model_len",
    "VLLM_MEM_UTIL": "gpu_memory_utilization",
}
ALIASES = {
    "model_name": ["--model"],
    "gpu_memory_utilization": ["--vllm-gpu-memory-utilization"],
    "sync_interval": ["--vllm-restart-interval"],
}
RETIRED = {
    "--vllm-gpu": "set ATROPOS_ENGINE_GPUS and ATROPOS_TRAINER_GPUS for atropos-grpo-run",
    "--vllm-config-path": "weights travel through a folder, see --weight-sync",
    "--trainer-rank": "start several processes with accelerate launch or torchrun",
    "--world-size": "start several processes with accelerate launch or torchrun",
    "--init-method": "start several processes with accelerate launch or torchrun",
    "--num-inference-nodes": "name every engine in --engine-urls",
    "--debug-loading": "nothing is mapped onto an engine's tensors any more",
    "--benchmark": "metrics.jsonl always holds the times of each step",
}
"""Flags of upstream's trainer that have no meaning here, and what to do instead."""
BRIDGE_MODES = {"none": "none", "lora_only": "vllm_lora", "lora_restart": "restart"}
"""Upstream's `--weight-bridge-mode` and what it is called here."""


def require_torch() -> None:
    """ConfigError where the trainer's packages are not installed, before anything is started for it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"the trainer needs torch, which {sys.executable} lacks; run: pip install -e '.[trainer]' in the repository"
        )


class RecipeParser(argparse.ArgumentParser):
    """Refuses unknown flags with the nearest known one."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # pyright: ignore
        """The flags as given; None where a flag was not. ConfigError for an unknown one."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            if flag in RETIRED:
                raise ConfigError(f"{flag} is gone: {RETIRED[flag]}")
            refuse_unknown([flag], [f for action in self._actions for f in action.option_strings], what="flag")
        return known


def parser_of(config: type[BaseModel], description: str, examples: str) -> RecipeParser:
    """One flag per field, its help the field's description. Values stay text; pydantic reads them."""
    parser = RecipeParser(
        usage="%(prog)s [OPTIONS]",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="YAML", help="Recipe; flags override it.")
    parser.add_argument("--weight-bridge-mode", choices=[*BRIDGE_MODES, "shared_vllm"], help=argparse.SUPPRESS)
    for name, field in config.model_fields.items():
        flags = ["--" + name.replace("_", "-"), *ALIASES.get(name, [])]
        parser.add_argument(*flags, dest=name, default=None, help=_help(field), **_shape(field.annotation))
    return parser


def build(config: type[ConfigT], flags: Mapping[str, Json], environ: Mapping[str, str]) -> ConfigT:
    """Recipe, then environment variables, then flags that are not None."""
    values: JsonObject = read_recipe(expand_path(flags["config"], what="--config")) if flags.get("config") else {}
    exported = values.pop("env", None) or {}
    if not isinstance(exported, dict):
        raise ConfigError(f"env is {exported!r}, expected a mapping of environment variables to values")
    os.environ.update({str(key): str(value) for key, value in exported.items()})
    environ = {**environ, **{str(key): str(value) for key, value in exported.items()}}
    for variable, name in ENVIRONMENT.items():
        if environ.get(variable) and name in config.model_fields:
            values[name] = environ[variable]
    if environ.get("MAXENT") == "1" and "objective" in config.model_fields:
        values["objective"] = "maxent"
    given = {key: value for key, value in flags.items() if value is not None and key in config.model_fields}
    if flags.get("weight_bridge_mode"):
        given["weight_sync"] = _bridge(flags["weight_bridge_mode"])
    return check(config, config.with_flags(values, given))


def read_recipe(path: Path) -> JsonObject:
    """The mapping in a YAML file. A file it names is looked for next to it, then left to the current folder."""
    content = read_mapping(path, expected="config fields such as model_name", what="a recipe")
    for mapping, key in _named_files(content):
        neighbour = path.parent / mapping[key]
        if neighbour.is_file():
            mapping[key] = str(neighbour.absolute())
    return content


def _named_files(recipe: JsonObject) -> list[tuple[JsonObject, str]]:
    """Where the recipe names a file: mapping and key."""
    sources = recipe.get("datasets")
    listed = [(source, "id") for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    places = [(recipe, "environment"), (recipe, "chat_template"), *listed]
    return [(mapping, key) for mapping, key in places if isinstance(mapping.get(key), str)]


def check(config: type[ConfigT], values: Mapping[str, Json]) -> ConfigT:
    """Validate; every problem in one sentence."""
    try:
        return config.model_validate(values)
    except ValidationError as error:
        missing = "{place} is missing; give --{flag} or write it in the recipe"
        raise ConfigError(mistakes(error, config, missing=missing)) from None


def _bridge(mode: str) -> str:
    if mode not in BRIDGE_MODES:
        raise ConfigError(
            f"--weight-bridge-mode {mode} shared GPU memory with a patched vLLM and is gone; use --weight-sync vllm "
            "(weights through a folder) or --weight-sync vllm_lora"
        )
    return BRIDGE_MODES[mode]


def _help(field: FieldInfo) -> str:
    default = "" if field.is_required() else f" (default: {field.default})"
    return ((field.description or "") + default).replace("%", "%%").strip()


def _shape(annotation: object) -> JsonObject:
    """argparse options of a field's type: switches for bools, several values for lists, JSON for the rest."""
    members = [member for member in get_args(annotation) if member is not type(None)]
    inner = annotation
    if get_origin(annotation) in (Union, types.UnionType) and len(members) == 1:
        inner = members[0]
    if inner is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(inner) is Literal:
        return {"metavar": "|".join(str(choice) for choice in get_args(inner))}
    if get_origin(inner) is list and get_args(inner)[0] is str:
        return {"nargs": "+", "metavar": "TEXT"}
    if inner in _METAVARS:
        return {"metavar": _METAVARS[inner]}
    return {"type": _json_or_text, "metavar": "VALUE"}


def _json_or_text(text: str) -> Json:
    """Mappings and lists are written as JSON on the command line; anything else stays text."""
    return json.loads(text) if text[:1] in "[{" else text
