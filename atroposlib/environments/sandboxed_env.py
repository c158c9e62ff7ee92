"""`SandboxedEnv`: the base of environments whose verifiers run in a sandbox."""

from atroposlib.envs.base import BaseEnv
from atroposlib.sandbox.workers import WorkerPool


class SandboxedEnv(BaseEnv):
    """`setup` sets `sandbox`; its processes end with the run."""

    sandbox: WorkerPool | None = None

    async def teardown(self) -> None:
        if self.sandbox is not None:
            self.sandbox.close()
