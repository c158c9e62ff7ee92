"""GSM8K: grade-school word problems, answered in \\boxed{}.

python environments/gsm8k_server.py process --env.dataset my_problems.jsonl
"""

from pydantic import Field

from atroposlib.environments.math_server import MathEnv, RSConfig
from atroposlib.environments.single_turn import THINK


class GSM8kConfig(RSConfig):
    """Where the problems come from, and how they are answered."""

    dataset: str | None = Field(
        default="openai/gsm8k",
        description="A .jsonl or .parquet file with the fields question and answer (GSM8K's own, or just the number), "
        "or a name on the model hub, which needs the package datasets.",
    )
    eval_dataset: str | None = Field(
        default=None,
        description="As dataset. null: the hub's test split, or every tenth row of a file.",
    )
    dataset_config: str | None = Field(default="main", description="hub: name of the configuration.")


class GSM8kEnv(MathEnv):
    """Score 1.0 for the right number as the last answer after the thinking, else -1.0."""

    name = "gsm8k"
    env_config_cls = GSM8kConfig
    system = THINK + "give the final answer, a number, in \\boxed{}."

    def reward(self, grade: float) -> float:
        return 1.0 if grade >= 1 else -1.0


if __name__ == "__main__":
    GSM8kEnv.cli()
