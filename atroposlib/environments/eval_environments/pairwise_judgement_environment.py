"""RewardBench 2, a row of `benchmarks.yaml`: the model judges. It tells the best of four answers, and in the subset
Ties, where several are right, it rates each alone.

python environments/eval_environments/pairwise_judgement_environment.py evaluate --env.dataset my_rows.jsonl
"""

import asyncio
import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field, PositiveInt

from atroposlib.environments.eval_environments.benchmark import BenchmarkConfig, of_table
from atroposlib.environments.eval_environments.upstream_names import with_old_names
from atroposlib.environments.judging import Judge
from atroposlib.environments.rows import Row, Split
from atroposlib.envs.base import Item
from atroposlib.errors import RolloutFault
from atroposlib.rollouts.failures import Unscored
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

TIES = "Ties"


class _Config(BenchmarkConfig):
    """As of every benchmark, and how many answers of the subset Ties are rated."""

    benchmark: str = Field(default="pairwise_judgement", description="Name of the row of the table.")
    max_ties_responses: PositiveInt = Field(
        default=100, description="Answers to one request of the subset Ties; wrong ones beyond it are left out."
    )


PairwiseJudgementConfig = with_old_names(_Config, "PairwiseJudgementConfig")
_OfTable, _ = of_table("pairwise_judgement")


class PairwiseJudgementEnv(_OfTable):
    """Grade 1 when the best answer is named; of Ties: when each right answer is rated above each wrong one."""

    env_config_cls = PairwiseJudgementConfig
    config: _Config  # pyright: ignore[reportIncompatibleVariableOverride]

    async def setup(self) -> None:
        await super().setup()
        self.rater = Judge(self.server, self.config.judge, max_tokens=self.config.max_token_length)

    def load(self) -> Split:
        """Return the rows; those of Ties are never shown, nor compared by their likelihood."""
        found = super().load()
        train, test = ([item for item in found[part] if "right" not in item] for part in ("train", "test"))
        if self.config.scoring == "generate":
            return Split(train=train, test=found["test"])
        logger.warning("left out, as they have no choices: %s rows of Ties", len(found["test"]) - len(test))
        return Split(train=train, test=test)

    def to_item(self, row: Row) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        if row.get("subset") != TIES:
            return super().to_item(row)
        right = list(row["chosen"])
        wrong = list(row["rejected"])[: max(1, self.config.max_ties_responses - len(right))]
        if not right or not wrong:
            raise ValueError(f"{len(right)} right and {len(wrong)} wrong answers")
        return {"question": row["prompt"], "right": right, "wrong": wrong, "id": str(row["id"]), "group": TIES}

    async def evaluate_one(self, item: Item, at_once: asyncio.Semaphore) -> JsonObject | None:
        if "right" not in item:
            return await super().evaluate_one(item, at_once)

        async def rated(answer: str) -> float:
            async with at_once:
                return await self.rater.rate([(item["question"], answer)])

        answers = [*item["right"], *item["wrong"]]
        try:
            ratings = await asyncio.gather(*map(rated, answers))
            if (unread := next((rating for rating in ratings if isinstance(rating, Unscored)), None)) is not None:
                raise unread.fault
        except RolloutFault as fault:
            logger.warning("ratings failed: item=%s error=%s", item["id"], fault)
            return None
        right = len(item["right"])
        margins = Margins.of(ratings[:right], ratings[right:])
        grade = float(margins.right_and_wrong > 0)
        sample = {"task": TIES, "item": item, "messages": [], "responses": answers, "margins": list(margins)}
        return {**sample, "grades": [grade], "score": grade, "right": [None], "right_answers": None}

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        """Return those of every benchmark, the score of Ties, and the mean of the subsets with that score in it."""
        found = super().sample_metrics(samples)
        margins = {sample["item"]["id"]: Margins(*sample["margins"]) for sample in samples if "margins" in sample}
        subsets = {name: value for name, value in found.items() if name.startswith("eval/mean_")}
        if margins and (ties := ties_score(margins)) is not None:
            subsets[f"eval/mean_{TIES}"] = found["eval/ties_score"] = ties
        return {**found, "eval/mean_of_subsets": statistics.fmean(subsets.values())} if subsets else found


class Margins(NamedTuple):
    """Distances between the ratings of one request."""

    among_right: float
    right_and_wrong: float  # the lowest of a right answer less the highest of a wrong one

    @classmethod
    def of(cls, right: Sequence[float], wrong: Sequence[float]) -> "Margins":
        return cls(max(right) - min(right), min(right) - max(wrong))


def ties_score(margins: Mapping[str, Margins]) -> float | None:
    """Return the score of the subset Ties; None unless a request comes as `ref:N` and as `tied:N`.

    A request has one right answer as `ref`, and several, which are as good as each other, as `tied`. 60% is whether
    right answers are rated above wrong ones, 40% whether by more than the right ones differ, 1% by how much.

    Source: RewardBench 2, arXiv:2506.01937, appendix; `process_single_model` of its repository.
    """
    known = {kind: {key: value for key, value in margins.items() if key.startswith(kind)} for kind in ("ref", "tied")}
    numbers = [key.partition(":")[2] for key in known["tied"] if f"ref:{key.partition(':')[2]}" in known["ref"]]
    if not numbers:
        return None
    alike = np.array([margins[f"tied:{number}"].among_right for number in numbers])
    tied, single = (
        np.array([margins[f"{kind}:{number}"].right_and_wrong for number in numbers]) for kind in ("tied", "ref")
    )
    least = np.minimum(tied, single)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_how_much = np.nan_to_num(np.tanh(least / alike - 1), nan=0.0)
    accuracy = [statistics.fmean(each.right_and_wrong > 0 for each in of_kind.values()) for of_kind in known.values()]
    parts = (*accuracy, np.mean(tied > alike), np.mean(least > alike), np.mean(by_how_much))
    return float(sum(weight * part for weight, part in zip((0.3, 0.3, 0.2, 0.2, 0.01), parts, strict=True)))


if __name__ == "__main__":
    PairwiseJudgementEnv.cli()
