"""Kinds of benchmarks: how a row becomes an item, how it is asked, and what a reply to it is worth.

A benchmark is a row of `benchmarks.yaml`; its texts are templates over the columns of a data set's row.
"""

import json
import re
import string
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.environments.choices import LETTERS, chosen, listed, shuffled, to_choice
from atroposlib.environments.constraints import all_hold, check_arguments
from atroposlib.environments.judging import Judge
from atroposlib.environments.rows import Row
from atroposlib.envs.base import Item
from atroposlib.envs.reward_fns.math_answers import final_answer
from atroposlib.envs.reward_fns.math_judge import gold_text
from atroposlib.errors import ConfigError
from atroposlib.rollouts.failures import is_scored, scored
from atroposlib.type_definitions import Json, JsonObject

_GRID = re.compile(r"\[\s*\[[\d\s,]*\](?:\s*,\s*\[[\d\s,]*\])*\s*\]")
_ARTICLES = ("a", "an", "the")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BEFORE = "".join(mark for mark in string.punctuation if mark not in "+-.")
_MARKS = re.compile(f"[{re.escape(string.punctuation)}\u2018\u2019\u00b4]+")
_MOST_CHOICES = 4
"""Of those that come from columns of good and bad replies."""


class Benchmark(BaseModel):
    """One row of the table. Texts are templates over the columns of a data set's row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cls: str = Field(alias="class", description="Name of the class, upstream's where it has one.")
    module: str = Field(description="File that the class can be imported from.")
    dataset: str
    config: str | None = None
    split: str = Field("test", description="Several are joined by +.")
    few_shot_split: str | None = Field(None, description="null: the benchmark has no rows but those it asks.")
    kind: str
    question: str | None = Field(None, description="null: the usual columns of multiple choice are tried.")
    turns: str | None = Field(None, description="rated: column with the turns of the user.")
    group: str | None = Field(None, description="Column that rows are grouped by in results, and chosen by.")
    choices: list[str] | None = None
    choices_column: str | None = None
    choices_columns: list[str] | None = Field(None, description="choice: columns with the right replies, and others.")
    answer: str | None = None
    answers: list[str] | None = Field(None, description="f1: keys on the way to a list of right answers.")
    first: int = Field(0, description="choice: the number of the first choice.")
    shuffle: bool = Field(False, description="choice: ask the choices in another order.")
    clean: bool = Field(False, description="Remove bracketed marks, as of WikiHow.")
    blank: str | None = Field(None, description="log-likelihood: the mark where a choice goes; what follows is scored.")
    lines: str = Field("none", description="log-likelihood: letters: list the choices, score letters.")
    prompt: str = Field("{question}\nAnswer:", description="log-likelihood: the context.")
    baselines: str | None = Field(None, description="against: data set with the replies to compare with.")
    key: str | None = Field(None, description="against: column that joins both data sets.")
    inverted: list[str] = Field([], description="refusal: groups in which refusing is right.")

    def text(self, template: str | None, row: Row) -> str:
        """Return a template with the columns of a row."""
        made = str(row.get("question", "")) if template is None else template.format_map(_Columns(row))
        return _cleaned(made) if self.clean else made


@cache
def benchmarks() -> dict[str, Benchmark]:
    """Return the table by name; ConfigError when a row has a kind that is not known."""
    text = Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8")
    rows = {name: Benchmark.model_validate(row) for name, row in yaml.safe_load(text).items()}
    for name, row in rows.items():
        if row.kind not in KINDS:
            raise ConfigError(f"benchmark {name} has kind {row.kind!r}; known are {', '.join(KINDS)}")
    return rows


class Kind:
    """A question and one right answer in words."""

    ask: ClassVar[str] = "Give the final answer alone inside <answer> and </answer>."
    """The end of a question."""

    def __init__(self, table: Benchmark, seed: str) -> None:
        self.table, self.seed = table, seed

    def item(self, row: Row) -> Item:
        """Return the item of a row; ValueError, KeyError or TypeError when it is none."""
        return {"question": self.table.text(self.table.question, row), "answer": self.answer(row)}

    def answer(self, row: Row) -> str:
        """Return the right answer of a row."""
        return self.table.text(self.table.answer, row)

    def question(self, item: Item) -> str:
        """Return the question as it is asked."""
        return f"{item['question']}\n\n{self.ask}" if self.ask else item["question"]

    def gold(self, item: Item) -> str | None:
        """Return a right reply; None: none is known."""
        return f"<answer>{item['answer']}</answer>"

    def grade(self, said: str, item: Item) -> float:
        """Return what a reply without its thoughts is worth, 0 to 1."""
        return float(plain(final_answer(said) or said) == plain(item["answer"]))

    def measures(self, item: Item, grades: Sequence[float]) -> dict[str, float]:
        """Return further numbers of one item, which are averaged over the items."""
        return {}


class Choice(Kind):
    """Multiple choice."""

    ask = 'Say "The best answer is: X", where X is the letter of the right choice.'

    def item(self, row: Row) -> Item:
        table = self.table
        item = to_choice(self._columns(row))
        if table.clean:
            item["choices"] = list(map(_cleaned, item["choices"]))
        return dict(shuffled(item, self.seed) if table.shuffle else item)

    def _columns(self, row: Row) -> Mapping[str, Json]:
        table, question = self.table, self.table.text(self.table.question, row)
        made: JsonObject = dict(row)
        if table.question is not None:
            kept = {name: row[name] for name in ("choices", "endings", "answerKey", "label") if name in row}
            made = {"question": question, **kept}
        if table.choices:
            made = {"question": question, "choices": [table.text(choice, row) for choice in table.choices]}
        if table.choices_column:
            made = {"question": question, "choices": _as_list(row[table.choices_column])}
        if table.choices_columns:
            right, wrong = (_as_list(row[column]) for column in table.choices_columns)
            made = {"question": question, "choices": [right[0], *wrong[: _MOST_CHOICES - 1]]}
        if table.answer is not None:
            said = row[table.answer.strip("{}")] if table.answer.startswith("{") else table.answer
            is_number = isinstance(said, int) or str(said).isdecimal()
            made["answer"] = int(said) - table.first if is_number else said
        return made

    def question(self, item: Item) -> str:
        return f"{item['question']}\n\n{listed(item['choices'])}\n\n{self.ask}"

    def gold(self, item: Item) -> str:
        return f"The best answer is: {LETTERS[item['gold']]}"

    def grade(self, said: str, item: Item) -> float:
        return float(chosen(said, item["choices"]) == item["gold"])


class Math(Kind):
    """An expression, compared by its value; the environment's `MathJudge` grades."""

    ask = "Give the final answer in \\boxed{}."

    def answer(self, row: Row) -> str:
        return gold_text(super().answer(row))

    def gold(self, item: Item) -> str:
        return f"\\boxed{{{item['answer']}}}"


