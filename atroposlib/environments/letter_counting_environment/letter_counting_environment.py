"""Letter counting: how often do letters occur in a text?

python environments/letter_counting_environment/letter_counting_environment.py process
"""

import json
import random
import string
from typing import Annotated, TypedDict

from pydantic import Field

from atroposlib.environments.intern_bootcamp.words import WORDS
from atroposlib.environments.single_turn import THINK, SingleTurnConfig, SingleTurnEnv
from atroposlib.environments.structured import answered_object

_WORD_LEVELS = 5
"""Texts of harder levels are random letters."""


class Count(TypedDict):
    """One problem."""

    text: str
    counts: dict[str, int]  # letter -> how often it occurs
    level: int


class LetterCountingConfig(SingleTurnConfig):
    """Difficulty of the texts."""

    levels: list[Annotated[int, Field(ge=1, le=10)]] = Field(
        default=[1, 2, 3],
        min_length=1,
        description="Difficulties, 1 to 10, each as often as the others: more letters to count in longer texts, from "
        "6 on of random letters.",
    )


class LetterCountingEnv(SingleTurnEnv):
    """Score 1.0 when every count is right, else 0.0."""

    name = "letter_counting"
    env_config_cls = LetterCountingConfig
    system = THINK + "give the final answer inside <answer> and </answer>."

    def make(self, rng: random.Random, level: int) -> Count:
        """Draw words or letters, and letters of which at least one is there often: no constant is right often."""
        if level <= _WORD_LEVELS:
            text = " ".join(rng.choices(WORDS, k=2 + 3 * level))
        else:
            text = "".join(rng.choices(string.ascii_lowercase, k=20 * level))
        letters = sorted({letter for letter in text if letter != " "}, key=lambda letter: (-text.count(letter), letter))
        asked = rng.sample(letters[: 6 + level], k=min(1 + level, 6))
        return Count(text=text, counts={letter: text.count(letter) for letter in sorted(asked)}, level=level)

    def question(self, item: Count) -> str:
        letters = ", ".join(f"'{letter}'" for letter in item["counts"])
        form = "{" + ", ".join(f'"{letter}": number' for letter in item["counts"]) + "}"
        return f"How often do the letters {letters} occur in this text?\n\n{item['text']}\n\nAnswer in the form {form}."

    def item_task(self, item: Count) -> str:
        return f"{self.label}_{item['level']}"

    def grade(self, said: str, item: Count) -> float:
        return float(_read(said) == item["counts"])

    def gold(self, item: Count) -> str:
        return f"<answer>{json.dumps(item['counts'])}</answer>"

    def other_spelling(self, item: Count) -> str:
        lines = ",\n  ".join(f'"{letter.upper()}" : {count}' for letter, count in reversed(item["counts"].items()))
        return f"Counted:\n<answer>\n{{\n  {lines}\n}}\n</answer>"


def _read(said: str) -> dict[str, int] | None:
    """Return the counts of a reply, by small letters; None when it has no such form."""
    given = answered_object(said)
    if given is None or not all(type(count) is int for count in given.values()):
        return None
    counts = {letter.lower(): count for letter, count in given.items()}
    return counts if len(counts) == len(given) else None


if __name__ == "__main__":
    LetterCountingEnv.cli()
