"""Tasks of Inspect (inspect-ai), by `file.py@task` or the name of an installed one: a rollout is a run of one sample.

Inspect allows one evaluation at a time in a process, so that `env.workers` processes run them, each with Inspect
imported once. Its solvers, agents, tools and sandboxes talk to the rollout's key; the score comes from Inspect's log.
Scorers that ask a model need `env.grader`: a grade is no word of the policy and must not be recorded as one.
"""

import asyncio
import contextlib
import math
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from atroposlib.environments.adapters.framework import FrameworkConfig, FrameworkEnv
from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun
from atroposlib.errors import ConfigError, VerifierFault
from atroposlib.sandbox.workers import SandboxError, WorkerPool
from atroposlib.type_definitions import Item, JsonObject

_MODULE = "atroposlib.environments.adapters.inspect_env"
"""Where a worker finds the functions below, also when this file is run as a script."""


class InspectConfig(FrameworkConfig, AgentEnvConfig):
    """Settings of running and scoring samples. `arguments` are those of the task."""

    scorer: str | None = Field(None, description="Which score counts: name, or name.key; null: the only one.")
    grader: JsonObject | None = Field(
        None, description="Model of the role `grader`: model (as Inspect names it), base_url, api_key."
    )
    options: JsonObject = Field({}, description="Further options of inspect_ai.eval, such as message_limit.")
    workers: PositiveInt = Field(4, description="Samples that run at the same time, each in a process.")


class InspectEnv(FrameworkEnv, AgentEnv):
    """Score: that of Inspect's scorer, C and I as 1 and 0."""

    name = "inspect"
    framework: ClassVar[str] = "inspect-ai"
    env_config_cls = InspectConfig
    config: InspectConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def prepare(self) -> int:
        import inspect_ai  # noqa: F401 (told here when it is missing)

        config = self.config
        file, _, task = config.id.partition("@")
        self.task = (
            str(Path(file).expanduser().resolve()) + (f"@{task}" if task else "") if ".py" in file else config.id
        )
        self.pool = WorkerPool(workers=config.workers, timeout_s=config.agent_timeout_s, memory_mb=16_384)
        self.free = asyncio.Semaphore(config.workers)  # else the time of an agent would begin before it runs
        try:
            self.samples: list[Any] = self.pool.run(f"{_MODULE}:sample_ids", self.task, config.arguments)
        except SandboxError as error:
            raise ConfigError(f"the task {config.id} of Inspect cannot be loaded: {error}") from error
        return len(self.samples)

    async def _roll_out(self, item: Item) -> Any:
        async with self.free:
            return await super()._roll_out(item)

    async def run_agent(self, item: Item, access: Access) -> dict[str, float | None]:
        policy = {"model": f"openai-api/atropos/{access.model}", "base_url": access.openai_base_url}
        policy["api_key"] = access.key
        given = [self.task, self.config.arguments, self.samples[item["index"]], policy, self.config.grader]
        return await self.pool.call(f"{_MODULE}:scores_of_sample", *given, str(access.folder), self.config.options)

    async def verify(self, item: Item, run: AgentRun) -> float:
        scores, wanted = run.result or {}, self.config.scorer
        if wanted is None and len(scores) == 1:
            (wanted,) = scores
        if wanted not in scores or scores[wanted] is None:
            raise VerifierFault(f"env.scorer is {wanted!r}, Inspect's scores are {scores}; {run.output}")
        return float(scores[wanted])

    async def teardown(self) -> None:
        await super().teardown()
        if hasattr(self, "pool"):
            await asyncio.to_thread(self.pool.close)


def sample_ids(task: str, arguments: JsonObject) -> list[Any]:
    """Return the ids of the samples of a task; called in a worker."""
    from inspect_ai import eval as evaluate

    with tempfile.TemporaryDirectory() as folder:
        where = {"log_dir": folder, "display": "none", "run_samples": False}
        (log,) = evaluate(task, "mockllm/model", task_args=arguments, **where)
    return log.eval.dataset.sample_ids


def scores_of_sample(
    task: str, arguments: JsonObject, sample: Any, policy: dict, grader: dict | None, folder: str, options: dict
) -> dict[str, float | None]:
    """Run one sample against the policy and return its scores by name, None for unscored; called in a worker."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    model = get_model(**policy, memoize=False)
    roles = {"grader": get_model(**grader, memoize=False) if grader else "none/none"}
    where = {"log_dir": folder, "log_realtime": False, "display": "none", "score_display": False}
    (log,) = evaluate(
        task, model, task_args=arguments, sample_id=sample, model_roles=roles, epochs=1, **where, **options
    )
    if log.error is not None or not log.samples or log.samples[0].error is not None:
        error = log.samples[0].error if log.samples and log.samples[0].error else log.error
        raise RuntimeError(error.message if error is not None else "the log has no sample")
    _refuse_grading_policy(log.samples[0].events, str(model))
    return {name: value for one in (log.samples[0].scores or {}).items() for name, value in _numbers(*one)}


def _refuse_grading_policy(events: list[Any], model: str) -> None:
    """Raise where a scorer asked the policy: the grade would be trained on as its own words."""
    scoring: set[str] = set()
    for event in events:
        if event.event == "span_begin" and (event.type in ("scorers", "scorer") or event.parent_id in scoring):
            scoring.add(event.id)
        elif event.event == "model" and event.span_id in scoring and event.model == model:
            raise RuntimeError("a scorer asked the policy's model; have it ask the role grader, and set env.grader")


def _numbers(name: str, score: Any) -> list[tuple[str, float | None]]:
    values = score.value.items() if isinstance(score.value, dict) else [(None, score.value)]
    return [(name if key is None else f"{name}.{key}", _number(value)) for key, value in values]


def _number(value: Any) -> float | None:
    """Return a value of a score as Inspect counts it; None for what is no number, which Inspect would count as 0."""
    from inspect_ai.scorer import value_to_float

    number = float(value_to_float()(value))
    if number == 0 and isinstance(value, str) and value not in ("I", "N") and value.lower() not in ("no", "false"):
        with contextlib.suppress(ValueError):
            return float(value)
        return None
    return number if math.isfinite(number) and isinstance(value, str | int | float) else None


if __name__ == "__main__":
    InspectEnv.cli()
