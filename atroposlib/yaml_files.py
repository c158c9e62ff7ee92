"""YAML files that users write, whose top level is a mapping."""

from pathlib import Path

import yaml

from atroposlib.errors import ConfigError
from atroposlib.type_definitions import JsonObject


def read_mapping(path: Path, *, expected: str, what: str) -> JsonObject:
    """The mapping in the file.

    Args:
        expected: what the file should hold, for the error about something else.
        what: the file itself, e.g. `a recipe`, for the error about a path that cannot be read.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of {what}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected {expected}")
    return content
