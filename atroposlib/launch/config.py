"""The YAML of `atropos datagen`: one file says what a run makes, with which engine and environment.

Every path may use `~`, `$VAR` and `${VAR}`; `load` expands them. `environment.script` and `environment.config` are
looked up next to the YAML file, outputs (`run_dir`, `log_dir`) in the current folder.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from atroposlib.envs.catalog import adapted
from atroposlib.type_definitions import JsonObject


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
        if not isinstance(values, dict) or not values.get("adapter") or "script" in values:
            return values
        script, env = adapted(values["adapter"], values.get("id"))
        return {**values, "script": script, "env": {**env, **(values.get("env") or {})}}


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
        """Folder of the services' logs."""
        return Path(self.log_dir) if self.log_dir else self.work_dir / "logs"
