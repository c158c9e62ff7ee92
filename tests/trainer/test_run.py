"""The order in which a training run starts and ends its services, with small programs in their places."""

import asyncio
import socket
import sys

import pytest

from atroposlib.errors import LaunchError
from atroposlib.example_trainer import run
from atroposlib.example_trainer.config import RunConfig
from atroposlib.example_trainer.recipe import check
from atroposlib.example_trainer.run import until_trained
from atroposlib.example_trainer.run_plan import TRAINER_GRACE_S, RunPlan
from atroposlib.json_lines import read_object
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service, Supervised, Supervisor
from atroposlib.lock_files import start_time
from atroposlib.status.runs import RunRecord

SLEEPER = "import time; time.sleep(600)"
FINISHES_ITS_STEP = """
import pathlib, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("in a step", flush=True)
signal.sigwait([signal.SIGTERM])
pathlib.Path({out!r}).touch()
raise SystemExit(75)
"""


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

        command, log = [sys.executable, "-c", program], self.folder / f"{name}.log"
        grace_s = TRAINER_GRACE_S if name == "trainer" else 10.0
        return Service(name, command, log, ready, ready_timeout_s=600, is_job=True, grace_s=grace_s)

    def supervisor(self):
        record = RunRecord("r", 0, 4, kind="train", node=socket.gethostname())
        return Supervisor(self.folder, record, RestartConfig(), lambda status: None)


@pytest.fixture
def told(tmp_path):
    return Told(tmp_path)


async def test_the_environment_starts_once_the_engine_serves_what_the_trainer_pushed(told):
    trainer, environment = told.service("trainer", SLEEPER, ready_at=3), told.service("environment", SLEEPER)
    async with asyncio.timeout(60), told.supervisor() as services:
        task = asyncio.create_task(until_trained(RunPlan([], trainer, environment), services))
        while "environment ready" not in told.events:
            await asyncio.sleep(0.02)
        services.ask_to_stop("SIGTERM")
        assert await task == 75
    assert told.events == ["trainer starting", "trainer starting", "trainer ready", "environment ready"]


async def test_a_trainer_that_fails_before_its_first_push_ends_the_run_without_an_environment(told):
    trainer = told.service("trainer", "raise SystemExit(1)", ready_at=10**6)
    async with told.supervisor() as services:
        assert await until_trained(RunPlan([], trainer, told.service("environment", SLEEPER)), services) == 1
    assert set(told.events) <= {"trainer starting"}


async def test_what_a_killed_run_left_behind_is_ended_by_the_same_command(told, tmp_path, monkeypatch):
    trainer = told.service("trainer", FINISHES_ITS_STEP.format(out=str(tmp_path / "saved")))
    services = told.supervisor()
    async with services:
        work = asyncio.create_task(until_trained(RunPlan([], trainer, told.service("environment", SLEEPER)), services))
        async with asyncio.timeout(60):
            while not (
                trainer.log.exists() and trainer.log.read_text() and left_in(tmp_path) == {"trainer", "environment"}
            ):
                await asyncio.sleep(0.02)
        services._ticker.cancel()

        async def starts(*_):
            return 0

        monkeypatch.setattr(run, "_supervise", starts)
        settings = {"model_name": "m", "run_dir": str(tmp_path), "environment": "e.py", "batch_size": 16}
        monkeypatch.setattr(
            Supervised, "_backoff_s", lambda *_: 600
        )  # here the supervisor lives, and must not restart them
        assert await asyncio.to_thread(run.run, check(RunConfig, settings)) == 0
        assert (tmp_path / "saved").exists()
        assert {start_time(service.pid) for service in services.services} == {None}
        work.cancel()


def left_in(folder):
    """Names of the services whose pids are on disk."""
    found = read_object(folder / "run.json") or {"services": []}
    return {service["name"] for service in found["services"] if service["started"]}


async def test_a_trainer_has_its_grace_also_when_the_environment_failed(told, tmp_path):
    trainer = told.service("trainer", FINISHES_ITS_STEP.format(out=str(tmp_path / "saved")))
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(trainer.log)!r}).stat().st_size: time.sleep(0.02)"
    environment = told.service("environment", f"{waits}\nraise SystemExit(3)")
    asked = []
    stop = Supervised.stop
    services = told.supervisor()
    async with services:
        with pytest.raises(LaunchError, match="environment ended: exit code 3"):
            await until_trained(RunPlan([], trainer, environment), services)
        for service in services.services:
            service.stop = lambda grace_s, service=service: asked.append(grace_s) or stop(service, grace_s)
    assert max(asked) == TRAINER_GRACE_S
    assert (tmp_path / "saved").exists()
