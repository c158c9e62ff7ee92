"""PHYBench, a row of `benchmarks.yaml`: formulas are compared by value, and by their expression edit distance.

python environments/eval_environments/phybench_eval.py evaluate --env.dataset my_rows.jsonl
"""

import asyncio
import logging
from collections.abc import Sequence

from atroposlib.environments.eval_environments import expression_distance
from atroposlib.environments.eval_environments.benchmark import of_table
from atroposlib.envs.base import Item
from atroposlib.envs.reward_fns.math_answers import after_thinking, final_answer
from atroposlib.sandbox.workers import SandboxError
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

_OfTable, PHYBenchEvalConfig = of_table("phybench")


class PHYBenchEvalEnv(_OfTable):
    """Grade 1 for the right value, else 0. `eed` is the mean score of the expression edit distance, 0 to 100."""

    async def evaluate_one(self, item: Item, at_once: asyncio.Semaphore) -> JsonObject | None:
        sample = await super().evaluate_one(item, at_once)
        if sample is None:
            return None
        answers = zip(sample["responses"], sample["grades"], strict=True)
        scores = await asyncio.gather(*(self.distance_score(said, grade, item["answer"]) for said, grade in answers))
        return {**sample, "eed": [100 * score for score in scores if score is not None]}

    async def distance_score(self, reply: str, grade: float, right: str) -> float | None:
        """Return the score of a reply by its distance, 0 to 1; None when it could not be computed."""
        answer = final_answer(after_thinking(reply) or "")
        if grade >= 1 or not answer:
            return float(grade >= 1)
        assert self.math_judge is not None
        call = self.math_judge.pool.submit(f"{expression_distance.__name__}:distance_score", answer, right)
        try:
            return await asyncio.wrap_future(call.future)
        except SandboxError as error:
            logger.warning("no edit distance: answer=%r right=%r reason=%s", answer[:100], right, error)
            return None

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        means = [sum(sample["eed"]) / len(sample["eed"]) for sample in samples if sample["eed"]]
        unknown = sum(len(sample["responses"]) - len(sample["eed"]) for sample in samples)
        found = {"eval/eed": sum(means) / len(means)} if means else {}
        return {**super().sample_metrics(samples), **found, "eval/eed_unknown": float(unknown)}


if __name__ == "__main__":
    PHYBenchEvalEnv.cli()
