"""Mathematics with a checkable answer: MATH, AIME and any other set of problems and solutions.

python environments/math_server.py process --env.dataset my_problems.jsonl
"""

import asyncio
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, TypedDict

from pydantic import Field, PositiveFloat, PositiveInt

from atroposlib.environments.rows import Row
from atroposlib.environments.single_turn import THINK, RowsConfig, RowsEnv
from atroposlib.envs.reward_fns.math_answers import last_boxed
from atroposlib.envs.reward_fns.math_judge import MathJudge, Verdict, scores
from atroposlib.errors import ConfigError

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Question(TypedDict):
    """One problem."""

    question: str
    gold: str  # a number or LaTeX


class RSConfig(RowsConfig):
    """Where the problems come from, and how answers are judged."""

    dataset: str | None = Field(
        default="zwhe99/DeepMath-103K",
        description="A .jsonl or .parquet file with the fields problem (or question) and answer (or final_answer, or "
        "solution with the answer in \\boxed{}); or a name on the model hub, which needs the package datasets.",
    )
    eval_dataset: str | None = Field(
        default="HuggingFaceH4/MATH-500", description="As dataset, for evaluation. null: every tenth row of a file."
    )
    max_token_length: int = Field(default=4096, description="Tokens of one answer.")
    verifier_workers: PositiveInt = Field(default=2, description="Processes for answers that need algebra.")
    verifier_timeout_s: PositiveFloat = Field(
        default=10, description="Seconds such a process may take for one response."
    )


class MathEnv(RowsEnv):
    """Score 1.0 for the right value as the last answer after the thinking, else 0.0."""

    name = "math"
    env_config_cls = RSConfig
    config: RSConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    judge: MathJudge | None = None
    extra, needs = "rewards", "math_verify"
    system: ClassVar[str] = THINK + "give the final answer in \\boxed{}."
    wanted = 'an object like {"question": "...", "answer": "42"} or {"problem": "...", "solution": "... \\\\boxed{42}"}'

    @classmethod
    def sample_rows(cls) -> list[dict[str, str]]:
        return [{"question": f"What is {1000 + n} + {3 * n}?", "answer": str(1000 + 4 * n)} for n in range(80)]

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        return [*super().check_flags(folder), "--env.verifier_workers", "1"]

    @classmethod
    def to_item(cls, row: Row) -> Question:
        return to_question(row)

    async def setup(self) -> None:
        """Load the problems; ConfigError or DataError when they cannot be used, or not judged."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("answers are judged by the package math-verify; run: pip install 'atroposlib[envs]'")
        await super().setup()
        self.judge = MathJudge(workers=self.config.verifier_workers, timeout_s=self.config.verifier_timeout_s)

    async def grades(self, replies: Sequence[str], item: Question) -> list[float]:
        return scores(await self.verdicts(replies, item))

    async def verdicts(self, replies: Sequence[str], item: Question) -> list[Verdict]:
        """Judge whole replies to one problem."""
        assert self.judge is not None
        return await self.judge.judge_async(replies, item["gold"])

    def gold(self, item: Question) -> str:
        return f"\\boxed{{{item['gold']}}}"

    def other_spelling(self, item: Question) -> str:
        return f"So the answer is $\\boxed{{ {item['gold']} }}$."

    def answer_of(self, said: str, item: Question) -> str:
        return item["gold"]

    def right_answers(self, item: Question) -> int:
        return 1

    async def teardown(self) -> None:
        if self.judge is not None:
            await asyncio.to_thread(self.judge.close)


def to_question(row: Row) -> Question:
    r"""Return the problem of a row. GSM8K's answers give the solution, then `#### 42`; a bare number will do.

    >>> to_question({"question": "6 times 7?", "answer": "It is 42. #### 42"})
    {'question': '6 times 7?', 'gold': '42'}
    >>> to_question({"problem": "6 times 7?", "solution": r"It is \boxed{42}."})["gold"]
    '42'
    """
    question = row["question"] if "question" in row else row["problem"]
    named = next((row[name] for name in ("answer", "final_answer") if name in row), None)
    answer = last_boxed(row["solution"]) if named is None and "solution" in row else named
    gold = _THOUSANDS.sub("", str(answer).rpartition("####")[2].strip())
    if not gold or answer is None or not isinstance(question, str):
        raise ValueError("no question, or no answer")
    return Question(question=question, gold=gold)


if __name__ == "__main__":
    MathEnv.cli()
