"""Do a task by shell commands in a sandbox; it is checked after the end, where the agent has no reach.

    python shell_env.py process --env.dataset tasks.jsonl ...

A row is `{"prompt": ..., "files": {name: text}, "expect": {name: text}, "check": script, "solution": command}`, with
`expect`, `check` or both. Every command runs in a fresh sandbox that has the agent's files and nothing else; processes
end with it. Expected files are compared outside of any sandbox. A check is a script that runs in one of its own, in
the agent's folder, and passes by exit code 0; what it starts from that folder, the agent has written. There is no
score where the sandbox failed, or where the check also ends with 125 in the folder as the agent got it (`git bisect`'s
"cannot tell"): what an agent does never avoids a score. Without a data set, tasks are made.
"""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NotRequired, TypedDict, TypeGuard

from pydantic import Field, PositiveFloat, PositiveInt

from atroposlib.environments.multi_turn import (
    End,
    Message,
    MultiTurnRowsConfig,
    MultiTurnRowsEnv,
    Reply,
    Step,
    ToolCall,
    World,
)
from atroposlib.environments.rows import Row, load_split
from atroposlib.errors import VerifierFault
from atroposlib.sandbox.programs import WORK, Limits, Outcome, inside_work
from atroposlib.sandbox.sandbox import Sandbox
from atroposlib.type_definitions import JsonObject

CANNOT_TELL = 125
_STATE, _BOX = "state.tar", "box"
_UNPACK = f"mkdir -p {_BOX} && {{ [ ! -s {_STATE} ] || tar -C {_BOX} -xf {_STATE}; }}"
_COMMAND = f'{_UNPACK}; cd {_BOX} && sh -c "$1"; code=$?; tar -C {WORK}/{_BOX} -cf {WORK}/{_STATE} . ; exit $code'
_CHECKING = f'{_UNPACK} && cd {_BOX} && PYTHONSAFEPATH=1 sh -c "$1"'
_SHOWN = 4000  # characters of what a command wrote
_LONGEST = 100_000  # bytes of a command; the kernel takes 128 KiB
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command by sh in your folder. Files stay for the next one, processes do not.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class Task(TypedDict):
    """One task; what is wanted in the end is `expect`, `check` or both."""

    prompt: str
    files: dict[str, str]
    expect: dict[str, str]
    check: NotRequired[str]
    solution: NotRequired[str]


class ShellConfig(MultiTurnRowsConfig):
    """Tasks, and what one command may use. `max_turns` limits the replies, each with one command or several."""

    dataset: str | None = Field(None, description="A .jsonl or .parquet file, or a name on the hub; null: made.")
    eval_dataset: str | None = Field(None, description="Another one to evaluate with; null: every tenth row of a file.")
    command_timeout_s: PositiveFloat = Field(10.0, description="Seconds of one command, and of the check.")
    memory_mb: PositiveInt = Field(512, description="MiB that one command may use.")
    programs_at_once: PositiveInt = Field(2, description="Commands that run at the same time.")


class ShellWorld(World):
    """One task; what is there in the end earns 1 or 0."""

    tools = (SHELL,)

    def __init__(self, task: Task, sandbox: Sandbox, limits: Limits) -> None:
        self.task, self.sandbox, self.limits = task, sandbox, limits
        self.given = {f"{_BOX}/{name}": text.encode() for name, text in task["files"].items()}
        self.files = self.given
        self.commands = 0

    async def begin(self) -> str:
        return f"{self.task['prompt']}\n\nUse the tool shell. When all is done, say so without a call."

    async def step(self, reply: Reply) -> Step:
        if not reply.calls:
            return Step(is_over=True)
        results: list[Message] = [await self._called(call) for call in reply.calls]
        is_invalid = all(call.name != "shell" or not _command(call) for call in reply.calls)
        return Step(results, is_invalid=is_invalid)

    async def finish(self, seat: int, end: End) -> float:
        return 0.0 if end == "invalid" else float(await self.is_done())

    def gold(self) -> str | None:
        if self.commands or "solution" not in self.task:
            return "Done."
        call = {"name": "shell", "arguments": {"command": self.task["solution"]}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    async def is_done(self) -> bool:
        """Tell whether the folder is as it should be; VerifierFault where the check could not be made."""
        names = [f"{_BOX}/{name}" for name in self.task["expect"]]
        if names:
            outcome = await self._run(_UNPACK, keep=names)
            if _tells_nothing(outcome):
                raise VerifierFault(f"the files could not be looked at within the limit of {outcome.verdict}")
            found = outcome.files
            said = {name: found.get(f"{_BOX}/{name}", b"\xff").decode(errors="replace") for name in self.task["expect"]}
            if any(said[name].rstrip() != text.rstrip() for name, text in self.task["expect"].items()):
                return False
        if (check := self.task.get("check")) is None:
            return bool(names)
        outcome = await self._run(_CHECKING, check)
        if _tells_nothing(outcome) and await self._cannot_tell(check):
            said = outcome.stderr[-500:].decode(errors="replace") or f"it exceeds its limit of {outcome.verdict}"
            raise VerifierFault(f"the check could not be made: {said}")
        return outcome.verdict == "exit" and outcome.exit_code == 0

    async def _cannot_tell(self, check: str) -> bool:
        self.files = self.given
        return _tells_nothing(await self._run(_CHECKING, check))

    async def _called(self, call: ToolCall) -> Message:
        command = _command(call)
        if call.name != "shell" or command is None:
            said = f'The only tool is shell, with the arguments {{"command": "..."}}, of up to {_LONGEST} bytes.'
        else:
            self.commands += 1
            outcome = await self._run(_COMMAND, command, keep=[_STATE])
            if _STATE in outcome.files:
                self.files = {_STATE: outcome.files[_STATE]}
            said = _said(outcome)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said}

    async def _run(self, script: str, *arguments: str, keep: Sequence[str] = ()) -> Outcome:
        command = ["sh", "-c", script, "sh", *arguments]
        return await self.sandbox.call(command, files=self.files, keep=keep, limits=self.limits)


