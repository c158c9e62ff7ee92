"""Evaluation as a table: a benchmark is a row of `benchmarks.yaml`, and one class runs them all.

    atropos eval run arc --env.dataset arc.jsonl --env.data_dir_to_save_evals results/arc

Multiple choice is scored by generation or by log-likelihood, as lm-eval does it: the context as plain text, each choice
as its continuation, `acc` by the sum of the log-probabilities and `acc_norm` by that sum over the choice's characters.
"""

import asyncio
import importlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from atroposlib.environments.choices import LETTERS, listed
from atroposlib.environments.eval_environments.eval_helpers import HERMES_REASONING_PROMPT
from atroposlib.environments.eval_environments.kinds import KINDS, Judged, Math, Rated, benchmarks
from atroposlib.environments.eval_environments.upstream_names import translated, with_old_names
from atroposlib.environments.judging import Judge
from atroposlib.environments.replies import text_of
from atroposlib.environments.rows import Row, Split, is_file, load_items, read_rows
from atroposlib.environments.single_turn import Part, RowsConfig, RowsEnv, local_engine
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, Item
from atroposlib.envs.eval import evaluate_items
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.envs.reward_fns.math_judge import MathJudge, scores
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.rollouts.failures import Unscored
from atroposlib.type_definitions import JsonObject, Message
from atroposlib.utils.eval_statistics import standard_error

logger = logging.getLogger(__name__)


