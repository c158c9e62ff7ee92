"""Evaluation as a table: a benchmark is a row of `benchmarks.yaml`, and one class runs them all.

    atropos eval run arc --env.dataset arc.jsonl --env.data_dir_to_save_evals results/arc

Multiple choice is scored by generation or by log-likelihood, as lm-eval does it: the context as plain text, each choice
as its continuation, `acc` by the sum of the log-probabilities and `acc_norm` by that sum over the choice's characters.
"""

import asyncio
import logging
import re
import string
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from atroposlib.environments.choices import LETTERS, chosen, listed, shuffled, to_choice
from atroposlib.environments.constraints import all_hold, check_arguments
from atroposlib.environments.judging import Grader
from atroposlib.environments.rows import Row, Split, load_items
from atroposlib.environments.single_turn import Part, RowsConfig, RowsEnv, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, Item
from atroposlib.envs.reward_fns.math_answers import after_thinking, final_answer
from atroposlib.envs.reward_fns.math_judge import MathJudge, gold_text, scores
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.utils.eval_statistics import standard_error

logger = logging.getLogger(__name__)

ASK = {
    "choice": 'Say "The best answer is: X", where X is the letter of the right choice.',
    "math": "Give the final answer in \\boxed{}.",
    "words": "Give the final answer alone inside <answer> and </answer>.",
    "f1": "Give the final answer alone inside <answer> and </answer>.",
    "constraints": "",
    "judged": "",
}
"""What a question ends with when replies are generated."""


