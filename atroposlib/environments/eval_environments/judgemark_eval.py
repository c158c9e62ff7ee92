"""JudgeMark: how well a model judges. It scores texts of several writers, and its order of the writers is compared.

python environments/eval_environments/judgemark_eval.py evaluate --env.samples_file s.json --env.prompts_file p.json

The files are those of Judgemark v2: `{writer: {"samples": {iteration: {item: text}}}}`, and `{item: prompt}` where
`[TEST MODEL RESPONSE]` is the place of the text. A judgement is lines such as `Coherence: 7`; its score is their mean.
"""

import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from atroposlib.environments.eval_environments.benchmark import BenchmarkConfig, BenchmarkEnv
from atroposlib.environments.eval_environments.upstream_names import with_old_names
from atroposlib.environments.rows import Split
from atroposlib.envs.base import Item
from atroposlib.errors import ConfigError, VerifierFault
from atroposlib.paths import expand_path
from atroposlib.rollouts.failures import Unscored
from atroposlib.type_definitions import JsonObject
from atroposlib.utils.eval_statistics import kendall_tau

PLACE = "[TEST MODEL RESPONSE]"
_SCORE = re.compile(
    r"^(?:[^\w\n]|_)*[A-Za-z][^:\n]{0,60}:[^\w\n-]*(-?\d+(?:\.\d+)?)(?: */ *\d+)?[^\w\n]*$", re.MULTILINE
)


class _Config(BenchmarkConfig):
    """Texts, prompts, and the scores that other judges gave to the writers."""

    benchmark: str = Field(default="judgemark", description="Name in the results.")
    samples_file: str = Field(default="", description="JSON file of the texts.")
    prompts_file: str = Field(default="", description="JSON file of the prompts.")
    reference_file: str | None = Field(default=None, description="JSON file {writer: score}; null: nothing to compare.")
    scoring_min: float = Field(default=0.0, description="Lowest score that counts as one.")
    scoring_max: float = Field(default=10.0, description="Highest.")


JudgeMarkEvalConfig = with_old_names(_Config, "JudgeMarkEvalConfig")


class JudgeMarkEvalEnv(BenchmarkEnv):
    """Grade: the score that the model gives to a text, as a share of `scoring_max`; not what the model is worth."""

    name = "judgemark_eval"
    benchmark = "judgemark"
    env_config_cls = JudgeMarkEvalConfig
    config: _Config  # pyright: ignore[reportIncompatibleVariableOverride]
    is_verifiable = False

    def load(self) -> Split:
        prompts, samples = _json(self.config.prompts_file, "prompts"), _json(self.config.samples_file, "samples")
        items = [
            {
                "question": prompts[number].replace(PLACE, text),
                "group": writer,
                "iteration": iteration,
                "number": number,
            }
            for writer, known in samples.items()
            for iteration, texts in known["samples"].items()
            for number, text in texts.items()
            if number in prompts
        ]
        if not items:
            raise ConfigError("env.samples_file has no text for any item of env.prompts_file; their item names differ")
        return Split(train=items, test=items)

    async def grades(self, replies: Sequence[str], item: Item) -> list[float]:
        return [self._score(reply) for reply in replies]

    def _score(self, reply: str) -> float:
        config = self.config
        given = [float(found) for found in _SCORE.findall(reply.rpartition("</think>")[2])]
        found = [score for score in given if config.scoring_min <= score <= config.scoring_max]
        if not found:
            return Unscored(VerifierFault("the judgement has no line such as `Coherence: 7` with a score in range"))
        return statistics.fmean(found) / config.scoring_max

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        """Return each writer's mean score, how far apart they are, and the agreement with the reference."""
        scores: dict[str, list[float]] = {}
        for sample in samples:
            scores.setdefault(sample["task"], []).append(self.config.scoring_max * sample["score"])
        means = {writer: statistics.fmean(values) for writer, values in scores.items()}
        within = statistics.fmean(statistics.pstdev(values) for values in scores.values())
        spread = statistics.pstdev(means.values())
        metrics = {f"eval/score_{writer}": mean for writer, mean in means.items()}
        metrics |= {"eval/spread_of_writers": spread, "eval/spread_within_writers": within}
        if self.config.reference_file:
            reference = _json(self.config.reference_file, "reference")
            known = [writer for writer in means if writer in reference]
            if len(known) < 2:
                raise ConfigError(f"env.reference_file knows {len(known)} of the writers; 2 can be compared")
            ours, theirs = [means[writer] for writer in known], [float(reference[writer]) for writer in known]
            metrics["eval/kendall_tau"] = kendall_tau(ours, theirs)
            if spread and statistics.pstdev(theirs):
                metrics["eval/pearson_r"] = statistics.correlation(ours, theirs)
        return metrics


def _json(file: str, what: str) -> Any:
    if not file:
        raise ConfigError(f"env.{what}_file is not set; name the JSON file of Judgemark's {what}")
    path = expand_path(file, what=f"env.{what}_file")
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"env.{what}_file {path} cannot be read: {error}") from error


if __name__ == "__main__":
    JudgeMarkEvalEnv.cli()
