"""Template of a verifiable environment: Roman numerals.

python environments/community/template_env.py process

Copy the file, change four methods, and run `atropos env check my_env.py`.
"""

import random
from typing import TypedDict

from atroposlib.environments.intern_bootcamp.bootcamp import extract_answer
from atroposlib.environments.single_turn import THINK, SingleTurnConfig, SingleTurnEnv, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

_SIGNS = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X"}
_SIGNS |= {9: "IX", 5: "V", 4: "IV", 1: "I"}


class Number(TypedDict):
    """One problem; items are JSON-shaped."""

    number: int


class TemplateEnv(SingleTurnEnv):
    """Score 1.0 for the right numeral in answer tags, else 0.0."""

    name = "template"
    system = THINK + "give the final answer inside <answer> and </answer>."

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        return SingleTurnConfig(group_size=8, tokenizer_name=engine[0].model_name), engine

    def make(self, rng: random.Random, level: int) -> Number:
        return Number(number=rng.randint(1, 10 ** (level + 1)))

    def question(self, item: Number) -> str:
        return f"Write {item['number']} in Roman numerals."

    def grade(self, said: str, item: Number) -> float:
        return float((extract_answer(said) or "").upper() == numeral(item["number"]))

    def gold(self, item: Number) -> str:
        return f"<answer>{numeral(item['number'])}</answer>"

    def other_spelling(self, item: Number) -> str:
        return f"It is <answer> {numeral(item['number']).lower()} </answer>."


def numeral(number: int) -> str:
    """Return a number in Roman numerals.

    >>> numeral(1994)
    'MCMXCIV'
    """
    text = ""
    for value, sign in _SIGNS.items():
        times, number = divmod(number, value)
        text += sign * times
    return text


if __name__ == "__main__":
    TemplateEnv.cli()