class Benchmark(BaseModel):
    """One row of the table. Texts are templates over the columns of a data set's row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cls: str = Field(alias="class", description="Name of the class, upstream's where it has one.")
    module: str = Field(description="File that the class can be imported from.")
    dataset: str
    config: str | None = None
    split: str = "test"
    few_shot_split: str | None = Field(None, description="null: the benchmark has no rows but those it asks.")
    kind: Literal["choice", "math", "words", "f1", "constraints", "judged"]
    question: str | None = Field(None, description="null: the usual columns of multiple choice are tried.")
    choices: list[str] | None = None
    choices_column: str | None = None
    answer: str | None = None
    answers: list[str] | None = Field(None, description="f1: keys on the way to a list of right answers.")
    first: int = Field(0, description="choice: the number of the first choice.")
    shuffle: bool = Field(False, description="choice: ask the choices in another order.")
    clean: bool = Field(False, description="Remove bracketed marks, as of WikiHow.")
    blank: str | None = Field(None, description="log-likelihood: the mark where a choice goes; what follows is scored.")
    lines: Literal["none", "letters"] = Field("none", description="log-likelihood: list the choices, score letters.")
    prompt: str = Field("{question}\nAnswer:", description="log-likelihood: the context.")


@cache
def benchmarks() -> dict[str, Benchmark]:
    """Return the table by name."""
    text = Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8")
    return {name: Benchmark.model_validate(row) for name, row in yaml.safe_load(text).items()}


class BenchmarkConfig(RowsConfig):
    """Which benchmark, and how its replies are scored."""

    benchmark: str = Field(default="mmlu", description="Name of a row of the table; `atropos eval list` shows them.")
    scoring: Literal["generate", "loglikelihood"] = Field(
        default="generate", description="loglikelihood: of the choices, without generating; multiple choice only."
    )
    few_shot_dataset: str | None = Field(default=None, description="File of rows to show; null: as the table says.")
    judge: APIServerConfig | None = Field(default=None, description="Engine that judges; null: the one that is asked.")
    max_token_length: int = Field(default=2048, description="Tokens of one answer.")

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        row = benchmarks().get(self.benchmark)
        if row is None:
            raise ValueError(f"there is no benchmark {self.benchmark!r}; known are {', '.join(benchmarks())}")
        if self.scoring == "loglikelihood" and row.kind != "choice":
            raise ValueError(f"{self.benchmark} has no choices whose likelihood could be compared; use generate")
        return self


class BenchmarkEnv(RowsEnv):
    """Grades as the kind of the benchmark says: 1 for a right reply, 0 for a wrong one; f1: a share of the words."""

    name = "benchmark"
    env_config_cls = BenchmarkConfig
    config: BenchmarkConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    benchmark = "mmlu"
    math_judge: MathJudge | None = None

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        config = BenchmarkConfig(benchmark=cls.benchmark, tokenizer_name=engine[0].model_name, wandb_name=cls.name)
        return config, engine

    async def setup(self) -> None:
        self.row = benchmarks()[self.config.benchmark]
        await super().setup()
        if self.row.kind == "math":
            self.math_judge = MathJudge()
        self.grader = Grader(self.server, self.config.judge)

    def load(self) -> Split:
        """Return the rows that are asked as test, those that are shown as train."""
        config, row = self.config, self.row
        test = load_items(config.dataset or row.dataset, self.to_item, name=row.config, split=row.split)
        shown = config.few_shot_dataset or (None if config.dataset else row.few_shot_split and row.dataset)
        if config.few_shot and shown:
            return Split(
                train=load_items(shown, self.to_item, name=row.config, split=row.few_shot_split or ""), test=test
            )
        return Split(train=test, test=test)

    async def problem(self, part: Part, index: int) -> Item | None:
        items = self.problems["test" if part == "test" else "train"]  # pyright: ignore[reportOptionalSubscript]
        return items[index] if index < len(items) else None

    def to_item(self, row: Row) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the item of a row, by the templates of the table."""
        table = self.row
        if table.kind == "constraints":
            ids = list(row["instruction_id_list"])
            given = [{k: v for k, v in (each or {}).items() if v is not None} for each in row["kwargs"]]
            check_arguments(ids, given)
            return {"question": row["prompt"], "ids": ids, "kwargs": given}
        question = self._text(table.question, row)
        if table.kind == "choice":
            item = to_choice(self._choice_row(row, question))
            if table.clean:
                item["choices"] = list(map(_cleaned, item["choices"]))
            return dict(shuffled(item, str(self.config.seed)) if table.shuffle else item)
        if table.kind == "f1":
            found: Any = row
            for key in table.answers or ():
                found = found[key]
            return {"question": question, "answers": [str(each) for each in found]}
        answer = self._text(table.answer, row)
        return {"question": question, "answer": gold_text(answer) if table.kind == "math" else answer}

    def _choice_row(self, row: Row, question: str) -> Mapping[str, Any]:
        table = self.row
        made: dict[str, Any] = dict(row)
        if table.question is not None:
            made = {
                "question": question,
                **{name: row[name] for name in ("choices", "endings", "answerKey", "label") if name in row},
            }
        if table.choices:
            made = {"question": question, "choices": [self._text(choice, row) for choice in table.choices]}
        if table.choices_column:
            made = {"question": question, "choices": _as_list(row[table.choices_column])}
        if table.answer is not None:
            said = row[table.answer.strip("{}")] if table.answer.startswith("{") else table.answer
            is_number = isinstance(said, int) or str(said).isdecimal()
            made["answer"] = int(said) - table.first if is_number else said
        return made

    def _text(self, template: str | None, row: Row) -> str:
        text = str(row.get("question", "")) if template is None else template.format_map(_Columns(row))
        if not self.row.clean:
            return text
        return _cleaned(text)

    # -- generation --------------------------------------------------------------------------------------------------

    def question(self, item: Item) -> str:
        ask, asked = ASK[self.row.kind], item["question"]
        if self.row.kind == "choice":
            asked = f"{asked}\n\n{listed(item['choices'])}"
        return f"{asked}\n\n{ask}" if ask else asked

    def grade(self, said: str, item: Item) -> float:
        kind = self.row.kind
        if kind == "choice":
            return float(chosen(said, item["choices"]) == item["gold"])
        if kind == "constraints":
            return float(all(all_hold(said, item["ids"], item["kwargs"])))
        given = final_answer(said) or said
        if kind == "words":
            return float(plain(given) == plain(item["answer"]))
        return max((f1(given, answer) for answer in item["answers"]), default=0.0)

    async def grades(self, replies: Sequence[str], item: Item) -> list[float]:
        if self.row.kind == "math":
            assert self.math_judge is not None
            return scores(await self.math_judge.judge_async(replies, item["answer"]))
        if self.row.kind == "judged":
            said = [(after_thinking(reply) or "").strip() for reply in replies]
            return list(
                await asyncio.gather(*(self.grader.grade(item["question"], each, item["answer"]) for each in said))
            )
        return await super().grades(replies, item)

    def gold(self, item: Item) -> str | None:
        kind = self.row.kind
        if kind == "choice":
            return f"The best answer is: {LETTERS[item['gold']]}"
        if kind == "math":
            return f"\\boxed{{{item['answer']}}}"
        answer = item["answers"][0] if kind == "f1" else item.get("answer")
        return answer and f"<answer>{answer}</answer>"

    # -- log-likelihood ----------------------------------------------------------------------------------------------

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.config.scoring == "generate":
            await super().evaluate(*args, **kwargs)
            return
        started, at_once = time.time(), asyncio.Semaphore(self.config.max_eval_workers)
        items = self.problems["test"][: self.config.eval_problems]  # pyright: ignore[reportOptionalSubscript]
        found = await asyncio.gather(*(self.compare(item, at_once) for item in items))
        samples = [sample for sample in found if sample is not None]
        if not samples:
            raise EnvironmentFault(f"all {len(items)} questions failed; the log has the reasons")
        metrics: dict[str, Any] = {}
        for name in ("acc", "acc_norm"):
            values = [float(sample[name]) for sample in samples]
            metrics[f"eval/{name}"] = sum(values) / len(values)
            metrics[f"eval/{name}_stderr"] = standard_error(values)
        self.eval_metrics = {**metrics, "eval/failed": len(items) - len(samples)}
        await self.evaluate_log(
            self.eval_metrics,
            task_name=self.config.benchmark,
            samples=samples,
            start_time=started,
            end_time=time.time(),
        )

    async def compare(self, item: Item, at_once: asyncio.Semaphore) -> dict[str, Any] | None:
        """Return which choice is the likeliest, by sum and by character; None when a request failed."""
        try:
            pairs = await self.continuations(item)
            sums = [await self._loglikelihood(context, text, at_once) for context, text in pairs]
        except RolloutFault as fault:
            logger.warning("question failed: %s", fault)
            return None
        normed = [value / max(1, len(text) - 1) for value, (_, text) in zip(sums, pairs, strict=True)]
        acc, acc_norm = (float(max(range(len(v)), key=v.__getitem__) == item["gold"]) for v in (sums, normed))
        return {"item": item, "loglikelihoods": sums, "acc": acc, "acc_norm": acc_norm, "score": acc, "grades": [acc]}

    async def continuations(self, item: Item) -> list[tuple[str, str]]:
        """Return context and continuation of every choice."""
        shown = [await self.problem("shot", number) for number in range(self.config.few_shot + 1)]
        shots = [shot for shot in shown if shot is not None and shot != item][: self.config.few_shot]
        solved = "".join("".join(self._pair(shot, shot["gold"])) + "\n\n" for shot in shots)
        pairs = [self._pair(item, number) for number in range(len(item["choices"]))]
        return [(solved + context, text) for context, text in pairs]

    def _pair(self, item: Item, number: int) -> tuple[str, str]:
        table, choice = self.row, item["choices"][number]
        if table.blank is not None:
            before, _, after = item["question"].partition(table.blank)
            return before + choice, " " + after.strip()
        question = (
            f"{item['question'].strip()}\n{listed(item['choices'])}" if table.lines == "letters" else item["question"]
        )
        context = table.prompt.format(question=question)
        return context, " " + (LETTERS[number] if table.lines == "letters" else choice)

    async def _loglikelihood(self, context: str, text: str, at_once: asyncio.Semaphore) -> float:
        """Return the sum of the log-probabilities of `text` after `context`."""
        whole, before = (self.tokenizer.encode(each) for each in (context + text, context))
        async with at_once:
            view = await self.server.get_logprobs(input_ids=whole, top_k=1, max_tokens=1, split="eval")
        return sum(view["prompt_logprobs"][len(before) :])

    async def teardown(self) -> None:
        if self.math_judge is not None:
            await asyncio.to_thread(self.math_judge.close)


