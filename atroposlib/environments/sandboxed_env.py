"""`SandboxedEnv`: the base of environments whose verifiers run in a sandbox."""

from atroposlib.environments.sandbox import Sandbox
from atroposlib.envs.base import BaseEnv


class SandboxedEnv(BaseEnv):
    """`setup` sets `sandbox`; its processes end with the run."""

    sandbox: Sandbox | None = None

    async def teardown(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()
