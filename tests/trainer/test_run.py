"""The order in which a training run starts and ends its services, with small programs in their places."""

import asyncio
import sys

import pytest

from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service
from example_trainer.run import _Running
from example_trainer.run_plan import RunPlan

SLEEPER = "import time; time.sleep(600)"


class Told:
    """Services that note what happens to them."""

    def __init__(self, folder):
        self.folder, self.events = folder, []

    def service(self, name, program, ready_at=1):
        """`ready` from its probe number `ready_at` on."""
        asked = iter(range(1, 10**6))

        async def ready(pid):
            number = next(asked)
            self.events.append(f"{name} {'ready' if number >= ready_at else 'starting'}")
            return number >= ready_at

        command = [sys.executable, "-c", program]
        return Service(name, command, self.folder / f"{name}.log", ready, ready_timeout_s=600, is_job=True)


@pytest.fixture
def told(tmp_path):
    return Told(tmp_path)


async def test_the_environment_starts_once_the_engine_serves_what_the_trainer_pushed(told):
    trainer, environment = told.service("trainer", SLEEPER, ready_at=3), told.service("environment", SLEEPER)
    running = _Running(RestartConfig())
    task = asyncio.create_task(running.until_trained(RunPlan([], trainer, environment)))
    async with asyncio.timeout(60):
        while "environment ready" not in told.events:
            await asyncio.sleep(0.02)
    running.stop_requested.set()
    assert await task == 75
    await running.stop_all()
    assert told.events == ["trainer starting", "trainer starting", "trainer ready", "environment ready"]


async def test_a_trainer_that_fails_before_its_first_push_ends_the_run_without_an_environment(told):
    trainer = told.service("trainer", "raise SystemExit(1)", ready_at=10**6)
    running = _Running(RestartConfig())
    code = await running.until_trained(RunPlan([], trainer, told.service("environment", SLEEPER)))
    await running.stop_all()
    assert code == 1
    assert set(told.events) <= {"trainer starting"}