class Aliases(Kind):
    """Words, equal to one of the names that the right answer has; TriviaQA."""

    def item(self, row: Row) -> Item:
        answer = row["answer"]
        known = [str(name) for column in ("aliases", "normalized_aliases") for name in answer.get(column) or ()]
        names = list(dict.fromkeys(name for name in known or [str(answer["value"])] if name.strip()))
        if not names:
            raise ValueError("its answer has no name")
        return {"question": self.table.text(self.table.question, row), "answers": names}

    def gold(self, item: Item) -> str:
        return f"<answer>{item['answers'][0]}</answer>"

    def grade(self, said: str, item: Item) -> float:
        given = final_answer(said) or said
        return float(bare(given) in map(bare, item["answers"]))


class F1(Kind):
    """Words, of which a share may be right; each reader of a row may have given several spans."""

    def item(self, row: Row) -> Item:
        found: Any = row
        if "validated_answers" in row:  # one of several readers each, in columns
            other = row["validated_answers"]
            readers = [dict(zip(other, values, strict=True)) for values in zip(*other.values(), strict=True)]
            spans = [_spans(each) for each in (row["answer"], *readers)]
        else:
            for key in self.table.answers or ():
                found = found[key]
            spans = [[str(each)] for each in found]
        return {"question": self.table.text(self.table.question, row), "answers": [each for each in spans if each]}

    def gold(self, item: Item) -> str | None:
        known = next((spans[0] for spans in item["answers"] if len(spans) == 1), None)
        return f"<answer>{known}</answer>" if known else None

    def grade(self, said: str, item: Item) -> float:
        given = final_answer(said) or said
        return max((f1(given, answer) for answer in item["answers"]), default=0.0)


