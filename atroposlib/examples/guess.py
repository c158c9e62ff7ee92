"""Guess a number from hints: several turns, one rollout each."""

import re

from atroposlib.environments.multi_turn import MultiTurnConfig, MultiTurnEnv, Step, World
from atroposlib.environments.single_turn import local_engine

RULES = "I think of a number from 1 to 20. Guess it: write one number."


class Guessing(World):
    """One number to find; a hint after each guess."""

    def __init__(self, number):
        self.number = number

    async def begin(self):
        return RULES

    async def step(self, reply):
        guess = only_number(reply.text)
        if guess is None:
            return Step("Write one number from 1 to 20, and no other.", is_invalid=True)
        if guess == self.number:
            return Step(is_over=True, reward=1.0)
        return Step("Higher." if guess < self.number else "Lower.")

    def gold(self):
        return str(self.number)


class GuessEnv(MultiTurnEnv):
    """Score 1.0 for a hit at the first guess, a tenth less for each later one, 0.0 for none."""

    name = "guess"

    @classmethod
    def config_init(cls):
        config = MultiTurnConfig(
            tokenizer_name="smollm2-135m",
            group_size=4,
            max_turns=6,
            discount=0.9,  # for each turn that a hit came later
            max_token_length=32,
            use_wandb=False,
        )
        return config, local_engine("smollm2-135m", port=9004)  # what `atropos engine` serves

    def make(self, rng, level):
        return {"number": rng.randint(1, 20), "round": rng.getrandbits(32)}

    async def open(self, item):
        return Guessing(item["number"])


def only_number(text: str) -> int | None:
    """Return the whole number of a text; None where there is none, or several."""
    numbers = set(re.findall(r"-?\d+", text))
    return int(numbers.pop()[:9]) if len(numbers) == 1 else None


if __name__ == "__main__":
    GuessEnv.cli()
