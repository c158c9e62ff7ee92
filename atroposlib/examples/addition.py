"""Two-digit sums: the smallest whole environment."""

import re

from atroposlib.environments.single_turn import SingleTurnConfig, SingleTurnEnv, local_engine


class AdditionEnv(SingleTurnEnv):
    """Score 1.0 for the exact sum in \\boxed{}, else 0.0."""

    name = "addition"

    @classmethod
    def config_init(cls):
        config = SingleTurnConfig(tokenizer_name="smollm2-135m", group_size=8, max_token_length=64, use_wandb=False)
        return config, local_engine("smollm2-135m", port=9004)  # what `atropos engine` serves

    def make(self, rng, level):
        return {"left": rng.randint(10, 99), "right": rng.randint(10, 99)}

    def question(self, item):
        return f"What is {item['left']} + {item['right']}? Write the answer as \\boxed{{number}}."

    def grade(self, said, item):
        return score(said, item["left"] + item["right"])

    def gold(self, item):
        return f"\\boxed{{{item['left'] + item['right']}}}"


def score(text: str, expected: int) -> float:
    """Return 1.0 if the last \\boxed{} holds `expected`, else 0.0."""
    boxed = re.findall(r"\\boxed\{\s*(-?\d{1,9})\s*\}", text)
    return float(bool(boxed) and int(boxed[-1]) == expected)


if __name__ == "__main__":
    AdditionEnv.cli()