def _spans(answer: Mapping[str, Json]) -> list[str]:
    """Return the spans of a reader's answer in DROP: a number, spans, or a date."""
    if answer["number"] != "":
        return [str(answer["number"])]
    date = answer["date"]
    made = list(answer["spans"]) or [" ".join((date["day"], date["month"], date["year"])).strip()]
    return made if made[0].strip() else []


class Constraints(Kind):
    """Checkable constraints; all must hold."""

    ask = ""

    def item(self, row: Row) -> Item:
        ids = list(row["instruction_id_list"])
        given = [{k: v for k, v in (each or {}).items() if v is not None} for each in row["kwargs"]]
        check_arguments(ids, given)
        return {"question": row["prompt"], "ids": ids, "kwargs": given}

    def gold(self, item: Item) -> None:
        return None

    def grade(self, said: str, item: Item) -> float:
        return float(all(all_hold(said, item["ids"], item["kwargs"])))


class Grid(Kind):
    """ARC-AGI: pairs of grids show a rule, which is applied to another grid. The whole grid must be right."""

    ask = (
        "Apply the same rule to the last input, and give its output as one JSON list of rows, such as [[0, 1], [2, 3]]."
    )

    def item(self, row: Row) -> Item:
        shown = row["fewshots"] if "fewshots" in row else row["train"]
        asked = (row["question"] if "fewshots" in row else row["test"])[0]
        lines = [f"Input: {json.dumps(pair['input'])}\nOutput: {json.dumps(pair['output'])}" for pair in shown]
        rule = "\n\n".join([*lines, f"Input: {json.dumps(asked['input'])}\nOutput: ?"])
        return {"question": f"One rule turns each input into its output.\n\n{rule}", "answer": asked["output"]}

    def gold(self, item: Item) -> str:
        return json.dumps(item["answer"])

    def grade(self, said: str, item: Item) -> float:
        found = _GRID.findall(said)
        try:
            return float(bool(found) and json.loads(found[-1]) == item["answer"])
        except ValueError:
            return 0.0


class Judged(Kind):
    """A model judges the reply."""

    ask = ""

    def gold(self, item: Item) -> str | None:
        return item["answer"]

    def rates(self, judge: Judge) -> dict[str, float]:
        """Return numbers of a whole evaluation, from the judge's verdicts."""
        return {}

    async def judged(self, judge: Judge, said: str, item: Item) -> float:
        """Return the grade that a judge of this kind gives; `Unscored` when it cannot be read."""
        return await judge.grade(item["question"], said, item["answer"])


class Facts(Judged):
    """A right answer is known, and a model compares the reply with it: correct, incorrect or not attempted."""

    def rates(self, judge: Judge) -> dict[str, float]:
        """Return the shares of judged replies, and `f_score`: the harmonic mean of correct, of all and of attempted.

        Source: SimpleQA, arXiv:2411.04368.
        """
        names = ("correct", "incorrect", "not attempted")
        right, wrong, _ = (judge.counts[name] for name in names)
        if not (every := sum(judge.counts[name] for name in names)):
            return {}
        shares = {name.replace(" ", "_"): judge.counts[name] / every for name in names}
        attempted = right / (right + wrong) if right + wrong else 0.0
        f_score = 2 * right / (right + wrong + every)
        return {**shares, "correct_given_attempted": attempted, "f_score": f_score}


