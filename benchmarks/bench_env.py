"""The environment of `bench_sglang.py` and `bench_knee.py`: answers of a given length, no scoring to speak of.

`python benchmarks/bench_env.py process|serve --config FILE`; when it ends, `spans_path` holds a list [start, end, new
tokens] of every group (Unix time), and the CPU seconds of this process from the first start to the last end. One short
request beforehand pays for imports and connections.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.type_definitions import Message

WORDS = ["river", "seven", "blue", "house", "music", "under", "green", "stone", "bread", "light", "window", "cloud"]


class BenchConfig(BaseEnvConfig):
    new_tokens: int = Field(default=128, description="Tokens of every answer.")
    spread: float = Field(default=0.0, description="Answers of problem i are up to this share longer or shorter.")
    spans_path: str = Field(default="spans.json", description="Where the times go.")
    first: int = Field(default=0, description="Number of this process's first problem.")
    stop_after_s: float = Field(default=1e6, description="Begin no group that long after the first one.")


class BenchEnv(BaseEnv):
    name = "bench"
    env_config_cls = BenchConfig
    config: BenchConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BenchConfig(group_size=16), [APIServerConfig(server_type="sglang", base_url="http://localhost:9000/v1")]

    async def setup(self) -> None:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=prompt(-1), n=1, max_tokens=1, temperature=1.0)
        self._spans: list[tuple[float, float, int]] = []
        self._cpu_start: float | None = None
        self._cpu_end = time.process_time()
        self._stop_at = float("inf")

    async def get_item(self, index: int) -> int | None:
        return self.config.first + index if time.monotonic() < self._stop_at else None

    async def collect_trajectories(self, item: int) -> tuple[ScoredDataGroup, list[Any]]:
        if self._cpu_start is None:
            self._cpu_start = time.process_time()
            self._stop_at = time.monotonic() + self.config.stop_after_s
        began = time.time()
        tokens = length(item, self.config.new_tokens, self.config.spread)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=prompt(item), n=self.config.group_size, max_tokens=tokens, temperature=1.0, ignore_eos=True
            )
            nodes = managed.get_state()["nodes"]
        self._spans.append((began, time.time(), tokens * self.config.group_size))
        self._cpu_end = time.process_time()
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [float(index % 2) for index in range(len(nodes))],
        }, []

    async def teardown(self) -> None:
        cpu_s = self._cpu_end - (self._cpu_start or self._cpu_end)
        found = {"spans": self._spans, "cpu_s": cpu_s}
        Path(self.config.spans_path).write_text(json.dumps(found), encoding="utf-8")

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


def prompt(index: int) -> list[Message]:
    """About 64 tokens with the template; every index another text, so the prefix cache does not help."""
    words = random.Random(index).choices(WORDS, k=36)
    return [{"role": "system", "content": "You write."}, {"role": "user", "content": f"{index}: {' '.join(words)}"}]


def length(index: int, mean: int, spread: float) -> int:
    """Tokens of the answers to problem `index`: uniform between mean * (1 - spread) and mean * (1 + spread)."""
    return round(mean * (1 + spread * random.Random(f"length {index}").uniform(-1, 1)))


if __name__ == "__main__":
    BenchEnv.cli()
