"""Calls of functions in one turn: a single one, several at once, the right one of several, or none where none fits.

    python tool_calling_server.py process --env.dataset bfcl --env.sets '["simple", "parallel"]' ...

Problems are made, or those of the Berkeley Function-Calling Leaderboard (v4) from the installed package `bfcl-eval`
(which is read, not imported) or from a folder of its files. Calls are compared by the leaderboard's rules.
"""

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.environments.multi_turn import (
    Message,
    MultiTurnRowsConfig,
    MultiTurnRowsEnv,
    Reply,
    Step,
    World,
    eval_metrics,
)
from atroposlib.environments.rows import Split, tenth_kept
from atroposlib.environments.tool_use.answers import fault_of
from atroposlib.environments.tool_use.bfcl import SetName, ToolProblem, data_folder, read_problems, right_calls, tool_of
from atroposlib.environments.tool_use.made_problems import make_problem
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.server_handling.tool_arguments import WrittenCall, dumped
from atroposlib.envs.server_handling.tool_formats import tool_format
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import JsonObject

NO_CALL = "No function fits."
MOST_RESULT = 8000
"""Characters of a tool's result that the model sees."""
MADE: tuple[SetName, ...] = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")


class ToolCallingConfig(MultiTurnRowsConfig):
    """Which problems come, and what counts as a refusal."""

    dataset: str | None = Field(
        None, description="bfcl: the files of the installed package bfcl-eval; or a folder of them; null: made."
    )
    sets: list[SetName] = Field([*MADE], min_length=1, description="Of BFCL v4, in Python; made: the first five.")
    eval_all: bool = Field(
        False, description="Evaluate with all rows of the sets; false: every tenth, which is not trained on."
    )
    no_call: str | None = Field(
        NO_CALL,
        description="What a reply must say where no function fits; null: any text without a call is right, as BFCL "
        "counts it, which rewards whoever never calls.",
    )


class ToolWorld(World):
    """One problem; its one reply earns 1 where all calls are right."""

    def __init__(self, problem: ToolProblem, no_call: str | None) -> None:
        self.problem, self.no_call = problem, no_call
        self.tools = [tool_of(function) for function in problem["functions"]]

    async def begin(self) -> list[Message]:
        return _without_system(self.problem["messages"])

    async def step(self, reply: Reply) -> Step:
        return Step(is_over=True, reward=float(self.fault_of(reply) is None))

    def fault_of(self, reply: Reply) -> str | None:
        """Return what is wrong with a reply, None where nothing is."""
        answers, functions = self.problem["answers"], self.problem["functions"]
        if answers == []:
            if reply.calls:
                return f"{reply.calls[0].name} is called, and no function fits"
            is_said = self.no_call.casefold() in reply.text.casefold() if self.no_call else bool(reply.text)
            return None if is_said else f"the reply does not say {self.no_call or 'anything'!r}"
        if broken := [call.name for call in reply.calls if call.arguments is None]:
            return f"the arguments of {broken[0]} are no JSON object"
        if answers is None:
            offered = {function["name"] for function in functions}
            others = [call.name for call in reply.calls if call.name not in offered]
            if others or not reply.calls:
                return f"{others[0] if others else 'no function'} is called, expected any of {sorted(offered)}"
            return None
        calls = [(call.name, call.arguments or {}) for call in reply.calls]
        return fault_of(calls, functions, answers)

    def gold(self) -> str:
        return written(right_calls(self.problem)) or self.no_call or NO_CALL


class SingleToolCallingEnv(MultiTurnRowsEnv):
    """Score 1 where exactly the right calls are made, or none and it is said that none fits; else 0."""

    name = "tool_calling"
    env_config_cls = ToolCallingConfig
    config: ToolCallingConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    uses_tools: ClassVar[bool] = True
    guessing: ClassVar[float] = 0.25  # a fifth of the problems fit no function
    data: ClassVar[str] = "made, or rows"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config, engine = super().config_init()
        return ToolCallingConfig(**{**config.model_dump(exclude_unset=True), "max_turns": 1}), engine

    async def setup(self) -> None:
        """Read the sets; ConfigError or DataError where they cannot be used."""
        await super().setup()
        config = self.config
        if config.dataset is not None:
            found = read_problems(data_folder(config.dataset), config.sets)
            self.problems = Split(train=found, test=found) if config.eval_all else tenth_kept(found, config.dataset)
        elif unknown := [name for name in config.sets if name not in MADE]:
            raise ConfigError(f"env.sets has {unknown[0]}, which is not made; set env.dataset to bfcl")

    def system_turns(self) -> list[Message]:
        said = "Do what the user asks by calling functions, all of those calls in one reply."
        if self.config.no_call:
            said += f' Where none of the functions can do it, call none and say "{self.config.no_call}"'
        system = said if self.config.system_prompt is None else self.config.system_prompt
        return [{"role": "system", "content": system}] if system else []

    def make(self, rng: random.Random, level: int) -> ToolProblem:
        return make_problem(rng, rng.choice(self.config.sets), level)

    async def open(self, item: ToolProblem) -> ToolWorld:
        return ToolWorld(item, self.config.no_call)

    def item_task(self, item: ToolProblem) -> str:
        return f"{self.label}/{item['set']}"

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        of_sets = {name: [one for one in samples if one["item"]["set"] == name] for name in self.config.sets}
        scores = {f"eval/score_{name}": eval_metrics(found)["eval/score"] for name, found in of_sets.items() if found}
        return super().sample_metrics(samples) | scores


def written(calls: Any) -> str:
    """Return calls (name, arguments) in the form `hermes`; "" for none."""
    made = [WrittenCall(call["name"], dumped(call["arguments"])) for call in calls]
    return tool_format("hermes").write(made)


def shown(result: str) -> str:
    """Return a tool's result as the model sees it; one that is cut says so."""
    left = len(result) - MOST_RESULT
    return result if left <= 0 else f"{result[:MOST_RESULT]} [{left} more characters]"


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Return a problem's messages with what its system says before the user's words: a chat has one system prompt."""
    first, *rest = messages
    if first["role"] != "system":
        return [*messages]
    return [{**rest[0], "content": f"{first['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


if __name__ == "__main__":
    SingleToolCallingEnv.cli()
