"""Runs a program against the tests of a problem, in a sandbox: one verdict a test.

The program sees inputs only; expected outputs stay out of the sandbox and are compared here. A check in Python, such as
HumanEval's, never shares a process with the program either: it runs first with the right solution, which shows what it
calls; then the program answers these calls; then the check runs with the answers.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from atroposlib.errors import EnvironmentFault
from atroposlib.sandbox.programs import Limits, Outcome
from atroposlib.sandbox.sandbox import Sandbox
from atroposlib.type_definitions import JsonObject

Word = Literal["right", "wrong", "crash", "time", "memory", "limit"]
"""time: of the processor, or waiting; limit: any other of the sandbox, such as processes or output."""

_WORDS: dict[str, Word] = {"exit": "crash", "time": "time", "cpu": "time", "memory": "memory"}
_CALLS = Path(__file__).with_name("calls.py").read_text(encoding="utf-8")
MOST_TIMEOUTS = 2
"""After this many tests that ran out of time, the others of an attempt are not run, and count as such."""
_SHOWN = 400  # characters of an output in a hint


class Case(TypedDict):
    """Input and output of a program, or arguments and result of a function."""

    stdin: NotRequired[str]
    stdout: NotRequired[str]
    args: NotRequired[list[Any]]
    returns: NotRequired[Any]


class Problem(TypedDict):
    """One problem; with `function` its tests have `args` and `returns`, with `check` it has no other tests."""

    prompt: str
    tests: list[Case]
    function: NotRequired[str]
    solution: NotRequired[str]
    header: NotRequired[str]  # stands before every program
    check: NotRequired[str]  # source of a function `check(candidate)` that asserts


@dataclass(frozen=True)
class Verdict:
    """Result of one test."""

    word: Word
    detail: str = ""  # what the program gave, or its last words


@dataclass
class Examiner:
    """Runs programs; `time_s` of processor time are for one input of a program, or for all calls of a function."""

    sandbox: Sandbox
    time_s: float
    memory_mb: int
    recorded: dict[str, list[str]] = field(default_factory=dict)  # calls of each check

    async def verdicts(self, code: str, problem: Problem, *, to_end: bool = True) -> list[Verdict]:
        """Return a verdict for each test, in order; `to_end=False`: up to the first that is not right."""
        program = problem.get("header", "") + code
        if "check" in problem:
            return [await self._checked(program, problem)]
        if "function" in problem:
            return await self._called(program, problem, to_end)
        found: list[Verdict] = []
        for test in problem["tests"]:
            if sum(verdict.word == "time" for verdict in found) >= MOST_TIMEOUTS:
                found.append(Verdict("time", "not run"))
                continue
            found.append(await self._printed(program, test))
            if found[-1].word != "right" and not to_end:
                break
        return found

    async def _printed(self, program: str, test: Case) -> Verdict:
        outcome = await self._run(["main.py"], {"main.py": program}, test.get("stdin", "").encode())
        if outcome.verdict != "exit" or outcome.exit_code:
            return _failed(outcome)
        said = outcome.stdout.decode(errors="replace")
        return Verdict("right" if _lines(said) == _lines(test.get("stdout", "")) else "wrong", said[:_SHOWN])

    async def _called(self, program: str, problem: Problem, to_end: bool) -> list[Verdict]:
        tests, function = problem["tests"], problem.get("function", "")
        results = await self._results(program, function, [repr(tuple(test.get("args", ()))) for test in tests])
        found: list[Verdict] = []
        for test, result in zip(tests, results, strict=True):
            found.append(result if isinstance(result, Verdict) else _compared(result, test.get("returns")))
            if found[-1].word != "right" and not to_end:
                break
        return found

    async def _results(self, program: str, function: str, calls: Sequence[str]) -> list[Verdict | JsonObject]:
        """Return for each call what the function gave, or why it gave nothing.

        One process makes all calls; after one that it does not survive, another makes the rest.
        """
        found: list[Verdict | JsonObject] = []
        timeouts = 0
        while len(found) < len(calls):
            rest = calls[len(found) :]
            if timeouts >= MOST_TIMEOUTS:
                return found + [Verdict("time", "not run")] * len(rest)
            files = {"main.py": program, "calls.py": _CALLS, "calls.txt": "\n".join(rest)}
            outcome = await self._run(["calls.py", "call", function], files)
            facts = _facts(outcome)
            begun = sum("begun" in fact for fact in facts)
            got = [fact for fact in facts if "number" in fact][: len(rest)]
            for fact in got:
                gave_up = Verdict("memory") if "memory" in fact else Verdict("crash", str(fact.get("error")))
                found.append(fact if "repr" in fact else gave_up)
            if len(got) < len(rest):
                verdict = _failed(outcome)
                timeouts += verdict.word == "time"
                found += [verdict] * (1 if begun else len(rest))
        return found[: len(calls)]  # a program may write more of them

    async def _checked(self, program: str, problem: Problem) -> Verdict:
        function, check = problem.get("function", ""), problem.get("check", "")
        trusted = f"{problem.get('header', '')}{problem.get('solution', '')}\n{check}\n"
        files = {"main.py": trusted, "calls.py": _CALLS}
        if trusted not in self.recorded:
            outcome = await self._run(["calls.py", "record", function], files)
            if outcome.verdict != "exit" or outcome.exit_code:
                raise EnvironmentFault(f"the check of {function} fails with its own solution: {_failed(outcome)}")
            self.recorded[trusted] = [fact["arguments"] for fact in _facts(outcome)]
        calls = self.recorded[trusted]
        results: list[JsonObject] = []
        for arguments, result in zip(calls, await self._results(program, function, calls), strict=True):
            if isinstance(result, Verdict) and result.word != "crash":
                return result
            results.append(
                {"arguments": arguments}
                | ({"error": result.detail} if isinstance(result, Verdict) else {"repr": str(result["repr"])})
            )
        files["results.jsonl"] = "\n".join(map(json.dumps, results))
        outcome = await self._run(["calls.py", "replay", function], files)
        if any(fact.get("passed") for fact in _facts(outcome)):
            return Verdict("right")
        errors = [result["error"] for result in results if "error" in result]
        return Verdict("crash", errors[0]) if errors else Verdict("wrong", _last_words(outcome))

    async def _run(self, arguments: Sequence[str], files: dict[str, str], stdin: bytes = b"") -> Outcome:
        limits = Limits(cpu_s=self.time_s, wall_s=3 * self.time_s + 2, memory_mb=self.memory_mb)
        encoded = {name: text.encode(errors="replace") for name, text in files.items()}
        return await self.sandbox.call(["python3", "-B", *arguments], files=encoded, stdin=stdin, limits=limits)


def _facts(outcome: Outcome) -> list[JsonObject]:
    """Return the objects among the lines that a program wrote; a stranger may have written them."""
    found = []
    for line in outcome.stdout.split(b"\n"):
        try:
            fact = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fact, dict):
            found.append(fact)
    return found


def _compared(result: JsonObject, expected: Any) -> Verdict:
    try:
        is_right = is_same(json.loads(result["json"]), expected)
    except (TypeError, ValueError, RecursionError, KeyError, OverflowError):  # no JSON, or beyond a float
        is_right = False
    return Verdict("right" if is_right else "wrong", str(result["repr"])[:_SHOWN])


def is_same(value: Any, expected: Any) -> bool:
    """Tell whether two JSON values are equal: true is not 1, and floats may differ by rounding.

    >>> is_same([1, 0.1 + 0.2], [1, 0.3]), is_same(True, 1)
    (True, False)
    """
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or (isinstance(expected, float) and math.isclose(value, expected, rel_tol=1e-9))
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(is_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(is_same(value[key], expected[key]) for key in value)
    return type(value) is type(expected) and value == expected


def _failed(outcome: Outcome) -> Verdict:
    return Verdict(_WORDS.get(outcome.verdict, "limit"), _last_words(outcome))


def _last_words(outcome: Outcome) -> str:
    """Return the last line of stderr, where Python says what was raised."""
    if outcome.verdict != "exit":
        return outcome.verdict
    lines = outcome.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:_SHOWN] if lines else f"ended early with exit code {outcome.exit_code}"


def _lines(text: str) -> list[str]:
    """Return the lines of an output, without white space at their ends and empty lines at its end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
