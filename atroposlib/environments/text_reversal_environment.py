"""Text reversal: write a text backwards, letter by letter.

python environments/text_reversal_environment.py process
"""

import random
import re
from typing import TypedDict

from pydantic import Field, PositiveInt

from atroposlib.environments.intern_bootcamp.words import WORDS
from atroposlib.environments.rows import Row
from atroposlib.environments.single_turn import RowsConfig, RowsEnv, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

_OPENING, _CLOSING = "<reversed_text>", "</reversed_text>"


class Text(TypedDict):
    """One problem."""

    text: str
    level: int


class TextReversalConfig(RowsConfig):
    """Which texts."""

    levels: list[PositiveInt] = Field(
        default=[1, 2, 3], min_length=1, description="Without a dataset: words of a text, each number as often."
    )
    dataset: str | None = Field(
        default=None, description="A .jsonl or .parquet file with the field text, or a name on the model hub."
    )
    eval_problems: int | None = Field(default=64, description="Problems of an evaluation; null: all rows.")


class TextReversalEnv(RowsEnv):
    """Score 1.0 for the exact text backwards, else 0.0."""

    name = "text_reversal"
    env_config_cls = TextReversalConfig
    system = f"Write the text of the user backwards, letter by letter, between {_OPENING} and {_CLOSING}."
    wanted = 'an object like {"text": "any text"}'

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        return TextReversalConfig(group_size=8, max_token_length=1024, tokenizer_name=engine[0].model_name), engine

    def make(self, rng: random.Random, level: int) -> Text:
        text = " ".join(rng.choices(WORDS, k=level))
        return Text(text=text, level=level) if text != text[::-1] else self.make(rng, level)

    @classmethod
    def to_item(cls, row: Row) -> Text:
        text = str(row["text"]).strip()
        if text == text[::-1]:
            raise ValueError("the text reads the same backwards")
        return Text(text=text, level=len(text.split()))

    def question(self, item: Text) -> str:
        return item["text"]

    def item_task(self, item: Text) -> str:
        return self.label if self.config.dataset else f"{self.label}_{item['level']}"  # pyright: ignore

    def grade(self, said: str, item: Text) -> float:
        found = re.findall(rf"{_OPENING}((?:(?!{_OPENING}).)*?){_CLOSING}", said, re.DOTALL)
        return float(bool(found) and found[-1].strip() == item["text"][::-1].strip())

    def gold(self, item: Text) -> str:
        return f"{_OPENING}{item['text'][::-1]}{_CLOSING}"

    def other_spelling(self, item: Text) -> str:
        return f"Backwards:\n{_OPENING}\n{item['text'][::-1]}\n{_CLOSING}"

    def right_answers(self, item: Text) -> int:
        return 1


if __name__ == "__main__":
    TextReversalEnv.cli()
