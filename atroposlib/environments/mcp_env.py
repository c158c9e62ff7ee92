"""Tasks with the tools of an MCP server, by stdio or streamable HTTP; the answer and the server's state then count.

    python mcp_env.py process --env.total_steps 20 ...
    python mcp_env.py process --env.dataset tasks.jsonl --env.server_command '["npx", "some-server"]' ...
    python mcp_env.py process --env.server_command '["python", "server.py", "--port", "{port}"]' ...

Each episode has a server process, or a session with the server at `server_url`, to itself; with `reset_tool` another
uses it next. Without a data set the tasks are those of a small store, whose server is part of this package. A task's
row: `prompt`; `answer`, the last line that is right; `before` and `checks`, calls that prepare and calls that must give
their `result` at the end; `solution`, calls.
"""

import asyncio
import random
import sys
from pathlib import Path
from typing import ClassVar, NotRequired, TypedDict

from pydantic import Field, PositiveFloat, PositiveInt

from atroposlib.environments.multi_turn import (
    Message,
    MultiTurnRowsConfig,
    MultiTurnRowsEnv,
    Reply,
    Step,
    World,
    last_move,
)
from atroposlib.environments.rows import Row, load_split
from atroposlib.environments.tool_calling_server import shown, written
from atroposlib.environments.tool_use.bfcl import MadeCall
from atroposlib.environments.tool_use.mcp_session import Session, SessionPool
from atroposlib.errors import EnvironmentFault, VerifierFault
from atroposlib.type_definitions import JsonObject

INVENTORY = [sys.executable, str(Path(__file__).parent / "tool_use" / "inventory_server.py")]
_ARTICLES = ["lamps", "chairs", "kettles", "routers", "tripods", "ladders", "mirrors", "shelves", "fans", "stools"]


class Check(MadeCall):
    """A call after the end, and what it must give."""

    result: str


class Task(TypedDict):
    """One episode."""

    prompt: str
    answer: NotRequired[str]
    before: NotRequired[list[MadeCall]]
    checks: NotRequired[list[Check]]
    solution: NotRequired[list[MadeCall]]


class McpConfig(MultiTurnRowsConfig):
    """Which server, and which tasks."""

    server_command: list[str] = Field(
        INVENTORY, min_length=1, description="Starts a server by stdio; with {port} in it, by streamable HTTP, /mcp."
    )
    server_url: str | None = Field(None, description="A server that runs, by streamable HTTP; in place of a command.")
    reset_tool: str | None = Field(
        None,
        description="A tool without arguments that puts the server back to its start, hidden from the model: a process "
        "then serves one episode after the other. null: a process an episode.",
    )
    servers_at_once: PositiveInt = Field(16, description="Episodes with a session at the same time.")
    tool_timeout_s: PositiveFloat = Field(30.0, description="Seconds for a call, which then gives an error.")
    dataset: str | None = Field(
        None, description="A .jsonl or .parquet file of tasks; null: made, for the small store."
    )
    eval_dataset: str | None = Field(None, description="Another one to evaluate with; null: every tenth row of a file.")


class McpWorld(World):
    """A task and a session; a reply without calls ends it."""

    def __init__(self, task: Task, pool: SessionPool) -> None:
        self.task, self._pool = task, pool
        self.session: Session | None = None
        self.made = 0  # calls of the model

    async def begin(self) -> str:
        self.session = await self._pool.take()
        self.tools = self.session.tools
        for call in self.task.get("before", ()):
            if (said := await self._call(call)).startswith("Error"):
                raise EnvironmentFault(f"{call['name']} should prepare the task, but gives {said}")
        return self.task["prompt"]

    async def step(self, reply: Reply) -> Step:
        if not reply.calls:
            if not reply.text:
                return Step("Call tools, or answer.", is_invalid=True)
            return Step(is_over=True, reward=float(await self._is_right(reply.text)))
        said: list[Message] = []
        for call in reply.calls:
            self.made += 1
            content = "Error: the arguments are no JSON object"
            if call.arguments is not None:
                content = await self._call({"name": call.name, "arguments": call.arguments})
            said.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": shown(content)})
        return Step(said)

    async def _is_right(self, text: str) -> bool:
        answer = self.task.get("answer")
        if answer is not None and last_move(text).casefold() != answer.casefold():
            return False
        return all([await self._check(check) == check["result"] for check in self.task.get("checks", ())])

    async def _check(self, check: Check) -> str:
        """Return the result of a call after the end; VerifierFault where it takes too long."""
        assert self.session is not None
        if (said := await self._call(check)) == self.session.late:
            raise VerifierFault(f"{check['name']} should check the task, but gives {said}")
        return said

    async def _call(self, call: MadeCall | Check) -> str:
        assert self.session is not None
        return await self.session.call(call["name"], call["arguments"])

    def gold(self) -> str | None:
        solution = self.task.get("solution")
        if solution is None:
            return None
        return self.task.get("answer", "Done.") if self.made >= len(solution) else written(solution)

    async def close(self) -> None:
        if self.session is not None:
            await self._pool.give(self.session)


