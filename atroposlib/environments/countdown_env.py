"""Countdown: make an expression with the given numbers, each used once, that equals the target.

Most problems have several right answers, so a policy that keeps its variety can be told from one that does not.
"""

import ast
import operator
import random
from collections.abc import Callable
from typing import TypedDict

from pydantic import Field

from atroposlib.environments.single_turn import Part, SingleTurnConfig, SingleTurnEnv, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.type_definitions import Message

_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Countdown(TypedDict):
    """One problem, and an expression that solves it."""

    numbers: list[int]
    target: int
    solution: str


class CountdownConfig(SingleTurnConfig):
    """Difficulty of the problems, and the form in which they are shown."""

    numbers: int = Field(default=3, ge=2, le=6, description="Numbers per problem.")
    largest: int = Field(default=20, ge=2, description="Numbers lie between 1 and this.")
    few_shot: int = Field(default=3, ge=0, description="Solved problems shown before each.")


class CountdownEnv(SingleTurnEnv):
    """Score 1.0 for an expression that is right, else 0.0."""

    name = "countdown"
    env_config_cls = CountdownConfig
    config: CountdownConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return CountdownConfig(group_size=8, max_token_length=64), local_engine("default")

    async def problem(self, part: Part, index: int) -> Countdown:
        return make_problem(f"{self.config.seed}/{part}/{index}", self.config.numbers, self.config.largest)

    async def messages(self, item: Countdown) -> list[Message]:
        return [*self.system_turns(), *prompt(item, few_shot=self.config.few_shot, largest=self.config.largest)]

    def question(self, item: Countdown) -> str:
        return question(item)

    def grade(self, said: str, item: Countdown) -> float:
        return float(right_answer(said, item) is not None)

    def gold(self, item: Countdown) -> str:
        return f"<answer>{item['solution']}</answer>"

    def other_spelling(self, item: Countdown) -> str:
        return f"It is <answer> ( {item['solution']} ) </answer>"

    def answer_of(self, said: str, item: Countdown) -> str:
        return right_answer(said, item) or ""


def make_problem(seed: str, numbers: int, largest: int) -> Countdown:
    """The problem that `seed` stands for; its target lies between 1 and 999."""
    rng = random.Random(seed)
    while True:
        drawn = [rng.randint(1, largest) for _ in range(numbers)]
        value, text = drawn[0], str(drawn[0])
        for number in drawn[1:]:
            sign = rng.choice("+-*")
            text = f"({text}) {sign} {number}" if sign == "*" and not text.isdigit() else f"{text} {sign} {number}"
            value = _SIGNS[sign](value, number)
        if 1 <= value <= 999:
            rng.shuffle(drawn)
            return Countdown(numbers=drawn, target=value, solution=text)


def prompt(item: Countdown, *, few_shot: int, largest: int) -> list[Message]:
    """Solved problems as earlier turns, then the question."""
    examples = [make_problem(f"example/{i}", len(item["numbers"]), largest) for i in range(few_shot)]
    turns: list[Message] = []
    for example in examples:
        turns.append({"role": "user", "content": question(example)})
        turns.append({"role": "assistant", "content": f"<answer>{example['solution']}</answer>"})
    form = "" if turns else " Answer with the expression inside <answer> and </answer>."
    return [*turns, {"role": "user", "content": question(item) + form}]


def question(item: Countdown) -> str:
    """The problem in words."""
    return f"Use the numbers {', '.join(map(str, item['numbers']))} once each to make {item['target']}."


def right_answer(text: str, item: Countdown) -> str | None:
    """The expression in the first `<answer>`, without spaces, when it is right; None when it is not.

    >>> right_answer("<answer> (2 + 3) * 4 </answer>", Countdown(numbers=[2, 3, 4], target=20, solution=""))
    '(2+3)*4'
    """
    said, is_closed, _ = text.partition("<answer>")[2].partition("</answer>")
    if not is_closed or len(said) > 100:
        return None
    try:
        tree = ast.parse(said.strip(), mode="eval").body
        used: list[int] = []
        value = _value(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    if sorted(used) != sorted(item["numbers"]) or abs(value - item["target"]) > 1e-9:
        return None
    return "".join(said.split())


def _value(node: ast.expr, used: list[int]) -> float:
    """Value of numbers and the four operations; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("not an expression of numbers and + - * /")


if __name__ == "__main__":
    CountdownEnv.cli()