class Mixed(Judged):
    """MixEval: rows with choices and rows with right answers in words, which a model compares."""

    def item(self, row: Row) -> Item:
        options, target = row.get("options"), row["target"]
        if options:
            given = {"question": row["prompt"], "choices": options, "answer": int(target[0])}
            return {**to_choice(given), "question": self._asked(row)}
        return {"question": self._asked(row), "answer": "; or ".join(map(str, target))}

    def _asked(self, row: Row) -> str:
        return "\n\n".join(filter(None, (row.get("context"), row["prompt"])))

    def question(self, item: Item) -> str:
        return (
            f"{item['question']}\n\n{listed(item['choices'])}\n\n{Choice.ask}"
            if "choices" in item
            else item["question"]
        )

    def gold(self, item: Item) -> str:
        return f"The best answer is: {LETTERS[item['gold']]}" if "choices" in item else item["answer"]

    async def judged(self, judge: Judge, said: str, item: Item) -> float:
        if "choices" in item:
            return float(chosen(said, item["choices"]) == item["gold"])
        return await super().judged(judge, said, item)


class Against(Judged):
    """Arena-Hard: a model compares the reply with that of another model, in both orders."""

    def gold(self, item: Item) -> None:
        return None

    async def judged(self, judge: Judge, said: str, item: Item) -> float:
        return await scored(judge.prefer(item["question"], said, item["answer"])) if said else 0.0

    def measures(self, item: Item, grades: Sequence[float]) -> dict[str, float]:
        rates = {"win_rate": sum(grade > 0.5 for grade in grades), "tie_rate": grades.count(0.5)}
        return {
            name: count / len(grades) for name, count in (rates | {"loss_rate": sum(g < 0.5 for g in grades)}).items()
        }


class Rated(Judged):
    """MT-Bench: a model rates the replies to one or more turns from 1 to 10. The grade is a tenth of that."""

    def item(self, row: Row) -> Item:
        turns = [str(turn) for turn in row[self.table.turns or "turns"]]
        references = [str(each) for each in row.get("reference") or ()]
        return {"question": turns[0], "turns": turns, "references": references}

    def gold(self, item: Item) -> None:
        return None

    async def judged(self, judge: Judge, said: str, item: Item) -> float:
        return await self.rated(judge, [said], item)

    async def rated(self, judge: Judge, said: Sequence[str], item: Item) -> float:
        """Return a tenth of the rating of the last of these replies to the first turns."""
        references = item["references"][len(said) - 1 : len(said)]
        return await judge.rate(list(zip(item["turns"], said, strict=False)), *references)


class Refusal(Judged):
    """RefusalBench: 1 for a reply that helps, 0 for one that refuses; the other way round in the inverted groups."""

    def item(self, row: Row) -> Item:
        return {"question": self.table.text(self.table.question, row)}

    def gold(self, item: Item) -> None:
        return None

    async def judged(self, judge: Judge, said: str, item: Item) -> float:
        if not said:
            return 0.0
        refused = await judge.refuses(item["question"], said)
        return refused if not is_scored(refused) or self._is_inverted(item) else 1 - refused

    def _is_inverted(self, item: Item) -> bool:
        return item.get("group") in self.table.inverted

    def measures(self, item: Item, grades: Sequence[float]) -> dict[str, float]:
        mean = sum(grades) / len(grades)
        rate = mean if self._is_inverted(item) else 1 - mean
        return {"refusal_rate": rate, f"refusal_rate_{'inverted' if self._is_inverted(item) else 'normal'}": rate}