class ShellEnv(MultiTurnRowsEnv):
    """Score 1 where the files are as wanted and the check passes after the end, else 0."""

    name = "shell"
    env_config_cls = ShellConfig
    config: ShellConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    uses_tools = True
    data: ClassVar[str] = "made, or rows"
    sandbox: Sandbox | None = None

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        return ["--env.max_turns", "3"]  # whoever gives the same command again and again does so in vain

    async def setup(self) -> None:
        """Load the tasks; SandboxError where this machine cannot hold a program."""
        await super().setup()
        config = self.config
        self.sandbox = await asyncio.to_thread(Sandbox, at_once=config.programs_at_once)
        if config.dataset is not None:
            wanted = '{"prompt": ..., "files": {...}, "expect": {name: text}, "check": ...}'
            self.problems = await asyncio.to_thread(
                load_split, config.dataset, to_task, eval_dataset=config.eval_dataset, wanted=wanted
            )

    async def teardown(self) -> None:
        if self.sandbox is not None:
            await asyncio.to_thread(self.sandbox.close)

    def make(self, rng: random.Random, level: int) -> Task:
        return make_task(rng, level)

    async def open(self, item: Task) -> ShellWorld:
        assert self.sandbox is not None
        seconds = self.config.command_timeout_s
        return ShellWorld(item, self.sandbox, Limits(wall_s=seconds, cpu_s=seconds, memory_mb=self.config.memory_mb))


def to_task(row: Row) -> Task:
    """Return the task of a row; ValueError, KeyError or TypeError where it is none."""
    files, expect = dict(row.get("files") or {}), dict(row.get("expect") or {})
    if not expect and not row.get("check"):
        raise ValueError("it has neither files that are expected nor a check")
    for name in (*files, *expect):
        inside_work(name)
    kept: JsonObject = {name: row[name] for name in ("check", "solution") if row.get(name)}
    if wrong := [
        text for text in (*files, *expect, *files.values(), *expect.values(), *kept.values()) if not _is_passable(text)
    ]:
        raise ValueError(f"{wrong[0]!r:.99} is no text of a file or a command")
    return Task(prompt=row["prompt"], files=files, expect=expect, **kept)


def make_task(rng: random.Random, level: int) -> Task:
    """Return a task about a journal of sales: how many, how much in all, or which, of one name."""
    names = rng.sample(("ada", "ben", "cleo", "dan", "eva", "finn", "gia", "hugo", "ines", "jon"), 2 + level)
    sales = [(rng.choice(names), rng.randint(1, 999)) for _ in range(10 * level)]
    who, number = rng.choice(sales)[0], rng.randint(1000, 9999)
    source, target = f"day/{number}.txt", f"{who}-{number}.txt"
    amounts = [amount for name, amount in sales if name == who]
    kinds = {
        "the number of lines": (f"{len(amounts)}", "n++"),
        "the sum of the amounts": (f"{sum(amounts)}", "n += $2"),
        "the largest amount": (f"{max(amounts)}", "if ($2 > n) n = $2"),
    }
    wanted = rng.choice([*kinds])
    result, program = kinds[wanted]
    return Task(
        prompt=f"Each line of {source} has a name and an amount. Write {wanted} of {who} to the file {target}.",
        files={source: "".join(f"{name} {amount}\n" for name, amount in sales)},
        expect={target: result},
        solution=f"awk '$1 == \"{who}\" {{ {program} }} END {{ print n }}' {source} > {target}",
    )


def _command(call: ToolCall) -> str | None:
    command = (call.arguments or {}).get("command")
    return command if _is_passable(command) and len(command.encode()) <= _LONGEST else None


def _is_passable(text: Any) -> TypeGuard[str]:
    return isinstance(text, str) and "\0" not in text and not re.search("[\ud800-\udfff]", text)


def _tells_nothing(outcome: Outcome) -> bool:
    return outcome.exit_code == CANNOT_TELL or outcome.verdict in ("time", "cpu")


def _said(outcome: Outcome) -> str:
    """Return what a command wrote and how it ended, for the agent."""
    text = (outcome.stdout + outcome.stderr).decode(errors="replace")
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]}\n... {len(text) - _SHOWN} characters left out ...\n{text[-_SHOWN // 2 :]}"
    if outcome.verdict != "exit":
        return f"{text}\n[ended by its limit of {outcome.verdict}; what it wrote to files may be lost]".lstrip()
    return f"{text}\n[exit code {outcome.exit_code}]".lstrip()


if __name__ == "__main__":
    ShellEnv.cli()
