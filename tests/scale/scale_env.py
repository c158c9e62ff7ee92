"""Sums, scored by one regular expression: an environment that costs little, so that everything around it shows."""

import re
import sys
from pathlib import Path
from typing import Any, TypedDict

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, by its path

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup, ServerBaseline
from tests.fakes import FakeTokenizer

ANSWER = re.compile(r"The answer is (\d+)$")


class Sum(TypedDict):
    left: int
    right: int
    padding: int  # bytes behind the question


class ScaleConfig(BaseEnvConfig):
    context: int = 4096
    too_long_every: int = 0  # items whose prompt exceeds the context: those with a number divisible by it; 0: none


class ScaleEnv(BaseEnv):
    """Score 1.0 for the right sum at the very end, else 0.0."""

    name = "scale"
    env_config_cls = ScaleConfig
    config: ScaleConfig

    @classmethod
    def config_init(cls) -> tuple[ScaleConfig, ServerBaseline]:
        return ScaleConfig(), ServerBaseline()

    def load_tokenizer(self) -> Any:
        return FakeTokenizer()

    async def setup(self) -> None:
        pass

    async def get_item(self, index: int) -> Sum:
        is_long = is_too_long(index, self.config.too_long_every)
        return Sum(left=index, right=7 * index % 1000, padding=self.config.context if is_long else 0)

    async def collect_trajectories(self, item: Sum) -> tuple[ScoredDataGroup, list[Sum]]:
        question = f"{item['left']} + {item['right']}" + " " * item["padding"]
        messages = [{"role": "user", "content": question}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        texts = [choice.message.content or "" for choice in reply.choices]
        total = item["left"] + item["right"]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [float((found := ANSWER.search(text)) is not None and int(found[1]) == total) for text in texts],
            "messages": [[*messages, {"role": "assistant", "content": text}] for text in texts],
        }, []


def is_too_long(index: int, every: int) -> bool:
    """Whether item `index` has a prompt that no engine takes."""
    return every > 0 and index % every == every - 1


if __name__ == "__main__":
    ScaleEnv.cli()
