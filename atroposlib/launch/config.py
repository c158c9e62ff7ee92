"""The YAML of `atropos datagen`: one file says what a run makes, with which engine and environment.

Every path may use `~`, `$VAR` and `${VAR}`. `environment.script` is looked up beside the YAML file, outputs
(`run_dir`) in the current folder. Unknown keys are refused with the nearest known name.
"""

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path


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
    port: PositiveInt | None = Field(None, description="Port on 127.0.0.1; null: a free one.")
    slots: PositiveInt = Field(32, description="embedded: sequences generated at the same time.")
    context: PositiveInt = Field(1024, description="embedded: tokens of prompt plus answer per sequence.")
    threads: PositiveInt | None = Field(None, description="embedded: CPU threads; null: all cores.")
    tp: PositiveInt = Field(1, description="sglang: GPUs that share one copy of the model.")
    dp: PositiveInt = Field(1, description="sglang: copies of the model.")
    args: list[str] = Field([], description="Further flags, handed to the engine as they are.")
    ready_timeout_s: PositiveFloat = Field(1800, description="How long loading may take before the run gives up.")


class EnvironmentConfig(Section):
    """Which environment makes the problems and scores the answers."""

    script: str = Field(description="The environment's Python file, relative to this YAML file.")
    workers: PositiveInt = Field(16, description="Problems rolled out at the same time.")
    env: dict[str, Any] = Field({}, description="Fields of the environment's own config, as under `env:` in its YAML.")
    server: dict[str, Any] = Field({}, description="Fields of its engine client, as under `openai:`, e.g. timeout.")


class ApiConfig(Section):
    """The trajectory API between environment and trainer."""

    port: PositiveInt | None = Field(None, description="Port on 127.0.0.1; null: a free one.")


class ExportConfig(Section):
    """One dataset made from the rollouts when the run is complete."""

    path: str = Field("sft.jsonl", description="File name inside run_dir.")
    format: Literal["messages", "sharegpt", "prefix", "tokens"] = "messages"
    above_score: float = Field(0.0, description="Responses are kept when their score is above this.")
    top_n_per_problem: PositiveInt | None = Field(None, description="Keep the best n of a problem; null: all.")


class RestartConfig(Section):
    """When a service that keeps dying stops the run."""

    limit: PositiveInt = Field(5, description="Restarts of one service ...")
    window_s: PositiveFloat = Field(600, description="... within this many seconds.")


class DatagenConfig(Section):
    """A whole run: `problems` x `responses`, recorded, scored and exported."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run and its files.")
    run_dir: str = Field(description="Everything the run writes goes here; the same folder resumes.")
    problems: PositiveInt = Field(description="Groups to record, exactly.")
    responses: PositiveInt = Field(description="Responses per problem (the group size).")
    expected_tokens: PositiveInt | None = Field(
        None, description="Mean tokens of a response, for the disk estimate; null: a quarter of max_token_length."
    )
    engine: EngineConfig = EngineConfig()  # pyright: ignore[reportCallIssue]
    environment: EnvironmentConfig
    api: ApiConfig = ApiConfig()  # pyright: ignore[reportCallIssue]
    export: list[ExportConfig] = [ExportConfig()]  # pyright: ignore[reportCallIssue]
    restarts: RestartConfig = RestartConfig()  # pyright: ignore[reportCallIssue]


def load_config(path: Path, **overrides: Any) -> DatagenConfig:
    """Read and check one YAML file; its script and run_dir come back as absolute paths.

    Args:
        overrides: top-level values that replace the file's; None keeps the file's.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, a wrong type; one line per problem.
        PathError: a path with an unset variable.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a datagen YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected keys such as name, run_dir and problems")
    content |= {key: value for key, value in overrides.items() if value is not None}
    try:
        config = DatagenConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_sentence(entry) for entry in error.errors())) from None
    script = expand_path(config.environment.script, what=f"{path}: environment.script")
    return config.model_copy(
        update={
            "run_dir": str(expand_path(config.run_dir, what=f"{path}: run_dir").absolute()),
            "environment": config.environment.model_copy(
                update={"script": str((path.absolute().parent / script).resolve())}
            ),
        }
    )


def _sentence(entry: Any) -> str:
    """One pydantic error in words: where, what was found, what was expected."""
    where = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(entry["loc"][-1]), _known_keys(entry["loc"][:-1]), n=1)
        return f"unknown key {where!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if entry["type"] == "missing":
        return f"{where!r} is missing"
    return f"{where} is {entry['input']!r}: {entry['msg']}"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
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