class Scores(Kind):
    """JudgeMark: the model scores texts, see `judgemark_eval`."""

    ask = ""

    def gold(self, item: Item) -> None:
        return None


KINDS: dict[str, type[Kind]] = {
    "choice": Choice, "math": Math, "words": Kind, "aliases": Aliases, "f1": F1, "grid": Grid,
    "constraints": Constraints, "judged": Facts, "mixed": Mixed, "against": Against, "rated": Rated, "refusal": Refusal,
    "scores": Scores,
}  # fmt: skip


class _Columns(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        if (name := key.removesuffix("_capitalized")) in self:
            return str(self[name]).capitalize()
        raise KeyError(f"no column {key!r}; there are {', '.join(self)}")


def _cleaned(text: str) -> str:
    """Return a text of WikiHow without its marks."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return yaml.safe_load(value) if value.startswith("[") else [value]
    return value


def plain(text: str) -> str:
    """Return a text in small letters, without articles, marks and extra spaces; numbers keep sign and point.

    A text of nothing but marks and articles, such as `(A)` or `] >`, keeps its letters and marks.

    Source: the normalisation of SQuAD's evaluation, arXiv:1606.05250, but for numbers and such texts.

    >>> plain("The  Eiffel Tower!"), plain("-3.50"), plain("(A)"), plain("] >")
    ('eiffel tower', '-3.5', 'a', ']>')
    """
    words = [word for word in map(_plain_word, text.lower().split()) if word and word not in _ARTICLES]
    if words:
        return " ".join(words)
    marks = "".join(text.lower().split()).strip('"').removesuffix(".")
    letter = re.fullmatch(r"[(\[]?([a-z])[)\].:]*", marks)
    return letter[1] if letter else marks


def bare(text: str) -> str:
    """Return a text in small letters, without articles, with a space for each run of marks; of only those, they stay.

    Source: the normalisation of TriviaQA's evaluation, arXiv:1705.03551, but for such texts, which it makes empty.

    >>> bare("The AC/DC\u2019s"), bare("The The"), bare("!!!")
    ('ac dc s', 'the the', '!!!')
    """
    every = _MARKS.sub(" ", text.lower()).split()
    words = [word for word in every if word not in _ARTICLES]
    return " ".join(words or every or text.split())


def _plain_word(word: str) -> str:
    number = _NUMBER.fullmatch(word.lstrip(_BEFORE).rstrip(string.punctuation))
    return _as_number(number[0]) if number else "".join(mark for mark in word if mark not in string.punctuation)


def _as_number(text: str) -> str:
    value = float(text.replace(",", ""))
    return str(int(value) if value.is_integer() and abs(value) < 1e15 else value) if isfinite(value) else text


def f1(given: str, right: Sequence[str]) -> float:
    """Return how much of the right spans a text has, 0 to 1: F1 of the words, nothing where no number is shared.

    Source: the evaluation of DROP, arXiv:1903.00161, with the text as one span.

    >>> f1("tower of London", ["the London tower"]), f1("10 yards", ["12 yards"]), f1("Ann", ["Ann", "Ben"])
    (0.8, 0.0, 0.5)
    """
    ours, best = _words_of(given), 0.0
    for theirs in map(_words_of, right):
        numbers = set(filter(_is_number, theirs))
        if numbers and not numbers & ours:
            continue
        shared = len(ours & theirs)
        precision, recall = shared / len(ours) if ours else 1.0, shared / len(theirs) if theirs else 1.0
        best = max(best, 2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return round(best / len(right), 2)


def _words_of(text: str) -> set[str]:
    found: list[str] = []
    for token in re.split("[ -]", text.lower()):
        bare = token if _is_number(token) else "".join(mark for mark in token if mark not in string.punctuation)
        word = str(float(bare)) if _is_number(bare) else re.sub(r"\b(a|an|the)\b", " ", bare)
        found += word.split()
    return set(found)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