class BenchmarkConfig(RowsConfig):
    """Which benchmark, and how its replies are scored. Names of settings of atroposlib 0.4.0 are taken, too."""

    benchmark: str = Field(default="mmlu", description="Name of a row of the table; `atropos eval list` shows them.")
    scoring: Literal["generate", "loglikelihood"] = Field(
        default="generate", description="loglikelihood: of the choices, without generating; multiple choice only."
    )
    eval_split: str | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, description="hub: which split is asked; null: as the table says."
    )
    few_shot_split: str | None = Field(default=None, description="hub: which split is shown; null: as the table says.")
    only: list[str] | None = Field(default=None, description="Groups of rows, such as subjects, to ask; null: all.")
    few_shot_dataset: str | None = Field(default=None, description="File of rows to show; null: as the table says.")
    baseline_dataset: str | None = Field(default=None, description="Replies to compare with; null: as the table says.")
    inverted_categories: list[str] | None = Field(
        default=None, description="refusalbench: groups in which refusing is right; null: as the table says."
    )
    judge: APIServerConfig | None = Field(default=None, description="Engine that judges; null: the one that is asked.")
    judge_max_tokens: PositiveInt = Field(default=1024, description="Tokens of one judgement.")
    max_token_length: int = Field(default=2048, description="Tokens of one answer.")

    @model_validator(mode="before")
    @classmethod
    def _of_0_4_0(cls, given: Any) -> Any:
        return translated(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        row = benchmarks().get(self.benchmark)
        if row is None:
            raise ValueError(f"there is no benchmark {self.benchmark!r}; known are {', '.join(benchmarks())}")
        if self.scoring == "loglikelihood" and row.kind != "choice":
            raise ValueError(f"{self.benchmark} has no choices whose likelihood could be compared; use generate")
        return self


class BenchmarkEnv(RowsEnv):
    """Grades as the kind of the benchmark says: 1 for a right reply, 0 for a wrong one, a share for one between."""

    name = "benchmark"
    env_config_cls = BenchmarkConfig
    config: BenchmarkConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    benchmark = "mmlu"
    math_judge: MathJudge | None = None

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        settings = {"benchmark": cls.benchmark, "tokenizer_name": engine[0].model_name, "wandb_name": cls.name}
        return cls.env_config_cls(**settings), engine

    async def setup(self) -> None:
        self.row = benchmarks()[self.config.benchmark]
        if self.config.inverted_categories is not None:
            self.row = self.row.model_copy(update={"inverted": self.config.inverted_categories})
        self.kind = KINDS[self.row.kind](self.row, str(self.config.seed))
        await super().setup()
        if isinstance(self.kind, Math):
            self.math_judge = MathJudge()
        self.judge = Judge(self.server, self.config.judge, max_tokens=self.config.judge_max_tokens)

    def load(self) -> Split:
        """Return the rows that are asked as test, those that are shown as train."""
        config, row = self.config, self.row
        asked = self._items(config.eval_dataset or config.dataset or row.dataset, config.eval_split or row.split)
        wanted = {_folded(group) for group in config.only or ()}
        test = [item for item in asked if not wanted or _folded(item.get("group", "")) in wanted]
        if not test:
            found = ", ".join(sorted({str(item.get("group")) for item in asked}))
            raise ConfigError(f"env.only is {config.only}, but the groups of {config.benchmark} are {found or 'none'}")
        split = config.few_shot_split or row.few_shot_split
        shown = config.few_shot_dataset or (None if self._is_own else split and row.dataset)
        return Split(train=self._items(shown, split or "") if config.few_shot and shown else test, test=test)

    @property
    def _is_own(self) -> bool:
        """True when the rows are not those of the table."""
        return bool(self.config.eval_dataset or self.config.dataset)

    def _items(self, dataset: str, splits: str) -> list[Item]:
        config, table = self.config, self.row
        replies, key = config.baseline_dataset or (None if self._is_own else table.baselines), table.key or "uid"
        others = {str(row[key]): row for _, row in read_rows(replies)} if replies else {}

        def to_item(row: Row) -> Item:
            return self.to_item({**others.get(str(row.get(key)), {}), **row})

        names = splits.split("+")[: 1 if is_file(dataset) else None]
        hub = config.dataset_config or table.config
        found = [load_items(dataset, to_item, name=hub, split=name) for name in names]
        return [item for items in found for item in items]

    def to_item(self, row: Row) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the item of a row, by the templates of the table."""
        item, group = self.kind.item(row), self.row.group
        return {**item, "group": str(row[group])} if group and group in row else item

    async def problem(self, part: Part, index: int) -> Item | None:
        items = self.problems["test" if part == "test" else "train"]  # pyright: ignore[reportOptionalSubscript]
        return items[index] if index < len(items) else None

    def item_task(self, item: Item) -> str:
        return item.get("group", self.label)

    # -- generation --------------------------------------------------------------------------------------------------

    def system_turns(self) -> list[Message]:
        turns, config = super().system_turns(), self.config
        if not config.thinking_mode:
            return turns
        words = [config.custom_thinking_prompt or HERMES_REASONING_PROMPT, *(turn.get("content", "") for turn in turns)]
        return [{"role": "system", "content": "\n\n".join(map(str, words))}]

    def question(self, item: Item) -> str:
        return self.kind.question(item)

    def grade(self, said: str, item: Item) -> float:
        return self.kind.grade(said, item)

    def gold(self, item: Item) -> str | None:
        return self.kind.gold(item)

    async def grades(self, replies: Sequence[str], item: Item) -> list[float]:
        if isinstance(self.kind, Math):
            assert self.math_judge is not None
            return scores(await self.math_judge.judge_async(replies, item["answer"]))
        if isinstance(self.kind, Judged):
            said = [(after_thinking(reply) or "").strip() for reply in replies]
            return list(await asyncio.gather(*(self.kind.judged(self.judge, each, item) for each in said)))
        return await super().grades(replies, item)

    async def evaluate_one(self, item: Item, at_once: asyncio.Semaphore) -> JsonObject | None:
        if not isinstance(self.kind, Rated) or len(item["turns"]) == 1:
            return await super().evaluate_one(item, at_once)
        try:
            return await self._conversation(self.kind, item, at_once)
        except RolloutFault as fault:
            logger.warning("conversation failed: %s", fault)
            return None

    async def _conversation(self, kind: Rated, item: Item, at_once: asyncio.Semaphore) -> JsonObject:
        """Ask all turns, and rate each reply; the grade is the mean."""
        messages, said, ratings = self.system_turns(), list[str](), list[float]()
        for turn in item["turns"]:
            messages.append({"role": "user", "content": turn})
            async with at_once:
                reply = await self.server.chat_completion(
                    messages=list(messages),
                    max_tokens=self.config.max_token_length,
                    split="eval",
                    **{**self.eval_sampling(), "n": 1},
                )
            said.append((after_thinking(text_of(reply.choices[0].message, self.opening)) or "").strip())
            messages.append({"role": "assistant", "content": said[-1]})
            ratings.append(await kind.rated(self.judge, said, item))
            if isinstance(ratings[-1], Unscored):
                raise ratings[-1].fault
        grade = sum(ratings) / len(ratings)
        sample = {"task": self.item_task(item), "item": item, "messages": messages, "responses": said}
        return {**sample, "ratings": ratings, "grades": [grade], "score": grade, "right": [None], "right_answers": None}

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        """Return those of every environment, what the kind measures of items, and the mean grade of each group."""
        found: dict[str, list[float]] = {}
        for sample in samples:
            measured = self.kind.measures(sample["item"], sample["grades"])
            measured |= {f"rating_turn_{n}": 10 * rating for n, rating in enumerate(sample.get("ratings", ()), 1)}
            if "group" in sample["item"]:
                measured[f"mean_{sample['task']}"] = sum(sample["grades"]) / len(sample["grades"])
            for name, value in measured.items():
                found.setdefault(name, []).append(value)
        if isinstance(self.kind, Judged):
            found |= {name: [rate] for name, rate in self.kind.rates(self.judge).items()}
        judged = {f"judge/{name.replace(' ', '_')}": float(count) for name, count in self.judge.counts.items()}
        means = {f"eval/{name}": sum(values) / len(values) for name, values in found.items()}
        count = min(len(sample["grades"]) for sample in samples)
        error = standard_error([sum(sample["grades"]) / len(sample["grades"]) for sample in samples])
        return {**super().sample_metrics(samples), f"eval/mean@{count}_stderr": error, **means, **judged}

    async def evaluate_log(self, *args: Any, **kwargs: Any) -> None:
        """Log as `BaseEnv` does, under the name of the benchmark."""
        await super().evaluate_log(*args, **{"task_name": self.config.benchmark, **kwargs})

    # -- log-likelihood ----------------------------------------------------------------------------------------------

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.judge.counts.clear()
        if self.config.scoring == "generate":
            await super().evaluate(*args, **kwargs)
            return
        started, at_once = time.time(), asyncio.Semaphore(self.config.max_eval_workers)
        items = self.problems["test"][: self.config.eval_problems]  # pyright: ignore[reportOptionalSubscript]
        found = await evaluate_items(self.compare(item, at_once) for item in items)
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
            samples=samples,
            start_time=started,
            end_time=time.time(),
        )

    async def compare(self, item: Item, at_once: asyncio.Semaphore) -> JsonObject | None:
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
    """Return the class of a benchmark and its config, which also takes the names of settings of 0.4.0."""
    if name not in benchmarks():
        raise ConfigError(f"there is no benchmark {name!r}; known are {', '.join(benchmarks())}")
    row = benchmarks()[name]
    config_cls = with_old_names(BenchmarkConfig, f"{row.cls.removesuffix('Env')}Config")
    facts = {"name": f"{name}_eval", "benchmark": name, "env_config_cls": config_cls, "__doc__": BenchmarkEnv.__doc__}
    return type(row.cls, (BenchmarkEnv,), {**facts, "__module__": __name__}), config_cls


def load_class(name: str) -> type[BenchmarkEnv]:
    """Return the class of a benchmark from the file of its own; ConfigError when there is no such benchmark."""
    if name not in benchmarks():
        raise ConfigError(f"there is no benchmark {name!r}; known are {', '.join(benchmarks())}")
    row = benchmarks()[name]
    return getattr(importlib.import_module(f"{__package__}.{row.module}"), row.cls)


def _folded(group: str) -> str:
    return group.lower().replace(" ", "_")


if __name__ == "__main__":
    BenchmarkEnv.cli()
