"""The task of the examples: sums of products, which a small model gets right with a tool."""

import random
import re
from typing import TypedDict


class Sum(TypedDict):
    """`left` times `right` plus `rest`."""

    left: int
    right: int
    rest: int


def sum_number(index: int) -> Sum:
    """Task number `index`, the same at every call."""
    rng = random.Random(index)
    return Sum(left=rng.randint(11, 99), right=rng.randint(11, 99), rest=rng.randint(1, 999))


def question(item: Sum) -> str:
    """The task in words."""
    return f"What is {item['left']} times {item['right']}, plus {item['rest']}? End with the number."


def grade(answer: str, item: Sum) -> float:
    """1.0 where the last number of an answer is right, else 0.0."""
    numbers = re.findall(r"-?\d+", answer.replace(",", ""))
    return float(bool(numbers) and int(numbers[-1]) == item["left"] * item["right"] + item["rest"])
