"""Answer format: give a right answer in exactly the form that is asked for.

python environments/answer_format_environment/answer_format_environment.py process
"""

import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypedDict

import yaml
from pydantic import Field, field_validator

from atroposlib.environments.rows import Row
from atroposlib.environments.single_turn import THINK, RowsConfig, RowsEnv
from atroposlib.environments.structured import read_json, read_yaml


@dataclass(frozen=True)
class Form:
    """The form of an answer: `shown.format(answer)`, which `read` takes apart, or raises ValueError."""

    shown: str
    read: Callable[[str], Any]


def _fields(load: Callable[[str], Any], **others: type) -> Callable[[str], Any]:
    """Read the field answer of a mapping that has just that and `others`."""

    def read(said: str) -> Any:
        loaded = load(said)
        if not isinstance(loaded, dict) or loaded.keys() != {"answer", *others}:
            raise ValueError("other fields")
        for name, kind in others.items():
            kind(loaded[name])
        return loaded["answer"]

    return read


def _between(start: str, end: str) -> Callable[[str], Any]:
    """Read what stands once between two marks, whatever comes before and after."""

    def read(said: str) -> str:
        rest = said.partition(start)[2]
        answer, closed, after = rest.partition(end)
        if not closed or start in after:
            raise ValueError("not given once")
        return answer

    return read


def _nested(outer: str, inner: str) -> Form:
    form = f"<{outer}>why it is so <{inner}>{{answer}}</{inner}></{outer}>"
    whole, part = _between(f"<{outer}>", f"</{outer}>"), _between(f"<{inner}>", f"</{inner}>")
    return Form(form, lambda said: part(whole(said)))


def _only(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Read the one element of a list."""

    def read(said: str) -> Any:
        loaded = load(said)
        if not isinstance(loaded, list) or len(loaded) != 1:
            raise ValueError("no list of one element")
        return loaded[0]

    return read


def _tags(name: str) -> Form:
    return Form(f"<{name}>{{answer}}</{name}>", _between(f"<{name}>", f"</{name}>"))


def _latex(macro: str) -> Form:
    return Form(f"\\{macro}{{{{{{answer}}}}}}", _between(f"\\{macro}{{", "}"))


_yaml = partial(read_yaml, as_texts=True)


class AnswerFormat(Enum):
    """The forms, by the names that configurations use."""

    JSON = Form('{{"answer": "{answer}"}}', _fields(read_json))
    JSON_ARRAY = Form('["{answer}"]', _only(read_json))
    JSON_CONFIDENCE = Form('{{"answer": "{answer}", "confidence": 0.9}}', _fields(read_json, confidence=float))
    YAML = Form("answer: {answer}", _fields(_yaml))
    YAML_LIST = Form("- {answer}", _only(_yaml))
    YAML_CONFIDENCE = Form("answer: {answer}\nconfidence: 0.9", _fields(_yaml, confidence=float))
    TOML = Form('answer = "{answer}"', _fields(tomllib.loads))
    TOML_CONFIDENCE = Form('answer = "{answer}"\nconfidence = 0.9', _fields(tomllib.loads, confidence=float))
    XML = _tags("answer")
    OUTPUT_TAGS = _tags("output")
    RESULT_TAGS = _tags("result")
    RESPONSE_TAGS = _tags("response")
    FINAL_ANSWER_TAGS = _tags("final_answer")
    SOLUTION_TAGS = _tags("solution")
    CONCLUSION_TAGS = _tags("conclusion")
    REPLY_TAGS = _tags("reply")
    NESTED_RESPONSE_ANSWER = _nested("response", "answer")
    NESTED_SOLUTION_ANSWER = _nested("solution", "answer")
    NESTED_OUTPUT_RESULT = _nested("output", "result")
    NESTED_ANALYSIS_CONCLUSION = _nested("analysis", "conclusion")
    LATEX_BOXED = _latex("boxed")
    LATEX_TEXTBF = _latex("textbf")
    LATEX_TEXTIT = _latex("textit")
    LATEX_UNDERLINE = _latex("underline")


class Task(TypedDict):
    """One problem."""

    question: str
    answer: str
    form: str  # name of an AnswerFormat


class AnswerFormatEnvConfig(RowsConfig):
    """Which questions and forms."""

    dataset: str | None = Field(
        default=None,
        description="A .jsonl or .parquet file with question and short answer, or a name on the model hub; null: sums.",
    )
    supported_formats: list[str] | None = Field(default=None, description="Names of forms; null: all.")
    eval_problems: int | None = Field(default=64, description="Problems of an evaluation; null: all rows.")

    @field_validator("supported_formats")
    @classmethod
    def _are_known(cls, names: list[str] | None) -> list[str] | None:
        known = AnswerFormat.__members__
        if unknown := [name for name in names or () if name.upper() not in known]:
            raise ValueError(f"there is no form {unknown[0]!r}; there are {', '.join(known)}")
        return names


class AnswerFormatEnv(RowsEnv):
    """Score 1.0 for the right answer in the form that is asked for, else 0.0."""

    name = "answer_format"
    env_config_cls = AnswerFormatEnvConfig
    config: AnswerFormatEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    system = THINK + "answer in exactly the form that is asked for, and write nothing else."
    wanted = 'an object like {"question": "Capital of France?", "answer": "Paris"}'

    def make(self, rng: random.Random, level: int) -> Task:
        left, right = (rng.randrange(10**level, 10 ** (level + 1)) for _ in range(2))
        return Task(question=f"What is {left} + {right}?", answer=str(left + right), form=self._form(rng))

    def to_item(self, row: Row) -> Task:  # pyright: ignore[reportIncompatibleMethodOverride]
        answer = str(row["answer"]).rpartition("####")[2].strip()
        if not re.fullmatch(r"[\w .,'-]+", answer):
            raise ValueError(f"the answer {answer[:50]!r} is no plain short text")
        rng = random.Random(f"{self.config.seed}/{row['question']}")
        return Task(question=str(row["question"]), answer=answer, form=self._form(rng))

    def _form(self, rng: random.Random) -> str:
        return rng.choice(self.config.supported_formats or list(AnswerFormat.__members__)).upper()

    def item_task(self, item: Task) -> str:
        return f"{self.label}_{item['form'].lower()}"

    def question(self, item: Task) -> str:
        shown = AnswerFormat[item["form"]].value.shown.format(answer="your answer")
        return f"{item['question']}\n\nAnswer in exactly this form, with the answer alone in its place:\n{shown}"

    def grade(self, said: str, item: Task) -> float:
        try:
            given = AnswerFormat[item["form"]].value.read(said)
        except (ValueError, TypeError, yaml.YAMLError, RecursionError):
            return 0.0
        return float(isinstance(given, str | int | float) and str(given).strip() == item["answer"])

    def gold(self, item: Task) -> str:
        return AnswerFormat[item["form"]].value.shown.format(answer=item["answer"])

    def other_spelling(self, item: Task) -> str:
        return f"\n{self.gold(item)}\n"

    def right_answers(self, item: Task) -> int:
        return 1


if __name__ == "__main__":
    AnswerFormatEnv.cli()
