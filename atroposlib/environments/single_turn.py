"""`SingleTurnEnv`: a problem, a prompt, a reply, a grade. `RowsEnv`: the same with problems from a data set.

An author writes `make` (or `to_item`), `question`, `grade` and `gold`. What every such environment needs is here:
thoughts are cut off before a reply is graded, one whose thought never ends has no answer, responses that the length
limit cut off do not count as mistakes, a verifier that fails costs its response alone, and an evaluation gives mean@k,
pass@k, distinct@k and coverage@k with confidence intervals.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from pydantic import Field, PositiveInt

from atroposlib.environments.problems import Part, ProblemsConfig, ProblemsEnv, as_number, closed, local_engine
from atroposlib.environments.replies import text_of
from atroposlib.environments.rows import Row, Split, item_at, load_split, write_rows
from atroposlib.envs.base import BaseEnvConfig, Item, ScoredDataGroup
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.rollouts.early_stop import sample_until
from atroposlib.rollouts.failures import Unscored, describe_error, is_scored
from atroposlib.rollouts.source import of_hook
from atroposlib.type_definitions import JsonObject, Message
from atroposlib.utils.eval_statistics import Answers, answer_metrics

logger = logging.getLogger(__name__)

__all__ = ["THINK", "Part", "RowsConfig", "RowsEnv", "SingleTurnConfig", "SingleTurnEnv", "as_number", "local_engine"]

THINK = "Think about the problem step by step inside <think> and </think>. After that, "


class SingleTurnConfig(ProblemsConfig):
    """Settings of choosing, asking and evaluating problems."""

    few_shot: int = Field(default=0, ge=0, le=32, description="Solved problems shown before each problem.")
    eval_samples: PositiveInt = Field(default=1, description="Answers to each of them.")
    eval_temperature: float | None = Field(
        default=None, ge=0, description="Of an evaluation; null: 0 for one answer, for several that of the rollouts."
    )
    eval_top_p: float | None = Field(default=None, gt=0, le=1, description="Of an evaluation; null: all tokens.")


class SingleTurnEnv(ProblemsEnv):
    """One question, one reply, one grade between 0 and 1."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = SingleTurnConfig
    config: SingleTurnConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    # -- what an author writes -------------------------------------------------------------------------------------

    def question(self, item: Item) -> str:
        """Return the problem in words."""
        return item["question"]

    def grade(self, said: str, item: Item) -> float:
        """Return 1 for a right reply, 0 for a wrong one, something between for a part of it.

        Args:
            said: the reply without its thoughts, stripped.

        Raises:
            VerifierFault: nobody can tell.
        """
        raise NotImplementedError(f"{type(self).__name__} must define grade(said, item)")

    def gold(self, item: Item) -> str | None:
        """Optional: a right reply, for examples in the prompt and for the test of the rewards; None: none is known."""
        return None

    def other_spelling(self, item: Item) -> str | None:
        """Optional: another reply that is as right as `gold`, in another form."""
        return None

    def answer_of(self, said: str, item: Item) -> str:
        """Optional: which of the right answers a right reply gives, in one spelling."""
        return " ".join(said.split())

    def right_answers(self, item: Item) -> int | None:
        """Optional: how many different right answers there are; None: nobody knows."""
        return None

    def reward(self, grade: float) -> float:
        """Optional: the score of a grade."""
        return grade

    @classmethod
    def check_judge(cls, prompt: str) -> str:
        """Optional: what a model says that your `grades` ask, in its place when the rewards are checked."""
        return ""

    # -- a group -----------------------------------------------------------------------------------------------------

    @cached_property
    def counts(self) -> dict[str, Counter[str]]:
        """Counts of "responses" and "right" by task, since the last log."""
        return {}

    async def messages(self, item: Item) -> list[Message]:
        """Return the prompt of one problem: system prompt, solved problems, question."""
        turns = self.system_turns()
        for question, reply in await self.shots(item):
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": reply})
        question: object = self.question(item)
        if not isinstance(question, str | list):  # a list of parts
            closed(question)
            raise EnvironmentFault(f"question(item) returned {question!r:.80}; it must return the problem as text")
        turns.append({"role": "user", "content": question})
        return turns

    async def shots(self, item: Item) -> list[tuple[str, str]]:
        """Return `few_shot` questions and right replies, none of them of this item; ConfigError when none is known."""
        wanted, found = self.config.few_shot, dict[str, str]()
        for number in range(10 * wanted):
            shot = await self.problem("shot", number)
            reply = self.gold(shot) if shot is not None else None
            if shot is None or reply is None:
                raise ConfigError(f"env.few_shot is {wanted}, but {self.label} has only {len(found)} solved problems")
            if (question := self.question(shot)) != self.question(item):
                found[question] = reply
            if len(found) == wanted:
                break
        return list(found.items())

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        messages, config = await of_hook(self.messages(item), "messages"), self.config
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:

            async def ask(size: int) -> list[tuple[str, float]]:
                reply = await managed.chat_completion(
                    messages=messages,
                    n=size,
                    max_tokens=config.max_token_length,
                    temperature=config.temperature,
                    top_p=config.top_p,
                )
                texts = [text_of(choice.message, self.opening) for choice in reply.choices]
                return list(zip(texts, await of_hook(self.grades(texts, item), "grades"), strict=True))

            def is_accepted(answer: tuple[str, float]) -> bool:
                return is_scored(answer[1]) and self.reward(answer[1]) > config.accept_score

            answers = await sample_until(self.early_stop, config.group_size, ask, is_accepted)
            nodes = managed.get_state()["nodes"]
        grades = [grade for _, grade in answers]
        self.count(self.item_task(item), grades)
        group: JsonObject = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [self.reward(grade) if is_scored(grade) else grade for grade in grades],
            "overrides": overrides_of(nodes, [not is_scored(grade) or grade >= 1 for grade in grades]),
            "messages": [[*messages, {"role": "assistant", "content": text}] for text, _ in answers],
        }
        if (task := self.item_task(item)) != self.label:
            group["task"] = task
        return self.sized(group), []  # pyright: ignore[reportArgumentType]  # a group may carry its task

    async def grades(self, replies: Sequence[str], item: Item) -> list[float]:
        """Return the grades of whole replies, thoughts included; `Unscored` for one that nobody could judge.

        Raises:
            EnvironmentFault: `grade` raised by mistake for every reply that it was given.
        """
        said = [(after_thinking(reply) or "").strip() for reply in replies]
        found = [self._grade(text, item) if text else 0.0 for text in said]
        faults = [grade.fault for grade in found if isinstance(grade, Unscored)]
        mistakes = [fault for fault in faults if not isinstance(fault, RolloutFault)]
        if mistakes and len(mistakes) == sum(map(bool, said)):
            raise EnvironmentFault(describe_error(mistakes[0])) from mistakes[0]
        return found

    def _grade(self, said: str, item: Item) -> float:
        try:
            return as_number(self.grade(said, item), "grade")
        except (ConfigError, EnvironmentFault):
            raise
        except Exception as error:
            return Unscored(error)

    def count(self, task: str, grades: Sequence[float]) -> None:
        """Remember how many responses were right, for the next log."""
        known = [grade for grade in grades if is_scored(grade)]
        self.counts.setdefault(task, Counter()).update(responses=len(known), right=sum(grade >= 1 for grade in known))

    # -- evaluation and logs -----------------------------------------------------------------------------------------

    async def evaluate_one(self, item: Item, at_once: asyncio.Semaphore) -> JsonObject | None:
        """Return one answered problem: task, messages, responses, grades and which answers were right; None: failed."""
        try:
            messages = await of_hook(self.messages(item), "messages")
            async with at_once:
                reply = await self.server.chat_completion(
                    messages=messages, max_tokens=self.config.max_token_length, split="eval", **self.eval_sampling()
                )
            texts = [text_of(choice.message, self.opening) for choice in reply.choices]
            grades = await of_hook(self.grades(texts, item), "grades")
            if unscored := next((grade for grade in grades if isinstance(grade, Unscored)), None):
                fault = unscored.fault
                raise fault if isinstance(fault, RolloutFault) else EnvironmentFault(describe_error(fault)) from fault
        except RolloutFault as fault:
            logger.warning("evaluation problem failed: task=%s error=%s", self.item_task(item), fault)
            return None
        right = [
            self.answer_of((after_thinking(text) or "").strip(), item) if grade >= 1 else None
            for text, grade in zip(texts, grades, strict=True)
        ]
        rewards = [self.reward(grade) for grade in grades]
        return {
            "task": self.item_task(item),
            "item": item,
            "messages": messages,
            "responses": texts,
            "grades": grades,
            "score": sum(rewards) / len(rewards),
            "right": right,
            "right_answers": self.right_answers(item),
        }

    def eval_sampling(self) -> JsonObject:
        """Return them as the settings have them."""
        config = self.config
        temperature = config.eval_temperature
        if temperature is None:
            temperature = config.temperature if config.eval_samples > 1 else 0.0
        given = {} if config.eval_top_p is None else {"top_p": config.eval_top_p}
        return {"n": config.eval_samples, "temperature": temperature, **given}

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        """Return shares of right answers, and what `answer_metrics` makes of the grades."""
        answers = [Answers(sample["grades"], sample["right"], sample["right_answers"]) for sample in samples]
        metrics = {f"eval/{name}": value for name, value in answer_metrics(answers).items()}
        shares = [sum(grade >= 1 for grade in sample["grades"]) / len(sample["grades"]) for sample in samples]
        metrics["eval/percent_correct"] = sum(shares) / len(shares)
        tasks = dict.fromkeys(sample["task"] for sample in samples)
        for task in tasks if len(tasks) > 1 else ():
            of_task = [share for sample, share in zip(samples, shares, strict=True) if sample["task"] == task]
            metrics[f"eval/percent_correct_{task}"] = sum(of_task) / len(of_task)
        return metrics

    def train_metrics(self) -> dict[str, float]:
        """Return the share of right responses, of all and by task."""
        counts = {task: found for task, found in self.counts.items() if found["responses"]}
        metrics: dict[str, float] = {}
        if total := sum(counts.values(), Counter()):
            metrics["train/percent_correct"] = total["right"] / total["responses"]
        for task, found in counts.items() if len(counts) > 1 else ():
            metrics[f"train/percent_correct_{task}"] = found["right"] / found["responses"]
        self.counts = {}
        return metrics


