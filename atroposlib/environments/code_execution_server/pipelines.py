"""Makes problems about lists of whole numbers: a few steps, one after the other, then a value of what is left."""

import random

from atroposlib.environments.code_execution_server.verdicts import Case, Problem

_STEPS = (
    ("keep the numbers that leave the remainder {r} when divided by {k}", "[x for x in a if x % {k} == {r}]"),
    ("replace each number x by {k} * x - {m}", "[{k} * x - {m} for x in a]"),
    ("replace each number x by the remainder of x * x when divided by {p}", "[x * x % {p} for x in a]"),
    ("reverse the order", "a[::-1]"),
    ("sort the numbers in ascending order", "sorted(a)"),
    ("drop every number that has stood before", "list(dict.fromkeys(a))"),
    ("replace each number by the sum of all numbers up to and with it", "[sum(a[: i + 1]) for i in range(len(a))]"),
    ("drop the first {r} number(s)", "a[{r}:]"),
    ("add {m} to each number at an odd place, counted from 0", "[x + {m} * (i % 2) for i, x in enumerate(a)]"),
)
_ENDS = (("the numbers themselves", "a"), ("their sum times {k}, plus {m}", "sum(a) * {k} + {m}"))
CASES = 6
"""Tests of a problem; no two give the same, so that no constant passes."""


def make_problem(rng: random.Random, level: int) -> Problem:
    """Return a problem of `level` + 1 steps, half of them functions, the others programs that read stdin."""
    while True:
        said, lines = [], []
        for text, source in [*rng.sample(_STEPS, min(level + 1, len(_STEPS))), rng.choice(_ENDS)]:
            values = {"k": rng.randint(2, 5), "r": rng.randint(1, 2), "m": rng.randint(1, 99), "p": rng.randint(11, 99)}
            values["r"] %= values["k"]
            said.append(text.format(**values))
            lines.append(f"    a = {source.format(**values)}\n")
        source = f"def solve(a):\n{''.join(lines)}    return a\n"
        inputs = [[rng.randint(-20, 99) for _ in range(rng.randint(5, 9))] for _ in range(CASES)]
        namespace: dict = {}
        exec(source, namespace)  # our own words, from above
        results = [namespace["solve"](list(numbers)) for numbers in inputs]
        if len({repr(result) for result in results}) == CASES:
            break
    steps = "; then ".join(said[:-1])
    task = f"Given a list of whole numbers, {steps}. The result is {said[-1]}."
    if rng.random() < 0.5:
        cases = [Case(args=[numbers], returns=result) for numbers, result in zip(inputs, results, strict=True)]
        return Problem(prompt=f"{task} Write a function solve(a).", tests=cases, function="solve", solution=source)
    print_it = "a = solve([int(word) for word in input().split()])\nprint(*(a if isinstance(a, list) else [a]))\n"
    cases = [
        Case(stdin=_line(numbers), stdout=_line(result if isinstance(result, list) else [result]))
        for numbers, result in zip(inputs, results, strict=True)
    ]
    said_io = "The numbers stand on one line of stdin, with spaces between them; print the result in the same way."
    return Problem(prompt=f"{task} {said_io}", tests=cases, solution=source + print_it)


def _line(numbers: list[int]) -> str:
    return " ".join(map(str, numbers)) + "\n"
