"""An environment without a model: item i gives a group whose tokens name it. For tests, also run as a script."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from fakes import FakeTokenizer

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ServerBaseline
from atroposlib.errors import VerifierFault


class CountingConfig(BaseEnvConfig):
    items: int = 10_000
    fail_every: int = 0  # item numbers divisible by it raise; 0: none
    seconds: float = 0.0
    groups_per_item: int = 1
    html_seconds: float = 0.0
    thread_seconds: float = 0.0  # of a verifier that nobody can interrupt
    note_starts_in: str | None = None  # a file that gets one line per started rollout


class CountingEnv(BaseEnv):
    """Items 0, 1, 2, ...; scores 1, 0, 1, 0, ..."""

    name = "counting"
    env_config_cls = CountingConfig

    @classmethod
    def config_init(cls) -> tuple[CountingConfig, ServerBaseline]:
        return CountingConfig(group_size=2, use_wandb=False, max_num_workers=8), ServerBaseline()

    def load_tokenizer(self) -> Any:
        return FakeTokenizer()

    async def setup(self) -> None:
        self.started: list[int] = []

    def write_html(self, rollouts: str, output: str) -> None:
        time.sleep(self.config.html_seconds)
        super().write_html(rollouts, output)

    async def get_item(self, index: int) -> dict[str, int] | None:
        return {"number": index} if index < self.config.items else None

    async def collect_trajectories(self, item: dict[str, int]) -> tuple[Any, list[Any]]:
        number = item["number"]
        self.started.append(number)
        if self.config.note_starts_in:
            note(self.config.note_starts_in, number)
        await asyncio.sleep(self.config.seconds)
        if self.config.thread_seconds and number >= 10:
            await asyncio.to_thread(time.sleep, self.config.thread_seconds)
        if self.config.fail_every and number % self.config.fail_every == 0:
            raise VerifierFault(f"cannot score {number}")
        groups = [make_group(number, self.config.group_size) for _ in range(self.config.groups_per_item)]
        return (groups[0] if len(groups) == 1 else groups), []


class StreamingEnv(CountingEnv):
    """The same without random access."""

    name = "streaming"
    get_item = BaseEnv.get_item

    async def setup(self) -> None:
        await super().setup()
        self.next_number = 0

    async def get_next_item(self) -> dict[str, int] | None:
        self.next_number += 1
        return {"number": self.next_number - 1} if self.next_number <= self.config.items else None


def note(path: str, number: int) -> None:
    """Append one line."""
    with Path(path).open("a") as notes:
        notes.write(f"{number}\n")


def make_group(number: int, size: int = 2) -> dict[str, Any]:
    """A group of `size` sequences [number, 1, 2] whose first token takes no loss."""
    return {
        "tokens": [[number, 1, 2] for _ in range(size)],
        "masks": [[-100, 1, 2] for _ in range(size)],
        "scores": [float(i % 2 == 0) for i in range(size)],
        "messages": [[{"role": "user", "content": str(number)}] for _ in range(size)],
    }


def make_env(env_cls: type[CountingEnv] = CountingEnv, **settings: Any) -> CountingEnv:
    """An environment with scripted servers."""
    config = env_cls.config_init()[0].model_copy(update={"ensure_scores_are_not_same": False, **settings})
    return env_cls(config, ServerBaseline(), False, True)


main = CountingEnv.cli

if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "disabled")
    main()
