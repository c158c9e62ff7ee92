"""What can be known to go wrong before anything is started, found in seconds and without a GPU.

Every check returns sentences; all of them are shown at once, so that one look at the message is enough.
"""

import contextlib
import importlib.util
import json
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.errors import AtroposError, LaunchError
from atroposlib.launch.config import DatagenConfig, EngineConfig
from atroposlib.paths import writable_dir

SETTINGS_FILE = "settings.json"
_BYTES_PER_TOKEN = 40  # id, mask and log-probability as JSON text, and the message text
_DEFAULT_TOKEN_LENGTH = 2048  # of BaseEnvConfig


@dataclass(frozen=True)
class Model:
    """The model as the run uses it."""

    name: str
    path: str
    tokenizer: str


def preflight(config: DatagenConfig) -> Model:
    """Check everything that can be checked; fetch the embedded model when it is not there yet.

    Raises:
        LaunchError: one line per problem, each with what to do.
    """
    problems = [
        *_script_problems(config),
        *_folder_problems(config),
        *_port_problems(config),
        *_engine_problems(config.engine),
        *_length_problems(config),
        *_settings_problems(config),
    ]
    model = None
    if not problems:
        try:
            model = resolve(config.engine)
        except AtroposError as error:
            problems.append(str(error))
    if model is None:
        raise LaunchError("; ".join(problems))
    return model


def resolve(engine: EngineConfig) -> Model:
    """Names and paths of the engine's model and tokenizer."""
    if engine.kind != "embedded":
        return Model(engine.model, engine.model, engine.tokenizer or engine.model)
    from atroposlib.engines.models import resolve_model

    local = resolve_model(engine.model)
    return Model(local.name, str(local.gguf), engine.tokenizer or str(local.tokenizer_dir))


def data_settings(config: DatagenConfig) -> dict[str, Any]:
    """The settings that shape the data; a run folder never mixes two of them."""
    return {
        "name": config.name,
        "responses": config.responses,
        "model": config.engine.model,
        "script": Path(config.environment.script).name,
        "env": config.environment.env,
    }


def _script_problems(config: DatagenConfig) -> list[str]:
    script = Path(config.environment.script)
    return [] if script.is_file() else [f"environment.script {script} does not exist; give the environment's .py file"]


def _folder_problems(config: DatagenConfig) -> list[str]:
    try:
        folder = writable_dir(config.run_dir, what="run_dir")
    except AtroposError as error:
        return [str(error)]
    tokens = config.expected_tokens or config.environment.env.get("max_token_length", _DEFAULT_TOKEN_LENGTH) // 4
    needed = config.problems * config.responses * tokens * _BYTES_PER_TOKEN
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return []
    return [
        f"run_dir {folder} has {free / 1e9:.1f} GB free, but {config.problems} x {config.responses} responses of about "
        f"{tokens} tokens need {needed / 1e9:.1f} GB; free some space, choose another disk, or correct expected_tokens"
    ]


def _port_problems(config: DatagenConfig) -> list[str]:
    found = []
    for what, port in (("engine.port", config.engine.port), ("api.port", config.api.port)):
        if port is None:
            continue
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                found.append(
                    f"{what} {port} cannot be used ({error.strerror}); free it or leave {what} out for a free one"
                )
    return found


def _engine_problems(engine: EngineConfig) -> list[str]:
    if engine.kind == "external" and not engine.base_url:
        return ["engine.kind is external but engine.base_url is not set; give the address of the running engine"]
    module, extra = {"embedded": ("xllamacpp", "local"), "sglang": ("sglang", "sglang")}.get(engine.kind, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        return [f"engine.kind {engine.kind} needs the package {module}; run: pip install 'atroposlib[{extra}]'"]
    return []


def _length_problems(config: DatagenConfig) -> list[str]:
    """An answer as long as allowed must fit the slot together with at least some prompt."""
    limit = config.environment.env.get("max_token_length")
    if config.engine.kind != "embedded" or not isinstance(limit, int) or limit < config.engine.context:
        return []
    return [
        f"environment.env.max_token_length is {limit}, but engine.context is {config.engine.context} tokens for prompt "
        "and answer together; lower the one or raise the other"
    ]


def _settings_problems(config: DatagenConfig) -> list[str]:
    """What differs from the settings with which this run folder was started."""
    try:
        earlier = json.loads((Path(config.run_dir) / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    current = json.loads(json.dumps(data_settings(config)))
    return [
        f"{key} was {earlier.get(key)!r} when run_dir {config.run_dir} was started and is {current[key]!r} now; "
        "set it back, choose another run_dir, or start anew with --fresh"
        for key in current
        if current[key] != earlier.get(key)
    ]
