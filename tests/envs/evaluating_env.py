"""An environment that evaluates: ten questions, one after the other. For tests that kill it; run as a script."""

import logging
import time
from typing import Any

from fakes import FakeTokenizer

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

QUESTIONS = 10


class EvaluatingEnv(BaseEnv):
    name = "evaluating"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(use_wandb=False), [APIServerConfig(model_name="fake", api_key="x")]

    def load_tokenizer(self) -> Any:
        return FakeTokenizer()

    async def setup(self) -> None:
        pass

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        samples = [await self.answer(number) for number in range(QUESTIONS)]
        accuracy = sum(sample["text"] == "hello" for sample in samples) / len(samples)
        await self.evaluate_log({"eval/accuracy": accuracy}, samples=samples, end_time=time.time())

    async def teardown(self) -> None:
        logging.getLogger(__name__).info("torn down")

    async def answer(self, number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"question {number}"}]
        reply = await self.server.chat_completion(messages=messages, n=1, temperature=0.0, split="eval")
        return {"number": number, "text": reply.choices[0].message.content}


if __name__ == "__main__":
    EvaluatingEnv.cli()
