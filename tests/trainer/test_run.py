"""The order in which a training run starts and ends its services, with small programs in their places."""

import asyncio
import socket
import sys

import pytest

from atroposlib.errors import LaunchError
from atroposlib.example_trainer import run
from atroposlib.example_trainer.config import RunConfig
from atroposlib.example_trainer.recipe import check
from atroposlib.example_trainer.run import _record, _Running
from atroposlib.example_trainer.run_plan import TRAINER_GRACE_S, RunPlan
from atroposlib.json_lines import read_object
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service, Supervised
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


async def test_what_a_killed_run_left_behind_is_ended_by_the_same_command(told, tmp_path, monkeypatch):
    running = _Running(RestartConfig())
    trainer = told.service("trainer", FINISHES_ITS_STEP.format(out=str(tmp_path / "saved")))
    work = asyncio.create_task(running.until_trained(RunPlan([], trainer, told.service("environment", SLEEPER))))
    recording = asyncio.create_task(
        _record(running, tmp_path, RunRecord("r", 0, 4, kind="train", node=socket.gethostname()))
    )
    async with asyncio.timeout(60):
        while not (
            trainer.log.exists() and trainer.log.read_text() and left_in(tmp_path) == {"trainer", "environment"}
        ):
            await asyncio.sleep(0.02)
    recording.cancel()

    async def starts(*_):
        return 0

    monkeypatch.setattr(run, "_supervise", starts)
    config = check(RunConfig, {"model_name": "m", "run_dir": str(tmp_path), "environment": "e.py", "batch_size": 16})
    monkeypatch.setattr(
        Supervised, "_backoff_s", lambda *_: 600
    )  # here the supervisor lives, and must not restart them
    assert await asyncio.to_thread(run.run, config) == 0
    assert (tmp_path / "saved").exists()
    assert {start_time(service.pid) for service in running.tasks.values()} == {None}
    work.cancel()
    for task in running.tasks:
        task.cancel()


def left_in(folder):
    """Names of the services whose pids are on disk."""
    found = read_object(folder / "run.json") or {"services": []}
    return {service["name"] for service in found["services"] if service["started"]}


async def test_a_trainer_has_its_grace_also_when_the_environment_failed(told, tmp_path):
    trainer = told.service("trainer", FINISHES_ITS_STEP.format(out=str(tmp_path / "saved")))
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(trainer.log)!r}).stat().st_size: time.sleep(0.02)"
    running = _Running(RestartConfig())
    with pytest.raises(LaunchError, match="environment ended: exit code 3"):
        await running.until_trained(RunPlan([], trainer, told.service("environment", f"{waits}\nraise SystemExit(3)")))
    asked = []
    stop = Supervised.stop
    for service in running.tasks.values():
        service.stop = lambda grace_s, service=service: asked.append(grace_s) or stop(service, grace_s)
    await running.stop_all()
    assert max(asked) == TRAINER_GRACE_S
    assert (tmp_path / "saved").exists()
