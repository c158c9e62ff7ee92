"""Wishes of several turns that tools fulfil: the tools really run, and what they hold at the end is what counts.

    python tool_use_multiturn_server.py process --env.levels '[1, 2]' --env.total_steps 20 ...

The world is a small office (files, calendar, calculator), or one of the simulated services of the Berkeley
Function-Calling Leaderboard's sets of several turns (v4), whose classes and files are those of the installed package
`bfcl-eval`. After each wish the state must be that of the right calls, and the results that it asks for must have come;
a wish that nothing can fulfil, as a tool or a fact is missing, is judged by the state after the next one.
"""

import asyncio
import importlib.util
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from pydantic import Field, PositiveFloat, PositiveInt

from atroposlib.environments.multi_turn import (
    Ask,
    Message,
    MultiTurnRowsConfig,
    MultiTurnRowsEnv,
    Player,
    Reply,
    Step,
    ToolCall,
    World,
    eval_metrics,
)
from atroposlib.environments.rows import Split, tenth_kept
from atroposlib.environments.tool_calling_server import shown, written
from atroposlib.environments.tool_use.bfcl import (
    MadeCall,
    call_of,
    data_folder,
    mixed,
    package_folder,
    read_lines,
    tool_of,
)
from atroposlib.environments.tool_use.boxes import SERVICES, Compared, Spec, compare, play
from atroposlib.environments.tool_use.inline import Inline, calling_inside
from atroposlib.environments.tool_use.office import Office, Wish, make_office, make_wish, tools_of
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.errors import ConfigError, DataError, EnvironmentFault
from atroposlib.sandbox.workers import SandboxError, WorkerPool
from atroposlib.type_definitions import JsonObject

_BOXES = "atroposlib.environments.tool_use.boxes"
_MORE = "You may use more tools from now on. Can you do it now?"
logger = logging.getLogger(__name__)

SetName = Literal["base", "miss_func", "miss_param", "long_context"]
"""Of the sets multi_turn_* of BFCL: nothing is missing; a tool comes late; a fact comes late; long results."""


class ToolUseConfig(MultiTurnRowsConfig):
    """Where the wishes come from, and how far a model may go for one."""

    dataset: str | None = Field(
        None,
        description="bfcl: episodes of the installed package bfcl-eval; or a folder of its files; null: made.",
    )
    sets: list[SetName] = Field(["base"], min_length=1, description="Of BFCL v4's sets multi_turn_*.")
    eval_all: bool = Field(False, description="Evaluate with all rows; false: every tenth, which is not trained on.")
    max_steps: PositiveInt = Field(20, description="Replies with calls for one wish; with more the episode is lost.")
    partial_credit: bool = Field(False, description="Score the share of wishes fulfilled before one fails, not 0 or 1.")
    interleaved_thinking: bool = Field(
        False, description="A call inside a thought runs at once, and the same turn continues behind its result."
    )
    tool_timeout_s: PositiveFloat = Field(10.0, description="Seconds for BFCL's tools; a call that takes longer fails.")
    workers: PositiveInt = Field(2, description="Processes in which BFCL's tools run.")


class Task(TypedDict):
    """One episode."""

    id: str
    spec: Spec
    wishes: list[Wish]
    tools: NotRequired[list[Message]]  # none: those of the office


Run = Callable[..., Awaitable[Any]]
"""Calls a function of `boxes`, where it is safe to."""


