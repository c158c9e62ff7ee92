"""Find what will go wrong before anything is started, in seconds and without a GPU.

Every check returns sentences; all of them are shown at once, so that one look at the message is enough.
"""

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.filesize import decimal

from atroposlib.data.tokenizers import cached_file
from atroposlib.envs.server_handling.server_config import GPUS_PER_NODE
from atroposlib.errors import AtroposError, LaunchError, ModelError
from atroposlib.json_lines import read_object
from atroposlib.launch.config import DatagenConfig, EngineConfig
from atroposlib.launch.plan import (
    DEFAULT_CONTEXT,
    Model,
    engine_urls,
    environment_flags,
    environment_yaml,
    has_recorded,
)
from atroposlib.paths import writable_dir
from atroposlib.status.runs import RUN_FILE, read_status
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
DEFAULT_TOKEN_LENGTH = 2048  # of BaseEnvConfig
_BYTES_PER_TOKEN = 40  # id, mask and log-probability as JSON text, and the message text


def preflight(config: DatagenConfig, *, starts: bool = True, say: Callable[[str], object] | None = None) -> Model:
    """Check everything that can be checked; fetch the embedded model when it is not there yet.

    Args:
        starts: the run begins here and now; else GPUs are only looked at where there are some.
        say: told the lines with which the environment describes the problems that it will ask; None: the log is.

    LaunchError: one line per problem, each with what to do.
    """
    script = Path(config.environment.script)
    problems = [
        *([] if script.is_file() else [f"environment.script {script} does not exist; give the environment's .py file"]),
        *_folder_problems(config),
        *_port_problems(config),
        *engine_problems(config, os.environ, starts=starts),
        *_settings_problems(config),
        *_sharing_problems(config),
        *_export_problems(config),
    ]
    model = None
    if not problems:
        try:
            model = resolve(config.engine)
            problems = model_problems(config, model)
            if config.engine.kind != "embedded" or not starts:  # else it is said as soon by the environment itself
                wrong, lines = check_environment(config, model, starts=starts)
                problems += wrong
                for line in lines:
                    (say or logger.info)(line)
        except AtroposError as error:
            problems.append(str(error))
    if model is None or problems:
        raise LaunchError("the run cannot start:\n" + "\n".join(f"- {problem}" for problem in problems))
    return model


def not_checked(config: DatagenConfig, model: Model) -> list[str]:
    """Return what `preflight` could not look at on this machine, for someone who checks on a login node."""
    if config.engine.kind != "sglang":
        return []
    found = []
    if not gpu_count(os.environ):
        found.append("GPUs: none are visible here")
    if model_context(_json_file(model.path, "config.json")) is None:
        found.append(f"context length: the config.json of {model.path} is not on this machine or does not say")
    if not vocabulary(model.tokenizer):
        found.append(f"tokenizer: the tokenizer.json of {model.tokenizer} is not on this machine")
    return found


def resolve(engine: EngineConfig) -> Model:
    """Names and paths of the engine's model and tokenizer."""
    if engine.kind != "embedded":
        return Model(engine.model, engine.model, engine.tokenizer or engine.model, engine.model)
    from atroposlib_engine.models import resolve_model

    local = resolve_model(engine.model)
    own = str(local.tokenizer_dir)
    return Model(local.name, str(local.gguf), engine.tokenizer or own, own)


def data_settings(config: DatagenConfig) -> JsonObject:
    """The settings that shape the data; a run folder never mixes two of them."""
    return {
        "name": config.name,
        "responses": config.responses,
        "model": config.engine.model,
        "script": Path(config.environment.script).name,
        "env": config.environment.env,
    }