def of_table(name: str) -> tuple[type[BenchmarkEnv], type[BenchmarkConfig]]:
    """Return the class of a benchmark and its config, under the names that the table gives them."""
    if name not in benchmarks():
        raise ConfigError(f"there is no benchmark {name!r}; known are {', '.join(benchmarks())}")
    row = benchmarks()[name]
    facts = {"name": f"{name}_eval", "benchmark": name, "__doc__": BenchmarkEnv.__doc__}
    return type(row.cls, (BenchmarkEnv,), {**facts, "__module__": __name__}), BenchmarkConfig


class _Columns(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        if (name := key.removesuffix("_capitalized")) in self:
            return str(self[name]).capitalize()
        raise KeyError(f"no column {key!r}; there are {', '.join(self)}")


def _cleaned(text: str) -> str:
    """Return a text of WikiHow without its marks."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _as_list(value: Any) -> Any:
    return yaml.safe_load(value) if isinstance(value, str) else value


def plain(text: str) -> str:
    """Return a text in small letters, without articles, punctuation and extra spaces.

    Source: the normalisation of SQuAD's evaluation, arXiv:1606.05250.

    >>> plain("The  Eiffel Tower!")
    'eiffel tower'
    """
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def f1(given: str, right: str) -> float:
    """Return the harmonic mean of precision and recall of the words, 0 to 1.

    >>> f1("tower of London", "the London tower")
    0.8
    """
    ours, theirs = plain(given).split(), plain(right).split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if ours and theirs else float(ours == theirs)


if __name__ == "__main__":
    BenchmarkEnv.cli()
