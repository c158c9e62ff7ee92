"""A trajectory API and a trainer in memory, with the interface of `EnvClient`."""

import asyncio
from typing import Any

from atroposlib.api.client import RegisteredEnv
from atroposlib.errors import ApiError


class MemoryApi:
    """Queues groups; `train(steps)` takes batches. Refuses groups whose first token is in `refused`."""

    def __init__(self, *, batch_size: int = 8, max_token_len: int = 512, num_steps: int = 100) -> None:
        self.batch_size, self.max_token_len, self.num_steps = batch_size, max_token_len, num_steps
        self.step = 0
        self.received: list[dict[str, Any]] = []
        self.refused: set[int] = set()
        self.taken = 0
        self.not_taken: str | None = None
        self.is_up = asyncio.Event()
        self.is_up.set()
        self.disconnected = self.closed = False
        self.registration: dict[str, Any] = {}
        self.registered: RegisteredEnv | None = None

    async def register(self, registration: dict[str, Any]) -> RegisteredEnv:
        self.registration = registration
        self.registered = RegisteredEnv(0, f"{registration['desired_name']}_0", "", self.step, -1, self.num_steps)
        return self.registered

    async def info(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "max_token_len": self.max_token_len}

    async def wandb_info(self) -> dict[str, str | None]:
        return {"group": "g", "project": "p"}

    async def status_env(self) -> dict[str, Any]:
        if self.registered is None:
            await self.register(self.registration)
        queued = len(self.received) - self.taken
        return {
            "current_step": self.step,
            "queue_size": queued,
            "self_queue_size": queued,
            "unallocated_fraction": 1.0,
            "max_group_size": 2,
            "env_weight": 1.0,
        }

    async def submit(self, groups: list[dict[str, Any]]) -> None:
        await self.is_up.wait()
        for group in groups:
            if group["tokens"][0][0] in self.refused:
                raise ApiError("scores: must be finite")
            self.received.append(group)

    async def disconnect(self, *, deadline_s: float | None = 10.0) -> None:
        self.disconnected = True

    async def close(self) -> None:
        self.closed = True

    def reset(self, *, batch_size: int, num_steps: int) -> None:
        """Forget everything; another trainer registers."""
        self.batch_size, self.num_steps, self.step, self.taken = batch_size, num_steps, 0, 0
        self.received.clear()
        self.registered = None

    def train(self, steps: int = 1) -> None:
        """Take `steps` batches of groups of two."""
        self.step += steps
        self.taken += steps * self.batch_size // 2
