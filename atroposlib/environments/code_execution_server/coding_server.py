"""Write a Python program or function that passes tests, and repair it when it does not.

    python coding_server.py process --env.dataset problems.jsonl --env.max_turns 3 ...

A row is `{"prompt": ..., "tests": [{"stdin": "1 2\\n", "stdout": "3\\n"}, ...], "solution": ...}`, or, for a function,
`{"prompt": ..., "function": "add", "tests": [{"args": [1, 2], "returns": 3}, ...], "solution": ...}`; the solution is
optional. Rows of HumanEval are taken as they are. Programs run in a sandbox that they share with nothing: see
`verdicts`. Without a data set, problems are made (`pipelines`).
"""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from atroposlib.environments.code_execution_server.pipelines import make_problem
from atroposlib.environments.code_execution_server.verdicts import Case, Examiner, Problem, Verdict
from atroposlib.environments.multi_turn import MultiTurnRowsConfig, MultiTurnRowsEnv, Reply, Step, World
from atroposlib.environments.rows import Row, load_split
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.sandbox.sandbox import Sandbox
from atroposlib.type_definitions import JsonObject

_BLOCK = re.compile(r"```([\w+-]*)[ \t]*\n(.*?)```", re.DOTALL)
_PYTHON = ("python", "py", "python3")


class CodeConfig(MultiTurnRowsConfig):
    """Problems, limits of programs, and what is told of failures. `max_turns` is the number of attempts."""

    dataset: str | None = Field(
        None, description="A .jsonl or .parquet file, or a name on the hub (needs datasets); null: made."
    )
    eval_dataset: str | None = Field(None, description="Another one to evaluate with; null: every tenth row of a file.")
    partial_credit: bool = Field(False, description="Score the share of tests that the last attempt passes, not 0.")
    shown_tests: NonNegativeInt = Field(1, description="Tests that the question shows; the others stay hidden.")
    time_s: PositiveFloat = Field(4.0, description="Processor seconds for one input, or for all calls of a function.")
    memory_mb: PositiveInt = Field(512, description="MiB that a program may use.")
    programs_at_once: PositiveInt = Field(2, description="Programs that run at the same time.")


class CodeWorld(World):
    """One problem; an attempt earns what its share of passed tests is above that of the attempt before."""

    def __init__(self, problem: Problem, examiner: Examiner, config: CodeConfig) -> None:
        self.problem, self.examiner, self.config = problem, examiner, config
        self.share = 0.0  # of the last attempt
        self.last: tuple[str, Step] | None = None  # which is not run again when it comes again

    async def begin(self) -> str:
        shown = [_shown(test, self.problem) for test in self.problem["tests"][: self.config.shown_tests]]
        examples = "\n\n".join(["", *shown]) if shown else ""
        return f"{self.problem['prompt']}{examples}\n\nEnd with the Python code in one block: ```python ... ```"

    async def step(self, reply: Reply) -> Step:
        blocks = _BLOCK.findall(reply.text)
        named = [code for language, code in blocks if language.lower() in _PYTHON]
        unnamed = [code for language, code in blocks if not language]
        if not (programs := named or unnamed):
            return Step("There is no block of Python code in this. Write ```python ... ```.", is_invalid=True)
        if self.last is not None and self.last[0] == programs[-1]:
            return self.last[1]
        verdicts = await self.examiner.verdicts(programs[-1], self.problem, to_end=self.config.partial_credit)
        right = sum(verdict.word == "right" for verdict in verdicts)
        count = len(self.problem["tests"]) or 1
        before, self.share = self.share, right / count
        if not self.config.partial_credit:
            self.share = float(right == count)
        step = Step(self._hint(verdicts), right == count, self.share - before)
        self.last = programs[-1], replace(step, reward=0.0)
        return step

    def gold(self) -> str | None:
        solution = self.problem.get("solution")
        return None if solution is None else f"```python\n{solution}\n```"

    def _hint(self, verdicts: Sequence[Verdict]) -> str:
        """Return what of the first failed test is told: all of a shown one, of others only what happened."""
        failed = next(((number, found) for number, found in enumerate(verdicts) if found.word != "right"), None)
        if failed is None:
            return "All tests pass."
        number, found = failed
        said = {
            "wrong": "gives another result",
            "crash": f"crashes: {found.detail}",
            "time": "takes too long",
            "memory": f"uses more than {self.config.memory_mb} MiB of memory",
            "limit": f"uses too much: {found.detail}",
        }[found.word]
        hint = f"Test {number + 1} of {len(self.problem['tests']) or 1} fails: the code {said}."
        if number < min(self.config.shown_tests, len(self.problem["tests"])):
            hint += f"\n\n{_shown(self.problem['tests'][number], self.problem)}"
            hint += f"\n\nYours gives:\n{found.detail}" if found.word == "wrong" else ""
        return f"{hint}\n\nRepair it, and write the whole code again in one block."