def overrides_of(nodes: Sequence[SequenceNode], right: Sequence[bool]) -> list[JsonObject] | None:
    """[G] trainer switches that keep responses which the length limit cut off from counting as mistakes.

    Whether they would have been right is not known; those that are right count. None when no response needs one. The
    score stays in the group, where files and tables show it.
    """
    ignored = [
        (node.metadata or {}).get("finish_reason") == "length" and not is_right
        for node, is_right in zip(nodes, right, strict=True)
    ]
    return [{"set_advantage_to_zero": True} if ignore else {} for ignore in ignored] if any(ignored) else None


class RowsConfig(SingleTurnConfig):
    """Where the problems come from."""

    dataset: str | None = Field(
        default=None,
        description="A .jsonl or .parquet file, or a name on the model hub (needs the package datasets). null: made, "
        "where the environment can make problems.",
    )
    dataset_config: str | None = Field(default=None, description="hub: name of the configuration.")
    train_split: str = Field(default="train", description="hub: which split is trained on.")
    eval_split: str = Field(default="test", description="hub: which split is evaluated with.")
    eval_dataset: str | None = Field(
        default=None,
        description="Another file or name for evaluation. null: the hub's eval_split, or every tenth row of a file, "
        "which is then not trained on.",
    )
    eval_problems: PositiveInt | None = Field(default=None, description="Problems of an evaluation; null: all rows.")
    epochs: PositiveInt | None = Field(default=1, description="How often all rows are rolled out; null: without end.")


