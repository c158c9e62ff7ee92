"""An environment over problem sets: each row's `problem` is the prompt, its `answer` the right answer.

The sets may be a mixture, with the same rows in the same order for the same seed: each source is shuffled, then cut to
the fraction `weight`; the parts are joined and shuffled again.
"""

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict, TypeVar

from pydantic import Field, PositiveInt

from atroposlib.environments.rows import Row, Split, read_rows, write_rows
from atroposlib.environments.single_turn import THINK, RowsConfig, RowsEnv, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.reward_fns.math_judge import judge, scores
from atroposlib.errors import ConfigError, DataError
from atroposlib.example_trainer.config import Source
from atroposlib.paths import expand_path
from atroposlib.type_definitions import Json, JsonObject, Message

T = TypeVar("T")
_THINKING = re.compile(r"(?is)<think>.*?</think>")
_THINKING_BEGINS = re.compile(r"(?i)\s*<think>")
_OPENING, _CLOSING = re.compile(r"(?i)<answer>"), re.compile(r"(?i)</answer>")
_PARENTHESES = re.compile(r"\(((?:[-+]?\d+(?:\.\d+)?)|(?:\\?sqrt\{?\d+\}?))\)")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def answer_tag_reward(text: str, gold: str, *, require_think: bool = True) -> float:
    """1.0 when the first `<answer>` after the thinking holds `gold` (both canonical), else 0.0.

    Args:
        text: the model's whole reply.
        require_think: the reply must *begin* with `<think>...</think>`, and the answer follow.

    >>> answer_tag_reward("<think>2+1</think><answer> 3.0 </answer>", "3")
    1.0
    """
    thinking = _THINKING.match(text)
    if not thinking and (require_think or _THINKING_BEGINS.match(text)):
        return 0.0  # a thought that never ends has no answer
    answer = _first_answer(text, thinking.end() if thinking else 0)
    return float(answer is not None and canonical(answer) == canonical(gold))


def math_rewards(texts: Sequence[str], gold: str) -> list[float]:
    """Return 1.0 where the answer after the thinking equals `gold` as mathematics, else 0.0.

    `Unscored` stands where nobody could judge. Needs math-verify for LaTeX. Blocks until all are judged.
    """
    return scores(judge(texts, gold))


def _first_answer(text: str, start: int) -> str | None:
    """Return the first `<answer>`. One pattern for both takes hours over a reply that repeats only the first."""
    opening = _OPENING.search(text, start)
    closing = _CLOSING.search(text, opening.end()) if opening else None
    return text[opening.end() : closing.start()] if opening and closing else None


def canonical(answer: str) -> str:
    """One spelling for equal answers: no outer braces, no spaces, no `(5)`, `3.0` is `3`, `-0` is `0`.

    >>> canonical("{ -0.50 }")
    '-0.5'
    """
    text = re.sub(r"\s+", "", answer)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    bare = _PARENTHESES.fullmatch(text)
    if bare:
        text = bare[1]
    if not _NUMBER.fullmatch(text):
        return text
    number = text.removeprefix("+")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number in ("-0", "") else number


class Problem(TypedDict):
    """One row of the mixture."""

    problem: str
    answer: str


class DatasetEnvConfig(RowsConfig):
    """Which problems, how they are asked and scored."""

    datasets: list[Source] = Field(default=[], description="Sources with columns problem and answer.")
    test_split_size: float = Field(default=0.05, ge=0, lt=1, description="Fraction kept for evaluation.")
    reward: Literal["answer_tag", "math"] = "answer_tag"
    require_think: bool = Field(default=True, description="answer_tag: replies must begin with <think>.")
    chat_template: str | None = Field(default=None, description="File with a Jinja template; null: the model's own.")
    epochs: PositiveInt | None = Field(default=None, description="How often all rows are asked; null: without end.")