class McpEnv(MultiTurnRowsEnv):
    """Score 1 where the last line is the answer and all checks hold, else 0."""

    name = "mcp"
    env_config_cls = McpConfig
    config: McpConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    system: ClassVar[str] = "Do what the user asks with the tools. Then end with the answer alone on the last line."
    uses_tools: ClassVar[bool] = True
    data: ClassVar[str] = "made, or rows"
    extra: ClassVar[str] = "mcp"
    needs: ClassVar[str] = "mcp"
    pool: SessionPool | None = None

    async def setup(self) -> None:
        """Load the tasks; ConfigError where the SDK is missing."""
        await super().setup()
        config = self.config
        is_own = config.server_command == INVENTORY and config.server_url is None
        reset = config.reset_tool or ("clear" if is_own else None)
        self.pool = SessionPool(self._start, config.servers_at_once, reset)
        if self.config.dataset is not None:
            wanted = '{"prompt": ..., "answer": ..., "checks": [{"name": ..., "arguments": {}, "result": ...}]}'
            self.problems = await asyncio.to_thread(
                load_split, self.config.dataset, to_task, eval_dataset=self.config.eval_dataset, wanted=wanted
            )

    async def _start(self) -> Session:
        config = self.config
        return await Session.of(url=config.server_url, command=config.server_command, timeout_s=config.tool_timeout_s)

    async def teardown(self) -> None:
        if self.pool is not None:
            await self.pool.close()

    def make(self, rng: random.Random, level: int) -> Task:
        return make_task(rng, level)

    async def open(self, item: Task) -> McpWorld:
        assert self.pool is not None
        return McpWorld(item, self.pool)


def to_task(row: Row) -> Task:
    """Return the task of a row; ValueError or KeyError for what is none."""
    if not row.get("checks") and not row.get("answer"):
        raise ValueError("a task needs an answer or checks")
    kept: JsonObject = {name: row[name] for name in ("answer", "before", "checks", "solution") if row.get(name)}
    for call in [*kept.get("before", ()), *kept.get("checks", ()), *kept.get("solution", ())]:
        if not {"name", "arguments"} <= call.keys():
            raise ValueError(f"a call needs name and arguments, this has {sorted(call)}")
    return Task(prompt=row["prompt"], **kept)


def make_task(rng: random.Random, level: int) -> Task:
    """Return a task for the small store; its level is the number of articles that come and go."""
    names = rng.sample(_ARTICLES, min(level, 4) + 2)
    store = {name: rng.randint(200, 999) for name in names}
    before = [_on("receive", name, store[name]) for name in names]
    wishes, solution = [], []
    for name in names[2:]:
        kind, pieces = rng.choice(["receive", "ship"]), rng.randint(1, 150)
        store[name] += pieces if kind == "receive" else -pieces
        wishes.append(f"{kind} {pieces} {name}")
        solution.append(_on(kind, name, pieces))
    asked = rng.sample(names, 2)
    counts: list[Check] = [
        {"name": "count", "arguments": {"article": name}, "result": str(store[name])} for name in names
    ]
    solution += [{"name": "count", "arguments": {"article": name}} for name in asked]
    return Task(
        prompt=f"Please {', '.join(wishes)}. How many {asked[0]} and {asked[1]} are there then, taken together?",
        answer=str(store[asked[0]] + store[asked[1]]),
        before=before,
        checks=counts,
        solution=solution,
    )


def _on(tool: str, article: str, pieces: int) -> MadeCall:
    return {"name": tool, "arguments": {"article": article, "pieces": pieces}}


if __name__ == "__main__":
    McpEnv.cli()
