"""`SandboxedEnv`: the base of environments whose verifiers run in a sandbox."""

from collections.abc import Awaitable
from typing import TypeVar

from atroposlib.envs.base import BaseEnv
from atroposlib.rollouts.run import Outcome
from environments.sandbox import Sandbox

T = TypeVar("T")


class SandboxedEnv(BaseEnv):
    """`setup` sets `sandbox`; its processes end with the run."""

    sandbox: Sandbox | None = None

    async def env_manager(self) -> Outcome:
        return await self._closing(super().env_manager())

    async def process_manager(self) -> Outcome:
        return await self._closing(super().process_manager())

    async def _run_evaluate(self) -> None:
        await self._closing(super()._run_evaluate())

    async def _closing(self, run: Awaitable[T]) -> T:
        try:
            return await run
        finally:
            if self.sandbox is not None:
                await self.sandbox.close()