class RowsEnv(SingleTurnEnv):
    """Problems from a data set, or made without one where `make` is defined; an author writes `to_item`."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = RowsConfig
    config: RowsConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    wanted: ClassVar[str] = "the columns that the environment names"  # a row as it should be, for messages

    @classmethod
    def to_item(cls, row: Row) -> Item:
        """Return the item of a row; ValueError, KeyError or TypeError when it is none."""
        raise NotImplementedError(f"{cls.__name__} must define to_item(row)")

    @classmethod
    def sample_rows(cls) -> list[JsonObject]:
        """Optional: rows such as a data set has, 20 or more, for checks of the environment; none where it can make."""
        return []

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        if not (rows := cls.sample_rows()):
            return []
        return ["--env.dataset", write_rows(folder / "sample.jsonl", rows), "--env.eval_dataset", "null"]

    async def setup(self) -> None:
        """Load the rows; ConfigError or DataError when they cannot be used."""
        await super().setup()
        self.problems = await asyncio.to_thread(self.load)

    def load(self) -> Split | None:
        """Return the items of both parts; None: they are made."""
        config = self.config
        if config.dataset is None:
            if type(self).make is SingleTurnEnv.make:
                raise ConfigError(
                    f"env.dataset is not set; name a .jsonl or .parquet file with rows like {self.wanted}"
                )
            return None
        return load_split(
            config.dataset,
            self.to_item,
            eval_dataset=config.eval_dataset,
            name=config.dataset_config,
            splits=(config.train_split, config.eval_split),
            wanted=self.wanted,
        )

    async def problem(self, part: Part, index: int) -> Item | None:
        if self.problems is None:
            return await super().problem(part, index)
        return item_at(self.problems, part, index, seed=self.config.seed, epochs=self.config.epochs)
