"""Environment checkpoints: small JSON files of attributes, one per training step.

`<checkpoint_dir>/env_checkpoints/<registered name>/step-<step>.json`. A restarted environment may be registered under
another name (`gsm8k_1` after `gsm8k_0`) and at a step between two checkpoints, so the newest one that is not ahead of
the trainer counts. An empty `checkpoint_dir` is a trainer that keeps none: nothing is written or found.
"""

import json
import logging
import re
from pathlib import Path

from atroposlib.paths import expand_path, write_text_atomic
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)\.json")
_INDEX = re.compile(r"_\d+$")


def save(checkpoint_dir: str, registered_name: str, step: int, data: JsonObject) -> Path | None:
    """Write the checkpoint of one step as a whole; its path."""
    if not checkpoint_dir:
        return None
    folder = expand_path(checkpoint_dir, what="checkpoint_dir") / "env_checkpoints" / registered_name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}.json"
    write_text_atomic(path, json.dumps(data))
    return path


def load(checkpoint_dir: str, registered_name: str, step: int) -> JsonObject:
    """Attributes of the checkpoint to continue with at `step`; {} where there is none."""
    path = newest(checkpoint_dir, registered_name, step)
    if path is None:
        return {}
    logger.info("checkpoint loaded: %s", path)
    return json.loads(path.read_text("utf-8"))


def newest(checkpoint_dir: str, registered_name: str, step: int) -> Path | None:
    """The checkpoint to continue with at `step`: the latest one not after it, of this name or its earlier indices."""
    if not checkpoint_dir:
        return None
    root = expand_path(checkpoint_dir, what="checkpoint_dir") / "env_checkpoints"
    base = _INDEX.sub("", registered_name)
    found = [
        (int(match[1]), folder.name == registered_name, path.stat().st_mtime, path)
        for folder in root.glob("*")
        if _INDEX.sub("", folder.name) == base
        for path in folder.glob("step-*.json")
        if (match := _STEP.fullmatch(path.name)) and int(match[1]) <= step
    ]
    return max(found)[-1] if found else None
