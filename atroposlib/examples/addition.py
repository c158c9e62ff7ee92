"""Two-digit sums: the smallest whole environment."""

import random
import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataGroup


class AdditionEnv(BaseEnv):
    """Score 1.0 for the exact sum in \\boxed{}, else 0.0."""

    name = "addition"

    @classmethod
    def config_init(cls):
        engine = APIServerConfig(
            model_name="smollm2-135m",  # what `atropos engine` serves
            base_url="http://localhost:9004/v1",
            server_type="sglang",
            api_key="x",
        )
        return BaseEnvConfig(tokenizer_name="smollm2-135m", group_size=8, max_token_length=64, use_wandb=False), engine

    async def get_item(self, index):
        rng = random.Random(index)
        return {"left": rng.randint(10, 99), "right": rng.randint(10, 99)}

    async def collect_trajectories(self, item) -> tuple[ScoredDataGroup, list[Item]]:
        question = f"What is {item['left']} + {item['right']}? Write the answer as \\boxed{{number}}."
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=[{"role": "user", "content": question}],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
            )
            nodes = managed.get_state()["nodes"]  # nodes[i] belongs to reply.choices[i]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [score(choice.message.content, item["left"] + item["right"]) for choice in reply.choices],
        }, []

    async def evaluate(self, *args, **kwargs):
        """Measure 32 sums that training does not see."""
        items = [await self.get_item(1_000_000 + number) for number in range(32)]
        groups = [(await self.collect_trajectories(item))[0] for item in items]
        scores = [value for group in groups for value in group.get("scores", [])]
        await self.evaluate_log({"eval/accuracy": sum(scores) / len(scores)})


def score(text: str | None, expected: int) -> float:
    """Return 1.0 if the last \\boxed{} holds `expected`, else 0.0."""
    boxed = re.findall(r"\\boxed\{\s*(-?\d+)\s*\}", text or "")
    return float(bool(boxed) and int(boxed[-1]) == expected)


if __name__ == "__main__":
    AdditionEnv.cli()