def _folder_problems(config: DatagenConfig) -> list[str]:
    problems = []
    for what, path in (("run_dir", config.work_dir), ("log_dir", config.logs)):
        try:
            writable_dir(path, what=what)
        except AtroposError as error:
            problems.append(str(error))
    if problems:
        return problems
    folder = Path(config.run_dir)
    longest = config.environment.env.get("max_token_length")  # only the environment knows what else it may be
    tokens = config.expected_tokens or (longest if isinstance(longest, int) else DEFAULT_TOKEN_LENGTH) // 4
    recorded = 0  # by earlier starts: a chain must not end because its disk fills as planned
    with contextlib.suppress(LaunchError):
        recorded = read_status(folder).groups_done
    missing = max(0, config.problems - recorded)
    needed = missing * config.responses * tokens * _BYTES_PER_TOKEN
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return []
    return [
        f"run_dir {folder} has {decimal(free)} free, but {missing} x {config.responses} responses of about "
        f"{tokens} tokens need {decimal(needed)}; free some space, choose another disk, or correct expected_tokens"
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


def _export_problems(config: DatagenConfig) -> list[str]:
    from atroposlib.data.output import DATASETS, refuse_other_kinds

    problems = []
    for export in config.export:
        try:
            refuse_other_kinds(Path(export.path), DATASETS, what="export.path")
        except AtroposError as error:
            problems.append(str(error))
    return problems


def _settings_problems(config: DatagenConfig) -> list[str]:
    """Name what differs from the settings of this run folder, once something is recorded or a member works."""
    if not (has_recorded(config) or _is_running(Path(config.run_dir))):
        return []
    earlier = read_object(Path(config.run_dir) / SETTINGS_FILE)
    if earlier is None:
        return []
    before, now = (_one_by_one(settings) for settings in (earlier, json.loads(json.dumps(data_settings(config)))))
    return [
        f"{key} was {json.dumps(before.get(key))} when run_dir {config.run_dir} was started and is "
        f"{json.dumps(now.get(key))} now; set it back, choose another run_dir, or start from scratch with --fresh"
        for key in now | before
        if now.get(key) != before.get(key)
    ]


def _is_running(run_dir: Path) -> bool:
    with contextlib.suppress(LaunchError):
        return read_status(run_dir).running
    return False


def _one_by_one(settings: JsonObject) -> JsonObject:
    """The environment's settings each under a name of its own, so that a message holds only what differs."""
    env = {f"environment.env.{key}": value for key, value in settings.get("env", {}).items()}
    return {key: value for key, value in settings.items() if key != "env"} | env


def _sharing_problems(config: DatagenConfig) -> list[str]:
    """A run alone and a shared one keep their rollouts apart: each would repeat what the other has done."""
    run_dir = Path(config.run_dir)
    members = sorted(record.parent.name for record in run_dir.glob(f"members/*/{RUN_FILE}"))
    was_alone = (run_dir / RUN_FILE).exists()
    if config.share.member and was_alone and not members:
        return [f"run_dir {run_dir} was started without share.member; continue without it, or choose another run_dir"]
    if members and not was_alone and not config.share.member:
        return [
            f"run_dir {run_dir} is shared by {', '.join(members)}; continue with --set share.member={members[0]} (or "
            "as a job array), or choose another run_dir"
        ]
    return []


_NOWHERE = "http://127.0.0.1:1"
_DEADLINE_S = 300.0  # a script may import a great deal


def check_environment(config: DatagenConfig, model: Model, *, starts: bool) -> tuple[list[str], list[str]]:
    """Return what `SCRIPT serve --check` finds wrong, and what it says; nothing is set up.

    An engine that runs already is asked, too, unless the run starts now and asks it as soon itself. One that the run
    starts is not there yet.
    """
    script, engine = config.environment.script, config.engine
    url = engine.base_url.rstrip("/").removesuffix("/v1") if engine.kind == "external" and engine.base_url else _NOWHERE
    check = "--check=settings" if starts or url == _NOWHERE else "--check"
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "environment.yaml"
        settings.write_text(environment_yaml(config, model, [url], _NOWHERE), encoding="utf-8")
        command = [sys.executable, script, "serve", "--config", str(settings), *environment_flags(config), check]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return [], [f"{script} serve --check did not end within {_DEADLINE_S:.0f} s; it was not waited for"]
    if done.returncode == 0:
        return [], done.stdout.splitlines()
    said = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
    return [f"environment.script {script} cannot start: {said[-1].removeprefix('error: ')}"], []


_PACKAGES = {"embedded": ("xllamacpp", "local"), "sglang": ("sglang", "sglang")}


def engine_problems(config: DatagenConfig, environ: Mapping[str, str], *, starts: bool) -> list[str]:
    """Sentences about the engine's settings, its package and its GPUs.

    Args:
        starts: the run begins here and now; else GPUs are only looked at where there are some.
    """
    engine = config.engine
    if engine.kind == "external":
        missing = "engine.kind is external but engine.base_url is not set; give the address of the running engine"
        return [] if engine.base_url else [missing]
    problems = []
    module, extra = _PACKAGES[engine.kind]
    if importlib.util.find_spec(module) is None:
        problems.append(f"engine.kind {engine.kind} needs the package {module}; run: pip install 'atroposlib[{extra}]'")
    if engine.kind == "embedded":
        return problems
    if engine_urls(config, environ):
        return [*problems, *_node_problems(engine, environ)]
    return [*problems, *(_gpu_problems(engine, environ) if starts or gpu_count(environ) else [])]


def gpu_count(environ: Mapping[str, str]) -> int:
    """GPUs that this process may use: those named in CUDA_VISIBLE_DEVICES, else those of the machine."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in {"", "-1"}])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def _gpu_problems(engine: EngineConfig, environ: Mapping[str, str]) -> list[str]:
    needed, found = engine.tp * engine.dp, gpu_count(environ)
    if found >= needed:
        return []
    return [
        f"engine.tp {engine.tp} x engine.dp {engine.dp} needs {needed} GPUs, but {found} are visible here "
        f"(CUDA_VISIBLE_DEVICES is {environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); ask for more or lower tp or dp"
    ]


def _node_problems(engine: EngineConfig, environ: Mapping[str, str]) -> list[str]:
    """On several nodes the addresses come from INFER_TP, so it must be what one server takes."""
    needed = engine.tp * engine.dp
    told = int(environ.get("INFER_TP") or needed)
    problems = []
    if needed != told:
        problems.append(
            f"this job has several nodes and INFER_TP is {told}, but engine.tp {engine.tp} x engine.dp {engine.dp} is "
            f"{needed} GPUs for each server; set INFER_TP={needed}"
        )
    if needed > GPUS_PER_NODE:
        problems.append(f"one server needs {needed} GPUs, but a node has {GPUS_PER_NODE}; lower engine.tp or engine.dp")
    if engine.router and importlib.util.find_spec("sglang_router") is None:
        problems.append("engine.router needs the package sglang_router; run: pip install sglang-router")
    return problems


def model_problems(config: DatagenConfig, model: Model) -> list[str]:
    """Sentences about lengths, and about a tokenizer that is not the model's."""
    facts = _json_file(model.path, "config.json")
    context = config.engine.context or (DEFAULT_CONTEXT if config.engine.kind == "embedded" else model_context(facts))
    return [*_length_problems(config, context), *_tokenizer_problems(model, facts)]


def model_context(facts: Mapping[str, Json]) -> int | None:
    """Tokens that a model takes, by its config.json; None when it does not say.

    >>> model_context({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 40}})
    163840
    >>> model_context({"max_position_embeddings": 163840, "rope_scaling": {"type": "yarn", "factor": 40,
    ...     "original_max_position_embeddings": 4096}})
    163840
    """
    text: Mapping[str, Json] = facts.get("text_config") or facts
    length = text.get("max_position_embeddings") or text.get("max_sequence_length") or text.get("n_positions")
    if not isinstance(length, int):
        return None
    scaling = text.get("rope_scaling") or {}
    already_scaled = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    return length if already_scaled else int(length * (scaling.get("factor") or 1))


def _length_problems(config: DatagenConfig, context: int | None) -> list[str]:
    """An answer as long as allowed must fit the context together with the longest prompt."""
    answer, prompt = config.environment.env.get("max_token_length", DEFAULT_TOKEN_LENGTH), config.max_prompt_tokens
    if context is None or not isinstance(answer, int) or answer + prompt <= context:
        return []
    return [
        f"environment.env.max_token_length is {answer} and max_prompt_tokens is {prompt}, together more than the "
        f"context of {context} tokens; lower one of them or raise engine.context"
    ]


def _tokenizer_problems(model: Model, facts: Mapping[str, Json]) -> list[str]:
    """Ids beyond the model's vocabulary kill an engine; ids that mean another text spoil the data silently."""
    words = vocabulary(model.tokenizer)
    rows = (facts.get("text_config") or facts).get("vocab_size")
    if not words:
        return []
    highest = max(words.values())
    if isinstance(rows, int) and highest >= rows:
        return [
            f"the tokenizer {model.tokenizer} has ids up to {highest}, but the model {model.path} only has {rows}; "
            "use the model's own tokenizer"
        ]
    own = vocabulary(model.own_tokenizer) if model.own_tokenizer != model.tokenizer else {}
    other = [token for token, number in own.items() if words.get(token) != number]
    if not other:
        return []
    return [
        f"the tokenizer {model.tokenizer} is not that of the model {model.path}: {len(other)} of {len(own)} tokens, "
        f"e.g. {other[0]!r}, have another id; use the model's own tokenizer"
    ]


def vocabulary(tokenizer: str) -> dict[str, int]:
    """Token to id, added tokens included; {} when the files are not here."""
    content = _json_file(tokenizer, "tokenizer.json")
    vocab = (content.get("model") or {}).get("vocab") or {}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    return {**vocab, **added} if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)} | added


def _json_file(name: str, file: str) -> JsonObject:
    """A file of a model folder or of a hub model in the local cache; {} when it is not there."""
    path: Path | None = Path(name, file)
    if not path.is_file():
        path = cached_file(name, file)
    if path is None:
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is damaged ({error}); fetch {name} again") from None