class DatasetEnv(RowsEnv):
    """Score 1.0 for a right answer, else 0.0. Problems come in a new order every epoch, without end."""

    name = "dataset"
    env_config_cls = DatasetEnvConfig
    config: DatasetEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return DatasetEnvConfig(), local_engine("default")

    async def setup(self) -> None:
        """Load the mixture; DataError when it cannot be used."""
        if self.config.chat_template:
            path = expand_path(self.config.chat_template, what="chat_template")
            self.tokenizer.chat_template = path.read_text(encoding="utf-8")
        await super().setup()

    def system_turns(self) -> list[Message]:
        """Say in which form the reward looks for an answer, where neither settings nor a template say something."""
        config = self.config
        if config.system_prompt is not None or config.chat_template:
            return super().system_turns()
        is_math = config.reward == "math"
        form = "give the final answer " + ("in \\boxed{}." if is_math else "inside <answer> and </answer>.")
        thinks = is_math or config.require_think
        return [{"role": "system", "content": THINK + form if thinks else form.capitalize()}]

    def load(self) -> Split:
        sources = self.config.datasets or (
            [Source.model_validate({"id": self.config.dataset})] if self.config.dataset else []
        )
        if not sources:
            raise ConfigError("env.datasets is empty; name at least one: --env.datasets '[{id: problems.jsonl}]'")
        rows = mix(sources, seed=self.config.seed)
        lacking = next((row for row in rows if not {"problem", "answer"} <= set(row)), None)
        if not rows or lacking is not None:
            found = "no rows" if lacking is None else f"a row with the columns {sorted(lacking)}"
            raise DataError(
                f"the data sets give {found}; expected rows with problem and answer; give "
                "other names as `columns: {problem: question, answer: solution}` of the data set"
            )
        train, test = split([self.to_item(row) for row in rows], self.config.test_split_size)
        return Split(train=train, test=test)

    @classmethod
    def sample_rows(cls) -> list[dict[str, str]]:
        return [{"problem": f"What is {1000 + n} + {3 * n}?", "answer": str(1000 + 4 * n)} for n in range(80)]

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        return ["--env.datasets", json.dumps([{"id": write_rows(folder / "sample.jsonl", cls.sample_rows())}])]

    @classmethod
    def to_item(cls, row: Row) -> Problem:
        return Problem(problem=str(row["problem"]), answer=str(row["answer"]))

    def question(self, item: Problem) -> str:
        return item["problem"]

    async def grades(self, replies: Sequence[str], item: Problem) -> list[float]:
        if self.config.reward == "math":
            return await asyncio.to_thread(math_rewards, replies, item["answer"])
        return [answer_tag_reward(text, item["answer"], require_think=self.config.require_think) for text in replies]

    def gold(self, item: Problem) -> str:
        answer = f"<answer>{item['answer']}</answer>"
        return f"<think>I see.</think>{answer}" if self.config.require_think else answer

    def other_spelling(self, item: Problem) -> str:
        return self.gold(item).replace("<answer>", "\nIt is <Answer>\n ").replace("</answer>", " \n</Answer>.")

    def answer_of(self, said: str, item: Problem) -> str:
        return item["answer"]


def mix(sources: Sequence[Source], *, seed: int) -> list[JsonObject]:
    """The rows of all sources.

    Raises:
        ConfigError: the sources that name columns name different ones.
        DataError: a source cannot be read, or lacks a column.
    """
    named = {frozenset(source.columns) for source in sources if source.columns is not None}
    if len(named) > 1:
        shown = " and ".join(str(sorted(columns)) for columns in sorted(named, key=sorted))
        raise ConfigError(f"datasets name different columns: {shown}; every source must give the same ones")
    rows = [row for source in sources for row in _part(source, seed)]
    random.Random(seed).shuffle(rows)
    return rows


def split(rows: Sequence[T], test_size: float) -> tuple[list[T], list[T]]:
    """Train and test rows; `test_size` is a fraction."""
    count = int(len(rows) * test_size)
    return list(rows[count:]), list(rows[:count])


def _part(source: Source, seed: int) -> list[JsonObject]:
    rows = [_renamed(row, source) for _, row in read_rows(source.id, name=source.config, split=source.split)]
    random.Random(seed).shuffle(rows)
    return rows[: int(len(rows) * source.weight)]


def _renamed(row: Mapping[str, Json], source: Source) -> JsonObject:
    if source.columns is None:
        return dict(row)
    missing = [theirs for theirs in source.columns.values() if theirs not in row]
    if missing:
        raise DataError(f"data set {source.id} has columns {sorted(row)}, but {missing[0]!r} is asked for")
    return {ours: row[theirs] for ours, theirs in source.columns.items()}


if __name__ == "__main__":
    DatasetEnv.cli()
