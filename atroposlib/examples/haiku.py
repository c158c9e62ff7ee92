"""Haikus scored by a judge: a second request to a model gives the reward."""

import asyncio
import re

from atroposlib.environments.single_turn import SingleTurnConfig, SingleTurnEnv, local_engine
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.errors import VerifierFault
from atroposlib.rollouts.failures import scored
from atroposlib.rollouts.trace import held_replies

SUBJECTS = ["rain", "a train at night", "the first snow", "an old dog", "the sea", "a lost key", "bread", "a moth"]
JUDGE = "Rate this haiku about {subject} from 1 to 10. Answer with the number alone.\n\n{haiku}"


class HaikuEnv(SingleTurnEnv):
    """Score 0.0 to 1.0 from a judge's grade of three lines; a grade that cannot be read gives no score, and no loss."""

    name = "haiku"
    guessing = 0.25  # a haiku always about the same subject fits one item in eight, of few items more

    @classmethod
    def config_init(cls):
        config = SingleTurnConfig(tokenizer_name="smollm2-135m", group_size=4, max_token_length=64, use_wandb=False)
        return config, local_engine("smollm2-135m", port=9004)  # what `atropos engine` serves; plays and judges

    def make(self, rng, level):
        return {"subject": rng.choice(SUBJECTS), "number": rng.getrandbits(32)}

    def question(self, item):
        return f"Write a haiku about {item['subject']}: three lines and nothing else."

    async def grades(self, replies, item):
        haikus = [(after_thinking(reply) or "").strip() for reply in replies]
        return await asyncio.gather(*(scored(self.judged(haiku, item["subject"])) for haiku in haikus))

    async def judged(self, haiku: str, subject: str) -> float:
        """Return the judge's grade of three lines; of anything else 0, unasked."""
        if haiku.count("\n") != 2:
            return 0.0
        asked = [{"role": "user", "content": JUDGE.format(subject=subject, haiku=haiku)}]
        with held_replies():  # what is recorded of the sampling is that of the haikus
            verdict = await self.server.chat_completion(messages=asked, n=1, max_tokens=8, temperature=0.0)
        return grade(verdict.choices[0].message.content)

    def gold(self, item):
        return f"I think of {item['subject']}\nuntil the evening has come\nand the lamps are lit"

    @classmethod
    def check_judge(cls, prompt):
        """Say in a judge's place, for checks of the rewards, whether a haiku names its subject."""
        asked, _, haiku = prompt.partition("\n\n")
        return "10" if any(f"about {subject} from" in asked and subject in haiku for subject in SUBJECTS) else "1"


def grade(text: str | None) -> float:
    """Return the judge's grade as 0.0 to 1.0; VerifierFault when there is none from 1 to 10."""
    first = re.search(r"\d+", text or "")
    number = int(first[0][:9]) if first else 0
    if not 1 <= number <= 10:
        raise VerifierFault(f"the judge said {str(text)[:80]!r}; expected a number from 1 to 10")
    return (number - 1) / 9


if __name__ == "__main__":
    HaikuEnv.cli()