class CodingEnv(MultiTurnRowsEnv):
    """Score 1 where all tests pass, else 0; with `partial_credit` the share that passes."""

    name = "coding"
    env_config_cls = CodeConfig
    config: CodeConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    data: ClassVar[str] = "made, or rows"
    sandbox: Sandbox | None = None

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config, engine = super().config_init()
        return CodeConfig(**{**config.model_dump(exclude_unset=True), "max_turns": 3}), engine

    async def setup(self) -> None:
        """Load the problems; SandboxError where this machine cannot hold a program."""
        await super().setup()
        config = self.config
        self.sandbox = await asyncio.to_thread(Sandbox, at_once=config.programs_at_once)
        self.examiner = Examiner(self.sandbox, config.time_s, config.memory_mb)
        if config.dataset is not None:
            wanted = '{"prompt": ..., "tests": [{"stdin": ..., "stdout": ...}]} or with "function", "args", "returns"'
            self.problems = await asyncio.to_thread(
                load_split, config.dataset, to_problem, eval_dataset=config.eval_dataset, wanted=wanted
            )

    async def teardown(self) -> None:
        if self.sandbox is not None:
            await asyncio.to_thread(self.sandbox.close)

    def make(self, rng: random.Random, level: int) -> Problem:
        return make_problem(rng, level)

    async def open(self, item: Problem) -> CodeWorld:
        return CodeWorld(item, self.examiner, self.config)


def to_problem(row: Row) -> Problem:
    """Return the problem of a row, of our own form or of HumanEval's; KeyError, TypeError, ValueError for others."""
    if "canonical_solution" in row:
        question = f"Complete this function.\n\n{row['prompt'].strip()}"
        facts = {"header": row["prompt"], "solution": row["canonical_solution"], "check": row["test"]}
        return Problem(prompt=question, tests=[], function=row["entry_point"], **facts)
    wanted = {"args", "returns"} if row.get("function") else {"stdin", "stdout"}
    tests = row["tests"] if isinstance(row["tests"], list) else json.loads(row["tests"])
    if not tests or any(not isinstance(test, dict) or not wanted <= test.keys() for test in tests):
        raise ValueError(f"its tests must be a list of objects with {' and '.join(sorted(wanted))}")
    kept: JsonObject = {name: row[name] for name in ("function", "solution", "header") if row.get(name)}
    return Problem(
        prompt=row["prompt"], tests=[Case(**{name: test[name] for name in wanted}) for test in tests], **kept
    )


def _shown(test: Case, problem: Problem) -> str:
    if "function" in problem:
        arguments = ", ".join(map(repr, test.get("args", [])))
        return f"{problem['function']}({arguments}) must give {test.get('returns')!r}."
    return f"Input:\n{test.get('stdin', '')}\nOutput:\n{test.get('stdout', '')}".rstrip()


if __name__ == "__main__":
    CodingEnv.cli()
