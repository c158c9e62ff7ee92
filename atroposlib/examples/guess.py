"""Guess a number from hints: several turns, one rollout each."""

import random
import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem

TURNS = 6


class GuessEnv(BaseEnv):
    """Score 1.0 for a hit at the first guess, less for later ones, 0.0 for none."""

    name = "guess"

    @classmethod
    def config_init(cls):
        engine = APIServerConfig(
            model_name="smollm2-135m",  # what `atropos engine` serves
            base_url="http://localhost:9004/v1",
            server_type="sglang",
            api_key="x",
        )
        return BaseEnvConfig(tokenizer_name="smollm2-135m", group_size=4, max_token_length=32, use_wandb=False), engine

    async def get_item(self, index):
        return {"number": random.Random(index).randint(1, 20)}

    async def collect_trajectory(self, item) -> tuple[ScoredDataItem, list[Item]]:
        messages = [{"role": "user", "content": "I think of a number from 1 to 20. Guess it: write one number."}]
        reward = 0.0
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(TURNS):
                reply = await managed.chat_completion(messages=messages, n=1, max_tokens=self.config.max_token_length)
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                guess = last_number(text)
                if guess == item["number"]:
                    reward = score(turn)
                    break
                messages.append({"role": "user", "content": hint(guess, item["number"])})
            node = managed.get_state()["nodes"][-1]  # the whole conversation; only what the model wrote takes loss
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": reward,
        }, []


def last_number(text: str) -> int | None:
    """Return the last whole number of a text, None where there is none."""
    numbers = re.findall(r"-?\d+", text or "")
    return int(numbers[-1][:9]) if numbers else None


def hint(guess: int | None, number: int) -> str:
    """Return what the player is told after a guess."""
    if guess is None:
        return "I saw no number. Write one number from 1 to 20."
    return "Higher." if guess < number else "Lower."


def score(turn: int) -> float:
    """Return the reward of a hit in turn 0, 1, ..."""
    return 1.0 - turn / (2 * TURNS)


if __name__ == "__main__":
    GuessEnv.cli()