class ToolUseWorld(World):
    """A user with some wishes, one after the other; the last one fulfilled earns 1, or each its share."""

    def __init__(self, task: Task, run: Run, config: ToolUseConfig) -> None:
        self.task, self.config, self._run = task, config, run
        self.tools = task.get("tools") or tools_of(Office)
        self.calls: list[MadeCall] = []
        self.turn, self.begun, self.steps = 0, 0, 0  # wish, calls before it, replies with calls for it
        self.fault = ""  # what was wrong with the wish that failed

    async def begin(self) -> str:
        return self._wish()

    def _wish(self) -> str:
        """Hand over the tools that come with a wish, and return what the user says."""
        wish = self.task["wishes"][self.turn]
        self.tools = [*self.tools, *wish.get("tools", ())]
        return wish["said"]

    async def step(self, reply: Reply) -> Step:
        if reply.calls:
            self.steps += 1
            results = await self.run(reply.calls)
            is_whole = self.task["spec"].get("long_context", False)  # which is what the set is about
            said: list[Message] = [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": call.name,
                    "content": result if is_whole else shown(result),
                }
                for call, result in zip(reply.calls, results, strict=True)
            ]
            return Step(said, self.steps >= self.config.max_steps)
        if not reply.text:
            return Step("Call tools, or say that it is done.", is_invalid=True)
        return await self._next()

    async def run(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run calls and return what comes of each; one that takes too long leaves no trace."""
        results: list[str] = []
        offered = {tool["function"]["name"] for tool in self.tools}
        for call in calls:
            if call.name not in offered:
                results.append(f"Error: there is no tool {call.name}")
                continue
            if call.arguments is None:
                results.append("Error: the arguments are no JSON object")
                continue
            made: MadeCall = {"name": call.name, "arguments": call.arguments}
            try:
                played = await self._run(play, self.task["spec"], [*self.calls, made])
            except SandboxError as error:
                await self._still_works(error)
                results.append(f"Error: {error}")
                continue
            self.calls.append(made)
            results.append(played[-1] or "(nothing)")
        return results

    async def _still_works(self, error: SandboxError) -> None:
        """Return where the fault is the last call's; EnvironmentFault where the box fails without it, too."""
        try:
            await self._run(play, self.task["spec"], self.calls)
        except SandboxError:
            raise EnvironmentFault(f"the tools of {self.task['id']} do not run: {error}") from error

    async def _next(self) -> Step:
        wishes = self.task["wishes"]
        self.fault = await self._fault()
        self.turn, self.begun, self.steps = self.turn + 1, len(self.calls), 0
        is_last = self.turn == len(wishes)
        share = 1 / len(wishes) if self.config.partial_credit else float(is_last)
        if self.fault or is_last:
            return Step(is_over=True, reward=0.0 if self.fault else share)
        return Step(self._wish(), reward=share)

    async def _fault(self) -> str:
        """Return what is wrong with the state or the results after a wish; "" where nothing is."""
        wish = self.task["wishes"][self.turn]
        if not wish["calls"]:
            return ""
        if len(self.calls) == self.begun:
            return "no tool was called"
        right = [call for wish in self.task["wishes"][: self.turn + 1] for call in wish["calls"]]
        found: Compared = await self._run(compare, self.task["spec"], self.calls, right)
        if found["differ"]:
            return f"another state: {', '.join(found['differ'])}"
        left = [*found["results"]]
        for result in found["expected"][len(right) - len(wish["calls"]) :][: wish["seen"]]:
            if result not in left:
                return f"no call gave {result[:200]}"
            left.remove(result)
        return ""

    def gold(self) -> str:
        wish = self.task["wishes"][self.turn]
        if len(self.calls) > self.begun or not wish["calls"]:
            return "It is done."
        return written(self._named(call) for call in wish["calls"])

    def _named(self, call: MadeCall) -> MadeCall:
        """Return a call with all of its arguments by name."""
        tool = next(tool["function"] for tool in self.tools if tool["function"]["name"] == call["name"])
        by_place = zip(tool["parameters"]["properties"], call.get("positional", ()), strict=False)
        return {"name": call["name"], "arguments": {**dict(by_place), **call["arguments"]}}


class MultiTurnToolCallingEnv(MultiTurnRowsEnv):
    """Score 1 where all wishes are fulfilled, else 0; with `partial_credit` the share before the first that is not."""

    name = "tool_use_multiturn"
    env_config_cls = ToolUseConfig
    config: ToolUseConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    system: ClassVar[str] = "Do what the user asks with the tools. When it is done, say so without a call."
    uses_tools: ClassVar[bool] = True
    data: ClassVar[str] = "made, or rows"
    pool: WorkerPool | None = None

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config, engine = super().config_init()
        return cls.env_config_cls(**{**config.model_dump(exclude_unset=True), "max_turns": 64}), engine

    async def setup(self) -> None:
        """Read the rows; ConfigError where the package is not there."""
        await super().setup()
        if self.config.dataset is not None:
            package_folder()
            if importlib.util.find_spec("mpmath") is None:
                raise ConfigError("BFCL's calculator needs the package mpmath; run: pip install mpmath")
            self.problems = self._split(self.config.dataset)
            self.pool = WorkerPool(workers=self.config.workers, timeout_s=self.config.tool_timeout_s, memory_mb=1024)

    def _split(self, dataset: str) -> Split:
        """Return the episodes; those kept have the same numbers in each set, as the sets vary the same episodes."""
        found = [read_tasks(dataset, name) for name in self.config.sets]
        splits = [Split(train=one, test=one) if self.config.eval_all else tenth_kept(one, dataset) for one in found]
        left_out = {task["id"] for one in found for task in one if not is_solvable(task)}
        if left_out:
            logger.warning(
                "episodes whose right calls need a tool before it comes are left out: %s", ", ".join(sorted(left_out))
            )
        train, test = (
            [task for split in splits for task in split[part] if task["id"] not in left_out]
            for part in ("train", "test")
        )
        return Split(train=train, test=mixed(test))

    async def teardown(self) -> None:
        if self.pool is not None:
            await asyncio.to_thread(self.pool.close)

    def make(self, rng: random.Random, level: int) -> Task:
        office = make_office(rng)
        start = {"files": dict(office.files), "events": dict(office.events)}
        wishes = [make_wish(rng, office) for _ in range(min(level, MOST_WISHES) + 1)]
        return Task(id="office", spec=Spec(classes=["Office"], start={"Office": start}), wishes=wishes)

    def item_task(self, item: Task) -> str:
        return f"{self.label}/{_set_of(item)}"

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        of_sets: dict[str, list[JsonObject]] = {}
        for sample in samples:
            of_sets.setdefault(_set_of(sample["item"]), []).append(sample)
        scores = {f"eval/score_{name}": eval_metrics(found)["eval/score"] for name, found in of_sets.items()}
        return super().sample_metrics(samples) | scores

    async def open(self, item: Task) -> ToolUseWorld:
        return ToolUseWorld(item, self.run_box, self.config)

    async def run_box(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.pool is None:
            return function(*arguments)
        return await self.pool.call(f"{_BOXES}:{function.__name__}", *arguments)

    async def take_turns(self, world: World, players: Sequence[Player]) -> None:
        if self.config.interleaved_thinking and isinstance(world, ToolUseWorld):
            for player in players:
                player.ask = calling_inside(player.ask, world.run, self.config, self.opening)
        await super().take_turns(world, players)

    def _asking(self, managed: Any, **sampling: Any) -> Ask:
        if self.config.interleaved_thinking:
            return Inline(managed, self.tokenizer, self.config, self.opening, sampling).ask
        return super()._asking(managed, **sampling)


MOST_WISHES = 5


def read_tasks(dataset: str, name: SetName = "base") -> list[Task]:
    """Return the episodes of a set, mixed in the same way as those of every other; errors as of `read_problems`."""
    folder, file = data_folder(dataset), f"BFCL_v4_multi_turn_{name}.json"
    answers = {row["id"]: row["ground_truth"] for row in read_lines(folder / "possible_answer" / file)}
    documents = folder / "multi_turn_func_doc"
    tools = {name: [*map(tool_of, read_lines(documents / f"{file}.json"))] for name, file in SERVICES.items()}
    try:
        return mixed([_task(row, answers[row["id"]], tools) for row in read_lines(folder / file)])
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(f"{folder / file} has a row that is no episode of BFCL v4: {error!r}") from error


def _task(row: JsonObject, answers: list[list[str]], tools: dict[str, list[Message]]) -> Task:
    offered = {tool["function"]["name"]: tool for name in row["involved_classes"] for tool in tools[name]}
    for name in row.get("excluded_function", ()):
        offered.pop(name, None)
    late = {int(turn): [offered.pop(name) for name in names] for turn, names in row.get("missed_function", {}).items()}
    wishes = []
    for turn, (said, sources) in enumerate(zip(row["question"], answers, strict=True)):
        calls = [call_of(source) for source in sources]
        wish = Wish(said="\n\n".join(each["content"] for each in said) or _MORE, calls=calls, seen=len(calls))
        wishes.append({**wish, "tools": late[turn]} if turn in late else wish)
    spec = Spec(classes=row["involved_classes"], start=row["initial_config"])
    if "long_context" in row["id"]:
        spec["long_context"] = True
    return Task(id=row["id"], spec=spec, wishes=wishes, tools=[*offered.values()])


def _set_of(task: Task) -> str:
    return task["id"].removeprefix("multi_turn_").rpartition("_")[0] or task["id"]  # those that are made: office


def is_solvable(task: Task) -> bool:
    """Return whether every right call has its tool by then."""
    offered = {tool["function"]["name"] for tool in task.get("tools", ())}
    for wish in task["wishes"]:
        offered |= {tool["function"]["name"] for tool in wish.get("tools", ())}
        if not all(call["name"] in offered for call in wish["calls"]):
            return False
    return True


if __name__ == "__main__":
    MultiTurnToolCallingEnv.cli()
